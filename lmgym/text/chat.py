"""Prompts and messages to token ids, and sampled ids to text. A conversation is appended to, never rendered again.

Sampled tokens stay ids. Text is tokenized only here, and only once: the first prompt, then each environment message, as
ids to append. Only the template and the recipe's own texts can make control tokens (control.py). `tokenizer` is any
object with the methods of a Hugging Face tokenizer; nothing here imports torch or transformers."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lmgym.core.errors import LmgymError, warn
from lmgym.text.answer_ends import end_id, end_mark
from lmgym.text.control import bare_ids, control_tokens, ids_of_pieces, split_text, text_ids
from lmgym.text.left_out import left_out
from lmgym.text.pictures import decoded
from lmgym.text.template import NO_TOOLS, ending_pieces, ignores_tools, template_pieces
from lmgym.types import BarePrompt, Message, Prompt, RecipeText, pictures_of

Template = Mapping[str, Any]  # keyword arguments of a chat template


@dataclass(frozen=True)
class Cut:
    """Truncation of prompts to `tokens` tokens, at their beginning ("left") or end ("right").
    As in Hugging Face's truncation, special tokens that the tokenizer adds to a text count, and are kept. Prompts from
    a chat template are not cut but refused.

    Example: Cut(tokens=512, side="left")"""

    tokens: int
    side: Literal["left", "right"] = "left"


def messages_of(prompt: Prompt) -> list[Message]:
    """The messages of a prompt; a text becomes one user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def has_template(tokenizer: Any, prompt: Prompt) -> bool:
    """True if a prompt goes through the tokenizer's chat template."""
    return bool(getattr(tokenizer, "chat_template", None)) and not isinstance(prompt, BarePrompt)


def prompt_ids(tokenizer: Any, prompt: Prompt, template: Template | None = None, cut: Cut | None = None) -> list[int]:
    """Token ids [P] of a first prompt, ready for the policy to answer.

    With a chat template, the messages are rendered through it, with `template` as its keyword arguments (for example
    `{"enable_thinking": False}`). Without one, and of a `BarePrompt`, `plain_text` is tokenized, with the special
    tokens that the tokenizer adds in front (BOS) but not at the end (EOS); a rendered prompt has its own. Raises
    LmgymError if a chat, or a prompt with pictures, is longer than `cut` allows.

    Example: prompt_ids(builtin_tokenizer("builtin:numbers"), "7 8") -> [1, 10, 11]"""
    rendered = isinstance(prompt, BarePrompt) and prompt.form == "rendered"
    if not has_template(tokenizer, prompt) and not rendered:
        return _plain_ids(tokenizer, prompt, cut, end=False)
    if not rendered and ignores_tools(tokenizer, messages_of(prompt), template):
        warn(NO_TOOLS)
    if not rendered and (sentence := left_out(tokenizer, messages_of(prompt), template)):
        warn(sentence)
    ids = ids_of_pieces(tokenizer, _prompt_pieces(tokenizer, prompt, template))
    if cut is not None and len(ids) > cut.tokens:
        raise LmgymError(
            f"a chat prompt has {len(ids)} tokens, more than policy.max_prompt_tokens ({cut.tokens}), and what a "
            "chat template writes is not cut; shorten the prompt, or raise or remove policy.max_prompt_tokens"
        )
    return ids


def plain_text(prompt: Prompt) -> str:
    """The text of a prompt or of messages for a model without a chat template.

    An answer follows its prompt directly; after a system prompt and after an answer there is a blank line, but not
    behind a last one, which the model goes on with.

    Example:
        >>> plain_text([{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="},
        ...             {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2="}])
        'Add.\\n\\n1+1=2\\n\\n2+2='
    """
    messages = messages_of(prompt)
    texts = [text for m in messages for text in (m["content"], "" if m["role"] == "user" else "\n\n")]
    goes_on = messages and messages[-1]["role"] == "assistant"
    return RecipeText.join(*(texts[:-1] if goes_on else texts))


def _prompt_pieces(tokenizer: Any, prompt: Prompt, template: Template | None = None) -> list[str]:
    """The text of a prompt, rendered or plain, in pieces as `split_text` gives them."""
    if has_template(tokenizer, prompt):
        return template_pieces(tokenizer, messages_of(prompt), template)
    return split_text(tokenizer, plain_text(prompt))


