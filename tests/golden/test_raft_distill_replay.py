"""RAFT, distillation and replay: numbers by hand, and what each must have in common with a tested algorithm."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, tensor

import lmgym
from lmgym.algorithms.base import Algorithm
from lmgym.algorithms.distill import Distill
from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.algorithms.grpo.self_certainty import SelfCertainty
from lmgym.algorithms.raft import RAFT
from lmgym.algorithms.replay import Replay
from lmgym.algorithms.requirements import Requirements
from lmgym.algorithms.supervised import Supervised
from lmgym.batch import Batch, collate
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.training.loop import mark_selected, selection
from lmgym.types import Episode, Example, Turn
from tests import models, runs
from tests.family import grpo


def group_of(scores: Sequence[float], group: int = 0, version: int = 0) -> list[Episode]:
    """Answers of one token each to the same prompt; the token says whose it is."""
    turns = [Turn([9], [50 + place], [-1.0], reward=score) for place, score in enumerate(scores)]
    example = Example(f"x/{group}", "?")
    return [
        Episode(example, group, place, [turn], version=version, score=turn.reward) for place, turn in enumerate(turns)
    ]


def places(groups: list[list[Episode]]) -> list[list[int]]:
    return [[episode.index for episode in group] for group in groups]


# RAFT


@pytest.mark.parametrize(
    ("algorithm", "picked"),
    [
        (RAFT(group_size=4), [[1], [0], [3]]),  # of equals the earliest
        (RAFT(group_size=4, keep=2), [[1, 2], [0, 1], [3, 0]]),
        (RAFT(group_size=4, keep=3, threshold=0.5), [[1, 2], [0, 1, 2], [3]]),
        (RAFT(group_size=4, keep=4, threshold=1.0), [[1, 2]]),
        (RAFT(group_size=4, skip_equal=True), [[1], [3]]),
    ],
)
def test_raft_picks_the_best(algorithm: RAFT, picked: list[list[int]]) -> None:
    groups = [group_of([0.0, 1.0, 1.0, 0.2]), group_of([0.5] * 4), group_of([0.1, 0.0, -1.0, 0.9])]
    selected, more = algorithm.select(groups, 3)
    assert places(selected) == picked and not more


def test_raft_asks_for_more_only_where_nothing_will_do() -> None:
    algorithm = RAFT(group_size=2, threshold=0.9)
    poor, good = group_of([0.0, 0.5]), group_of([0.0, 1.0], 1)
    assert algorithm.select([poor], 2) == ([], True)
    selected, more = algorithm.select([poor, good], 2)
    assert places(selected) == [[1]] and not more
    assert [episode.selected for episode in mark_selected([poor, good], selected)] == [False, False, False, True]


def test_raft_is_supervised_training_on_what_it_picked() -> None:
    """log-probabilities -1, -2 and -6: their mean over 3 tokens, whatever the scores."""
    batch = RAFT().advantages(collate([Episode(Example("x", "?"), 0, n, [Turn([9], [5] * (2 - n))]) for n in (0, 1)]))
    logprobs = tensor([[0, -1.0, -2.0], [0, -6.0, 0]])
    assert float(models.loss_of(RAFT(), batch, logprobs)) == pytest.approx(3.0)
    assert float(models.loss_of(Supervised(), batch, logprobs)) == pytest.approx(3.0)


# Distillation


def conversation(lengths: Sequence[int], score: float = 0.0, index: int = 0, restart: bool = False) -> Episode:
    turns = [Turn([9], [5] * n, [-1.0] * n, restart=restart and k > 0) for k, n in enumerate(lengths)]
    return Episode(Example("x", "?"), 0, index, turns, score=score)


def distilled(algorithm: Distill, batch: Batch, student: Tensor, teacher: Tensor) -> Tensor:
    advantages = algorithm.advantages(batch.replace(logprobs_sampler=student, logprobs_teacher=teacher)).advantages
    assert advantages is not None
    return advantages


def test_the_advantages_of_distillation() -> None:
    """Log-ratios .5, -1 and 2: each token's own; or with those ahead at gamma .5: .5 - .5 + .5, -1 + 1, 2."""
    batch = collate([conversation([3])])
    student, teacher = tensor([[0, -1.5, -1.0, -3.0]]), tensor([[0, -1.0, -2.0, -1.0]])
    assert distilled(Distill(teacher="t"), batch, student, teacher).tolist() == [[0, 0.5, -1.0, 2.0]]
    assert distilled(Distill(teacher="t", gamma=0.5), batch, student, teacher).tolist() == [[0, 0.5, 0.0, 2.0]]
    assert distilled(Distill(teacher="t", gamma=1.0), batch, student, teacher).tolist() == [[0, 1.5, 1.0, 2.0]]


