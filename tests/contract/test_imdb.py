"""The experiment on film reviews in miniature: who sees which review, and what the table says of a run."""

import json
import math
import random
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import imdb
from lmgym.tasks.base import hash_fraction
from lmgym.types import Example
from tests import rounding, runs
from tests.runs import Shell

pytestmark = pytest.mark.slow
MOODS = (["bad", "dull", "awful", "poor"], ["good", "fine", "lovely", "great"])


def review(label: int, number: int) -> str:
    draw = random.Random(f"{label} {number}")
    said = [
        f"The {draw.choice(['film', 'cast', 'end'])} was so {draw.choice(MOODS[label])} that we all said so."
        for _ in range(6)
    ]
    return f"Number {number} again!<br /><br />" + " ".join(said)


def reviews(folder: Path) -> Path:
    rows = [
        {"text": review(label, number), "label": label, "split": part}
        for part, numbers in (("train", range(80)), ("test", range(80, 100)))
        for label in (0, 1)
        for number in numbers
    ]
    (folder / "reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "reviews.jsonl"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imdb")
    imdb.main(["prepare", "--folder", str(folder), f"path={reviews(folder)}"])
    return folder


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_review_is_cut_into_an_opening_and_passages() -> None:
    words = [f"w{n}" for n in range(100)]
    words[4], words[9] = "w4.", 'w9!"'  # the fifth word ends a sentence too early, the tenth in time
    example = Example(
        "a/0", "?", (), {"review": " ".join(words[:50]) + "<br /><br />" + " ".join(words[50:]), "label": 1}
    )
    opening = imdb.opening(example)
    assert opening == {"prompt": " ".join(words[:10]), "references": " " + " ".join(words[10:42]), "label": 1}
    cut = list(imdb.passages(example))
    assert "".join(row["references"] for row in cut) == " " + " ".join(words[8:])
    assert [row["prompt"] for row in cut] == [" ".join(words[n - 8 : n]) for n in (8, 40, 72)]
    for text in (" ".join(words[:20]), " ".join(w.strip('.!"') for w in words)):  # too little follows; no end in time
        assert imdb.opening(Example("a/0", "?", (), {"review": text, "label": 1})) is None


def test_nobody_sees_the_reviews_of_another(prepared: Path) -> None:
    """The parts of [0, 1) do not overlap, and each file has the openings of its own part."""
    bounds = sorted(imdb.SLICES.values())
    assert [low for low, _ in bounds] == [0.0, *(high for _, high in bounds[:-1])] and bounds[-1][1] == 1.0
    texts = [review(label, number) for label in (0, 1) for number in range(80)]
    for name in ("train", "validation"):
        low, high = imdb.SLICES[name]
        own = {" ".join(imdb.words_of(text))[:40] for text in texts if low <= hash_fraction(text) < high}
        openings = rows_of(prepared / f"openings_{name}.jsonl")
        assert openings and {row["prompt"][:40] for row in openings} == own
    assert len(rows_of(prepared / "openings_test.jsonl")) == 40
    for name in ("classifier_a", "classifier_b"):
        low, high = imdb.SLICES[name]
        report = json.loads((prepared / name / "training.json").read_text())
        assert report["trained_on"] == sum(low <= hash_fraction(text) < high for text in texts)
        assert report["held_out"]["texts"] == 40


def test_a_run_is_measured_before_and_after(
    prepared: Path,
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forked(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """`python -m lmgym.cli.main ...` in a process that need not import anything."""
        status = shell.run(*command[3:])
        return subprocess.CompletedProcess(command, status, shell.said, shell.said)

    monkeypatch.setattr("benchmarks.training.subprocess.run", forked)
    policy = {
        "model": "builtin:tiny",
        "device": "cpu",
        "architecture": runs.ARCHITECTURE | {"max_position_embeddings": 1024},
    }
    small = [
        f"warm.policy={json.dumps(policy)}", "warm.steps=2", "warm.prompts_per_step=4", "warm.evaluation.examples=4",
        "steps=2", "prompts_per_step=4", "sampling={max_new_tokens: 12, min_new_tokens: 12}",
        "evaluation.examples=20", "optimizer.learning_rate=0.01",
    ]  # fmt: skip
    outcome = imdb.run("ppo", 3, Namespace(folder=prepared, overrides=small))
    folder = prepared / "ppo-3"
    summary = json.loads((folder / "summary.json").read_text())
    for moment, said in zip(("before", "after"), outcome.sentiment, strict=True):
        assert said.mean == pytest.approx(summary[moment]["results"]["judge"]["mean"])
    assert outcome.rise.mean == pytest.approx(outcome.sentiment[1].mean - outcome.sentiment[0].mean)
    before, after = outcome.perplexity
    assert before != after
    assert after / before - 1 == pytest.approx(outcome.growth.mean)
    assert outcome.growth.low < outcome.growth.mean < outcome.growth.high
    said = imdb.table([outcome])
    assert "| ppo | 3 |" in said and "| ppo | mean |" in said and "nan" not in said
    sums = imdb.likelihoods(folder, folder / "final")
    tokens, words = sum(row[1] for row in sums), sum(row[2] for row in sums)
    assert after == pytest.approx(math.exp(-sum(row[0] for row in sums) / tokens))
    assert 1 + outcome.growth_words.mean == pytest.approx((1 + outcome.growth.mean) ** (tokens / words))
    assert_transformers_agrees(folder / "final", rows_of(prepared / "openings_test.jsonl"), sums)


def assert_transformers_agrees(model: Path, rows: list[dict[str, str]], sums: list[tuple[float, int, int]]) -> None:
    """The likelihoods are those of the reference's own tokens behind its prompt, by Hugging Face's own forward pass."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    for row, (total, tokens, words) in list(zip(rows, sums, strict=False))[:3]:
        ids = tokenizer(row["prompt"] + row["references"], return_tensors="pt")["input_ids"]
        behind = len(tokenizer(row["prompt"])["input_ids"])
        with torch.no_grad():
            logprobs = loaded(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        assert (tokens, words) == (ids.shape[1] - behind, len(row["references"].split()))
        wanted = logprobs[behind - 1 :].double()
        assert rounding.near(loaded, [total / tokens], [float(wanted.mean())], tokens=ids.shape[1])