def answer_ids(
    tokenizer: Any, prompt: Prompt, answer: str, template: Template | None = None, start: str = ""
) -> list[int]:
    """Token ids [A] of a reference answer after its prompt, and `end_id`: the targets of supervised training. `start`
    is the given start of an answer (`start_ids`), if it has one. What the end of the prompt, or `start`, has written
    already of the answer (`<think>`) is not written again.

    Prompt and answer are tokenized together, so that the word at the boundary gets the ids that a model would sample;
    separately if that would change the prompt's ids. Raises LmgymError if the tokenizer has no end-of-sequence token.
    """
    end = end_id(tokenizer) if has_template(tokenizer, prompt) else tokenizer.eos_token_id
    if end is None:
        raise LmgymError(
            "the tokenizer has no end-of-sequence token; set one (tokenizer.eos_token) before training on references"
        )
    pieces = _prompt_pieces(tokenizer, prompt, template)
    answer = unwritten(tokenizer, prompt, answer, template, start)
    if start:
        return [*continued_ids(tokenizer, answer), end]
    # The answer's first piece goes on where the prompt's last one ends.
    first, *others = split_text(tokenizer, answer)
    before, both = (ids_of_pieces(tokenizer, some) for some in (pieces, [*pieces[:-1], pieces[-1] + first, *others]))
    ids = both[len(before) :]
    if both[: len(before)] != before or not ids or control_tokens(tokenizer).made_of(answer, ids):
        ids = text_ids(tokenizer, answer)
    return [*ids, end]


def unwritten(tokenizer: Any, prompt: Prompt, answer: str, template: Template | None = None, start: str = "") -> str:
    """The rest of an answer whose beginning the end of its prompt, or `start`, has written already.

    Example: unwritten(tokenizer, "2+2=", "<think>so</think>4") -> "so</think>4", where a prompt ends with <think>"""
    if answer[:1] not in ("<", "["):
        return answer
    return answer[written_already(_begun(tokenizer, prompt, template) + start, answer) :]


def _begun(tokenizer: Any, prompt: Prompt, template: Template | None) -> str:
    """What a prompt holds of the answer already: what the template writes behind the last message, and a message of the
    assistant there that the model goes on with; a rendered prompt may hold it anywhere."""
    history = messages_of(prompt)
    if len(history) > 1 and history[-1]["role"] == "assistant":
        return _begun(tokenizer, history[:-1], template) + history[-1]["content"]
    if not has_template(tokenizer, prompt):
        return str(prompt) if isinstance(prompt, BarePrompt) and prompt.form == "rendered" else ""
    asked, told = ("".join(template_pieces(tokenizer, history, template, generate)) for generate in (True, False))
    return asked.removeprefix(told) if asked.startswith(told) else ""


def written_already(before: str, answer: str) -> int:
    """How many characters of an answer the text before it ends with: a mark such as <think>, all that follows it there,
    and the white space behind it.

    Example: written_already("<|im_start|>assistant\n<think>\n", "<think>\n2+2 is 4.</think>4") -> 8"""
    for mark in re.finditer(r"[<\[]", before):
        start = before[mark.start() :]
        if answer.startswith(start.rstrip()):
            same = map(str.__eq__, start, answer)
            return next((place for place, equal in enumerate(same) if not equal), min(len(start), len(answer)))
    return 0


def source_ids(tokenizer: Any, prompt: Prompt, template: Template | None = None, cut: Cut | None = None) -> list[int]:
    """Token ids [S] of a prompt for an encoder, with all special tokens that the tokenizer adds. These include the
    end-of-sequence token (of T5, for example), which `prompt_ids` leaves out."""
    if has_template(tokenizer, prompt):
        return prompt_ids(tokenizer, prompt, template, cut)
    return _plain_ids(tokenizer, prompt, cut, end=True)