@pytest.mark.parametrize("restart", [False, True])
def test_credit_ahead_goes_through_the_turns_of_an_episode_and_no_further(restart: bool) -> None:
    """Log-ratio 1 everywhere, gamma 1: as many as are left. The prompt of the second turn is no step."""
    batch = collate([conversation([1, 2], index=3, restart=restart), conversation([1], index=4)])
    teacher = torch.zeros(batch.tokens.shape)
    found = distilled(Distill(teacher="t", gamma=1.0), batch, teacher - 1, teacher)
    assert found[batch.actions].tolist() == [3, 2, 1, 1]
    assert bool((found[~batch.actions] == 0).all())


def test_rewards_and_teacher_together() -> None:
    """Scores 1 and 0: +-.5 in the group, times 2."""
    batch = collate([conversation([1], 1.0, 0), conversation([1], 0.0, 1)])
    student, teacher = tensor([[0, -1.0], [0, -1.0]]), tensor([[0, -1.5], [0, -0.5]])
    algorithm = Distill(teacher="t", group_size=2, reward_coefficient=2.0)
    assert distilled(algorithm, batch, student, teacher)[:, 1].tolist() == [0.5, -0.5]
    loss = models.loss_of(
        algorithm, algorithm.advantages(batch.replace(logprobs_sampler=student, logprobs_teacher=teacher)), student
    )
    assert float(loss) == pytest.approx((0.5 - 0.5) / 2)


def every_answer(policy: Policy) -> list[Episode]:
    """One answer of each token of the vocabulary to one prompt."""
    return [Episode(Example("x", "?"), 0, t, [Turn([5, 6], [t], [0.0])]) for t in range(policy.vocabulary)]


def test_the_expected_gradient_is_that_of_the_reverse_kl() -> None:
    """E over tokens of the policy-gradient estimate, summed exactly over the vocabulary, against autograd of the KL."""
    student, teacher = (Policy(models.gpt2(seed).double(), models.tokenizer(), torch.float64) for seed in (0, 1))
    batch = models.batch_of(every_answer(student))
    keeper = models.KeepGradient(student)
    with torch.no_grad():
        now, other = student.compute_logprobs(batch).logprobs, teacher.compute_logprobs(batch).logprobs
    algorithm = Distill(teacher="t")
    ready = algorithm.advantages(batch.replace(logprobs_sampler=now, logprobs_teacher=other))
    terms, metrics = algorithm.loss(ready, student.compute_logprobs(ready))
    keeper.zero_grad()
    (now[:, 2].exp() * terms["policy"][0][:, 2]).sum().backward()
    found = keeper.flat().clone()
    keeper.zero_grad()
    logprobs = student.compute_logprobs(batch).logprobs[:, 2]
    divergence = (logprobs.exp() * (logprobs - other[:, 2])).sum()
    divergence.backward()
    assert float(found.norm()) > 0.1
    assert models.relative(found, keeper.flat()) < 1e-9
    expected = float((now[:, 2].exp() * metrics["kl/teacher"][:, 2]).sum())
    assert expected == pytest.approx(float(divergence.detach())) and expected > 0


