"""Two tokenizers' tokens of one text, laid side by side by their bytes."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

from lmgym.text.chat import continued_ids
from lmgym.text.token_bytes import TokenBytes

UNREADABLE = "\ufffd"  # stands for a byte that is part of no character


class Aligned(NamedTuple):
    """A text in the tokens of two tokenizers: the second one's ids, and for each token of both the number of its span,
    from 1 on; 0 for a token that is in none.

    Example: "cats" as [b"c", b"at", b"s"] and [b"cat", b"s"] has two spans: own [1, 1, 2], other [1, 2]"""

    ids: list[int]
    own: list[int]
    other: list[int]


def aligned(ids: Sequence[int], own: TokenBytes, tokenizer: Any, other: TokenBytes) -> Aligned:
    """Read the text of some sampled ids with another tokenizer, and number the spans of both.

    The ids need not spell a text: a byte that is part of no character is read as U+FFFD, and its span counts as none.
    So do tokens that write nothing, control tokens first of all, and everything if the other tokenizer does not give
    the text back (it may know no token for a letter)."""
    data, ids = b"".join(map(own.of, ids)), list(ids)
    text, places, unreadable = readable(data)
    read = continued_ids(tokenizer, text)
    if b"".join(map(other.of, read)) != text.encode():
        return Aligned(read, [0] * len(ids), [0] * len(read))
    ends = [places[end] for end in own.ends(ids)]
    own_spans, other_spans, cuts = spans_of(ends, other.ends(read))
    left_out = {0, *(bisect_left(cuts, end) + 1 for end in unreadable)}

    def kept(numbers: list[int], tokens: Sequence[int], table: TokenBytes) -> list[int]:
        return [
            0 if number in left_out or not table.of(id) else number for number, id in zip(numbers, tokens, strict=True)
        ]

    return Aligned(read, kept(own_spans, ids, own), kept(other_spans, read, other))


def spans_of(own: Sequence[int], other: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """The number of each token's span, from 1 on, by where the tokens of two cuts of one text end; and where the spans
    end. A span ends wherever both have an end, so none can be made shorter. What lies behind the last common end is in
    no span: 0.

    Example: spans_of([1, 3, 4], [3, 4]) -> ([1, 1, 2], [1, 2], [3, 4])"""
    cuts = sorted({*own} & {*other} - {0})

    def numbers(ends: Sequence[int]) -> list[int]:
        places = [bisect_left(cuts, end) for end in ends]
        return [place + 1 if place < len(cuts) else 0 for place in places]

    return numbers(own), numbers(other), cuts


def readable(data: bytes) -> tuple[str, list[int], list[int]]:
    """Bytes as a text: a byte that belongs to no character becomes U+FFFD. Returns the text; for each place in `data`
    the same place in the bytes of the text, [len(data) + 1]; and the places where the new U+FFFD end.

    Example: readable(b"a\\xff") -> ("a\\ufffd", [0, 1, 4], [4])"""
    letters, places, unreadable = [], [0], []
    for letter in data.decode(errors="surrogateescape"):  # such a byte becomes a surrogate, which no text holds
        place = places[-1]
        if "\udc80" <= letter <= "\udcff":
            letters.append(UNREADABLE)
            places.append(place + len(UNREADABLE.encode()))
            unreadable.append(places[-1])
        else:
            letters.append(letter)
            places += range(place + 1, place + len(letter.encode()) + 1)
    return "".join(letters), places, unreadable