def _plain_ids(tokenizer: Any, prompt: Prompt, cut: Cut | None, end: bool) -> list[int]:
    """The ids of a prompt without a chat template, with the tokenizer's special tokens around it (`end`: also the end
    of sequence), cut to `cut.tokens`: ids of the text are removed, special tokens around it stay."""

    def ended(ids: list[int]) -> list[int]:
        return ids if end or ids[-1:] != [tokenizer.eos_token_id] else ids[:-1]

    # 1. The ids that the tokenizer gives, if no foreign text in them is a control token and they need no cut.
    text = plain_text(prompt)
    pieces, ids = split_text(tokenizer, text), list(tokenizer(str(text))["input_ids"])
    if len(pieces) == 1 and (cut is None or len(ended(ids)) <= cut.tokens):
        return ended(ids)
    # 2. Find what the tokenizer puts around a text: around this one without the names of control tokens.
    text = "".join(pieces[::2])
    if not bare_ids(tokenizer, text):
        text = next((piece[0] for piece in pieces[1::2] if piece and not pictures_of(piece)), "")
    ids, plain = list(tokenizer(text)["input_ids"]), bare_ids(tokenizer, text)
    start = next((n for n in range(len(ids) - len(plain) + 1) if ids[n : n + len(plain)] == plain), None)
    if not plain:  # a prompt that is a picture alone
        start = len(ended(ids))
    own = ids_of_pieces(tokenizer, pieces)
    if start is None and (cut is None or len(own) <= cut.tokens):
        return own
    if start is None:
        raise LmgymError(
            "policy.max_prompt_tokens: this tokenizer gives a text other ids where it puts special tokens around it, "
            "so it is unclear where to cut; shorten the prompts in the task, and remove policy.max_prompt_tokens"
        )
    before, after = ids[:start], ended(ids[start + len(plain) :])
    # 3. Put the text's own ids in their place, as many as fit.
    around = len(before) + len(after)
    if cut is not None and cut.tokens <= around:
        raise LmgymError(
            f"policy.max_prompt_tokens is {cut.tokens}, and the tokenizer puts {around} special tokens around a text; "
            f"it must be at least {around + 1}"
        )
    if cut is not None and len(own) > cut.tokens - around:
        if any(map(pictures_of, pieces)):
            raise LmgymError(
                f"a prompt with pictures has {around + len(own)} tokens, more than policy.max_prompt_tokens "
                f"({cut.tokens}), and is not cut; shorten it, or raise or remove policy.max_prompt_tokens"
            )
        own = own[around - cut.tokens :] if cut.side == "left" else own[: cut.tokens - around]
    return [*before, *own, *after]


def decoder_answer_ids(tokenizer: Any, answer: str, begun: bool = False) -> list[int]:
    """Token ids [A] of a reference answer for the decoder of an encoder-decoder: the text and the end of sequence. A
    beginning-of-sequence id is not part of it; it belongs to the decoder's first tokens. `begun`: behind the given
    start of an answer (`start_ids`)."""
    return [*text_ids(tokenizer, answer, continued=begun, target=True), tokenizer.eos_token_id]


def start_ids(tokenizer: Any, text: str, target: bool = False) -> list[int]:
    """Token ids of the given start of an answer, behind what the chat template or the decoder begins with. The recipe
    writes it, so it may hold control tokens. `target`: of an encoder-decoder's answer.

    Example: start_ids(builtin_tokenizer("builtin:numbers"), "7 8") -> [10, 11]"""
    return bare_ids(tokenizer, text, later=True, target=target)


def appended_ids(
    tokenizer: Any,
    history: Sequence[Message],
    new: Sequence[Message],
    last: int,
    template: Template | None = None,
    ended: bool = False,
    bare: bool = False,
) -> list[int]:
    """Token ids of `new` environment messages, to append to a sampled answer, ready for the next answer.

    `history` are the messages before that answer; they are rendered only to see what the template writes after an
    answer. `last` is the last id of the answer, and `ended` says whether it ends an answer: then the template's own end
    mark is not written behind it. `bare`: the conversation has begun with a BarePrompt. Raises LmgymError if the
    template drops or repeats earlier answers."""
    # 1. Without a template: a blank line, then the messages.
    if bare or not getattr(tokenizer, "chat_template", None):
        text = RecipeText.join("\n\n", plain_text(new))
        return ids_of_pieces(tokenizer, split_text(tokenizer, text))
    # 2. With a template: what it writes behind the answer.
    if sentence := left_out(tokenizer, new, template, begun=True):
        warn(sentence)
    ids = ids_of_pieces(tokenizer, ending_pieces(tokenizer, history, new, template))
    # 3. Drop the end mark if the answer already ends with it, or with another; some templates put a space before it.
    for mark in (last, end_mark(tokenizer)) if ended else (last,):
        place = ids.index(mark) if mark in ids else None
        if place is not None and not decoded(tokenizer, ids[:place], skip_special_tokens=False).strip():
            return ids[place + 1 :]
    return ids


def continued_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that continues sampled tokens, without the space that some tokenizers add in front."""
    return text_ids(tokenizer, text, continued=True)


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of sampled ids, without special tokens, with spaces exactly as in the tokens."""
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
