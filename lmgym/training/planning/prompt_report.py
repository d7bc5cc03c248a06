"""What `lmgym check`, and the start of a run, say of prompts: how they reach the model, and how one looks there."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from lmgym.config.schema import Config, Stage
from lmgym.core.errors import shortened
from lmgym.envs.vector import Envs, Opening
from lmgym.models.policy import Policy
from lmgym.pictures.ids import is_piece, picture_of
from lmgym.text.chat import answer_ids, decoder_answer_ids, has_template, start_ids
from lmgym.text.control import control_tokens, split_text
from lmgym.text.template import NO_TOOLS, ignores_tools, template_pieces
from lmgym.training.planning.report import Report
from lmgym.types import PICTURE, BarePrompt, Episode, Example

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
        if marks := [mark for mark in marks if mark != PICTURE and (own is None or mark in own)]:
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


def report_prompts(
    report: Report,
    config: Config,
    stage: Stage,
    policy: Policy,
    examples: Sequence[Example],
    episodes: Sequence[Episode],
) -> None:
    """Report a prompt as the policy has read it, and the lengths of prompts and references."""
    start = config.policy.answer_start
    given = len(start_ids(policy.tokenizer, start, policy.encoder_decoder))
    read = [episode.turns[0].source_ids or episode.turns[0].prompt_ids for episode in episodes if episode.turns]
    if not read:
        return
    lengths = [len(ids) for ids in read]
    if not getattr(policy.tokenizer, "chat_template", None) and any(len(one.messages) > 2 for one in episodes):
        report.note("messages of the environment are joined without marks, since the model has no chat template")
    report.note(f"a prompt as the model reads it, control tokens in ⟦⟧: {prompt_as_read(policy.tokenizer, read[0])}")
    report.note(f"prompt tokens: {min(lengths)} to {max(lengths)}; context {policy.context or 'without limit'}")
    # What an answer shares its context with.
    before = len(policy.decoder_start) + given if policy.encoder_decoder else max(lengths)
    room = None if policy.context is None else policy.context - before
    if room is not None and room < stage.sampling.max_new_tokens:
        report.warn(f"the longest of {len(examples)} prompts leaves room for {max(room, 0)} new tokens, fewer than "
                    f"sampling.max_new_tokens ({stage.sampling.max_new_tokens})")  # fmt: skip
    references = [
        len(decoder_answer_ids(policy.tokenizer, text, given > 0))
        if policy.encoder_decoder
        else len(answer_ids(policy.tokenizer, example.prompt, text, config.policy.chat_template_kwargs, start))
        for example in examples
        for text in example.references
    ]
    if references:
        report.note(f"reference tokens: {min(references)} to {max(references)}")
        if max(references) > stage.sampling.max_new_tokens:
            report.warn(f"a reference has {max(references)} tokens, more than sampling.max_new_tokens "
                        f"({stage.sampling.max_new_tokens}): right answers would be cut off")  # fmt: skip
