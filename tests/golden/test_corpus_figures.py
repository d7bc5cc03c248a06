"""Figures of all answers at once in evaluations and comparisons: against sacrebleu's own, and against the intervals and
tests of means, which are figures of sums too."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmgym.cli.main import main
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.experiments.paired_metrics import of_all
from lmgym.rewards.building import build_rewards
from lmgym.rewards.corpus import corpora
from lmgym.stats.intervals import Interval, SufficientStatistics
from lmgym.stats.paired import compare_paired, compare_summed, sign_flip, untested
from lmgym.types import Episode, Example, Turn
from tests import runs

sacrebleu: Any = pytest.importorskip("sacrebleu.metrics")
WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "in", "mat", "park", "by", "red"]


def pairs(count: int, seed: int, right: float = 0.7) -> list[tuple[str, str]]:
    """Texts and references of random words, equal at about a share `right` of their places."""
    random, made = np.random.default_rng(seed), []
    for _ in range(count):
        reference = random.choice(WORDS, int(random.integers(5, 14))).tolist()
        text = [word if random.random() < right else str(random.choice(WORDS)) for word in reference]
        made.append((" ".join(text), " ".join(reference)))
    return made


def groups_of(made: Sequence[tuple[str, str]], each: int = 1) -> list[list[Episode]]:
    """`each` answers to a prompt; the reference is that of its first one."""
    groups = []
    for place in range(0, len(made), each):
        example = Example(f"a/{place}", "?", (made[place][1],))
        turns = [Turn([1], [2], text=text) for text, _ in made[place : place + each]]
        groups.append([Episode(example, place, n, turns=[turn]) for n, turn in enumerate(turns)])
    return groups


def mean_of(values: Sequence[float]) -> SufficientStatistics:
    return SufficientStatistics(np.array([[value, 1.0] for value in values]), lambda sums: sums[:, 0] / sums[:, 1])


# ---------------------------------------------------------------- the figures


@pytest.mark.parametrize(
    ("section", "library"),
    [
        ({"sacre_bleu": 0}, sacrebleu.BLEU()),
        ({"sacre_bleu": {"lowercase": True, "smooth_method": "floor", "weight": 0}}, None),
        ({"bleu": 0}, sacrebleu.BLEU(tokenize="none", smooth_method="none")),
        ({"totto_bleu": 0}, sacrebleu.BLEU(lowercase=True)),
        ({"chrf": 0}, sacrebleu.CHRF()),
        ({"chrf_plus_plus": 0}, sacrebleu.CHRF(word_order=2)),
        ({"ter": 0}, sacrebleu.TER()),
    ],
    ids=lambda section: next(iter(section)) if isinstance(section, dict) else "",
)
def test_figure_and_interval_are_sacrebleus(section: dict[str, Any], library: Any) -> None:
    """sacrebleu gives half the width between the quantiles of 1,000 resamples; for 120 texts that is near the
    jackknife's, whose t is larger by 1 %."""
    library = library or sacrebleu.BLEU(lowercase=True, smooth_method="floor")
    made = pairs(120, seed=1)
    (found,) = corpora(build_rewards(section), groups_of(made)).values()
    theirs = library.corpus_score([text for text, _ in made], [[reference for _, reference in made]], n_bootstrap=1000)
    score = 1 - theirs.score / 100 if "ter" in section else theirs.score / 100
    interval = found.interval
    assert found.prompts == interval.count == 120
    assert interval.mean == found.value == pytest.approx(score, abs=1e-9)
    assert interval.low < interval.mean < interval.high
    assert (interval.high - interval.low) / 2 == pytest.approx(theirs._ci / 100, rel=0.15)


def test_the_arguments_of_the_recipe_count() -> None:
    upper = [(text.upper(), reference) for text, reference in pairs(20, seed=2)]
    values = [
        corpora(build_rewards({"sacre_bleu": {"lowercase": lowercase, "weight": 0}}), groups_of(upper))[
            "sacre_bleu/corpus"
        ]
        for lowercase in (False, True)
    ]
    assert values[0].value < 0.1 < values[1].value


