"""Answers that a reward cannot judge: None, an exception, no end. They take no part in a step, and are counted."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.algorithms.raft import RAFT
from lmgym.algorithms.requirements import Requirements
from lmgym.core.errors import LmgymError
from lmgym.logs.console import Console
from lmgym.logs.records import episode_metrics, rollout_record
from lmgym.processes.pool import Failure
from lmgym.rewards.base import Reward, call_reward, linear_time
from lmgym.rewards.building import build_rewards
from lmgym.rewards.check import check_reward
from lmgym.rewards.failures import RewardFailed, values_or_failures
from lmgym.rewards.normalisation import Moments, normalise
from lmgym.rewards.token_credit import rewards_by_turn
from lmgym.rollouts.evaluate import chosen_by, measured
from lmgym.rollouts.rollout import apply_rewards, groups_of
from lmgym.training.unjudged import refuse_unjudged, usable_groups
from lmgym.types import Episode, Example, Turn
from tests import runs
from tests.parity.test_resume import Interrupting
from tests.ranks import Group

HERE = "tests.contract.unjudged_rewards"
EXAMPLE = Example("a/0", "2+2=", ("4",))


def answers(*texts: str, size: int = 4) -> list[Episode]:
    return [Episode(EXAMPLE, index // size, index, [Turn([1], [2], [-0.1], text)]) for index, text in enumerate(texts)]


def gives(*values: Any) -> Reward:
    """A reward with these values, in order."""
    return Reward("mine", 1.0, lambda texts, examples: list(values))


def reward(name: str, **options: Any) -> Reward:
    return build_rewards({f"{HERE}:{name}": {"weight": 1.0, **options}})[0]


# What a reward says


def test_none_means_not_judged() -> None:
    scored = answers("a", "b", "c", "d")
    apply_rewards(scored, [gives(1.0, None, 0.0, 1.0)])
    assert [one.judged for one in scored] == [True, False, True, True]
    assert [one.reward_components["mine"] for one in scored] == [1.0, None, 0.0, 1.0]
    assert [one.score for one in scored] == [1.0, 0.0, 0.0, 1.0]


def test_what_one_reward_cannot_judge_another_may() -> None:
    """The sum is of those that judged, as TRL's nansum; a metric (weight 0) judges nothing, nor does a reward that is
    for other examples."""
    other, metric = Reward("other", 0.5, lambda texts, _: [2.0, None]), Reward("metric", 0.0, lambda t, _: [1.0, 1.0])
    elsewhere = Reward("elsewhere", 1.0, lambda texts, _: [], where={"kind": "b"})
    scored = [Episode(Example("a", "?", meta={"kind": "a"}), 0, n, [Turn([1], [2])]) for n in range(2)]
    apply_rewards(scored, [gives(None, None), other, metric, elsewhere])
    assert [(one.judged, one.score) for one in scored] == [(True, 1.0), (False, 0.0)]


def test_what_the_environment_has_paid_for_is_judged() -> None:
    scored = answers("a", "b")
    scored[0].turns[0].reward = 0.5
    apply_rewards(scored, [gives(None, None)])
    assert [(one.judged, one.score) for one in scored] == [(True, 0.5), (False, 0.0)]


def test_a_failure_in_place_of_a_number_is_one_answer_that_went_wrong() -> None:
    scored = answers("a", "b", "c")
    apply_rewards(scored, [gives(1.0, Failure("time", "took too long"), 0.0)], most_failures=1)
    assert [one.judged for one in scored] == [True, False, True]
    assert [one.reward_errors for one in scored] == [{}, {"mine": "took too long"}, {}]
    with pytest.raises(LmgymError, match=r"^reward 'mine': took too long$"):
        apply_rewards(answers("a"), [gives(Failure("time", "took too long"))])


def test_a_contract_may_hold_none() -> None:
    check_reward(f"{HERE}:even_lengths")


# A reward that fails for some answers


@given(st.integers(1, 40), st.sets(st.integers(0, 39)), st.integers(1, 40))
def test_those_to_blame_are_found_and_the_others_keep_their_values(count: int, bad: set[int], most: int) -> None:
    episodes = answers(*("a" for _ in range(count)))
    guilty, calls = {index for index in bad if index < count}, list[int]()

    def call(some: Sequence[Episode], seconds: float | None) -> list[float | Failure]:
        calls.append(len(some))
        assert seconds is not None and 0 < seconds <= 60.0
        if any(one.index in guilty for one in some):
            raise RewardFailed("reward 'mine' raised")
        return [float(one.index) for one in some]

    if len(guilty) > most:
        with pytest.raises(
            LmgymError,
            match=f"^reward 'mine' raised; it failed for {most + 1} answers, and rewards_failed allows {most}$",
        ):
            values_or_failures("mine", call, [[one] for one in episodes], 60.0, most)
        return
    found = values_or_failures("mine", call, [[one] for one in episodes], 60.0, most)
    assert {index for index, value in enumerate(found) if isinstance(value, Failure)} == guilty
    assert all(value == index for index, value in enumerate(found) if index not in guilty)
    assert len(calls) <= 1 + 2 * len(guilty) * (count - 1).bit_length()


def test_with_no_failure_allowed_the_first_one_is_raised_without_a_search() -> None:
    calls = list[int]()

    def call(some: Sequence[Episode], seconds: float | None) -> list[float | Failure]:
        calls.append(len(some))
        raise RewardFailed("reward 'mine' raised")

    with pytest.raises(LmgymError, match="reward 'mine' raised"):
        values_or_failures("mine", call, [answers("a"), answers("b")], 60.0, 0)
    assert calls == [2]


@pytest.mark.processes
@pytest.mark.parametrize("pool", [True, False])
def test_an_answer_that_a_reward_raises_for_is_not_judged(pool: bool) -> None:
    scored, mine = answers("aa", "b", "x", "ccc"), reward("raises_at_x", pool=pool)
    apply_rewards(scored, [mine], most_failures=1)
    assert [one.reward_components[mine.name] for one in scored] == [2.0, 1.0, None, 3.0]
    assert [one.judged for one in scored] == [True, True, False, True]
    [error] = scored[2].reward_errors.values()
    assert "raised ValueError: no score for an x at " in error and "unjudged_rewards.py:" in error


@pytest.mark.processes
def test_an_answer_without_end_costs_its_own_reward_alone() -> None:
    scored, mine = answers("aa", "x"), reward("hangs_at_x")
    apply_rewards(scored, [mine], timeout=0.5, most_failures=1)
    assert [one.reward_components[mine.name] for one in scored] == [2.0, None]
    assert "did not return within" in scored[1].reward_errors[mine.name]


def test_a_mistake_in_the_recipe_is_no_failure_of_an_answer() -> None:
    """A reward of lmgym's own that refuses an example stops, and so does one that returns no number."""
    for mine in (gives("1"), gives(1.0, 2.0, 3.0), gives(float("nan"))):
        with pytest.raises(LmgymError, match="returned"):
            apply_rewards(answers("a"), [mine], most_failures=9)


