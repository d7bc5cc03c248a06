"""Prompts and messages to token ids, and sampled ids to text. Appends, never re-renders.

What the policy sampled is kept as ids. Text enters a conversation only here: the first prompt once, then each
environment message once, as the ids that go behind what is already there. `tokenizer` is any object with a
Hugging Face tokenizer's methods; nothing here imports torch or transformers.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lmgym.core.errors import LmgymError
from lmgym.types import Message

ANSWER = "\x02answer\x03"  # stands for a sampled answer while the template is asked what surrounds it


@dataclass(frozen=True)
class Cut:
    """A prompt of more than `tokens` tokens loses those too many, at its beginning ("left") or its end ("right").

    As in Hugging Face's truncation, the tokens that the tokenizer puts around a text count, and stay. What a chat
    template writes is not cut.

    Example: Cut(tokens=512, side="left")
    """

    tokens: int
    side: Literal["left", "right"] = "left"


def messages_of(prompt: str | Sequence[Message]) -> list[Message]:
    """A text prompt is one user message; a list of messages is itself."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def prompt_ids(
    tokenizer: Any,
    prompt: str | Sequence[Message],
    template: Mapping[str, Any] | None = None,
    cut: Cut | None = None,
) -> list[int]:
    """Token ids [P] of a first prompt, ready for the policy to answer.

    A tokenizer with a chat template renders messages through it, with `template` as its keyword arguments (for
    example `{"enable_thinking": False}`). One without gets the plain text of `plain_text`, with the special tokens
    that it puts at the beginning (BOS) but not one at the end. Raises LmgymError where a chat is longer than `cut`
    allows.
    """
    if getattr(tokenizer, "chat_template", None):
        text = _template(tokenizer, messages_of(prompt), True, template)
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if cut is not None and len(ids) > cut.tokens:
            raise LmgymError(
                f"a chat prompt has {len(ids)} tokens, more than policy.max_prompt_tokens ({cut.tokens}), and what a "
                "chat template writes is not cut; shorten the prompt, or raise or remove policy.max_prompt_tokens"
            )
        return ids
    ids = list(tokenizer(plain_text(messages_of(prompt)))["input_ids"])
    ended = bool(ids) and ids[-1] == tokenizer.eos_token_id
    return _fitted(tokenizer, prompt, ids[:-1] if ended else ids, cut)


def plain_text(messages: Sequence[Message]) -> str:
    """Messages for a model without a chat template: a prompt is followed at once by its answer, and a blank line
    ends a system prompt and an answer.

    Example:
        >>> plain_text([{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="},
        ...             {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2="}])
        'Add.\\n\\n1+1=2\\n\\n2+2='
    """
    return "".join(message["content"] + ("" if message["role"] == "user" else "\n\n") for message in messages)


def answer_ids(
    tokenizer: Any, prompt: str | Sequence[Message], answer: str, template: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids [A] of a reference answer behind its prompt, end of sequence included: what a demonstration trains on.

    Prompt and answer are tokenized together where that leaves the prompt's ids as they are (so that a word at the
    seam gets the ids that a model would have sampled), else apart.
    """
    if tokenizer.eos_token_id is None:
        raise LmgymError(
            "the tokenizer has no end-of-sequence token; set one (tokenizer.eos_token) before training on references"
        )
    before = prompt_ids(tokenizer, prompt, template)
    if getattr(tokenizer, "chat_template", None):
        text = _template(tokenizer, messages_of(prompt), True, template)
        both = list(tokenizer(text + answer, add_special_tokens=False)["input_ids"])
    else:
        both = list(tokenizer(plain_text(messages_of(prompt)) + answer)["input_ids"])
        if both and both[-1] == tokenizer.eos_token_id:
            both.pop()
    if both[: len(before)] == before and len(both) > len(before):
        return [*both[len(before) :], tokenizer.eos_token_id]
    return [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def source_ids(
    tokenizer: Any,
    prompt: str | Sequence[Message],
    template: Mapping[str, Any] | None = None,
    cut: Cut | None = None,
) -> list[int]:
    """Token ids [S] of a prompt for an encoder: with all the special tokens that the tokenizer puts around a text, the
    end mark of T5 included, which `prompt_ids` leaves out."""
    if getattr(tokenizer, "chat_template", None):
        return prompt_ids(tokenizer, prompt, template, cut)
    return _fitted(tokenizer, prompt, list(tokenizer(plain_text(messages_of(prompt)))["input_ids"]), cut)


def _fitted(tokenizer: Any, prompt: str | Sequence[Message], ids: list[int], cut: Cut | None) -> list[int]:
    """The ids of a plain prompt without those too many: the text's own ones go, what stands around them stays."""
    if cut is None or len(ids) <= cut.tokens:
        return ids
    own = list(tokenizer(plain_text(messages_of(prompt)), add_special_tokens=False)["input_ids"])
    around = len(ids) - len(own)
    start = next((place for place in range(around + 1) if ids[place : place + len(own)] == own), None)
    if start is None:
        raise LmgymError(
            "policy.max_prompt_tokens: this tokenizer gives a text other ids where it puts special tokens around it, "
            "so it is unclear where to cut; shorten the prompts in the task, and remove policy.max_prompt_tokens"
        )
    room = cut.tokens - around
    if room < 1:
        raise LmgymError(
            f"policy.max_prompt_tokens is {cut.tokens}, and the tokenizer puts {around} special tokens around a text; "
            f"it must be at least {around + 1}"
        )
    kept = own[-room:] if cut.side == "left" else own[:room]
    return [*ids[:start], *kept, *ids[start + len(own) :]]


