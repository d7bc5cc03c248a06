"""Turns texts into rows of token ids for a scoring model. No text can make control tokens (text/control.py). A text
that is too long is refused, or cut if the user asks for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.rewards.learned.scorers import Scorer
from lmgym.text.chat import plain_text
from lmgym.text.control import bare_ids, control_tokens, ids_of_pieces, text_ids
from lmgym.text.template import template_pieces
from lmgym.types import Message

PREFIXED = ("GPT2Tokenizer", "RobertaTokenizer")  # a word's token begins with its space


@dataclass(frozen=True)
class Row:
    """One input of a model: ids, and for a pair of texts the number (0 or 1) of the text that each id belongs to.

    Example: Row(ids=(101, 7592, 102), types=(0, 0, 0))"""

    ids: tuple[int, ...]
    types: tuple[int, ...] | None = None


def text_rows(scorer: Scorer, texts: Sequence[str], second: Sequence[str] | None = None) -> list[Row]:
    """One row per text, or per pair (text, second text), with the tokenizer's special tokens.

    A row that is too long raises LmgymError, or loses tokens at its left or right end (`scorer.truncation`); of a pair
    the longer text is cut. If a row has no token, as with some tokenizers for an empty text, it becomes the
    end-of-sequence token."""
    if not texts:
        return []
    rows = _rows(scorer, texts, second)
    longest = scorer.longest
    for index, row in enumerate(rows):
        pair = None if second is None else second[index]
        too_long = longest is not None and len(row.ids) > longest
        if too_long and scorer.truncation == "refuse":
            raise length_error(scorer, f"text {index} of {len(rows)}", len(row.ids))
        if _forged(scorer, row, texts[index], pair):
            rows[index] = _row_apart(scorer, texts[index], pair)
        elif too_long:
            scorer.tokenizer.truncation_side = scorer.truncation
            own = None if pair is None else [pair]
            rows[index] = _rows(scorer, [texts[index]], own, truncation=True, max_length=longest)[0]
    return rows


def _rows(scorer: Scorer, texts: Sequence[str], second: Sequence[str] | None, **cut: Any) -> list[Row]:
    found = scorer.tokenizer(
        list(map(clean, texts)), *([] if second is None else [list(map(clean, second))]),
        split_special_tokens=True, verbose=False, **cut,
    )  # fmt: skip
    types = found.get("token_type_ids") or [None] * len(texts)
    rows = [Row(tuple(ids), None if t is None else tuple(t)) for ids, t in zip(found["input_ids"], types, strict=True)]
    return [row if row.ids else Row((_filler(scorer),), None if row.types is None else (0,)) for row in rows]


def _forged(scorer: Scorer, row: Row, *texts: str | None) -> bool:
    """True if the tokenizer reads control tokens in a row's texts, though it is told not to: those of SentencePiece's
    unigram models are pieces of the vocabulary like any other."""
    tokenizer, control = scorer.tokenizer, control_tokens(scorer.tokenizer)
    if sum(id in control.ids for id in row.ids) <= tokenizer.num_special_tokens_to_add(pair=texts[-1] is not None):
        return False
    cleaned = [clean(text) for text in texts if text is not None]
    return any(control.made_of(text, bare_ids(tokenizer, text, split_special_tokens=True)) for text in cleaned)


def _row_apart(scorer: Scorer, text: str, pair: str | None) -> Row:
    """The row of a text (and a second one) that `_forged` is about: the tokenizer's special tokens stay, and the ids of
    the texts are replaced by those of `text_ids`, cut at their end (or beginning) if the row is too long."""
    whole = _rows(scorer, [text], None if pair is None else [pair])[0]
    types = list(whole.types or [0] * len(whole.ids))
    parts, place = list[tuple[list[int], list[int], bool]](), 0  # ids, types, whether they are those of a text
    for given in [text] if pair is None else [text, pair]:
        read = bare_ids(scorer.tokenizer, clean(given), split_special_tokens=True)
        ids = text_ids(scorer.tokenizer, clean(given))
        starts = (n for n in range(place, len(whole.ids)) if list(whole.ids[n : n + len(read)]) == read)
        start = next(starts, place)
        parts.append((list(whole.ids[place:start]), types[place:start], False))
        parts.append((ids, [types[start]] * len(ids) if start < len(types) else [], True))
        place = start + len(read)
    parts.append((list(whole.ids[place:]), types[place:], False))
    # Cut the longer text, token by token, until the row fits.
    while scorer.longest is not None and sum(len(ids) for ids, _, _ in parts) > scorer.longest:
        ids, kinds, _ = max((part for part in parts if part[2]), key=lambda part: len(part[0]))
        del ids[0 if scorer.truncation == "left" else -1], kinds[-1]
    joined = tuple(id for ids, _, _ in parts for id in ids)
    return Row(joined, None if whole.types is None else tuple(kind for _, kinds, _ in parts for kind in kinds))


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text's characters, without special tokens."""
    return text_ids(tokenizer, clean(text))