# Turns and tokens


def test_a_turn_that_cannot_be_judged_earns_nothing() -> None:
    episode = Episode(EXAMPLE, 0, 0, [Turn([1], [2], text="a"), Turn([1], [2], text="b"), Turn([1], [2], text="c")])
    by_turn = Reward("mine", 2.0, lambda texts, _: [1.0, None, 0.5], each_turn=True)
    assert rewards_by_turn(by_turn, [episode]) == [[1.0, 0.0, 0.5]]
    apply_rewards([episode], [by_turn])
    assert [turn.reward for turn in episode.turns] == [2.0, 0.0, 1.0]
    assert episode.judged and episode.reward_components == {"mine": 1.5}
    assert rewards_by_turn(Reward("mine", 1.0, lambda t, _: [None] * 3, each_turn=True), [episode]) == [None]


class Letters:
    """A tokenizer of letters."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(96 + one) for one in ids)


def test_a_beginning_that_cannot_be_judged_is_worth_as_much_as_the_one_before() -> None:
    shaped = Reward("mine", 1.0, lambda texts, _: [None if len(t) == 2 else float(len(t)) for t in texts], shaping=True)
    three, two = (Episode(EXAMPLE, 0, n, [Turn([1], [1] * n, text="a" * n)]) for n in (3, 2))
    apply_rewards([three, two], [shaped], tokenizer=Letters())
    assert three.turns[0].token_rewards == [1.0, 0.0, 2.0] and three.score == 3.0
    assert not two.judged and two.reward_components == {"mine": None} and two.turns[0].token_rewards is None


# Records, estimates, evaluations


def scored_groups() -> list[Episode]:
    scored = answers("a", "b", "c", "d", size=2)
    apply_rewards(scored, [gives(1.0, None, None, None), Reward("other", 0.0, lambda t, _: [0.0, 1.0, None, 1.0])])
    return scored


def test_records_have_no_number_for_what_was_not_judged() -> None:
    scored = scored_groups()
    metrics = episode_metrics(scored)
    assert metrics["reward"] == metrics["reward/mine"] == 1.0
    assert metrics["reward/other"] == 2 / 3
    assert {name: metrics[name] for name in metrics if name.startswith("unjudged")} == {
        "unjudged": 0.75, "unjudged/mine": 0.75, "unjudged/other": 0.25,
    }  # fmt: skip
    assert "zero_variance_groups" not in metrics  # no group has two answers that were judged
    record = json.loads(json.dumps(rollout_record(scored[1]), allow_nan=False))
    assert record["score"] is None and record["reward_components"] == {"mine": None, "other": 1.0}
    back = Episode.from_json(json.loads(json.dumps(scored[2].to_json(), allow_nan=False)))
    assert back == scored[2] and not back.judged


def test_a_running_estimate_learns_from_what_was_judged() -> None:
    scored, moments = answers("a", "b", "c"), dict[str, Moments]()
    mine = Reward("mine", 1.0, lambda texts, _: [1.0, None, 3.0], normalise=True)
    apply_rewards(scored, [mine])
    normalise(scored, [mine], moments)
    assert (moments["mine"].count, moments["mine"].mean) == (2, 2.0)
    assert scored[1].reward_components == {"mine": None} and scored[1].score == 0.0


def test_an_evaluation_leaves_out_what_was_not_judged_and_counts_it() -> None:
    rewards = [gives(), Reward("other", 0.0, lambda t, _: [])]
    values = measured(groups_of(scored_groups()), rewards)
    assert values["reward"] == values["mine"] == [[1.0], []]
    assert values["other"] == [[0.0, 1.0], [1.0]]
    assert values["unjudged"] == values["unjudged/mine"] == [[0.0, 1.0], [1.0, 1.0]]
    assert values["unjudged/other"] == [[0.0, 0.0], [1.0, 0.0]]
    assert values["other/pass@2"] == [[1.0], []]  # of a prompt with two judged answers
    assert values["other/pass@1"] == [[0.5], [1.0]]


def failed_groups() -> list[Episode]:
    """Two prompts with three right answers each; the environment of one failed in its turn, of another before it."""
    scored = answers("a", "b", "c", "d", "e", "f", size=3)
    scored[0].error, scored[4].error, scored[4].turns = "lost", "down", []
    apply_rewards(scored, [Reward("mine", 1.0, lambda texts, _: [float(text != "a") for text in texts])])
    return scored


def test_an_environment_that_fails_is_no_wrong_answer() -> None:
    scored = failed_groups()
    rewards = [Reward("mine", 1.0, lambda texts, _: [])]
    values = measured(groups_of(scored), rewards) | chosen_by("mine", groups_of(scored), rewards)
    assert values["reward"] == values["mine"] == values["length/mean"] == [[1.0, 1.0], [1.0, 1.0]]
    assert values["mine/pass@1"] == values["mine/pass@2"] == values["mine/best@2"] == [[1.0], [1.0]]
    assert values["mine/pass@3"] == [[], []] and "unjudged" not in values
    assert values["environment_errors"] == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    metrics = episode_metrics(scored)
    wanted = {"answers": 6.0, "reward": 1.0, "reward/mine": 1.0, "length/mean": 1.0, "zero_variance_groups": 1.0}
    assert {name: metrics[name] for name in wanted} == wanted
    assert metrics["environment_errors"] == 1 / 3 and "unjudged" not in metrics and "turns/mean" not in metrics


def test_where_all_environments_fail_there_is_no_mean() -> None:
    scored = answers("a", "b")
    for one in scored:
        one.error = "down"
    metrics = episode_metrics(scored)
    assert metrics["environment_errors"] == 1.0 and math.isnan(metrics["reward"]) and math.isnan(metrics["length/max"])
    assert measured(groups_of(scored), [])["reward"] == [[]]


def test_an_answer_without_a_judged_baseline_takes_no_part() -> None:
    scored = scored_groups()
    scored[0].baseline = None
    assert usable_groups(groups_of(scored), Requirements()) == [[scored[0]]]
    assert usable_groups(groups_of(scored), Requirements(greedy=True)) == []
    assert usable_groups(groups_of(scored), Requirements(reward=False)) == groups_of(scored)


@pytest.mark.parametrize("reward", [True, False])
def test_an_answer_whose_environment_failed_takes_no_part(reward: bool) -> None:
    """Its score of 0 is nobody's judgement: it makes no group one whose scores differ, and is no best answer."""
    said = [Turn([1], [2])]
    groups = [
        [Episode(Example("x", "?"), n, 2 * n, said, score=1.0), Episode(Example("x", "?"), n, 2 * n + 1, said)]
        for n in (0, 1)
    ]
    groups[0][1].error = "step() took longer than 60 s"
    assert usable_groups(groups, Requirements(reward=reward)) == [groups[0][:1], groups[1]]
    failed = [[replace(groups[0][1])], [replace(groups[0][1])]]
    with pytest.raises(LmgymError, match=r"the environment failed for each of its 2 answers; the first: step\(\) took"):
        refuse_unjudged(failed, 0)
    dapo = GRPO(group_size=2, dynamic_sampling=True)
    assert dapo.select(usable_groups(groups, dapo.requirements), 2) == ([groups[1]], True)
    worse = [Episode(Example("x", "?"), 0, n, said, score=-1.0 - n) for n in range(3)]
    worse[2].error, worse[2].score = "it fell over", 0.0
    raft = RAFT(group_size=3, keep=1)
    assert raft.select(usable_groups([worse], raft.requirements), 1)[0] == [[worse[0]]]


