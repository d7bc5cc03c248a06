"""Prompts and messages to token ids, and sampled ids to text. A conversation is appended to, never rendered again.

Sampled tokens stay ids. Text is tokenized only here, and only once: the first prompt, then each environment message, as
ids to append. `tokenizer` is any object with the methods of a Hugging Face tokenizer; nothing here imports torch or
transformers.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lmgym.core.errors import LmgymError
from lmgym.types import Message

ANSWER = "\x02answer\x03"  # placeholder of a sampled answer, to find what a template writes around it


@dataclass(frozen=True)
class Cut:
    """Truncation of prompts to `tokens` tokens, at their beginning ("left") or end ("right").

    As in Hugging Face's truncation, special tokens that the tokenizer adds to a text count, and are kept. Prompts from
    a chat template are not cut but refused.

    Example: Cut(tokens=512, side="left")
    """

    tokens: int
    side: Literal["left", "right"] = "left"


def messages_of(prompt: str | Sequence[Message]) -> list[Message]:
    """The messages of a prompt; a text becomes one user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def prompt_ids(
    tokenizer: Any, prompt: str | Sequence[Message], template: Mapping[str, Any] | None = None, cut: Cut | None = None
) -> list[int]:
    """Token ids [P] of a first prompt, ready for the policy to answer.

    With a chat template, the messages are rendered through it, with `template` as its keyword arguments (for example
    `{"enable_thinking": False}`). Without one, `plain_text` is tokenized, with the special tokens that the tokenizer
    adds in front (BOS) but not at the end (EOS). Raises LmgymError if a chat is longer than `cut` allows.

    Example: prompt_ids(builtin_tokenizer("builtin:numbers"), "7 8") -> [1, 10, 11]
    """
    ids = _whole_ids(tokenizer, prompt, template)
    if not getattr(tokenizer, "chat_template", None):
        return _fitted(tokenizer, prompt, ids, cut)
    if cut is not None and len(ids) > cut.tokens:
        raise LmgymError(
            f"a chat prompt has {len(ids)} tokens, more than policy.max_prompt_tokens ({cut.tokens}), and what a "
            "chat template writes is not cut; shorten the prompt, or raise or remove policy.max_prompt_tokens"
        )
    return ids


def plain_text(messages: Sequence[Message]) -> str:
    """The text of messages for a model without a chat template.

    An answer follows its prompt directly; after a system prompt and after an answer there is a blank line.

    Example:
        >>> plain_text([{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="},
        ...             {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2="}])
        'Add.\\n\\n1+1=2\\n\\n2+2='
    """
    return "".join(message["content"] + ("" if message["role"] == "user" else "\n\n") for message in messages)


def answer_ids(
    tokenizer: Any, prompt: str | Sequence[Message], answer: str, template: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids [A] of a reference answer after its prompt, with end of sequence: the targets of supervised training.

    Prompt and answer are tokenized together, so that the word at the boundary gets the ids that a model would sample;
    separately if that would change the prompt's ids. Raises LmgymError if the tokenizer has no end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise LmgymError(
            "the tokenizer has no end-of-sequence token; set one (tokenizer.eos_token) before training on references"
        )
    before, both = (_whole_ids(tokenizer, prompt, template, text) for text in ("", answer))
    if both[: len(before)] == before and len(both) > len(before):
        return [*both[len(before) :], tokenizer.eos_token_id]
    return [*_bare_ids(tokenizer, answer), tokenizer.eos_token_id]


def source_ids(
    tokenizer: Any, prompt: str | Sequence[Message], template: Mapping[str, Any] | None = None, cut: Cut | None = None
) -> list[int]:
    """Token ids [S] of a prompt for an encoder, with all special tokens that the tokenizer adds. These include the
    end-of-sequence token (of T5, for example), which `prompt_ids` leaves out."""
    if getattr(tokenizer, "chat_template", None):
        return prompt_ids(tokenizer, prompt, template, cut)
    return _fitted(tokenizer, prompt, list(tokenizer(plain_text(messages_of(prompt)))["input_ids"]), cut)


def _fitted(tokenizer: Any, prompt: str | Sequence[Message], ids: list[int], cut: Cut | None) -> list[int]:
    """The ids of a plain prompt, cut to `cut.tokens`: ids of the text are removed, special tokens around it stay."""
    if cut is None or len(ids) <= cut.tokens:
        return ids
    # 1. Find the ids of the text alone among all ids.
    text_ids = _bare_ids(tokenizer, plain_text(messages_of(prompt)))
    around = len(ids) - len(text_ids)
    start = next((index for index in range(around + 1) if ids[index : index + len(text_ids)] == text_ids), None)
    if start is None:
        raise LmgymError(
            "policy.max_prompt_tokens: this tokenizer gives a text other ids where it puts special tokens around it, "
            "so it is unclear where to cut; shorten the prompts in the task, and remove policy.max_prompt_tokens"
        )
    # 2. Cut them.
    room = cut.tokens - around
    if room < 1:
        raise LmgymError(
            f"policy.max_prompt_tokens is {cut.tokens}, and the tokenizer puts {around} special tokens around a text; "
            f"it must be at least {around + 1}"
        )
    kept = text_ids[-room:] if cut.side == "left" else text_ids[:room]
    return [*ids[:start], *kept, *ids[start + len(text_ids) :]]