def test_the_gradient_on_samples_is_that_of_the_log_ratio() -> None:
    """-mean over tokens of (log pT - log pS) grad log pS, and not zero: LLM_RL's teacher term was a constant."""
    student, teacher = (Policy(models.gpt2(seed).double(), models.tokenizer(), torch.float64) for seed in (0, 1))
    batch = models.batch_of(models.episodes(3))
    with torch.no_grad():
        now, other = student.compute_logprobs(batch).logprobs, teacher.compute_logprobs(batch).logprobs
    algorithm = Distill(teacher="t")
    ready = algorithm.advantages(batch.replace(logprobs_sampler=now, logprobs_teacher=other))
    found, _ = models.gradient(algorithm, student, ready, first=True)
    keeper = models.KeepGradient(student)
    keeper.zero_grad()
    (-((other - now) * student.compute_logprobs(batch).logprobs)[batch.actions].mean()).backward()
    assert float(found.norm()) > 0.1
    assert models.relative(found, keeper.flat()) < 1e-9
    same = algorithm.advantages(batch.replace(logprobs_sampler=now, logprobs_teacher=now))
    assert float(models.gradient(algorithm, student, same, first=True)[0].norm()) == 0


def test_distillation_from_references_is_supervised_training() -> None:
    algorithm = Distill(source="references", epochs=2)
    assert Supervised().requirements == Requirements(answers="references")
    assert algorithm.requirements == Requirements(answers="references", reward=False)
    assert Distill(teacher="t").requirements == Requirements(teacher="t", reward=False)
    batch = algorithm.advantages(collate([conversation([2]), conversation([1], index=1)]))
    assert float(models.loss_of(algorithm, batch, tensor([[0, -1.0, -2.0], [0, -6.0, 0]]))) == pytest.approx(3.0)


def test_only_distillation_without_rewards_goes_without_them(tmp_path: Path) -> None:
    assert (Distill(teacher="t").requirements.reward, GRPO().requirements.reward) == (False, True)
    assert Distill(teacher="t", reward_coefficient=0.5, group_size=2).requirements.reward
    teacher = {"name": "distill", "teacher": "builtin:tiny"}
    assert runs.build_config(runs.tiny(algorithm=teacher, rewards=None)).stages[0].rewards == {}
    for algorithm in ({**teacher, "reward_coefficient": 1.0, "group_size": 2}, {"name": "raft"}):
        with pytest.raises(LmgymError, match="names no reward"):
            runs.build_config(runs.tiny(algorithm=algorithm, rewards=None))


# Replay


class Stage(SimpleNamespace):
    """What `after_update` reads of a run."""

    path = (0, "stage", 0)


def step(algorithm: Replay, version: int, scores: Sequence[Sequence[float]]) -> list[list[Episode]]:
    """What is selected in a step of groups with these scores; then the step ends."""
    groups = [group_of(s, number, version) for number, s in enumerate(scores)]
    selected, more = algorithm.select(groups, len(groups))
    assert not more and selected[: len(groups)] == groups
    mark_selected(groups, selected)
    algorithm.after_update(Stage(step=version + 1))
    return selected


MIXED = (0.0, 1.0)


def test_a_group_is_replayed_after_its_step_until_it_is_too_old() -> None:
    algorithm = Replay(group_size=2, max_age=2, capacity=8, replayed=8)
    assert [[group[0].version for group in step(algorithm, version, [MIXED])] for version in range(5)] == [
        [0],
        [1, 0],
        [2, 0, 1],
        [3, 1, 2],
        [4, 2, 3],
    ]


def test_the_buffer_holds_the_newest_groups_that_teach_something() -> None:
    algorithm = Replay(group_size=2, capacity=3, replayed=3, max_age=9)
    step(algorithm, 0, [MIXED, (0.5, 0.5), MIXED])
    assert [group[0].group for group in algorithm.buffer.groups] == [0, 2]
    step(algorithm, 1, [MIXED, MIXED])
    assert [(group[0].version, group[0].group) for group in algorithm.buffer.groups] == [(0, 2), (1, 0), (1, 1)]