# Whole runs

SOME = {f"{HERE}:even_lengths": 1.0}
SAMPLED = [
    "a2c",
    "grpo",
    "nlpo",
    "online_dpo",
    "ppo",
    "raft",
    "reinforce",
    "reinforce_pp",
    "reinforce_stable",
    "replay",
]
SAMPLED += ["rloo", "trpo", "xpo", "nash_md"]


@pytest.mark.parametrize("name", SAMPLED)
def test_every_algorithm_goes_without_them(tmp_path: Path, name: str) -> None:
    sizes = {"group_size": 4} if name in ("grpo", "online_dpo", "raft", "replay", "rloo") else {}
    folder = runs.run(
        tmp_path / "run", algorithm={"name": name, **sizes}, rewards=SOME, steps=2, logs={"rollouts": "all"}
    )
    steps = [record for record in runs.records(folder / "metrics.jsonl") if record["kind"] == "train"]
    assert [0 < record["unjudged"] < 1 for record in steps] == [True, True]
    written = [record for record in runs.records(folder / "rollouts.jsonl") if record["kind"] == "train"]
    odd = [len(record["turns"][-1]["text"]) % 2 for record in written if not record.get("by")]
    assert [record["score"] is None for record in written if not record.get("by")] == [bool(one) for one in odd]
    assert "NaN" not in (folder / "metrics.jsonl").read_text() + (folder / "rollouts.jsonl").read_text()


