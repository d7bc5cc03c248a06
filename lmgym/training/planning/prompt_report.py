"""What `lmgym check`, and the start of a run, say of prompts: how they reach the model, and how one looks there."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from lmgym.core.errors import shortened
from lmgym.envs.vector import Envs, Opening
from lmgym.pictures.ids import is_piece, picture_of
from lmgym.text.chat import has_template
from lmgym.text.control import control_tokens, split_text
from lmgym.text.template import NO_TOOLS, ignores_tools, template_pieces
from lmgym.types import BarePrompt, Example

LOOKED_AT = 1000  # examples
SHOWN = 1200  # characters of a prompt


def about_prompts(examples: Sequence[Example], tokenizer: Any, env: str = "single_turn") -> tuple[list[str], list[str]]:
    """Sentences on how prompts reach the model, and sentences on what would spoil a run. Another environment than
    `single_turn` may put texts into messages.

    Example: about_prompts([Example("a/0", [{"role": "user", "content": "2+2="}])], builtin_tokenizer())[0] ->
        ["the model has no chat template: messages are joined without marks (policy.template: FILE gives it one)"]"""
    examples, template = examples[:LOOKED_AT], bool(getattr(tokenizer, "chat_template", None))
    bare = [example.prompt for example in examples if isinstance(example.prompt, BarePrompt)]
    notes = []
    if any(prompt.form == "rendered" for prompt in bare):
        notes.append(
            "prompts are rendered already (task.prompts): the names of control tokens in them are control tokens"
        )
    elif bare and template and env == "single_turn":
        notes.append(
            "prompts are texts, which the model reads without its chat template, as in TRL (task.prompts: chat would "
            "put each into a message of the user)"
        )
    if not template and any(not isinstance(example.prompt, str) for example in examples):
        notes.append(
            "the model has no chat template: messages are joined without marks (policy.template: FILE gives it one)"
        )
    asked = [example.prompt for example in examples if not isinstance(example.prompt, str)]
    with_tools = next((prompt for prompt in asked if any("tools" in message for message in prompt)), None)
    lost = with_tools is not None and (not template or ignores_tools(tokenizer, with_tools, None))
    return notes, [*([NO_TOOLS] if lost else []), *_foreign_marks(examples, tokenizer)]


def _foreign_marks(examples: Sequence[Example], tokenizer: Any) -> list[str]:
    """A sentence on texts that hold the marks of a template, as text."""
    control, own = control_tokens(tokenizer), None
    if getattr(tokenizer, "chat_template", None):
        try:
            own = "".join(template_pieces(tokenizer, [{"role": "user", "content": "?"}], generate=False))
        except Exception:  # a template of other roles
            own = None
    found: dict[str, list[str]] = {}
    for example in examples:
        texts = [example.prompt] if isinstance(example.prompt, str) else [one["content"] for one in example.prompt]
        marks = [mark for text in texts for mark in split_text(tokenizer, text, control)[1::2]]
        if marks := [mark for mark in marks if own is None or mark in own]:
            found[example.id] = marks
    if not found:
        return []
    first, marks = next(iter(found.items()))
    return [
        f"{len(found)} of {len(examples)} prompts hold marks of a chat template ('{first}': {marks[0]}), which are "
        "plain text there; if a template has written these prompts, and you trust them, write task.prompts: rendered"
    ]


def prompt_as_read(tokenizer: Any, ids: Sequence[int]) -> str:
    """A prompt as the model sees it: its ids as one line of text, with each control token in brackets, and pictures by
    the beginning of their names with their tokens.

    Example:
        >>> prompt_as_read(builtin_tokenizer("builtin:numbers"), [1, 10, 11])
        '⟦<bos>⟧7 8'
    """
    control, pieces = control_tokens(tokenizer).ids, []
    for kind, group in groupby(ids, lambda id: picture_of(id)[0] if is_piece(id) else id in control):
        if isinstance(kind, str):
            pieces.append(f"⟦picture {kind}: {len(list(group))} tokens⟧")
        elif kind:
            pieces += [f"⟦{tokenizer.convert_ids_to_tokens(id)}⟧" for id in group]
        else:
            pieces.append(tokenizer.decode(list(group), clean_up_tokenization_spaces=False))
    return shortened("".join(pieces).replace("\n", "⏎"), SHOWN)


def lost_tools(envs: Envs, example: Example, tokenizer: Any) -> bool:
    """True if the environment gives its tools to a chat template that leaves them out."""
    [opening] = envs.begin([(0, example, 0)])
    envs.end([0])
    if not isinstance(opening, Opening) or not has_template(tokenizer, opening.prompt):
        return False
    return not isinstance(opening.prompt, str) and ignores_tools(tokenizer, opening.prompt, opening.template)