def test_the_trainer_gets_copies_numbered_after_the_fresh_groups() -> None:
    algorithm = Replay(group_size=2, replayed=1)
    step(algorithm, 0, [MIXED])
    kept = algorithm.buffer.groups[0]
    fresh = [group_of(MIXED, 0, 1)]
    episodes = mark_selected(fresh, algorithm.select(fresh, 1)[0])
    assert [(e.version, e.group, e.index, e.selected) for e in episodes] == [
        (1, 0, 0, True),
        (1, 0, 1, True),
        (0, 1, 2, True),
        (0, 1, 3, True),
    ]
    assert [(e.group, e.index) for e in kept] == [(0, 0), (0, 1)]
    kept[1].error = "it failed"  # older versions kept such an answer
    fresh = [group_of(MIXED, 0, 1)]
    episodes = mark_selected(fresh, algorithm.select(fresh, 1)[0])
    assert [e.selected for e in episodes] == [True, True, True, False]


def test_the_draw_is_uniform_without_replacement_and_a_function_of_the_key() -> None:
    algorithm = Replay(group_size=2, replayed=3, capacity=10, max_age=99)
    algorithm.buffer.groups = [group_of(MIXED, number) for number in range(10)]
    counts = np.zeros(10)
    for key in range(400):
        algorithm.buffer.key = key
        drawn = [group[0].group for group in algorithm.select([group_of(MIXED, version=1)], 1)[0][1:]]
        assert len(set(drawn)) == 3
        assert drawn == [group[0].group for group in algorithm.select([group_of(MIXED, version=1)], 1)[0][1:]]
        counts[drawn] += 1
    assert abs(counts - 120).max() < 4 * math.sqrt(400 * 0.3 * 0.7)  # 4 standard deviations of a fair draw


def scored(algorithm: Algorithm, seed: int = 5) -> tuple[Batch, Tensor]:
    """A batch whose old log-probabilities are not the sampler's, and what a policy far from both says now."""
    batch = models.batch_of(models.episodes(seed))
    random = torch.Generator().manual_seed(seed)
    now, old = (-2 * torch.rand(batch.tokens.shape, generator=random, dtype=torch.float64) for _ in range(2))
    return algorithm.advantages(batch.replace(logprobs_old=old)), now


@pytest.mark.parametrize("settings", [{}, {"scale_rewards": "group", "reduction": "sequence"}, {"clip_high": 0.4}])
def test_replay_is_grpo_whose_old_policy_is_the_sampler(settings: dict[str, Any]) -> None:
    usual, replay = grpo(group_size=4, **settings), grpo(kind=Replay, group_size=4, **settings)
    batch, now = scored(replay)
    expected = models.loss_of(usual, batch.replace(logprobs_old=batch.logprobs_sampler), now)
    assert float(models.loss_of(replay, batch, now)) == float(expected)
    assert float(models.loss_of(usual, batch, now)) != pytest.approx(float(expected))


def test_on_fresh_groups_only_replay_is_grpo() -> None:
    """The sampler is then the old policy: the same gradient, on the first optimizer step of a batch."""
    policy = Policy(models.gpt2().double(), models.tokenizer(), torch.float64)
    batch = models.batch_of(models.episodes(5))
    with torch.no_grad():
        batch = batch.replace(logprobs_sampler=policy.compute_logprobs(batch).logprobs)
    gradients = [
        models.gradient(algorithm, policy, algorithm.advantages(batch), first=True)[0]
        for algorithm in (GRPO(group_size=4), Replay(group_size=4), grpo(kind=Replay, group_size=4, truncate=2.0))
    ]
    assert float(gradients[0].norm()) > 0
    for gradient in gradients[1:]:
        assert models.relative(gradients[0], gradient) < 1e-9


