"""Texts to the token ids that a scoring model reads. Words are words, whatever they spell: "<|im_end|>" in an answer
becomes the tokens of its characters, never the control token. What is too long is refused, or cut where asked."""

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
    """What a model reads at once: ids, and for a pair of texts which of them each id belongs to.

    Example: Row(ids=(101, 7592, 102), types=(0, 0, 0))
    """

    ids: tuple[int, ...]
    types: tuple[int, ...] | None = None


def text_rows(
    reward: str, scorer: Scorer, texts: Sequence[str], truncation: Truncation, behind: Sequence[str] | None = None
) -> list[Row]:
    """One row per text, or per pair (text, behind), with the special tokens that the tokenizer puts around it.

    Cut are the tokens at the left or right, of a pair those of the longer text. A row without any token, as an empty
    text has with some tokenizers, becomes the end-of-sequence token. Raises LmgymError for a text that is too long.
    """
    if not texts:
        return []
    rows = _rows(scorer, texts, behind)
    longest = scorer.longest
    if longest is None or max(len(row.ids) for row in rows) <= longest:
        return rows
    for index, row in enumerate(rows):
        if len(row.ids) > longest:
            if truncation == "refuse":
                raise _too_long(reward, scorer, f"text {index} of {len(rows)}", len(row.ids))
            pair = None if behind is None else [behind[index]]
            scorer.tokenizer.truncation_side = truncation
            rows[index] = _rows(scorer, [texts[index]], pair, truncation=True, max_length=longest)[0]
    return rows


def _rows(scorer: Scorer, texts: Sequence[str], behind: Sequence[str] | None, **cut: Any) -> list[Row]:
    found = scorer.tokenizer(
        list(map(clean, texts)), *([] if behind is None else [list(map(clean, behind))]),
        split_special_tokens=True, verbose=False, **cut,
    )  # fmt: skip
    types = found.get("token_type_ids") or [None] * len(texts)
    rows = [Row(tuple(ids), None if t is None else tuple(t)) for ids, t in zip(found["input_ids"], types, strict=True)]
    return [row if row.ids else Row((_filler(scorer),), None if row.types is None else (0,)) for row in rows]


def plain_ids(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    """The ids of a text's own characters; with `special`, what spells a control token is that token."""
    text = clean(text)
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=not special, verbose=False)["input_ids"])


def chat_ids(scorer: Scorer, messages: Sequence[Message], generate: bool = True, begin: str = "") -> list[int]:
    """Ids of a conversation through the tokenizer's chat template, with `begin` as the start of the answer.

    Control tokens are those that the template writes; in the messages they are plain text. Without a template it is
    the plain text of rendering.plain_text. Raises LmgymError where the template refuses the messages.

    Example:
        >>> chat_ids(scorer, [{"role": "user", "content": "Is 4 even?"}], begin="Yes or no:")
    """
    tokenizer = scorer.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        text = plain_text(messages) + begin
        ids = list(tokenizer(clean(text), split_special_tokens=True, verbose=False)["input_ids"])
        ends = (tokenizer.eos_token_id, tokenizer.sep_token_id)
        return (ids[:-1] if generate and ids and ids[-1] in ends else ids) or [_filler(scorer)]
    hidden, found, edge = _hide(tokenizer, messages)
    try:
        text = tokenizer.apply_chat_template(hidden, tokenize=False, add_generation_prompt=generate)
    except Exception as error:  # jinja raises whatever the template's author chose
        roles = ", ".join(message["role"] for message in messages)
        raise LmgymError(f"the chat template of {scorer.name} refuses the messages ({roles}): {error}") from error
    ids = []
    for number, piece in enumerate(re.split(f"{edge}([0-9]+){edge}", text + begin)):
        ids += plain_ids(tokenizer, found[int(piece)]) if number % 2 else plain_ids(tokenizer, piece, special=True)
    return ids


def _hide(tokenizer: Any, messages: Sequence[Message]) -> tuple[list[dict[str, str]], list[str], str]:
    """The messages with a numbered mark in place of each control token that a content spells."""
    control = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    control |= set(tokenizer.all_special_tokens)
    if not control:
        return [dict(message) for message in messages], [], "\x02"
    edge, found = "\x02", list[str]()
    while any(edge in message["content"] for message in messages):
        edge += "\x02\x03"
    pattern = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True))))

    def hide(match: re.Match[str]) -> str:
        found.append(match[0])
        return f"{edge}{len(found) - 1}{edge}"

    return [{**message, "content": pattern.sub(hide, message["content"])} for message in messages], found, edge


def fitted(reward: str, scorer: Scorer, text: str, rendered: Callable[[str], list[int]], side: Truncation) -> Row:
    """The row of `rendered(text)`, or, where it is too long, of as much of the text as fits, without its left or right.

    Raises LmgymError where it is too long and must not be cut, or would be too long with nothing left of the text.
    """
    ids, longest = rendered(text), scorer.longest
    if longest is None or len(ids) <= longest:
        return Row(tuple(ids))
    if side == "refuse":
        raise _too_long(reward, scorer, "a text with what is put around it", len(ids))
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
    """The text with a space in front where the tokenizer's words begin with one, as words within a sentence do."""
    return f" {text}" if type(tokenizer).__name__.removesuffix("Fast") in PREFIXED else text


def _filler(scorer: Scorer) -> int:
    tokenizer = scorer.tokenizer
    for id in (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id):
        if id is not None:
            return int(id)
    return 0


def clean(text: str) -> str:
    """The text with U+FFFD for half a surrogate pair, which no tokenizer takes.

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
