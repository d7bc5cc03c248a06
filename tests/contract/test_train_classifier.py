"""examples/train_classifier.py: what it makes is what `learned_reward` reads, and what it says of it is so."""

import json
import random
import runpy
from pathlib import Path
from typing import Any

import pytest

from lmgym.core.errors import LmgymError
from lmgym.rewards.learned.classifier import learned_reward
from lmgym.tasks.base import hash_fraction
from lmgym.types import Example
from tests import runs

SCRIPT = runpy.run_path(str(runs.ROOT / "examples" / "train_classifier.py"))
MOODS = {"ask": "where when who", "order": "do bring stop", "tell": "is was has"}
SMALL = [
    "--width",
    "32",
    "--vocabulary",
    "340",
    "--longest",
    "64",
    "--epochs",
    "20",
    "--dropout",
    "0",
    "--learning-rate",
    "0.005",
]


def sentence(mood: str, number: int) -> str:
    draw = random.Random(f"{mood} {number}")
    filler = draw.choices(["the", "a", "cup", "door", "man", "of", "in", "it"], k=6)
    filler.insert(draw.randrange(7), draw.choice(MOODS[mood].split()))
    return " ".join(filler) + f" {number}"


def utterances(folder: Path, **changes: Any) -> Path:
    """Sentences of three moods, each told by one of three words, 60 a mood to train on and 20 to test on."""
    for part, numbers in (("train", range(60)), ("test", range(60, 80))):
        rows = [
            {"prompt": f"{part} {mood} {n}", "references": sentence(mood, n), "intent": mood, **changes}
            for mood in MOODS
            for n in numbers
        ]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def trained(folder: Path, name: str = "model", *more: str) -> dict[str, Any]:
    command = ["jsonl", f"path={folder}/{{split}}.jsonl", "--text", "reference", "--label", "intent"]
    SCRIPT["main"]([*command, "--out", str(folder / name), *SMALL, *more])
    return json.loads((folder / name / "training.json").read_text())


@pytest.mark.slow
def test_learned_reward_reads_the_classifier_and_finds_what_the_report_says(tmp_path: Path) -> None:
    report = trained(utterances(tmp_path))
    assert report["trained_on"] == 180
    found = report["held_out"]
    assert (found["texts"], found["most"]) == (60, pytest.approx(1 / 3))
    tested = [(sentence(mood, n), mood) for mood in MOODS for n in range(60, 80)]
    texts, examples = [text for text, _ in tested], [Example(f"a/{n}", "?") for n in range(60)]
    said = {mood: learned_reward(texts, examples, model=str(tmp_path / "model"), label=mood) for mood in MOODS}
    right = sum(max(said, key=lambda one: said[one][n]) == mood for n, (_, mood) in enumerate(tested))
    assert found["accuracy"] == right / 60
    assert right > 50  # a third by chance; the words that tell are among the first that it learns
    assert found["low"] < found["accuracy"] <= found["high"]
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names


def test_slices_share_no_text_and_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    utterances(tmp_path)
    short = ["--epochs", "1"]
    low = trained(tmp_path, "low", "--slice", "0", "0.4", *short)
    again = trained(tmp_path, "again", "--slice", "0", "0.4", *short)
    high = trained(tmp_path, "high", "--slice", "0.4", "1", *short)
    shares = [hash_fraction(sentence(mood, n)) for mood in MOODS for n in range(60)]
    assert low["trained_on"] == sum(one < 0.4 for one in shares) == 180 - high["trained_on"]
    assert low["held_out"] == again["held_out"]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("low", "again", "high")]
    assert weights[0] == weights[1] != weights[2]


def test_texts_come_from_where_they_are_asked_for() -> None:
    example = Example("a/0", "So", (" good", " bad"), {"label": 1, "review": "So good."})
    for text, expected in (("prompt", "So"), ("reference", " good"), ("both", "So good"), ("review", "So good.")):
        assert SCRIPT["labelled"]([example], text, "label") == [(expected, "1")]


@pytest.mark.parametrize(
    ("text", "label", "sentence"),
    [
        ("review", "label", r"example 'a/0' has no 'review'; it has both, label, prompt"),
        ("reference", "label", r"example 'a/0' has no 'reference'"),
        ("prompt", "intent", r"example 'a/0' has no 'intent'; it has label"),
        ("label", "label", r"example 'a/0': 'label' must be a text, not 1"),
    ],
)
def test_a_missing_text_or_label_is_named(text: str, label: str, sentence: str) -> None:
    with pytest.raises(LmgymError, match=sentence):
        SCRIPT["labelled"]([Example("a/0", "So", (), {"label": 1})], text, label)


def test_one_label_is_nothing_to_learn_and_an_unseen_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"have the labels \['tell'\]"):
        trained(utterances(tmp_path, intent="tell"))
    utterances(tmp_path)
    with (tmp_path / "test.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "x", "references": "y", "intent": "sing"}) + "\n")
    with pytest.raises(SystemExit, match=r"those of 'test' besides \{'sing'\}"):
        trained(tmp_path)
    assert not (tmp_path / "model").exists()


def test_an_epoch_shows_a_run_of_a_text_with_some_of_it_hidden() -> None:
    row, draw = [2, *range(100, 150), 3], random.Random(0)
    seen = [SCRIPT["shown"](row, 8, 0.0, draw) for _ in range(500)]
    assert all(one[0] == 2 and one[-1] == 3 and len(one) == 10 for one in seen)
    assert all(one[1:-1] == list(range(one[1], one[1] + 8)) for one in seen)
    assert {one[1] for one in seen} == set(range(100, 143))  # every run, the first and the last included
    assert SCRIPT["shown"](row, 64, 0.0, draw) == row  # a text that is shorter is shown whole
    hidden = [SCRIPT["shown"](row, 50, 0.3, draw).count(1) for _ in range(200)]
    assert 14 < sum(hidden) / 200 < 16  # of 50