def test_truncated_importance_weights() -> None:
    """Ratios e and e^-1, advantages 1 and -1, weights cut to 2: -2 log p and e^-1 log p; the weight has no gradient."""
    algorithm = grpo(kind=Replay, group_size=2, truncate=2.0)
    batch = collate(group_of([1.0, 0.0])).replace(advantages=tensor([[0, 1.0], [0, -1.0]]))
    batch = batch.replace(logprobs_sampler=tensor([[0, -1.5], [0, -0.5]]))
    now = tensor([[0, -0.5], [0, -1.5]]).requires_grad_()
    loss = models.loss_of(algorithm, batch, now)
    loss.backward()
    assert float(loss.detach()) == pytest.approx((2 * 0.5 - math.exp(-1) * 1.5) / 2)
    assert now.grad is not None
    assert now.grad[:, 1].tolist() == pytest.approx([-1.0, math.exp(-1) / 2])


def test_the_state_of_replay_comes_back_bit_for_bit() -> None:
    """Two-turn episodes of an encoder-decoder with kept sets and numbers that decimals cannot say."""
    meta = Example("x/7", [{"role": "user", "content": "Ähm?"}], ("4",), {"answer": object()})
    turns = [
        Turn([1], [7, 2], [-1 / 3, -0.1], "a", "eos", 1, 0.0, False, [5, 6], np.array([[255, 1], [3, 0]], np.uint8)),
        Turn([1], [8], [-1e-30], "b", "length", 1, 0.3, True, [5, 6, 7], np.array([[9, 9]], np.uint8)),
    ]
    parts = {"reward": 0.1 + 0.2}
    group = [
        Episode(meta, 3, n, turns, False, 4, parts, score=0.1 * n, baseline=None if n else 1 / 7) for n in range(2)
    ]
    before, after = Replay(group_size=2), Replay(group_size=2)
    before.select([group], 1)
    before.after_update(Stage(step=5))
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.buffer.key == before.buffer.key > 0
    fresh = [group_of(MIXED, version=5)]
    for one, other, original in zip(before.select(fresh, 1)[0][1], after.select(fresh, 1)[0][1], group, strict=True):
        assert replace(one, turns=[]) == replace(other, turns=[])
        assert replace(one, turns=[], example=meta) == replace(original, turns=[])
        for restored, turn in zip(other.turns, original.turns, strict=True):
            assert replace(restored, kept=None) == replace(turn, kept=None)
            assert restored.kept is not None and turn.kept is not None and np.array_equal(restored.kept, turn.kept)
    columns = [collate(algorithm.buffer.groups[0]) for algorithm in (before, after)]
    assert torch.equal(columns[0].source, columns[1].source) and columns[1].source.shape == (4, 3)
    assert torch.equal(columns[0].sampling_mask.bits, columns[1].sampling_mask.bits)


def test_an_example_comes_back_from_json() -> None:
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "\u00c4hm?"}]
    for example in (Example("a/0", "2+2=", ("4", "four"), {"answer": 4}), Example("a/1", chat)):
        assert Example.from_json(json.loads(json.dumps(example.to_json()))) == example
    assert Example.from_json({"id": "a/2", "prompt": "?", "references": ["!"]}) == Example("a/2", "?", ("!",))
    with pytest.raises(TypeError, match="set is not JSON serializable"):
        Example("a/3", "?", meta={"no": {1}}).to_json()


def test_a_run_replays_and_logs_the_fresh_answers(tmp_path: Path) -> None:
    algorithm = {"name": "replay", "group_size": 4, "replayed": 3, "max_age": 2}
    folder = runs.run(tmp_path / "run", algorithm=algorithm, steps=4, logs={"rollouts": "all"})
    rollouts = [record for record in runs.records(folder / "rollouts.jsonl") if record["kind"] == "train"]
    trained = [record for record in runs.records(folder / "metrics.jsonl") if record["kind"] == "train"]
    for record in trained:
        own = [rollout for rollout in rollouts if rollout["step"] == record["step"]]
        fresh = [rollout for rollout in own if rollout["version"] == record["step"]]
        assert len(fresh) == 16 and (len(own) == 16) == (record["step"] == 0)
        assert record["step"] - min(rollout["version"] for rollout in own) <= 2
        assert record["reward"] == pytest.approx(sum(rollout["score"] for rollout in fresh) / 16)
    assert {len(group) for group in runs.algorithm_state(folder)["buffer"]} == {4}


