"""The doctor finds what is wrong with runs that were made to fail, and nothing else; training warns of the same.

That it has nothing to say of good runs is tested where they are trained: tests/learn, every algorithm.
"""

import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as some

from lmgym.cli.main import main
from lmgym.config.build import build_config, dump
from lmgym.config.yaml import read_yaml
from lmgym.core.errors import LmgymError
from lmgym.distributed.ranks import Ranks
from lmgym.logs.console import Console
from lmgym.logs.doctor import examine as doctor
from lmgym.logs.doctor.examine import Diagnosis, Watch, examine
from lmgym.logs.doctor.facts import Answer, Bounds, Facts, facts_of
from lmgym.logs.doctor.history import WINDOW, History, Sign, errors_apart
from lmgym.logs.doctor.report import report
from lmgym.logs.doctor.rules import LIVE, RULES, Rule
from lmgym.logs.doctor.rules_policy import SEEN
from lmgym.models.builtin import builtin_model, byte_tokenizer
from lmgym.rewards.base import linear_time
from lmgym.training.loop import train
from lmgym.training.run import lock_folder
from lmgym.training.symptoms import warn_of_symptoms
from lmgym.types import Example
from tests import failing_runs, runs
from tests.contract.test_guides import recipe_keys, rows
from tests.failing_runs import FAILING
from tests.runs import complaint

SLOW_STEP = Path(__file__).parents[1] / "golden" / "slow_step.json"
NOT_OF_A_RULE = "ended_early"  # is about the folder, not about the numbers