def chat_ids(scorer: Scorer, messages: Sequence[Message], generate: bool = True, begin: str = "") -> list[int]:
    """Ids of a conversation in the tokenizer's chat template, with `begin` as the start of the answer.

    Only the template and `begin`, which the recipe writes, can make control tokens; in the messages their names are
    plain text. Without a template the conversation is rendered by text.chat.plain_text, and `begin` makes none either.
    Raises LmgymError if the template refuses the messages."""
    tokenizer = scorer.tokenizer
    messages = [{**message, "content": clean(message["content"])} for message in messages]
    if not getattr(tokenizer, "chat_template", None):
        unlimited = replace(scorer, longest=None)
        ids = list(text_rows(unlimited, [plain_text(messages) + begin])[0].ids)
        ends = (tokenizer.eos_token_id, tokenizer.sep_token_id)
        return (ids[:-1] if generate and ids and ids[-1] in ends else ids) or [_filler(scorer)]
    try:
        pieces = template_pieces(tokenizer, messages, generate=generate, merge=False)
    except LmgymError as error:
        raise LmgymError(f"{scorer.name}: {error}") from error
    return ids_of_pieces(tokenizer, [*pieces[:-1], pieces[-1] + clean(begin)])


def fitted(scorer: Scorer, text: str, rendered: Callable[[str], list[int]]) -> Row:
    """The row of `rendered(text)`. If it is too long, as much of the text as fits, cut at its left or right.

    Raises LmgymError if the row is too long and `scorer.truncation` is "refuse", or if it is too long even with an
    empty text."""
    ids, longest = rendered(text), scorer.longest
    if longest is None or len(ids) <= longest:
        return Row(tuple(ids))
    if scorer.truncation == "refuse":
        raise length_error(scorer, "a text with what is put around it", len(ids))
    # Find by bisection the most characters that fit: 0 characters must fit, all of them do not.
    fits, most = 0, len(text)
    best = rendered("")
    if len(best) > longest:
        raise LmgymError(
            f"reward '{scorer.reward}': what is put around the text has {len(best)} tokens, and {scorer.name} reads "
            f"{longest}; shorten the prompt or the template, or take a model that reads more"
        )
    while most - fits > 1:
        middle = (fits + most) // 2
        ids = rendered(text[len(text) - middle :] if scorer.truncation == "left" else text[:middle])
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
    known = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
    return next((int(id) for id in known if id is not None), 0)


def clean(text: str) -> str:
    """The text with U+FFFD in place of each lone surrogate (half of a surrogate pair), which no tokenizer accepts."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def length_error(scorer: Scorer, what: str, tokens: int) -> LmgymError:
    """What to say of a text of more tokens than the model reads, where the recipe does not let it be cut."""
    return LmgymError(
        f"reward '{scorer.reward}': {what} has {tokens} tokens, and {scorer.name} reads {scorer.longest}; write "
        f"'truncation: left' to keep the end of the text or 'right' to keep its beginning"
    )