def test_a_run_with_them_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    """Its buffer holds judged answers alone, its running estimate is of these, and the reward raises too."""
    rewards = {"mine": {"reward": f"{HERE}:even_lengths", "normalise": True}, f"{HERE}:odd_raises": 0.5}
    changes = {"rewards": rewards, "rewards_failed": 1.0, "algorithm": {"name": "replay", "group_size": 4}}
    whole = runs.run(tmp_path / "whole", **changes)
    halves = runs.run(tmp_path / "halves", Interrupting(at=3), **changes)
    buffer = runs.algorithm_state(halves)
    assert '"judged": true' in json.dumps(buffer) and '"judged": false' not in json.dumps(buffer)
    runs.run(halves, **changes)
    runs.assert_equal_runs(whole, halves)


@pytest.mark.slow
def test_ranks_leave_out_the_same_answers(group: Group, tmp_path: Path) -> None:
    """The error of an answer that another rank has judged travels with it."""
    changes = {"rewards": {**SOME, f"{HERE}:odd_raises": 0.5}, "rewards_failed": 1.0, "logs": {"rollouts": "all"}}
    one = runs.run(tmp_path / "one", **changes, steps=1)
    recipe = runs.write(tmp_path / "two.yaml", **changes, steps=1)
    assert group.run(2, ["train", str(recipe), f"out={tmp_path / 'two'}"]) == [0, 0], group.said() + group.said(1)
    ours = [runs.records(folder / "rollouts.jsonl") for folder in (one, tmp_path / "two")]
    names = ("score", "reward_components", "reward_errors")
    assert [[r.get(name) for name in names] for r in ours[0]] == [[r.get(name) for name in names] for r in ours[1]]
    assert any(record.get("reward_errors") for record in ours[0])
    metrics = [runs.records(folder / "metrics.jsonl") for folder in (one, tmp_path / "two")]
    assert metrics[0][1]["unjudged"] == metrics[1][1]["unjudged"] > 0


