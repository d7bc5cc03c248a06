"""PARENT, ToTTo's figures and CommonGen's rewards: worked cases. "Case" numbers those of a study of the systems whose
behaviour is matched."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lmgym.core.errors import LmgymError
from lmgym.rewards.base import check_examples
from lmgym.rewards.building import build_rewards
from lmgym.rewards.text.common_gen import common_gen_preference, common_gen_repeat_penalty, concept_coverage
from lmgym.rewards.text.parent import parent, totto_tables
from lmgym.rewards.text.totto import (
    parent_non_overlap,
    parent_overlap,
    totto_bleu,
    totto_bleu_non_overlap,
    totto_bleu_overlap,
)
from lmgym.types import Example

DRUMMER = [("name", "Michael Dahlquist"), ("occupation", "drummer")]
TEXT = "michael dahlquist was a drummer"
REFERENCE = "michael dahlquist was an american drummer"


def asked(*references: str, id: str = "a/0", **meta: Any) -> Example:
    return Example(id, "?", references=references, meta=meta)


# Case 12, computed by running RL4LMs' ToTTo script (a weight of the table that the reference sets) and with weight 0.5.
def test_parent_of_the_drummer() -> None:
    example = asked(REFERENCE, table=DRUMMER)
    found = [parent([TEXT], [example], part=part)[0] for part in ("precision", "recall", "f")]  # type: ignore[arg-type]
    assert found == pytest.approx([0.610474, 0.044006, 0.082094], abs=1e-6)
    assert parent([TEXT], [example], part="recall", table_weight=0.5) == pytest.approx([0.209775], abs=1e-6)
    assert parent([TEXT], [example], table_weight=0.5) == pytest.approx([0.312252], abs=1e-6)


def test_parent_by_hand() -> None:
    table = [("what", "x y z w")]
    # Every n-gram is right and every value is named.
    assert parent(["x y z w"], [asked("x y z w", table=table)]) == pytest.approx([1.0], abs=1e-7)
    # "a b c d" shares nothing with either: precision 0.
    assert parent(["a b c d", ""], [asked("x y z w", table=table)] * 2) == [0.0, 0.0]
    # Text "x y z w" and a reference of other words: the table says every word, so precision is 1; the reference has
    # no word of the table, so its recall is 1, and the weight of the table's own recall, 1, is 1.
    assert parent(["x y z w"], [asked("a b c d", table=table)]) == pytest.approx([1.0], abs=1e-7)
    assert parent(["x y z w"], [asked("a b c d", table=table)], part="recall", table_weight=0.0) == [1.0]
    # Half of the value, in order: recall of the table is 2/4. With weight 1 nothing else counts.
    example = asked("x y z w", table=table)
    assert parent(["x q z"], [example], part="recall", table_weight=1.0) == pytest.approx([2 / 4])
    # Precision of "x q z": words (1 + 0 + 1) / 3; pairs "x q", "q z": half of each is in the table; one triple: 2/3;
    # no run of four: 0.00001.
    assert parent(["x q z"], [example], part="precision") == pytest.approx([(2 / 3 * 1 / 2 * 2 / 3 * 1e-5) ** 0.25])
    # A triple's head and tail count, its relation does not.
    triple = asked("a b c d", table=[("x y", "w", "z")])
    assert parent(["x y z"], [triple], part="recall", table_weight=1.0) == [1.0]
    assert parent(["w"], [triple], part="precision") == [0.0]


def test_the_best_reference_counts() -> None:
    one, two = asked("nothing of the kind", table=DRUMMER), asked(REFERENCE, table=DRUMMER)
    both = asked("nothing of the kind", REFERENCE, table=DRUMMER)
    values = [parent([REFERENCE], [example])[0] for example in (one, two, both)]
    assert values[2] == max(values) and values[0] != values[1]


RAW = {
    "table": [
        [{"value": "Year", "is_header": True}, {"value": "Film", "is_header": True}],
        [{"value": "1998", "is_header": False}, {"value": " Ronin ", "is_header": False}],
        [{"value": "", "is_header": False}, {"value": "Heat", "is_header": False}],
    ],
    "highlighted_cells": [[1, 1], [2, 0]],
    "table_page_title": "Robert De Niro",
    "table_section_title": "",
    "table_section_text": "His films.",
}


def test_the_tables_of_totto() -> None:
    everything, wanted = totto_tables(RAW)
    assert everything == [
        *(("header", "Year"), ("header", "Film"), ("cell", "1998"), ("cell", "Ronin"), ("cell", "Heat")),
        *(("page_title", "Robert De Niro"), ("section_text", "His films.")),
    ]
    assert wanted == [("cell", "Ronin"), ("page_title", "Robert De Niro")]
    # Precision knows all cells, recall the highlighted ones: "heat" is right, and is not asked for.
    example = asked("robert de niro made ronin", raw_table=RAW)
    assert parent(["heat heat heat heat"], [example], part="precision") == [1.0]
    assert parent(["ronin heat"], [example], part="recall", table_weight=1.0) == pytest.approx([(1 + 0) / 2])


def test_subsets_count_for_the_corpus_and_nothing_else_does() -> None:
    seen = asked(REFERENCE, id="a", table=DRUMMER, overlap_subset=True)
    new = asked("one two three four five", id="b", raw_table=RAW | {"overlap_subset": False})
    texts, examples = [TEXT, "one two three four six"], [seen, new]
    values = parent(texts, examples)
    assert 0 < values[0] != values[1]
    assert parent_overlap(texts, examples) == [values[0], 0.0]
    assert parent_overlap.corpus(texts, examples) == values[0]  # type: ignore[attr-defined]
    assert parent_non_overlap(texts, examples) == [0.0, values[1]]
    assert parent_non_overlap.corpus(texts, examples) == values[1]  # type: ignore[attr-defined]
    fixed = parent(texts, examples, table_weight=0.5)[0]
    assert parent_overlap.corpus(texts, examples, table_weight=0.5) == fixed != values[0]  # type: ignore[attr-defined]
    scores = totto_bleu(texts, examples)
    assert totto_bleu_overlap(texts, examples) == [scores[0], 0.0]
    assert totto_bleu_non_overlap(texts, examples) == [0.0, scores[1]]
    # 4/5, 3/4, 2/3 and 1/2 of the n-grams are right.
    assert scores[1] == pytest.approx((4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)
    assert totto_bleu_non_overlap.corpus(texts, examples) == pytest.approx(scores[1])  # type: ignore[attr-defined]
    assert math.isnan(totto_bleu_overlap.corpus(texts[1:], examples[1:]))  # type: ignore[attr-defined]
    assert math.isnan(parent_overlap.corpus(texts[1:], examples[1:]))  # type: ignore[attr-defined]


def test_bleu_of_totto_is_in_lower_case() -> None:
    assert totto_bleu(["The CAT sat down."], [asked("the cat sat down.")]) == [1.0]
    assert totto_bleu.corpus(["The CAT sat down."], [asked("the cat sat down.")]) == 1.0  # type: ignore[attr-defined]


# The sample outputs of ToTTo's repository, whose README prints what its scripts make of them with the sample tables.
OUTPUTS = [
    "Colin Hanlon starred as Pete in The 12 in 2015.",
    "\u00c9cole Polytechnique has 4 Fields Medal winners.",
    "The New Hampshire census of 2010 reported that there were 7,230 people living in Swanzey.",
    "King Demetrius reigned over Cyrene.",
    "On October 10, 2012, The Nashville series premiered to over 8.93 million viewers.",
]


def test_the_numbers_of_tottos_documentation(shared: Path) -> None:
    path = shared / "data" / "totto" / "dev_sample.jsonl"
    if not path.is_file():
        pytest.skip(f"needs {path}")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    examples = []
    for row in rows:
        references = [annotation["final_sentence"] for annotation in row["sentence_annotations"]]
        examples.append(asked(*references, id=str(row["example_id"]), raw_table=row))
    names = ["parent", "parent_overlap", "parent_non_overlap", "totto_bleu_overlap", "totto_bleu_non_overlap"]
    check_examples(build_rewards(dict.fromkeys(names, 1.0)), examples)

    def mean(part: Any) -> float:
        return sum(parent(OUTPUTS, examples, part=part)) / len(examples)

    def figures(function: Any) -> list[float]:
        parts = [function.corpus(OUTPUTS, examples, part=part) for part in ("precision", "recall", "f")]
        return [round(value, 4) for value in parts]

    assert [round(mean(part), 4) for part in ("precision", "recall", "f")] == [0.7611, 0.4383, 0.5334]
    assert figures(parent_overlap) == [0.7140, 0.3135, 0.4134]
    assert figures(parent_non_overlap) == [0.8317, 0.6256, 0.7135]
    bleu = [one.corpus(OUTPUTS, examples) for one in (totto_bleu, totto_bleu_overlap, totto_bleu_non_overlap)]  # type: ignore[attr-defined]
    assert [round(100 * value, 1) for value in bleu] == [45.5, 37.2, 58.3]


@pytest.mark.parametrize(
    ("meta", "sentence"),
    [
        ({}, r"needs meta\['table'\] .* example 'a/0' has none that can be read: KeyError\('table'\)"),
        ({"table": [("a", "b", "c", "d")]}, "has none that can be read: ValueError.*an entry of 4"),
        ({"table": [("a", 3)]}, "has none that can be read"),
        ({"table": 3}, "has none that can be read"),
        ({"raw_table": {"table": []}}, "has none that can be read: KeyError"),
        ({"table": []}, "the table of example 'a/0' has no words"),
        ({"table": [("a", " ")]}, "the table of example 'a/0' has no words"),
    ],
)
def test_a_table_that_cannot_be_read_is_named(meta: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LmgymError, match=sentence):
        check_examples(build_rewards({"parent": 1.0}), [asked("x", **meta)])
    with pytest.raises(LmgymError, match=sentence):
        parent(["x"], [asked("x", **meta)])


def test_what_else_is_missing_is_named() -> None:
    with pytest.raises(LmgymError, match="'parent' needs a reference, and example 'a/0' has none"):
        check_examples(build_rewards({"parent": 1.0}), [asked(table=DRUMMER)])
    with pytest.raises(LmgymError, match=r"'parent_overlap' needs meta\['overlap_subset'\], .* 'a/0' is None"):
        check_examples(build_rewards({"parent_overlap": 1.0}), [asked("x", table=DRUMMER)])
    with pytest.raises(LmgymError, match=r"table_weight of PARENT must be from 0 to 1, not 2"):
        parent(["x"], [asked("x", table=DRUMMER)], table_weight=2)
    for name, reward in (("parent", "parent"), ("parent_overlap", "parent_overlap"), ("mine", "parent_non_overlap")):
        with pytest.raises(LmgymError, match=rf"^rewards\.{name}\.table_weight is 2.0; it must lie between 0 and 1"):
            build_rewards({name: {"reward": reward, "table_weight": 2}})
    with pytest.raises(LmgymError, match=r"unknown key 'rewards.parent_overlap.weigth'"):
        build_rewards({"parent_overlap": {"weigth": 2}})


# ---------------------------------------------------------------- CommonGen


def test_repeating_the_question_costs_one() -> None:
    example = asked(concepts=["field", "look", "stand"])
    texts = [
        "A man stands in a field.",
        "So: FIELD look stand!",
        "generate a sentence with: a",
        "A sentence.",
        "degenerates",
    ]
    assert common_gen_repeat_penalty(texts, [example] * 5) == [0.0, -1.0, -1.0, -1.0, -1.0]
    other = ["field, look, stand", "field look stand", "use these words: stand"]
    options = {"separator": ", ", "prefix": "Use these words: "}
    assert common_gen_repeat_penalty(other, [example] * 3, **options) == [-1.0, 0.0, -1.0]


def test_coverage_counts_stems() -> None:
    example = asked(concepts=("field", "look", "stand", "ice cream"))
    texts = ["He looks at the FIELDS, standing with creamed ice.", "stood", "", "ice, looking"]
    assert concept_coverage(texts, [example] * 4) == [1.0, 0.0, 0.0, 0.25]


# Case 11, computed by running RL4LMs' formula: METEOR 0.3, coefficient 0.5, p 0.8, penalty 0.5; 0 and 2 missing.
def liked(texts: list[str], examples: list[Example], *, p: float = 0.8) -> list[float]:
    return [p for _ in texts]


def test_preference() -> None:
    text, reference = "dog a throw b ball", "ball c dog d throw"  # METEOR 0.3, see test_overlap_metrics.py
    none = asked(reference, concepts=["dog", "throw", "ball"])
    two = asked(reference, concepts=["dog", "catch", "frisbee"])
    options: dict[str, Any] = {"preference": f"{__name__}:liked", "synonyms": False}
    assert common_gen_preference([text, text], [none, two], **options) == pytest.approx([0.95, 0.55])
    options |= {"preference_arguments": {"p": 0.4}, "meteor_coefficient": 1.0, "concept_penalty": 1.0}
    assert common_gen_preference([text, text], [none, two], **options) == pytest.approx([0.7, 0.3 + 0.4 / 3])


@pytest.mark.parametrize("concepts", [None, [], "dog", [1], 3])
@pytest.mark.parametrize("name", ["common_gen_repeat_penalty", "concept_coverage"])
def test_concepts_that_are_missing_are_named(name: str, concepts: Any) -> None:
    meta = {} if concepts is None else {"concepts": concepts}
    with pytest.raises(LmgymError, match=rf"'{name}' needs meta\['concepts'\], a list of words, .* 'a/0' is "):
        check_examples(build_rewards({name: 1.0}), [asked("x", **meta)])


def test_the_preference_is_checked_with_all_that_it_needs() -> None:
    def check(example: Example, **options: Any) -> None:
        check_examples(build_rewards({"common_gen_preference": {"synonyms": False, **options}}), [example])

    with pytest.raises(LmgymError, match="unknown reward 'likd'"):
        check(asked("x", concepts=["x"]), preference="likd")
    with pytest.raises(LmgymError, match=r"needs meta\['concepts'\]"):
        check(asked("x"), preference="words")
    with pytest.raises(LmgymError, match="needs a reference, and example 'a/0' has none"):
        check(asked(concepts=["x"]), preference="words")
    with pytest.raises(LmgymError, match="'token_f1' needs a reference"):
        check(asked(concepts=["x"]), preference="token_f1")