class Listening(Console):
    """Keeps the warnings of the doctor's rules."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.heard: list[str] = []

    def warn(self, sentence: str) -> None:
        if "`lmgym doctor " in sentence or "the doctor's rules" in sentence:
            self.heard.append(sentence)


def fail(folder: Path, name: str, console: Console | None = None, **changes: Any) -> Path:
    """Train one of the runs that fail."""
    config = build_config({**failing_runs.recipe(name), "out": str(folder), **changes})
    return train(config, console or Console(quiet=True))


def diagnosis(folder: Path) -> Diagnosis:
    return examine(folder, read_yaml(folder / "recipe.yaml"))


# ---------------------------------------------------------------- runs that were made to fail


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILING)
def test_what_was_made_to_fail_is_found_and_warned_of_once(name: str, tmp_path: Path) -> None:
    console = Listening()
    found = diagnosis(fail(tmp_path / "run", name, console))
    assert found.state == "finished"
    assert FAILING[name].rules <= {finding.rule for finding in found.findings}
    for finding in found.findings:
        assert 0 <= finding.step <= finding.sign_step <= finding.last_step < found.steps
        assert math.isfinite(finding.sign.value) and finding.sign.what and finding.sign.remedy
    live = [finding for finding in found.findings if finding.rule in LIVE]
    assert len(console.heard) == len(live)
    for finding in live:
        (said,) = (sentence for sentence in console.heard if finding.sign.remedy in sentence)
        assert said.startswith(f"step {finding.step + 1}: ") and f"`lmgym doctor {tmp_path / 'run'}`" in said
        assert finding.sign_step > finding.step or finding.sign.what in said


def test_every_rule_is_proven_by_a_run() -> None:
    proven = set().union(*(failing.rules for failing in FAILING.values()))
    assert proven | {"slow_part", "unseen_updates", "memory_budget"} == {rule.name for rule in RULES}


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_updates_that_bf16_hides_are_named(rounding: str, tmp_path: Path) -> None:
    """A model stored in bf16, at a small rate: to nearest hardly a weight moves, else they move on average."""
    tokenizer = byte_tokenizer()
    builtin_model("builtin:tiny", tokenizer, runs.ARCHITECTURE, 0).bfloat16().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    changes = {
        "policy": {"model": str(tmp_path / "model"), "device": "cpu", "compute": "bfloat16", "rounding": rounding},
        "optimizer": {"learning_rate": 1e-6, "warmup": 0},
    }
    train(build_config({**failing_runs.BASE, **changes, "steps": 12, "out": str(tmp_path / "run")}), Listening())
    found = {finding.rule: finding.sign for finding in diagnosis(tmp_path / "run").findings}
    assert ("unseen_updates" in found) is (rounding == "nearest")
    if rounding == "nearest":
        assert found["unseen_updates"].value < SEEN and found["unseen_updates"].metric == "weights/seen"


def test_the_slow_part_of_a_step_is_named() -> None:
    """The times are those of a real run with a slow reward: tests/golden/record_slow_step.py."""
    records = json.loads(SLOW_STEP.read_text())
    slow, quick = Watch(Facts()), Watch(Facts())
    for record in records:
        slow.add_step(record)
        quick.add_step(record | {name: value / 100 for name, value in record.items() if name.startswith("seconds")})
    (finding,) = slow.findings.values()
    assert finding.rule == "slow_part" and finding.sign.metric == "seconds/rollout"
    assert not quick.findings  # nobody waits for it


@pytest.mark.parametrize("samples", [True, False])
def test_a_stage_that_samples_nothing_may_spend_its_time_on_updates(samples: bool) -> None:
    """A supervised stage of SmolLM2: the gap between sampler and trainer is known where something is sampled."""
    record = {"seconds": 4.13, "seconds/rollout": 0.04, "seconds/update": 4.08}
    sampled = {"sampler_logprob_gap": 0.01} if samples else {}
    assert ("slow_part" in watched([(record | sampled, [], None)] * WINDOW).findings) == samples


CALLS: list[int] = []


@linear_time
def fails_at_the_third_call(texts: list[str], examples: list[Example]) -> list[float]:
    CALLS.append(len(texts))
    return [float("nan") if len(CALLS) == 4 else 1.0 for _ in texts]  # the first call is an evaluation's


@pytest.mark.slow
def test_a_run_that_ended_early_says_so_and_one_that_still_trains_does_not(tmp_path: Path) -> None:
    CALLS.clear()
    rewards = {f"{__name__}:{fails_at_the_third_call.__name__}": 1.0}
    with pytest.raises(LmgymError):
        fail(tmp_path / "run", "impossible_task", rewards=rewards)
    found = diagnosis(tmp_path / "run")
    (finding,) = found.findings
    assert (found.state, finding.rule, finding.step) == ("unfinished", NOT_OF_A_RULE, 1)
    assert "after 2 of 12 steps" in finding.sign.what
    with lock_folder(tmp_path / "run", print):
        found = diagnosis(tmp_path / "run")
    assert (found.state, found.findings) == ("running", [])


# ---------------------------------------------------------------- training


@pytest.mark.slow
def test_the_rules_change_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Listening()
    fail(tmp_path / "watched", "impossible_task", console)
    assert console.heard
    monkeypatch.setattr("lmgym.training.loop.warn_of_symptoms", lambda *_: None)
    fail(tmp_path / "alone", "impossible_task")
    runs.assert_equal_runs(tmp_path / "watched", tmp_path / "alone")


def test_other_ranks_than_the_first_are_silent() -> None:
    class Second(Ranks):
        rank, size = 1, 2

    stage: Any = SimpleNamespace(run=SimpleNamespace(ranks=Second()), watch=None)
    warn_of_symptoms(stage, {"step": 0}, [])  # looks at nothing else


@pytest.mark.slow
def test_a_rule_that_fails_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(history: History) -> Sign | None:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(doctor, "RULES", (Rule("broken", broken, lambda _: True),))
    console = Listening()
    fail(tmp_path / "run", "impossible_task", console, steps=2)
    said = "the doctor's rules failed (ZeroDivisionError: a mistake of ours), and are not asked any more"
    assert console.heard == [said]


# ---------------------------------------------------------------- any numbers

NAMES = [
    *("reward", "reward/a", "reward/b", "entropy", "length/mean", "truncated", "zero_variance_groups", "kl/old"),
    *("kl/reference", "gradient_norm", "ratio/clipped", "updates", "value/explained_variance", "version_lag"),
    *("sampler_logprob_gap", "seconds", "seconds/rollout", "seconds/update", "learning_rate"),
]
NUMBERS = some.one_of(
    some.floats(), some.floats(0, 1), some.just(None), some.integers(), some.sampled_from([0.0, 1.0, 1e308, -1e308])
)
RECORDS = some.dictionaries(some.sampled_from(NAMES), NUMBERS)
HELD_OUT = ["reward", "reward/low", "reward/high", "goal", "goal/low", "goal/high"]
EVALUATIONS = some.dictionaries(some.sampled_from(HELD_OUT), NUMBERS)
ANSWERS = some.builds(
    Answer,
    some.floats(-1e100, 1e100),
    some.dictionaries(some.sampled_from(["a", "b"]), some.floats(-1e100, 1e100)),
    some.booleans(),
    some.one_of(some.just(math.nan), some.floats(0, 1)),
)
STEPS = some.tuples(RECORDS, some.lists(ANSWERS, max_size=3), some.none() | EVALUATIONS)
FACTS = Facts(learning_rate=0.5, weights={"a": 1.0, "b": -0.5}, gap_limit=0.1, updates=4)


def watched(steps: list[Any], repeat: int = 1) -> Watch:
    watch = Watch(FACTS)
    for step, (record, answers, evaluation) in enumerate(steps * repeat):
        if evaluation is not None:
            watch.add_evaluation({"step": step, "split": "test", **evaluation})
        watch.add_step({"step": step, **record}, answers)
    watch.close()
    return watch


@pytest.mark.parametrize(("goal", "found"), [(0.1, True), (0.55, False)])
def test_a_small_gain_in_reward_is_suspect_if_the_goal_falls(goal: float, found: bool) -> None:
    """A reward model's scores reach from -3 to 3, and rise by 0.2 while the accuracy falls from 0.55 to 0.1."""
    answers = [Answer(-3.0, {"a": -3.0}, False, math.nan), Answer(3.0, {"a": 3.0}, False, math.nan)]
    steps: list[Any] = []
    for step in range(4 * WINDOW):
        late = step >= 2 * WINDOW
        measured = goal if late else 0.55
        reward = (0.4 if late else 0.2) + 0.01 * (-1) ** step
        bounds = {"goal": measured, "goal/low": measured - 0.05, "goal/high": measured + 0.05}
        steps.append(({"reward": reward}, answers, bounds if step % WINDOW == 0 else None))
    assert ("reward_hacking" in watched(steps).findings) == found


