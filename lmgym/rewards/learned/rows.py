"""Turns texts into rows of token ids for a scoring model. A text cannot contain control tokens: "<|im_end|>" in an
answer becomes the tokens of its characters. A text that is too long is refused, or cut if the user asks for it."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lmgym.core.errors import LmgymError
from lmgym.rewards.learned.scorers import Scorer
from lmgym.text.chat import plain_text
from lmgym.types import Message

Truncation = Literal["refuse", "left", "right"]
PREFIXED = ("GPT2Tokenizer", "RobertaTokenizer")  # a word's token begins with its space


@dataclass(frozen=True)
class Row:
    """One input of a model: ids, and for a pair of texts the number (0 or 1) of the text that each id belongs to.

    Example: Row(ids=(101, 7592, 102), types=(0, 0, 0))
    """

    ids: tuple[int, ...]
    types: tuple[int, ...] | None = None


def text_rows(
    reward: str, scorer: Scorer, texts: Sequence[str], truncation: Truncation, second: Sequence[str] | None = None
) -> list[Row]:
    """One row per text, or per pair (text, second text), with the tokenizer's special tokens.

    A row that is too long raises LmgymError, or loses tokens at its left or right end (`truncation`); of a pair the
    longer text is cut. If a row has no token, as with some tokenizers for an empty text, it becomes the end-of-sequence
    token.
    """
    if not texts:
        return []
    rows = _rows(scorer, texts, second)
    longest = scorer.longest
    if longest is None or max(len(row.ids) for row in rows) <= longest:
        return rows
    for index, row in enumerate(rows):
        if len(row.ids) > longest:
            if truncation == "refuse":
                raise _too_long(reward, scorer, f"text {index} of {len(rows)}", len(row.ids))
            pair = None if second is None else [second[index]]
            scorer.tokenizer.truncation_side = truncation
            rows[index] = _rows(scorer, [texts[index]], pair, truncation=True, max_length=longest)[0]
    return rows


def _rows(scorer: Scorer, texts: Sequence[str], second: Sequence[str] | None, **cut: Any) -> list[Row]:
    found = scorer.tokenizer(
        list(map(clean, texts)), *([] if second is None else [list(map(clean, second))]),
        split_special_tokens=True, verbose=False, **cut,
    )  # fmt: skip
    types = found.get("token_type_ids") or [None] * len(texts)
    rows = [Row(tuple(ids), None if t is None else tuple(t)) for ids, t in zip(found["input_ids"], types, strict=True)]
    return [row if row.ids else Row((_filler(scorer),), None if row.types is None else (0,)) for row in rows]


def plain_ids(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    """The ids of a text's characters, without special tokens; with `special`, the name of a control token in the text
    becomes that token."""
    text = clean(text)
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=not special, verbose=False)["input_ids"])


def chat_ids(scorer: Scorer, messages: Sequence[Message], generate: bool = True, begin: str = "") -> list[int]:
    """Ids of a conversation in the tokenizer's chat template, with `begin` as the start of the answer.

    Only the template can write control tokens; in the messages their names are plain text. Without a template the
    conversation is rendered by text.chat.plain_text. Raises LmgymError if the template refuses the messages.

    Example:
        >>> chat_ids(scorer, [{"role": "user", "content": "Is 4 even?"}], begin="Yes or no:")
    """
    tokenizer = scorer.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        text = plain_text(messages) + begin
        ids = list(tokenizer(clean(text), split_special_tokens=True, verbose=False)["input_ids"])
        ends = (tokenizer.eos_token_id, tokenizer.sep_token_id)
        return (ids[:-1] if generate and ids and ids[-1] in ends else ids) or [_filler(scorer)]
    # Replace the names of control tokens in the messages by marks, render, then put them back as plain text.
    hidden, names, edge = _hide(tokenizer, messages)
    try:
        text = tokenizer.apply_chat_template(hidden, tokenize=False, add_generation_prompt=generate)
    except Exception as error:  # a template may raise any error
        roles = ", ".join(message["role"] for message in messages)
        raise LmgymError(f"the chat template of {scorer.name} refuses the messages ({roles}): {error}") from error
    ids = []
    for number, piece in enumerate(re.split(f"{edge}([0-9]+){edge}", text + begin)):
        ids += plain_ids(tokenizer, names[int(piece)]) if number % 2 else plain_ids(tokenizer, piece, special=True)
    return ids


def _hide(tokenizer: Any, messages: Sequence[Message]) -> tuple[list[dict[str, str]], list[str], str]:
    """The messages with a numbered mark in place of each control token's name, the names by number, and the characters
    at both ends of a mark."""
    control = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    control |= set(tokenizer.all_special_tokens)
    if not control:
        return [dict(message) for message in messages], [], "\x02"
    edge, names = "\x02", list[str]()
    while any(edge in message["content"] for message in messages):  # no content may look like a mark
        edge += "\x02\x03"
    pattern = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))))

    def hide(match: re.Match[str]) -> str:
        names.append(match[0])
        return f"{edge}{len(names) - 1}{edge}"

    return [{**message, "content": pattern.sub(hide, message["content"])} for message in messages], names, edge


def fitted(reward: str, scorer: Scorer, text: str, rendered: Callable[[str], list[int]], side: Truncation) -> Row:
    """The row of `rendered(text)`. If it is too long, as much of the text as fits, cut at its left or right.

    Raises LmgymError if the row is too long and `side` is "refuse", or if it is too long even with an empty text.
    """
    ids, longest = rendered(text), scorer.longest
    if longest is None or len(ids) <= longest:
        return Row(tuple(ids))
    if side == "refuse":
        raise _too_long(reward, scorer, "a text with what is put around it", len(ids))
    # Find by bisection the most characters that fit: 0 characters must fit, all of them do not.
    fits, most = 0, len(text)
    best = rendered("")
    if len(best) > longest:
        raise LmgymError(
            f"reward '{reward}': what is put around the text has {len(best)} tokens, and {scorer.name} reads "
            f"{longest}; shorten the prompt or the template, or take a model that reads more"
        )
    while most - fits > 1:
        middle = (fits + most) // 2
        ids = rendered(text[len(text) - middle :] if side == "left" else text[:middle])
        if len(ids) <= longest:
            fits, best = middle, ids
        else:
            most = middle
    return Row(tuple(best))


def spaced(tokenizer: Any, text: str) -> str:
    """The text, with a leading space for tokenizers whose word tokens include one; so the first word gets the token
    that it has inside of a sentence."""
    return f" {text}" if type(tokenizer).__name__.removesuffix("Fast") in PREFIXED else text


def _filler(scorer: Scorer) -> int:
    """The token of a row that would otherwise be empty."""
    tokenizer = scorer.tokenizer
    for id in (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id):
        if id is not None:
            return int(id)
    return 0


def clean(text: str) -> str:
    """The text with U+FFFD in place of each lone surrogate (half of a surrogate pair), which no tokenizer accepts.

    Example:
        >>> clean("a\\ud800b")
        'a\ufffdb'
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _too_long(reward: str, scorer: Scorer, what: str, tokens: int) -> LmgymError:
    return LmgymError(
        f"reward '{reward}': {what} has {tokens} tokens, and {scorer.name} reads {scorer.longest}; write "
        f"'truncation: left' to keep the end of the text or 'right' to keep its beginning"
    )
