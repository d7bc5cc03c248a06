"""A few hundred damaged recipes, data and run folders, as `python -m tests.torture.fuzz` tries many thousands of."""

from collections import Counter
from pathlib import Path

import pytest

from tests.torture import folders, fuzz, trials

NUMBERS = {"recipe": range(146, 206), "data": range(414, 600), "folder": range(25)}  # a few seconds each


@pytest.mark.slow
@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_a_mutant_is_accepted_or_told_in_a_sentence(kind: str, tmp_path: Path) -> None:
    bases = folders.make_bases(tmp_path / "bases") if kind == "folder" else {}
    verdicts, findings = Counter[str](), {}
    for number in NUMBERS[kind]:
        mutant = fuzz.make_mutant(kind, 21, number, bases)
        with fuzz.emptied(tmp_path / "place" / "here") as place:
            outcome = trials.judge(mutant, place, bases, deep=number % 3 == 0)
        verdicts[outcome.verdict] += 1
        if outcome.finding:
            findings[number] = (mutant.what, outcome)
    assert not findings
    assert verdicts["accepted"] and verdicts["refused"]  # else the mutants are too wild, or too tame


@pytest.mark.parametrize("kind", ["recipe", "data"])
def test_a_mutant_is_a_function_of_its_number_and_survives_a_file(kind: str) -> None:
    for number in range(20):
        mutant = fuzz.make_mutant(kind, 0, number, {})
        assert mutant == fuzz.make_mutant(kind, 0, number, {})
        again = fuzz.from_plain(kind, fuzz.as_plain(mutant))
        assert fuzz.as_plain(again) == fuzz.as_plain(mutant) and type(again) is type(mutant)
    assert len({str(fuzz.make_mutant(kind, 0, number, {})) for number in range(20)}) == 20


@pytest.mark.parametrize(
    ("message", "finding"),
    [
        ("recipe.yaml: unknown key 'stepz'", ""),
        ("x" * 1001, "long message"),
        ("one\ntwo", "several lines"),
        (" ", "empty message"),
        ("task 'x' raised KeyError: 'y'", "wrapped traceback"),
    ],
)
def test_what_a_message_may_not_be(message: str, finding: str) -> None:
    assert trials.complaint_about(message) == finding