# Settings that cannot work


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RAFT(group_size=4, keep=5), "algorithm.keep is 5; it must lie between 1 and group_size"),
        (lambda: RAFT(group_size=4, keep=4), "every answer would be imitated"),
        (lambda: Distill(), "algorithm.teacher is missing"),
        (lambda: Distill(teacher="t", gamma=1.5), "algorithm.gamma is 1.5"),
        (lambda: Distill(teacher="t", reward_coefficient=-1.0), "algorithm.reward_coefficient is -1.0"),
        (lambda: Distill(teacher="t", reward_coefficient=1.0), "distill needs at least 2"),
        (lambda: Distill(teacher="t", epochs=2), "no ratio"),
        (lambda: Distill(teacher="t", source="references"), "algorithm.teacher is set, and source is references"),
        (lambda: Replay(replayed=0), "algorithm.replayed is 0"),
        (lambda: Replay(replayed=9, capacity=8), "raise capacity, or lower replayed"),
        (lambda: grpo(kind=Replay, truncate=0.0), "algorithm.surrogate.cap is 0.0"),
        (lambda: Replay(group_size=1), "at least 2"),
        (lambda: Replay(credit=SelfCertainty()), "replay keeps groups by their rewards; take another"),
    ],
)
def test_refusals(make: Callable[[], Algorithm], message: str) -> None:
    with pytest.raises(LmgymError, match=message):
        make()


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ("builtin:tiny_t5", "must both be causal, or both encoder-decoders"),
        ("builtin:tinny", "there is no 'builtin:tinny'"),
    ],
)
def test_a_teacher_that_cannot_teach(teacher: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(LmgymError, match=message):
        runs.run(tmp_path / "run", algorithm={"name": "distill", "teacher": teacher})


def test_a_teacher_of_other_words_is_refused(tmp_path: Path) -> None:
    section = PolicySection(tokenizer="builtin:numbers", architecture=runs.ARCHITECTURE, device="cpu")
    load_policy(section).save_pretrained(tmp_path / "teacher")
    with pytest.raises(LmgymError, match=r"algorithm\.teacher: .*teacher has another tokenizer than the policy"):
        runs.run(tmp_path / "run", algorithm={"name": "distill", "teacher": str(tmp_path / "teacher")})


def test_a_threshold_that_nothing_reaches_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LmgymError, match="step 1: the algorithm rejected every group of 2 draws; raise max_draws"):
        runs.run(tmp_path / "run", algorithm={"name": "raft", "threshold": 1e9}, max_draws=2)


def test_the_public_names() -> None:
    for name, algorithm in (("raft", RAFT), ("distill", Distill), ("replay", Replay)):
        assert registry.get("algorithm", name) is algorithm is getattr(lmgym, algorithm.__name__)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (lambda groups: None, "returned a NoneType that is no pair"),
        (lambda groups: groups, "returned a list that is no pair"),
        (lambda groups: (groups[0], False), "returned a tuple that is no pair"),  # episodes, not groups
        (lambda groups: (groups * 2, False), "returned an episode twice"),
    ],
)
def test_what_select_should_not_return_is_refused(chosen: Any, said: str) -> None:
    groups = [group_of(MIXED, number) for number in range(3)]
    with pytest.raises(LmgymError, match=rf"Chooses\.select {said}"):
        selection(Chooses(group_size=2, chosen=chosen), groups, 3)


def test_the_groups_that_select_returns_may_be_a_generator() -> None:
    groups = [group_of(MIXED, number) for number in range(3)]
    algorithm = Chooses(group_size=2, chosen=lambda groups: ((group for group in groups), False))
    assert selection(algorithm, groups, 3) == (groups, False)


@dataclass(kw_only=True)
class Chooses(Replay):
    chosen: Any = None

    def select(self, groups: Any, wanted: int) -> Any:
        return self.chosen(groups)