def test_distinct_words_are_no_sum_over_the_texts() -> None:
    """GEM's distinct-1 of these two (RL4LMs' code was run on them): 4 different words of 6. No interval."""
    groups = groups_of([("the cat sat", ""), ("the cat ran", "")])
    found = corpora(build_rewards({"distinct_1": 0, "prediction_length": 0}), groups)
    assert set(found) == {"distinct_1/corpus"}  # the mean length is what the evaluation says anyway
    assert found["distinct_1/corpus"].interval.mean == pytest.approx(4 / 6)
    assert math.isnan(found["distinct_1/corpus"].interval.low) and found["distinct_1/corpus"].summed is None


def test_only_what_a_reward_judges_counts() -> None:
    groups = groups_of([("a b", "a b"), ("<think>x</think>a b", "a b"), ("c", "a b")])
    groups[2][0].turns = []  # its environment failed
    reward = build_rewards({"sacre_bleu": {"strip_thinking": True, "weight": 0}})
    (found,) = corpora(reward, groups).values()
    assert found.prompts == 2
    assert found.value == registry.get("reward", "sacre_bleu").corpus(["a b"] * 2, [groups[0][0].example] * 2)
    assert corpora(reward, groups[2:]) == {}


def test_answers_to_one_prompt_are_left_out_together() -> None:
    made = pairs(40, seed=3)
    (single,) = corpora(build_rewards({"chrf": 0}), groups_of(made)).values()
    doubled = [pair for pair in made for _ in range(2)]
    (twice,) = corpora(build_rewards({"chrf": 0}), groups_of(doubled, each=2)).values()
    assert twice.prompts == 40 and twice.interval == single.interval  # the second answer is no new evidence
    (one,) = corpora(build_rewards({"chrf": 0}), groups_of(made[:1])).values()
    assert math.isnan(one.interval.low) and one.interval.mean == one.value


def test_a_broken_corpus_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(texts: list[str], examples: list[Example]) -> list[float]:
        return [0.0] * len(texts)

    reward = build_rewards({"words": 0})
    monkeypatch.setattr(reward[0], "function", judge)
    for corpus, sentence in (
        (lambda texts, examples: 1 / 0, "reward 'words' raised ZeroDivisionError"),
        (lambda texts, examples: None, "its corpus returned None; it must be a number"),
    ):
        judge.corpus = corpus  # type: ignore[attr-defined]
        with pytest.raises(LmgymError, match=sentence):
            corpora(reward, groups_of([("a", "b")]))


def test_a_corpus_may_be_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(texts: list[str], examples: list[Example]) -> list[float]:
        return [0.0] * len(texts)

    reward = build_rewards({"words": 0})
    monkeypatch.setattr(reward[0], "function", judge)
    for number in (2, np.int64(2), np.float32(2)):
        judge.corpus = lambda texts, examples, number=number: number  # type: ignore[attr-defined]
        (found,) = corpora(reward, groups_of([("a", "b")])).values()
        assert (found.value, type(found.value)) == (2.0, float)


# ---------------------------------------------------------------- intervals and tests of sums


def test_the_difference_of_two_means_is_a_difference_of_figures_of_sums() -> None:
    random = np.random.default_rng(4)
    first = random.random(60)
    second = first + 0.1 * random.standard_normal(60) + 0.02
    ours = compare_summed(mean_of(first.tolist()), mean_of(second.tolist()))
    theirs = compare_paired([[value] for value in first], [[value] for value in second])
    assert ours.difference.mean == pytest.approx(theirs.difference.mean, abs=1e-12)
    assert [ours.difference.low, ours.difference.high] == pytest.approx(
        [theirs.difference.low, theirs.difference.high], abs=1e-12
    )
    p = sign_flip((second - first).tolist())
    assert 0.02 < p < 0.8
    assert ours.p == pytest.approx(p, abs=4 * math.sqrt(2 * p * (1 - p) / 9999))  # two draws of 9,999 signs
    assert (ours.higher_first, ours.equal, ours.higher_second) == (None, None, None)


