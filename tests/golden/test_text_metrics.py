"""Metrics of a text alone: how varied it is, and VADER's sentiment. Numbers by hand, from the literature, and recorded
from the package vaderSentiment (record_metrics.py). "Case" numbers those of a study of the systems whose behaviour is
matched."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.rewards.base import check_examples
from lmgym.rewards.building import build_rewards
from lmgym.rewards.text.diversity import msttr, prediction_length
from lmgym.rewards.text.lexicon import Lexicon, load_lexicon
from lmgym.rewards.text.vader import sentiment, vader
from lmgym.types import Example

RECORD = json.loads(Path(__file__).with_name("metrics.json").read_text(encoding="utf-8"))["vader"]
OPEN = Example("open/0", "Write about rain")
CATS = ["The cat sat", "the cat ran"]


def corpus(name: str, texts: list[str], **arguments: Any) -> float:
    value: float = registry.get("reward", name).corpus(texts, [OPEN] * len(texts), **arguments)
    return value


# Case 12, computed by running RL4LMs' diversity metrics (GEM), to the digits that it names.
def test_the_numbers_of_gem() -> None:
    assert corpus("distinct_1", CATS) == pytest.approx(0.66667, abs=5e-6)
    assert corpus("entropy_1", CATS) == pytest.approx(1.9183, abs=5e-5)
    assert corpus("distinct_2", CATS) == 0.75
    assert corpus("conditional_entropy_2", CATS) == pytest.approx(-0.08496, abs=5e-6)
    assert corpus("msttr", ["a b a c d", "d d e f"], window=4) == 0.625
    assert math.isnan(corpus("msttr", ["a b c"], window=4))


def test_the_other_counts_by_hand() -> None:
    expected = {
        **{"vocabulary_1": 4, "vocabulary_2": 3, "vocabulary_3": 2, "unique_1": 2, "unique_2": 2, "unique_3": 2},
        # pairs: 1/2, 1/4, 1/4; triples: two, each once, p(triple) / p(pair) = 1/2 / (1/2)
        **{"entropy_2": 1.5, "entropy_3": 1.0, "conditional_entropy_3": 0.0, "distinct_3": 1.0},
    }
    assert {name: corpus(name, CATS) for name in expected} == expected
    # No n-gram crosses from one text to the next, and single texts are judged alone.
    assert corpus("vocabulary_2", ["a b", "c d"]) == 2
    assert registry.get("reward", "distinct_1")(["a a", "b b c"], [OPEN] * 2) == [0.5, 2 / 3]


def test_marks_count_unless_told_otherwise() -> None:
    assert corpus("vocabulary_1", ["Yes, yes."]) == 3
    assert corpus("vocabulary_1", ["Yes, yes."], punctuation=False) == 1
    assert corpus("vocabulary_1", ["Yes, yes."], tokens="spaces") == 2
    assert prediction_length(["Don't stop."], [OPEN]) == [4.0]
    assert prediction_length(["Don't stop."], [OPEN], punctuation=False) == [3.0]


def test_segments_by_hand() -> None:
    assert msttr(["a b a c d d d e f", "a a b", "", "a b c d"], [OPEN] * 4, window=4) == [0.625, 2 / 3, 0.0, 1.0]
    with pytest.raises(LmgymError, match=r"'rewards.msttr.window' must be at least 1, not 0"):
        msttr(["a"], [OPEN], window=0)


# ---------------------------------------------------------------- VADER


def test_vader_is_that_of_vader_sentiment() -> None:
    lexicon = Lexicon(RECORD["ratings"], RECORD["emoji"])
    wrong = []
    for row in RECORD["sentences"]:
        found = sentiment(row["text"], lexicon)
        rounded = {"compound": round(found["compound"], 4)}
        rounded |= {name[:3]: round(found[name], 3) for name in ("positive", "negative", "neutral")}  # type: ignore[literal-required]
        if rounded != {name: row[name] for name in ("compound", "pos", "neg", "neu")}:
            wrong.append((row, rounded))
    assert len(RECORD["sentences"]) == 44 and not wrong


def test_vader_by_hand() -> None:
    lexicon = Lexicon({"good": 1.9, "bad": -2.5, "kiss": 1.8, "kind": 2.4}, {})

    def compound(total: float) -> float:
        return total / math.sqrt(total**2 + 15)

    sums = {
        "good": 1.9,
        "not good": 1.9 * -0.74,
        "very good": 1.9 + 0.293,
        "very bad": -2.5 - 0.293,
        "very very good": 1.9 + 0.293 + 0.95 * 0.293,
        "very nice and good": 1.9 + 0.9 * 0.293,
        "a kind man": 2.4,
        "kind of you": 0.0,
        "no x good": 1.9 * -0.74,
        "it was a kiss of death": -1.5,
        "GOOD x": 1.9 + 0.733,
        "good!": 1.9 + 0.292,
        "bad! x?? bad": -5 - 0.292 - 0.36,
        "good but bad": 0.5 * 1.9 - 1.5 * 2.5,
        "kind of good": 1.9,  # looked for only where three words stand before
        "a kind of good": 1.9 - 0.293,
        "": 0.0,
    }
    for text, total in sums.items():
        assert sentiment(text, lexicon)["compound"] == pytest.approx(compound(total)), text
    # One positive word (1.9 + 1) among two neutral ones.
    shares = sentiment("a good x", lexicon)
    assert [shares["positive"], shares["negative"], shares["neutral"]] == pytest.approx([2.9 / 4.9, 0.0, 2 / 4.9])


def test_but_changes_each_rating_once() -> None:
    # vaderSentiment 3.3.2 looks its ratings up by value: 2 becomes 1, and then it is that 1 that is halved again, where
    # the second word should be raised to 1.5.
    lexicon = Lexicon({"lovely": 2.0, "okay": 1.0}, {})
    total = 0.5 * 2.0 + 1.5 * 1.0
    assert sentiment("lovely but okay", lexicon)["compound"] == pytest.approx(total / math.sqrt(total**2 + 15))


# The documentation of vaderSentiment prints these compound scores (README, "Code Examples").
@pytest.mark.parametrize(
    ("text", "compound"),
    [
        ("VADER is smart, handsome, and funny.", 0.8316),
        ("VADER is smart, handsome, and funny!", 0.8439),
        ("VADER is very smart, handsome, and funny.", 0.8545),
        ("VADER is VERY SMART, handsome, and FUNNY.", 0.9227),
        ("VADER is VERY SMART, handsome, and FUNNY!!!", 0.9342),
        ("VADER is not smart, handsome, nor funny.", -0.7424),
        ("The book was good.", 0.4404),
        ("Not bad at all", 0.431),
    ],
)
def test_vader_with_its_own_lexicon(text: str, compound: float, shared: Path) -> None:
    folder = shared / "data" / "vader"
    if not folder.is_dir():
        pytest.skip(f"needs {folder}")
    assert round(vader([text], [OPEN], lexicon=str(folder))[0], 4) == compound


def written(folder: Path) -> Path:
    (folder / "vader_lexicon.txt").write_text("good\t1.9\t0.9\t[2, 1]\nbad\t-2.5\t0.7\t[]\n\n", encoding="utf-8")
    (folder / "emoji_utf8_lexicon.txt").write_text("\U0001f600\tgood face\n", encoding="utf-8")
    return folder


def test_a_lexicon_is_read_from_a_folder_or_a_file(tmp_path: Path) -> None:
    folder = written(tmp_path)
    assert load_lexicon(str(folder)) == Lexicon({"good": 1.9, "bad": -2.5}, {"\U0001f600": "good face"})
    assert load_lexicon(str(folder / "vader_lexicon.txt")) == Lexicon({"good": 1.9, "bad": -2.5}, {})
    values = vader(["so\U0001f600", "bad"], [OPEN] * 2, lexicon=str(folder), score="negative")
    assert values == [0.0, 1.0]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot read"),
        ("good 1.9\n", "line 1 of .*vader_lexicon.txt has no tab"),
        ("good\t1.9\nbad\tx\n", "the rating 'x' of 'bad' in .*vader_lexicon.txt is no number"),
    ],
)
def test_a_lexicon_that_cannot_be_read_is_named(content: str | None, sentence: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "vader_lexicon.txt").write_text(content, encoding="utf-8")
    rewards = build_rewards({"vader": {"lexicon": str(tmp_path)}})
    with pytest.raises(LmgymError, match=f"key 'rewards.vader.lexicon': {sentence}"):
        check_examples(rewards, [OPEN])


def test_the_lexicon_of_the_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "vaderSentiment"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    written(package)
    monkeypatch.syspath_prepend(str(tmp_path))
    load_lexicon.cache_clear()
    assert load_lexicon().ratings == {"good": 1.9, "bad": -2.5}
    load_lexicon.cache_clear()
