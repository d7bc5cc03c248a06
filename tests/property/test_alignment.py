"""Two tokenizers' tokens of one text: spans by their bytes, for any cut and any sampled ids."""

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmgym.core.errors import LmgymError
from lmgym.models.builtin import builtin_tokenizer
from lmgym.text.alignment import aligned, readable, spans_of
from lmgym.text.token_bytes import token_bytes
from lmgym.text.token_pairs import token_pairs
from tests.toy_tokenizers import byte_level, sentence_piece

OWN = byte_level(["t h", "th e", "Ġ a", "Ã ©", "a n", "an d", "n d", "Ġa nd"])  # two bytes of "é" are one token
OTHERS = {
    "byte-level": byte_level(["h e", "n d", "a t", "Ġ t", "e Ġ"]),
    "SentencePiece": sentence_piece("thea nd", ["t h", "h e", "▁ a", "a n", "th e"]),
    "single bytes": builtin_tokenizer("builtin:bytes"),
}
TABLES = {name: token_bytes(tokenizer, name) for name, tokenizer in OTHERS.items()}
OWN_TABLE = token_bytes(OWN, "own")

cuts = st.lists(st.integers(1, 12), unique=True).map(lambda ends: [*sorted({*ends, 13})])


@given(cuts, cuts)
def test_spans_are_in_order_whole_and_as_short_as_can_be(own: list[int], other: list[int]) -> None:
    numbers, others, ends = spans_of(own, other)
    for tokens, found in ((own, numbers), (other, others)):
        assert found == sorted(found) and {*found} == set(range(1, len(ends) + 1))
        last = {number: end for number, end in zip(found, tokens, strict=True)}
        assert list(last.values()) == ends  # the same piece on both sides
    for number in range(1, len(ends) + 1):  # no end inside a span is common
        inside = [
            {end for end, n in zip(*pair, strict=True) if n == number} for pair in ((own, numbers), (other, others))
        ]
        assert inside[0] & inside[1] == {ends[number - 1]}


def test_what_lies_behind_the_last_common_end_is_in_no_span() -> None:
    assert spans_of([1, 3], [1, 2]) == ([1, 0], [1, 0], [1])
    assert spans_of([], [2]) == ([], [0], [])


@given(st.lists(st.integers(0, 270), max_size=12), st.sampled_from(sorted(OTHERS)))
@settings(max_examples=300)
def test_each_span_of_any_sampled_ids_has_the_same_bytes_on_both_sides(ids: list[int], name: str) -> None:
    """Any ids: bytes of no character, control tokens, and ids that the tokenizer does not have."""
    table = TABLES[name]
    found = aligned(ids, OWN_TABLE, OTHERS[name], table)
    sides = []
    for tokens, numbers, known in ((ids, found.own, OWN_TABLE), (found.ids, found.other, table)):
        kept = [(number, known.of(id)) for number, id in zip(numbers, tokens, strict=True) if number]
        assert all(written for _, written in kept)
        sides.append({n: b"".join(w for _, w in group) for n, group in groupby(kept, key=lambda pair: pair[0])})
    assert sides[0] == sides[1]
    # Nothing that can be aligned is left out: bytes of whole characters all are.
    data = b"".join(map(OWN_TABLE.of, ids))
    if readable(data)[2] == []:
        assert b"".join(sides[0].values()) == data
    else:
        assert all("\ufffd".encode() not in written for written in sides[0].values())


@given(st.binary(max_size=20))
def test_bytes_as_a_text(data: bytes) -> None:
    text, places, unreadable = readable(data)
    assert len(places) == len(data) + 1 and places[-1] == len(text.encode()) and places == sorted(places)
    assert (
        text == data.decode()
        if not unreadable
        else len(unreadable) == sum("\udc80" <= letter <= "\udcff" for letter in data.decode(errors="surrogateescape"))
    )