def decoder_answer_ids(tokenizer: Any, answer: str) -> list[int]:
    """Token ids [A] of a reference answer for a decoder that begins it apart from the prompt: the text's own ids and
    the end of sequence. (A beginning-of-sequence id belongs to the decoder's first tokens, not to the answer.)"""
    return [*tokenizer(text_target=answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def appended_ids(
    tokenizer: Any,
    history: Sequence[Message],
    new: Sequence[Message],
    last: int,
    template: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids that put `new` environment messages behind a sampled answer, ready for the next one.

    `history` are the messages before that answer. Their content is not rendered again: the template is only asked what
    it writes between an answer and the next prompt. `last` is the answer's last id: an end mark that the policy has
    sampled itself is not written twice. Raises LmgymError if the template rewrites what came before.
    """
    if not getattr(tokenizer, "chat_template", None):
        return list(tokenizer("\n\n" + plain_text(new), add_special_tokens=False)["input_ids"])
    answered = [*history, {"role": "assistant", "content": ANSWER}]
    text = _template(tokenizer, [*answered, *new], True, template)
    if text.count(ANSWER) != 1:
        raise LmgymError(
            "the chat template drops or repeats an earlier answer, so a conversation cannot be appended to"
        )
    suffix = text.split(ANSWER)[1]
    ids = list(tokenizer(suffix, add_special_tokens=False)["input_ids"])
    if last in ids:
        mark = ids.index(last)
        if not decode(tokenizer, ids[:mark]).strip():  # some templates put a space before the end mark
            return ids[mark + 1 :]
    return ids


def continued_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that goes on right behind a sampled token, without the space that some tokenizers put before
    what they are given."""
    if not text:
        return []
    anchor, both = (list(tokenizer(before, add_special_tokens=False)["input_ids"]) for before in ("\n", "\n" + text))
    if both[: len(anchor)] == anchor and len(both) > len(anchor):
        return both[len(anchor) :]
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of sampled ids, special tokens removed, spaces as the tokens have them."""
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _template(tokenizer: Any, messages: Sequence[Message], generate: bool, template: Mapping[str, Any] | None) -> str:
    """The messages as the template writes them; where it refuses them, merged as it may want them, with a warning."""
    try:
        return _applied(tokenizer, messages, generate, template)
    except Exception as error:  # jinja raises whatever the template's author chose
        roles = ", ".join(message["role"] for message in messages)
        fewer = merged(messages)
        if len(fewer) == len(messages):
            raise LmgymError(f"the tokenizer's chat template refuses the messages ({roles}): {error}") from error
        try:
            text = _applied(tokenizer, fewer, generate, template)
        except Exception:
            raise LmgymError(f"the tokenizer's chat template refuses the messages ({roles}): {error}") from error
        warnings.warn(
            f"the chat template refuses the messages as they are ({error}); system messages were put into the user's "
            "next ones, and messages of one role in a row joined",
            stacklevel=2,
        )
        return text


def _applied(tokenizer: Any, messages: Sequence[Message], generate: bool, template: Mapping[str, Any] | None) -> str:
    return tokenizer.apply_chat_template(
        [dict(message) for message in messages], tokenize=False, add_generation_prompt=generate, **(template or {})
    )


def merged(messages: Sequence[Message]) -> list[Message]:
    """Messages for a template without a system role, or that wants the roles to alternate: system messages are the
    user's, and messages of one role in a row become one, a blank line between them.

    Example:
        >>> merged([{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}])
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