def rising(steps: int, held_out: list[float], every: int = 40) -> Watch:
    """A training reward of 0.1 for 40 steps, 0.8 after 40 more, and these held-out rewards, give or take 0.05."""
    answers = [Answer(score, {}, False, math.nan) for score in (0.0, 1.0)]
    records: list[Any] = []
    for step in range(steps):
        bounds = None
        if step % every == 0:
            value = held_out[step // every]
            bounds = {"reward": value, "reward/low": value - 0.05, "reward/high": value + 0.05}
        records.append(({"reward": 0.1 + 0.7 * min(max(step - 40, 0) / 40, 1) + 0.01 * (-1) ** step}, answers, bounds))
    return watched(records)


@pytest.mark.parametrize(("held_out", "found"), [([0.1, 0.12, 0.8], False), ([0.1, 0.11, 0.12], True)])
def test_held_out_rewards_are_compared_with_training_at_the_same_moment(held_out: list[float], found: bool) -> None:
    """A held-out reward that keeps up is no overfitting, though at each step between two evaluations the newest of them
    lies below the training reward by as much as was gained since."""
    assert ("overfitting" in rising(82, held_out).findings) == found


def test_what_the_newest_evaluation_refutes_is_minor_and_says_so() -> None:
    watch = rising(121, [0.1, 0.12, 0.13, 0.8])
    finding = watch.findings["overfitting"]
    assert (finding.sign.level, finding.held, finding.level, finding.end_value) == ("severe", False, "minor", 0.8)
    lines = list(report(Diagnosis(Path("run"), "finished", [finding], [watch.history], {}, {})))
    assert "   Refuted by the newest evaluation: reward is 0.8." in lines


@pytest.mark.parametrize(
    ("tens", "noise", "held_out", "found"),
    [
        ([0.06, 0.22, 0.14, 0.01, 0.03, 0.0], 0.02, [0.05, 0.05, 0.36, 0.2, 0.015, 0.01], True),  # too high a rate
        ([0.03, 0.08, 0.05, 0.21, 0.21, 0.13], 0.02, [0.05, 0.05, 0.16, 0.2, 0.22, 0.05], True),  # held-out ones know
        ([0.48, 0.51, 0.54, 0.49, 0.57, 0.58], 0.02, [0.4, 0.51, 0.47, 0.47, 0.59, 0.44], False),  # training is well
        ([0.56, 0.51, 0.49, 0.53, 0.5, 0.48], 0.02, [0.5, 0.5, 0.48, 0.5, 0.47, 0.48], False),  # stays
        ([0.1, 0.4, 0.6, 0.7, 0.62, 0.65], 0.02, [0.1, 0.3, 0.5, 0.6, 0.65, 0.6], False),
        ([0.24, 0.36, 0.48, 0.29, 0.4, 0.46], 0.11, [0.3, 0.39, 0.43, 0.36, 0.39, 0.39], False),  # by chance
    ],
)
def test_a_run_that_loses_most_of_what_it_had_learned_has_collapsed(
    tens: list[float], noise: float, held_out: list[float], found: bool
) -> None:
    """Though it had learned less than four tenths of what there is. Nobody says that its reward is rarely earned."""
    answers = [Answer(score, {"a": score}, False, math.nan) for score in (0.0, 1.0)]
    steps: list[Any] = []
    for step in range(10 * len(tens)):
        value, reward = held_out[step // 10], max(0.0, tens[step // 10] + noise * (-1) ** step)
        bounds = {"reward": value, "reward/low": value - 0.05, "reward/high": value + 0.05}
        record = {"reward": reward, "reward/a": reward, "answers": 64}
        steps.append((record, answers, bounds if step % 10 == 9 else None))
    named = watched(steps).findings
    assert ("reward_collapse" in named) == found and "rarely_earned" not in named


@given(some.lists(some.tuples(some.sampled_from([None, 0.1, 0.2, 0.3]), some.sampled_from([0.0, 0.1]))))
def test_the_first_the_best_and_the_newest_evaluation_are_kept(values: list[tuple[float | None, float]]) -> None:
    """As a look at all of them would find them, which at every step of a long run would take hours."""
    history = History(FACTS)
    for step, (value, width) in enumerate(values):
        bounds = {} if value is None else {"reward": value, "reward/low": value - width, "reward/high": value + width}
        history.add_evaluation({"step": step, **bounds})
    known = [(step, Bounds(value, value - width, value + width)) for step, (value, width) in enumerate(values) if value]
    best = max(known, key=lambda one: one[1].low, default=None)
    assert history.held_out == (None if best is None else (known[0][1], best, known[-1][1]))


RARE = [(1, 64), (0, 64)]  # in turn


@pytest.mark.parametrize(("earned", "found"), [(RARE, True), ([(0, 9)], True), ([(4, 256)], False), ([(4, 64)], False)])
def test_a_main_reward_that_hardly_any_answer_earns_is_found_after_ten_steps(
    earned: list[tuple[int, int]], found: bool
) -> None:
    """The other component is earned by all. 4 of 256 are as many as frozen_lake begins with."""
    steps: list[Any] = []
    for step in range(14):
        count, of = earned[step % len(earned)]
        record = {"reward": 0.5 + count / of, "reward/a": count / of, "reward/b": -1.0, "answers": of}
        steps.append((record, [Answer(0.5, {"a": 0.0, "b": -1.0}, False, math.nan)], None))
    assert ("rarely_earned" in watched(steps).findings) == found


@pytest.mark.parametrize(("valid", "found"), [(None, True), (4, False), (9, False)])
def test_actions_are_called_invalid_if_not_one_of_ten_steps_was_valid(valid: int | None, found: bool) -> None:
    """A single valid action among them is no finding: there is something to learn from."""
    steps: list[Any] = []
    for step in range(14):
        steps.append(({"reward": 0.0, "environment/invalid": 0.99 if step == valid else 1.0}, [], None))
    assert ("invalid_actions" in watched(steps).findings) == found
    assert "invalid_actions" not in watched([({"reward": 0.0}, [], None)] * 14).findings


def test_rules_that_had_too_little_to_judge_are_named_with_what_they_lack() -> None:
    numbers = {"reward": 0.5, "entropy": 1.0, "value/explained_variance": 0.5, "answers": 8}
    evaluation = {"reward": 0.5, "reward/low": 0.4, "reward/high": 0.6}
    plain: list[Any] = [(numbers, [], None)]
    short, alone = watched(plain * 12), watched([(numbers, [], evaluation), *plain * 60])
    lacking = short.unjudged()
    assert {"entropy_collapse", "overfitting"} <= set(lacking["needs 20 steps"])
    assert lacking["needs 50 steps"] == ["dead_critic"]
    assert "kl_blow_up" not in str(lacking)  # there is no reference
    needs = "needs a held-out metric that is no part of the reward: name one in evaluation.metrics"
    twice = "needs two evaluations of several prompts, some 15 steps apart"
    assert alone.unjudged() == {
        twice: ["overfitting"],
        needs: ["reward_hacking"],
        "needs 100 steps": ["learning_rate_too_low"],
    }


LATE: list[Any] = [({}, [], None)] * 2 + [({}, [Answer(score, {}, False, math.nan) for score in (0.0, 1.0)], None)]


@given(some.lists(STEPS, min_size=1, max_size=6), some.integers(2, 20))
@example([*LATE, *[({"reward": 0.0}, [], None)] * 3], 2)  # a reward that begins in the middle of the first window
def test_a_rule_that_has_too_little_finds_nothing(steps: list[Any], repeat: int) -> None:
    """What `Rule.lacks` says of the steps is what the rule asks for itself."""
    watch = watched(steps, repeat)
    for rule in RULES:
        if rule.lacks(watch.history):
            assert rule.check(watch.history) is None, rule.name


@pytest.mark.parametrize(("shares", "found"), [((0.9, 0.4), False), ((0.65, 0.65), True), ((0.4, 0.9), True)])
def test_answers_that_are_cut_less_and_less_are_no_finding(shares: tuple[float, float], found: bool) -> None:
    """Whole answers earn more in all three; the mean share of a window is the same."""
    answers = [Answer(score, {}, score < 0.5, math.nan) for score in (0.1, 0.2, 0.8, 0.9)]
    steps = [({"reward": 0.5, "truncated": shares[2 * step // WINDOW]}, answers, None) for step in range(WINDOW)]
    assert ("truncation" in watched(steps).findings) == found


@given(some.lists(STEPS, max_size=WINDOW - 1))
def test_no_rule_fires_because_a_run_is_short(steps: list[Any]) -> None:
    assert not watched(steps).findings


@given(some.lists(STEPS, min_size=1, max_size=6), some.integers(2, 12))
def test_any_numbers_are_judged_without_an_error(steps: list[Any], repeat: int) -> None:
    for finding in watched(steps, repeat).findings.values():
        assert math.isfinite(finding.sign.value) and "nan" not in finding.sign.what


@given(some.lists(some.floats(-1e100, 1e100), min_size=1), some.floats(-1e9, 1e9))
def test_equal_windows_are_no_errors_apart(values: list[float], shift: float) -> None:
    assert errors_apart(values, values) == 0.0
    apart = errors_apart(values, [value + shift for value in values])
    assert apart == 0.0 or math.copysign(1, apart) == math.copysign(1, shift)


@given(*[some.lists(some.floats(-1e6, 1e6), min_size=2, max_size=20)] * 2)
def test_standard_errors_are_welchs(before: list[float], after: list[float]) -> None:
    """Means' difference over the root of the sum of var / n, by numpy."""
    error = np.sqrt(np.var(before, ddof=1) / len(before) + np.var(after, ddof=1) / len(after))
    # In fp64 a mean of 20 is off by 20 * 2^-53 of the largest number, so by 2e-9 of an error of a millionth of it.
    if error > 1e-6 * max(map(abs, [*before, *after])):
        expected = (np.mean(after) - np.mean(before)) / error
        assert errors_apart(before, after) == pytest.approx(expected, rel=1e-6, abs=1e-6)


# ---------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmgym.training.evaluation_points.training_plot", lambda metrics, plot: plot)
        return fail(tmp_path_factory.mktemp("doctor") / "run", "impossible_task")


def command(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.mark.slow
def test_the_report_has_the_worst_first_with_number_step_and_remedy(
    failed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("doctor", failed, "--out", tmp_path / "new" / "findings.png") == 0
    said = capsys.readouterr().out
    assert f"{failed}: finished, 12 steps; 3 findings, worst first" in said
    assert "1. severe: rarely earned (step 10 to the end)" in said  # as the log counts: the tenth
    assert "2. severe: equal groups (step 10 to the end)" in said
    assert "zero_variance_groups is 1 at step 10, the limit is 0.8." in said
    assert "dead critic" not in said  # there is none
    assert "length drift (needs 20 steps)" in " ".join(said.split())
    assert "Remedy: choose easier or harder prompts (task)" in said
    assert f"picture: {tmp_path / 'new' / 'findings.png'}" in said
    assert (tmp_path / "new" / "findings.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_json_has_every_number_and_the_picture_is_beside_the_run(
    failed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("doctor", failed, "--json") == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["picture"] == str(failed / "doctor.png") and (failed / "doctor.png").is_file()
    assert (tree["state"], tree["steps"]) == ("finished", 12)
    assert set(tree["seconds"]["train"]) == {"seconds", "seconds/rollout", "seconds/update"}
    first = tree["findings"][1]
    assert {key: first[key] for key in ("rule", "level", "step", "metric", "value", "limit")} == {
        "rule": "equal_groups",
        "level": "severe",
        "step": 9,
        "metric": "zero_variance_groups",
        "value": 1.0,
        "limit": 0.8,
    }


@pytest.mark.slow
def test_a_picture_that_cannot_be_written_keeps_no_finding_back(
    failed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("doctor", failed, "--out", failed / "metrics.jsonl" / "findings.png") == 0
    said = capsys.readouterr().out
    assert "2. severe: equal groups" in said and "no picture: " in said


@pytest.mark.slow
def test_a_folder_of_an_older_version_is_read(failed: Path, tmp_path: Path) -> None:
    """Without answers, precision and lock; with fewer keys in its recipe."""
    recipe = read_yaml(failed / "recipe.yaml")
    (tmp_path / "metrics.jsonl").write_bytes((failed / "metrics.jsonl").read_bytes())
    found = examine(tmp_path, {key: value for key, value in recipe.items() if key != "engine"})
    rules = [finding.rule for finding in found.findings]
    assert rules == ["rarely_earned", "equal_groups", "truncation", NOT_OF_A_RULE]


def test_what_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, "doctor", tmp_path / "nowhere").startswith("there is no run folder")
    assert "has no metrics.jsonl, so it is no run" in complaint(capsys, "doctor", tmp_path)
    (tmp_path / "seed-0").mkdir()
    (tmp_path / "seed-0" / "metrics.jsonl").write_text("")
    assert f"holds 1 runs; name one of them, such as {tmp_path / 'seed-0'}" in complaint(capsys, "doctor", tmp_path)
    assert "there is no recipe" in complaint(capsys, "doctor", tmp_path / "seed-0")
    (tmp_path / "seed-0" / "recipe.yaml").write_text("stages: []\n")
    assert command("doctor", tmp_path / "seed-0") == 0  # a run that has not begun
    assert "0 steps; there is nothing to judge yet" in capsys.readouterr().out
    out = complaint(capsys, "doctor", tmp_path / "seed-0", "--out", "findings.pdf")
    assert out == "--out is findings.pdf; its name must end in .png"
    (tmp_path / "seed-0" / "metrics.jsonl").write_text('{"kind": "train", "stage": 0, "step": 0}\n')
    assert "is not the resolved recipe of this run" in complaint(capsys, "doctor", tmp_path / "seed-0")
    (tmp_path / "seed-0" / "metrics.jsonl").write_text("{}\n")
    assert "line 1: this is no record" in complaint(capsys, "doctor", tmp_path / "seed-0")
    (tmp_path / "seed-0" / "metrics.jsonl").write_text("")
    (tmp_path / "seed-0" / "rollouts.jsonl").write_text('{"kind": "train", "stage": 0, "step": 3, "group": 0}\n')
    assert "an answer of stage 1, step 4 is not as lmgym" in complaint(capsys, "doctor", tmp_path / "seed-0")


@pytest.mark.timeout(60)  # it hung for ever
def test_a_hostile_machine_is_an_unknown_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.yaml").write_text(dump(build_config(runs.tiny())))
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "stage": 0, "step": 0, "reward": 0.5}\n')
    (tmp_path / "machine.json").write_text("[" * 200_000)
    assert command("doctor", tmp_path) == 0
    (tmp_path / "machine.json").unlink()
    os.mkfifo(tmp_path / "machine.json")
    assert command("doctor", tmp_path) == 0


def test_lines_fit_a_narrow_terminal(failed: Path) -> None:
    lines = list(report(diagnosis(failed), columns=40))
    assert all(len(line) <= 40 or not line.startswith(" ") for line in lines)


# ---------------------------------------------------------------- the page

KEY = re.compile(r"\b(?:algorithm|optimizer|policy|sampling|engine|checkpoint)\.\w+")


def test_remedies_name_keys_that_exist() -> None:
    named = set()
    for name in ("rules_policy", "rules_reward"):
        named |= set(KEY.findall((runs.ROOT / "lmgym" / "logs" / "doctor" / f"{name}.py").read_text(encoding="utf-8")))
    assert len(named) > 15
    assert named <= recipe_keys().keys()


def test_the_page_has_a_row_for_each_rule_with_the_runs_that_prove_it() -> None:
    described = {row["rule"].strip("`"): row["run that proves it"] for row in rows("doctor") if "rule" in row}
    assert set(described) == {rule.name for rule in RULES} | {NOT_OF_A_RULE}
    for name, failing in FAILING.items():
        assert all(f"`{name}`" in described[rule] for rule in failing.rules), name


def test_facts_are_read_from_a_resolved_recipe() -> None:
    stage: dict[str, Any] = {
        "name": "rl",
        "optimizer": {"learning_rate": 0.1},
        "rewards": {"a": 2, "b": {"weight": -1.0}, "c": {"target": 3}},
        "algorithm": {"name": "ppo", "target_kl": 0.1, "epochs": 4, "minibatches": 2},
    }
    facts = facts_of({"stages": [stage]}, 0, "float32")
    assert facts == Facts(0, "rl", 0.1, {"a": 2.0, "b": -1.0, "c": 1.0}, 1e-3, 8, False, True, True)
    replay = {**stage, "algorithm": {"name": "replay", "replayed": 8, "ratio": "sequence"}}
    facts = facts_of({"stages": [replay], "engine": {"gap_warning": 0.5}}, 0)
    assert (facts.gap_limit, facts.replays, facts.clips_tokens) == (None, True, False)
    assert facts_of({"stages": [stage], "engine": {"ahead": 1}}, 0).gap_limit is None  # answers of older weights