def test_a_span_with_half_a_character_is_left_out_and_those_around_it_are_not() -> None:
    ids = [*OWN("the ")["input_ids"], OWN_TABLE.ids[b"\xc3"], *OWN("and")["input_ids"]]
    found = aligned(ids, OWN_TABLE, OTHERS["byte-level"], TABLES["byte-level"])
    table = TABLES["byte-level"]
    assert [OWN_TABLE.of(id) for id in ids] == [b"the", b" ", b"\xc3", b"and"]
    assert [table.of(id) for id in found.ids] == [b"t", b"he", b" ", b"\xef", b"\xbf", b"\xbd", b"a", b"nd"]
    assert found.own == [1, 2, 0, 4] and found.other == [1, 1, 2, 0, 0, 0, 4, 4]


# Which tokens are taken for each other


def test_a_token_that_one_side_lacks_counts_as_the_common_one_that_it_begins_with() -> None:
    pairs = token_pairs(OWN, OTHERS["byte-level"], "t")

    def written(side: int, text: bytes) -> bytes | None:
        """The common token whose class this token has."""
        tables, classes = (pairs.policy, pairs.teacher), (pairs.policy_classes, pairs.teacher_classes)
        number = classes[side][tables[side].ids[text]]
        common = [
            text
            for text, id in tables[side].ids.items()
            if text in tables[1 - side].ids and classes[side][id] == number
        ]
        return common[0] if common else None

    assert written(0, b"the") == b"t"  # the teacher reads t|he
    assert written(0, b" and") == b" "  # " "|a|nd
    assert written(1, b"he") == b"h" and written(1, b" t") == b" " and written(1, b"e ") == b"e"
    assert written(0, b"a") == b"a" == written(1, b"a")
    half = token_pairs(byte_level(["æ Ŀ"]), OTHERS["byte-level"], "t")  # two bytes of three
    assert half.policy_classes[half.policy.ids[b"\xe6\x9d"]] == half.teacher_classes[half.teacher.ids[b"\xe6"]]
    assert pairs.ends == [(1, 1)] and pairs.policy_classes[1] == pairs.teacher_classes[1]
    # 256 bytes, "nd" and the end; the pads are the rest.
    assert pairs.rest == 258 and pairs.policy_classes[0] == pairs.teacher_classes[0] == pairs.rest
    assert all(0 <= number <= pairs.rest for number in [*pairs.policy_classes, *pairs.teacher_classes])


def test_heads_larger_and_smaller_than_the_tokenizer() -> None:
    pairs = token_pairs(OWN, OTHERS["byte-level"], "t", 300, 200)
    assert len(pairs.policy_classes) == 300 and len(pairs.teacher_classes) == 200
    assert pairs.policy_classes[290] == pairs.rest and max(pairs.teacher_classes) == pairs.rest


def test_the_table_that_a_run_prints() -> None:
    named = byte_level(["t h", "q q"], end="<|end|>", template="{{ messages[0]['content'] }}<|end|>")
    table = token_pairs(OWN, named, "t").table(OWN, named)
    assert table[1:] == [
        "  policy   264 tokens of text: 257 are common, 7 count as the common one they begin with, 0 as the rest; no "
        "chat template",
        "  teacher  258 tokens of text: 257 are common, 1 count as the common one they begin with, 0 as the rest; its "
        "own chat template",
        "  the end of an answer: <eos> is <|end|>",
    ]


def test_tokenizers_whose_bytes_are_not_known_are_refused() -> None:
    with pytest.raises(
        LmgymError, match=r"policy\.model: its tokenizer is neither byte-level nor of SentencePiece's kind"
    ):
        token_pairs(builtin_tokenizer("builtin:numbers"), OWN, "t")
    from tokenizers import normalizers

    small = byte_level([])
    small.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(LmgymError, match=r"algorithm\.teacher: t: its tokenizer changes a text"):
        token_pairs(OWN, small, "t")