def test_only_prompts_that_were_judged_for_both_are_compared() -> None:
    """Each side lacks another prompt: the rows of the others belong together."""
    reward, sides = build_rewards({"sacre_bleu": 0}), []
    for right, lacking in ((0.5, [0]), (0.8, [29]), (0.5, [0, 29]), (0.8, [0, 29])):
        groups = groups_of(pairs(30, seed=6, right=right))
        for place in lacking:
            groups[place][0].reward_components["sacre_bleu"] = None
        sides.append(corpora(reward, groups)["sacre_bleu/corpus"])
    one, other, *both = sides
    assert one.prompts == other.prompts == 29 and one.places != other.places
    assert of_all(one, other) == of_all(*both) and of_all(one, other).difference.count == 28
    assert of_all(one, replace(other, summed=None)).test == "none"
    assert of_all(one, replace(other, places=(99,))).test == "none"  # no prompt in common


@pytest.mark.slow
def test_differences_of_bleu() -> None:
    one, other = pairs(80, seed=5, right=0.5), pairs(80, seed=5, right=0.8)
    reward = build_rewards({"sacre_bleu": 0})
    worse, better, same = (corpora(reward, groups_of(made))["sacre_bleu/corpus"] for made in (one, other, one))
    assert worse.summed is not None and better.summed is not None and same.summed is not None
    found = compare_summed(worse.summed, better.summed)
    assert found.difference.low > 0 and found.p == pytest.approx(1e-4)  # no swap of 9,999 is as far from 0
    assert found.difference.mean == pytest.approx(better.value - worse.value)
    undefined = SufficientStatistics(worse.summed.rows, lambda rows: np.full(len(rows), math.nan))
    assert math.isnan(compare_summed(undefined, undefined).p) and compare_summed(undefined, undefined).test == "none"
    equal = compare_summed(worse.summed, same.summed)
    assert (equal.difference.mean, equal.difference.has_bounds, equal.interval, equal.p) == (0.0, False, "none", 1.0)
    with pytest.raises(LmgymError, match="comparison of 80 prompts with 79"):
        compare_summed(worse.summed, SufficientStatistics(better.summed.rows[:79], better.summed.value))
    bare = untested(Interval(3.0, math.nan, math.nan, 9), Interval(5.0, math.nan, math.nan, 9))
    assert bare.difference.mean == 2.0 and math.isnan(bare.p) and bare.test == "none"


# ---------------------------------------------------------------- what a user sees


@pytest.mark.slow
def test_runs_and_comparisons_report_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"chrf": 0, "distinct_1": 0, "msttr": {"window": 4, "weight": 0}}
    evaluation = {"every": 3, "examples": 8, "metrics": metrics, "keep_best": "chrf/corpus"}
    recipe = runs.write(tmp_path / "recipe.yaml", evaluation=evaluation, steps=3, checkpoint={"every": 0})
    assert main(["train", str(recipe), f"out={tmp_path / 'run'}"]) == 0
    said = capsys.readouterr().out
    record = [r for r in runs.records(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "evaluation"][-1]
    for name in ("chrf", "distinct_1"):
        assert f"{name}/corpus {record[f'{name}/corpus']:.3f} [" in said
    bounds = [record["chrf/corpus/low"], record["chrf/corpus/high"]]
    assert bounds == [None, None] or bounds[0] <= record["chrf/corpus"] <= bounds[1]  # none, where all are 0
    assert record["distinct_1/corpus/low"] is None and re.search(r"distinct_1/corpus [0-9.]+ \[no interval\]", said)
    best = json.loads((tmp_path / "run" / "summary.json").read_text())["best"]
    assert best["metric"] == "chrf/corpus"
    assert main(["eval", str(tmp_path / "run")]) == 0
    assert re.search(r"chrf/corpus +[0-9.]+ \[", capsys.readouterr().out)
    path = tmp_path / "result.json"
    assert main(["compare", str(recipe), str(tmp_path / "run"), "--json", str(path)]) == 0
    table = capsys.readouterr().out
    assert re.search(r"distinct_1/corpus +-?[0-9.]+ \[no interval\] +- +- +-", table)
    result = json.loads(path.read_text())["metrics"]
    assert result["chrf/corpus"]["second"]["mean"] == pytest.approx(record["chrf/corpus"])
    assert result["distinct_1/corpus"]["p"] is None and result["distinct_1/corpus"]["equal"] is None
    assert "chrf/corpus" not in json.loads(path.read_text())["examples"][0]["first"]["values"]