def test_a_step_in_which_nothing_is_judged_is_drawn_again(tmp_path: Path) -> None:
    once = {"prompts_per_step": 4, "steps": 1, "shuffle": False, "evaluation": None}
    later = runs.tiny()["task"] | {"size": 64}
    folder = runs.run(
        tmp_path / "run", rewards={f"{HERE}:first_only": 1.0}, task=later, **once, logs={"rollouts": "all"}
    )
    assert folder.is_dir()
    with pytest.raises(LmgymError, match="step 1: no reward judged any of its 64 answers"):
        runs.run(tmp_path / "none", rewards={f"{HERE}:nothing": 1.0}, **once)


def test_an_evaluation_that_judged_nothing_decides_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the best model nor an early end, and the run goes on."""
    name = f"{HERE}:nothing"
    rewards = runs.TINY["rewards"] | {name: 1.0}
    by = {"evaluation": {"every": 2, "examples": 4, "keep_best": name}, "early_stop": {"metric": name, "patience": 1}}
    folder = runs.run(tmp_path / "run", Console(), rewards=rewards, **by)
    trained = [record for record in runs.records(folder / "metrics.jsonl") if record["kind"] == "train"]
    assert len(trained) == 6 and not (folder / "best").exists()
    said = capsys.readouterr().out
    for key in ("evaluation.keep_best", "early_stop.metric"):
        assert f"{key} decides nothing, since '{name}' has no answer" in said


@linear_time
def worse(texts: list[str], examples: list[Example]) -> list[float]:
    return [0.0 for _ in texts]


VALUES: list[float] = []


def _next(texts: list[str], examples: list[Example]) -> float:
    VALUES.append(math.nan if not VALUES else float(len(VALUES)))
    return VALUES[-1]


worse.corpus = _next  # type: ignore[attr-defined]


def test_an_evaluation_that_is_no_number_decides_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NaN, then 1, 2, 3: all of them are better."""
    VALUES.clear()
    reward = f"{__name__}:{worse.__name__}"
    name = f"{reward}/corpus"
    by = {
        "evaluation": {"every": 2, "examples": 4, "keep_best": name, "metrics": {reward: {}}},
        "early_stop": {"metric": name, "patience": 1},
    }
    folder = runs.run(tmp_path / "run", Console(), **by)
    summary = json.loads((folder / "summary.json").read_text())
    assert len(VALUES) == 4 and math.isnan(VALUES[0])
    assert (summary["best"]["step"], summary["best"]["value"], summary["stop"]) == (6, 3.0, None)
    said = capsys.readouterr().out
    for key in ("evaluation.keep_best", "early_stop.metric"):
        assert f"{key} decides nothing, since '{name}' is not a number" in said


@pytest.mark.processes
def test_a_run_ends_where_a_reward_fails_for_too_many(tmp_path: Path) -> None:
    rewards = {f"{HERE}:odd_raises": 1.0}
    with pytest.raises(LmgymError, match=r"odd_raises' raised ValueError: an odd text.*; it failed for .* allows 1$"):
        runs.run(tmp_path / "few", rewards=rewards, evaluation=None, rewards_failed=0.1)
    with pytest.raises(LmgymError, match="odd_raises' raised ValueError: an odd text"):
        runs.run(tmp_path / "none", rewards=rewards, evaluation=None, rewards_failed=0)
    folder = runs.run(tmp_path / "all", rewards=rewards, evaluation=None, rewards_failed=1.0, steps=2)
    record = next(one for one in runs.records(folder / "rollouts.jsonl") if one["score"] is None)
    assert "an odd text" in record["reward_errors"][f"{HERE}:odd_raises"]
    judged = runs.run(tmp_path / "judged", rewards=SOME, evaluation=None, steps=2)
    assert runs.records(judged / "metrics.jsonl")[0]["reward"] == runs.records(folder / "metrics.jsonl")[0]["reward"]


def test_call_reward_is_as_it_was() -> None:
    assert call_reward(gives(1, True, 0.5), answers("a", "b", "c")) == [1.0, 1.0, 0.5]