def decoder_answer_ids(tokenizer: Any, answer: str) -> list[int]:
    """Token ids [A] of a reference answer for the decoder of an encoder-decoder: the text and the end of sequence. A
    beginning-of-sequence id is not part of it; it belongs to the decoder's first tokens."""
    return [*tokenizer(text_target=answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def appended_ids(
    tokenizer: Any,
    history: Sequence[Message],
    new: Sequence[Message],
    last: int,
    template: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of `new` environment messages, to append to a sampled answer, ready for the next answer.

    `history` are the messages before that answer; they are rendered only to see what the template writes after an
    answer. `last` is the last id of the answer: if the policy sampled the end mark itself, it is not written again.
    Raises LmgymError if the template drops or repeats earlier answers.
    """
    # 1. Without a template: a blank line, then the messages.
    if not getattr(tokenizer, "chat_template", None):
        return _bare_ids(tokenizer, "\n\n" + plain_text(new))
    # 2. Render the conversation with a placeholder as the answer; what follows it is to be appended.
    answered = [*history, {"role": "assistant", "content": ANSWER}]
    text = _template(tokenizer, [*answered, *new], template)
    if text.count(ANSWER) != 1:
        raise LmgymError(
            "the chat template drops or repeats an earlier answer, so a conversation cannot be appended to"
        )
    ids = _bare_ids(tokenizer, text.split(ANSWER)[1])
    # 3. Drop the end mark if the answer already ends with it.
    if last in ids:
        mark = ids.index(last)
        if not decode(tokenizer, ids[:mark]).strip():  # some templates put a space before the end mark
            return ids[mark + 1 :]
    return ids


def continued_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that continues sampled tokens, without the space that some tokenizers add in front."""
    if not text:
        return []
    # Tokenize behind a line break, then remove the ids of the line break.
    anchor, both = _bare_ids(tokenizer, "\n"), _bare_ids(tokenizer, "\n" + text)
    if both[: len(anchor)] == anchor and len(both) > len(anchor):
        return both[len(anchor) :]
    return _bare_ids(tokenizer, text)


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of sampled ids, without special tokens, with spaces exactly as in the tokens."""
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _bare_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text, without special tokens."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _whole_ids(
    tokenizer: Any, prompt: str | Sequence[Message], template: Mapping[str, Any] | None, answer: str = ""
) -> list[int]:
    """Token ids of a prompt, and of an answer directly behind it, without an end of sequence."""
    if getattr(tokenizer, "chat_template", None):
        return _bare_ids(tokenizer, _template(tokenizer, messages_of(prompt), template) + answer)
    ids = list(tokenizer(plain_text(messages_of(prompt)) + answer)["input_ids"])
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def _template(tokenizer: Any, messages: Sequence[Message], template: Mapping[str, Any] | None) -> str:
    """The messages rendered by the chat template; if it refuses them, merged by `merge_roles`, with a warning."""
    try:
        return _render(tokenizer, messages, template)
    except Exception as error:  # jinja raises whatever the template's author chose
        roles = ", ".join(message["role"] for message in messages)
        fewer = merge_roles(messages)
        if len(fewer) == len(messages):
            raise LmgymError(f"the tokenizer's chat template refuses the messages ({roles}): {error}") from error
        try:
            text = _render(tokenizer, fewer, template)
        except Exception:
            raise LmgymError(f"the tokenizer's chat template refuses the messages ({roles}): {error}") from error
        warnings.warn(
            f"the chat template refuses the messages as they are ({error}); system messages were put into the user's "
            "next ones, and messages of one role in a row joined",
            stacklevel=2,
        )
        return text


def _render(tokenizer: Any, messages: Sequence[Message], template: Mapping[str, Any] | None) -> str:
    plain = [dict(message) for message in messages]
    return tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True, **(template or {}))


def merge_roles(messages: Sequence[Message]) -> list[Message]:
    """Messages for a chat template without a system role, or with strictly alternating roles.

    System messages become user messages; consecutive messages of one role become one, with a blank line between them.

    Example:
        >>> merge_roles([{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}])
        [{'role': 'user', 'content': 'Add.\\n\\n1+1='}]
    """
    fewer: list[Message] = []
    for message in messages:
        role = "user" if message["role"] == "system" else message["role"]
        if fewer and fewer[-1]["role"] == role:
            fewer[-1] = {**fewer[-1], "content": f"{fewer[-1]['content']}\n\n{message['content']}"}
        else:
            fewer.append({**message, "role": role})
    return fewer
