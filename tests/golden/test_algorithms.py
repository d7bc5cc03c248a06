"""Algorithms against worked numbers of NanoRL, RL4LMs and Michael-JB's GRPO, through the methods the trainer calls."""

import pytest
import torch
from torch import Tensor, tensor

from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.algorithms.reinforce import RLOO, Reinforce
from lmgym.algorithms.requirements import Requirements
from lmgym.algorithms.supervised import Supervised
from lmgym.batch import Batch, PolicyOutputs, collate
from lmgym.core.errors import LmgymError
from lmgym.types import Episode, Example, Turn
from lmgym.updates.first_order import minibatches_of
from tests import rounding
from tests.family import grpo
from tests.models import loss_of


def batch_of(scores: list[float], lengths: list[int] | None = None, groups: list[int] | None = None) -> Batch:
    """One row per score, in fp64: a prompt of one token and `lengths` actions (1 each by default)."""
    episodes = []
    for place, score in enumerate(scores):
        turn = Turn([9], [5] * (lengths[place] if lengths else 1), reward=score)
        episodes.append(Episode(Example("x", "?"), groups[place] if groups else 0, place, [turn], score=score))
    batch = collate(episodes)
    return batch.replace(score=tensor(scores, dtype=torch.float64), rewards=batch.rewards.double())


def per_row(batch: Batch) -> list[float]:
    return [float(row[mask][0]) for row, mask in zip(batch.advantages, batch.actions, strict=True)]


# Columns


def test_collate_writes_what_its_docstring_shows() -> None:
    """Two answers to the prompt [5, 6]: [7, 2], ended and scored 1; [8], cut off and scored 0."""
    ended = Turn([5, 6], [7, 2], [-0.5, -0.1], reward=1.0)
    cut = Turn([5, 6], [8], [-0.7], stop="length")
    example = Example("x", "?")
    batch = collate([Episode(example, 0, 0, [ended], score=1.0), Episode(example, 0, 1, [cut], terminated=False)])
    assert batch.tokens.tolist() == [[5, 6, 7, 2], [5, 6, 8, 0]]
    assert batch.mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch.actions.tolist() == [[0, 0, 1, 1], [0, 0, 1, 0]]
    assert batch.rewards.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]
    assert torch.equal(batch.logprobs_sampler, tensor([[0, 0, -0.5, -0.1], [0, 0, -0.7, 0]]))
    assert (batch.score.tolist(), batch.terminated.tolist()) == ([1, 0], [1, 0])
    assert (batch.episode.tolist(), batch.group.tolist(), batch.version.tolist()) == ([0, 1], [0, 0], [0, 0])
    assert batch.stop_excluded is None
    assert batch.baseline is None


def test_collate_of_a_conversation() -> None:
    """Two turns in one row, then a rewritten prompt: a second row of the same episode. The first two actions of each
    turn were drawn without stop ids."""
    turns = [
        Turn([1, 5], [6, 7, 2], [-1.0, -2.0, -3.0], reward=0.25, min_new_tokens=2),
        Turn([8], [9], [-4.0], reward=0.5, min_new_tokens=2),
        Turn([1, 3, 4], [6, 2], [-5.0, -6.0], reward=1.0, min_new_tokens=2, restart=True),
    ]
    episode = Episode(Example("x", "?"), 3, 11, turns, score=1.75, version=4, baseline=0.5)
    batch = collate([episode], pad_id=99, temperature=0.5, stop_ids=[2], key=17)
    assert batch.tokens.tolist() == [[1, 5, 6, 7, 2, 8, 9], [1, 3, 4, 6, 2, 99, 99]]
    assert batch.mask.tolist() == [[1] * 7, [1] * 5 + [0] * 2]
    assert batch.actions.tolist() == [[0, 0, 1, 1, 1, 0, 1], [0, 0, 0, 1, 1, 0, 0]]
    assert batch.stop_excluded.tolist() == [[0, 0, 1, 1, 0, 0, 1], [0, 0, 0, 1, 1, 0, 0]]
    assert batch.rewards.tolist() == [[0, 0, 0, 0, 0.25, 0, 0.5], [0, 0, 0, 0, 1, 0, 0]]
    assert batch.logprobs_sampler.tolist() == [[0, 0, -1, -2, -3, 0, -4], [0, 0, 0, -5, -6, 0, 0]]
    assert (batch.score.tolist(), batch.baseline.tolist()) == ([1.75, 1.75], [0.5, 0.5])
    assert (batch.episode.tolist(), batch.group.tolist(), batch.version.tolist()) == ([11, 11], [3, 3], [4, 4])
    assert (batch.temperature, batch.stop_ids, batch.key) == (0.5, (2,), 17)
    second = batch[tensor([1])]
    assert second.tokens.tolist() == [[1, 3, 4, 6, 2]]
    assert second.stop_excluded.shape == second.rewards.shape == (1, 5)


def test_collate_refuses_what_cannot_be_trained_on() -> None:
    with pytest.raises(LmgymError, match="no episode"):
        collate([])
    with pytest.raises(LmgymError, match=r"episode 6 \(example x/1\) has a turn without an action"):
        collate([Episode(Example("x/1", "?"), 0, 6, [Turn([5], [])])])


def test_demonstrations_have_no_sampler() -> None:
    episodes = [Episode(Example("x", "?"), 0, n, [Turn([5], [6], logprobs)]) for n, logprobs in enumerate([[-1.0], []])]
    assert collate(episodes).logprobs_sampler is None
    assert collate(episodes[:1]).logprobs_sampler is not None


# Baselines of REINFORCE

MEANS = [0.5, 0.7, 0.6, 0.9]


@pytest.mark.parametrize(("beta", "baselines"), [(0.9, [0.5, 0.52, 0.528, 0.5652]), (0.5, [0.5, 0.6, 0.6, 0.75])])
def test_ema_baseline_over_batches(beta: float, baselines: list[float]) -> None:
    """NanoRL: the baseline of a batch already holds that batch. Each batch is its mean -+ .1."""
    algorithm = Reinforce(baseline="ema", ema_beta=beta)
    for mean, baseline in zip(MEANS, baselines, strict=True):
        batch = algorithm.advantages(batch_of([mean - 0.1, mean + 0.1]))
        wanted = [mean - 0.1 - baseline, mean + 0.1 - baseline]
        assert per_row(batch) == pytest.approx(wanted, rel=0, abs=rounding.rounding(1))  # the baseline is taken in fp32
        assert algorithm.state_dict()["moving_mean"] == pytest.approx(baseline, abs=1e-12)


def test_ema_baseline_survives_a_checkpoint() -> None:
    before = Reinforce(baseline="ema")
    before.advantages(batch_of([0.5]))
    after = Reinforce(baseline="ema")
    after.load_state_dict(before.state_dict())
    assert per_row(after.advantages(batch_of([0.7]))) == pytest.approx([0.18])


def test_mean_none_and_self_critical_baselines() -> None:
    scores = [1.0, 0.5, 0.0, 0.5]
    assert per_row(Reinforce(baseline="mean").advantages(batch_of(scores))) == pytest.approx([0.5, 0, -0.5, 0])
    assert per_row(Reinforce(baseline="none").advantages(batch_of(scores))) == pytest.approx(scores)
    greedy = batch_of([0.9, 0.6]).replace(baseline=tensor([0.7, 0.8]))
    assert per_row(Reinforce(baseline="scst").advantages(greedy)) == pytest.approx([0.2, -0.2])
    assert Reinforce(baseline="scst").requirements == Requirements(greedy=True)


def test_a_self_critical_difference_has_no_penalty_on_one_side() -> None:
    """Rennie et al. (arXiv 1612.00563) subtract the greedy answer's reward from the sampled one's, by one function."""
    with pytest.raises(LmgymError, match="scst, the difference of two answers' scores, and a KL penalty in the reward"):
        Reinforce(baseline="scst", kl_coefficient=0.1)
    algorithm = Reinforce(baseline="scst", kl_coefficient=0.1, kl_in="loss")
    batch = batch_of([0.9, 0.6]).replace(baseline=tensor([0.7, 0.8]))
    batch = batch.replace(logprobs_old=-1.0 * batch.actions, logprobs_ref=-3.0 * batch.actions)
    assert per_row(algorithm.advantages(batch)) == pytest.approx([0.2, -0.2])
    assert set(algorithm.loss(batch.replace(advantages=batch.rewards), PolicyOutputs(batch.rewards))[0]) == {
        "policy",
        "kl",
    }


def test_the_mean_baseline_ignores_groups_and_rloo_does_not() -> None:
    batch = batch_of([1.0, 0.0, 5.0, 3.0], groups=[0, 0, 1, 1])
    assert per_row(Reinforce().advantages(batch)) == pytest.approx([-1.25, -2.25, 2.75, 0.75])
    assert per_row(RLOO(group_size=2).advantages(batch)) == pytest.approx([1, -1, 2, -2])


# Losses


def test_rloo_loss_on_sums_of_log_probabilities() -> None:
    """Scores 1, .5, 0, .5; sums -10, -12, -8, -11: -(2/3 * -10 + 2/3 * 8) / 4 = 1/3, however long the answers are."""
    batch = RLOO().advantages(batch_of([1.0, 0.5, 0.0, 0.5], lengths=[1, 2, 3, 4]))
    assert per_row(batch) == pytest.approx([2 / 3, 0, -2 / 3, 0])
    logprobs = batch.per_token(tensor([-10.0, -12.0, -8.0, -11.0]) / batch.actions.sum(1))
    assert float(loss_of(RLOO(), batch, logprobs)) == pytest.approx(0.333333, abs=5e-7)


def test_reinforce_loss_by_hand() -> None:
    """-(.5 * (-1 - 2) + -.5 * -4) / 2 = -.25: a mean over answers of sums over tokens."""
    batch = Reinforce().advantages(batch_of([1.0, 0.0], lengths=[2, 1]))
    logprobs = tensor([[0, -1.0, -2.0], [0, -4.0, 0]])
    assert float(loss_of(Reinforce(), batch, logprobs)) == pytest.approx(-0.25)


def test_the_divergence_of_reinforce_is_a_sum_over_tokens_as_its_policy_term() -> None:
    """Ratio 1 and k3 at log p - log q = .5 (.1065307) for the first two tokens, 0 for the third: .1 * 2 * .1065307 for
    two answers, where a mean over the three tokens would divide by 3. The entropy is a mean over tokens: 7 / 3."""
    batch = Reinforce().advantages(batch_of([1.0, 0.0], lengths=[2, 1]))
    logprobs = tensor([[0, -1.0, -2.0], [0, -4.0, 0]])
    batch = batch.replace(logprobs_old=logprobs, logprobs_ref=logprobs - tensor([[0, 0.5, 0.5], [0, 0, 0]]))
    divergence = Reinforce(kl_coefficient=0.1, kl_in="loss", kl_estimator="k3")
    assert float(loss_of(divergence, batch, logprobs)) == pytest.approx(-0.25 + 0.1 * 2 * 0.1065307 / 2)
    assert float(loss_of(Reinforce(entropy_coefficient=0.3), batch, logprobs)) == pytest.approx(-0.25 - 0.3 * 7 / 3)


def test_supervised_loss_is_the_mean_over_tokens() -> None:
    batch = Supervised().advantages(batch_of([0.0, 0.0], lengths=[2, 1]))
    assert float(loss_of(Supervised(), batch, tensor([[0, -1.0, -2.0], [0, -6.0, 0]]))) == pytest.approx(3.0)
    assert bool(Supervised().active(batch).all())


def test_grpo_scaled_advantages() -> None:
    """Michael-JB's numbers hold an epsilon of 1e-6, ours TRL's 1e-4: 1.224742 -> 1.224445."""
    batch = grpo(group_size=4, scale_rewards="group").advantages(batch_of([1.0, 0.5, 0.0, 0.5]))
    assert per_row(batch) == pytest.approx([1.224445, 0, -1.224445, 0], abs=1e-6)
    assert per_row(batch) == pytest.approx([1.224742, 0, -1.224742, 0], abs=4e-4)


def one_row(new: list[float], old: list[float], advantage: list[float]) -> tuple[Batch, Tensor]:
    """A prompt token, then one action for each number; in fp64."""
    batch = batch_of([1.0], lengths=[len(new)])
    logprobs, old_logprobs, advantages = tensor([[0.0, *new], [0.0, *old], [0.0, *advantage]], dtype=torch.float64)
    return batch.replace(logprobs_old=old_logprobs[None], advantages=advantages[None]), logprobs[None]


@pytest.mark.parametrize("reduction", ["token", "sequence"])
def test_grpo_clips_like_ppo(reduction: str) -> None:
    """RL4LMs' worked PPO step: loss -.3, clip fraction .6667, approximate KL .0426445."""
    batch, logprobs = one_row([-1.0, -2.0, -0.5], [-1.2, -1.5, -0.5], [1.0, -1.0, 0.5])
    algorithm = grpo(clip_low=0.2, clip_high=0.2, reduction=reduction)
    assert float(loss_of(algorithm, batch, logprobs)) == pytest.approx(-0.3)
    _, metrics = algorithm.loss(batch, PolicyOutputs(logprobs))
    means = {name: float(value[batch.actions].mean()) for name, value in metrics.items()}
    assert means["ratio/clipped"] == pytest.approx(0.6667, abs=5e-5)
    assert means["kl/old"] == pytest.approx(0.0426445, abs=5e-8)
    assert means["ratio/mean"] == pytest.approx((1.2214028 + 0.6065307 + 1) / 3)


def test_grpo_clips_higher_than_lower_by_default() -> None:
    batch, logprobs = one_row([0.0, -3.0], [-0.3, -2.0], [1.0, -1.0])  # ratios 1.35 and .37
    assert float(loss_of(GRPO(), batch, logprobs)) == pytest.approx((-1.28 + 0.8) / 2)


def test_the_kl_term_of_grpo() -> None:
    """Ratio 1.2214, k3 at log p - log q = .5: e^-.5 + .5 - 1 = .1065307; their product times .1."""
    batch, logprobs = one_row([-1.0], [-1.2], [0.0])
    batch = batch.replace(logprobs_ref=tensor([[0.0, -1.5]]))
    assert float(loss_of(GRPO(kl_coefficient=0.1), batch, logprobs)) == pytest.approx(0.1 * 1.2214028 * 0.1065307)
    assert GRPO(kl_coefficient=0.1).requirements == Requirements(reference=True)
    assert GRPO().requirements == Requirements()


# What rows cost


def test_rows_without_advantage_are_not_active_unless_there_is_a_penalty() -> None:
    batch = GRPO(group_size=2).advantages(batch_of([1.0, 0.0, 0.5, 0.5], groups=[0, 0, 1, 1]))
    assert GRPO().active(batch).tolist() == [True, True, False, False]
    assert GRPO(kl_coefficient=0.1).active(batch.replace(logprobs_ref=torch.zeros(4, 2))).tolist() == [True] * 4


# Minibatches


@pytest.mark.parametrize(("epochs", "minibatches", "rows"), [(1, 1, 7), (3, 1, 7), (1, 3, 7), (2, 4, 10), (2, 5, 3)])
def test_minibatches_cover_every_row_once_per_epoch(epochs: int, minibatches: int, rows: int) -> None:
    batch = batch_of([float(n) for n in range(rows)]).replace(group=torch.arange(rows))
    cuts = list(minibatches_of(batch, epochs, minibatches))
    per_epoch = min(minibatches, rows)
    assert len(cuts) == epochs * per_epoch
    orders = []
    for epoch in range(epochs):
        parts = [cut.episode.tolist() for cut in cuts[epoch * per_epoch : (epoch + 1) * per_epoch]]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        orders.append([row for part in parts for row in part])
        assert sorted(orders[-1]) == list(range(rows))
    for cut in cuts:
        assert torch.equal(cut.score, cut.episode.float())  # whole rows moved


def test_minibatches_keep_groups_whole() -> None:
    batch = batch_of([float(n) for n in range(12)]).replace(group=torch.arange(12) // 3)
    cuts = list(minibatches_of(batch, epochs=1, minibatches=3))
    assert sorted(len(cut) for cut in cuts) == [3, 3, 6]
    groups = [set(cut.group.tolist()) for cut in cuts]
    assert sum(map(len, groups)) == len(set.union(*groups)) == 4
    assert len(list(minibatches_of(batch, epochs=1, minibatches=9))) == 4  # as many as there are groups


def test_minibatches_are_a_function_of_the_key_and_the_epoch() -> None:
    batch = batch_of([float(n) for n in range(12)]).replace(group=torch.arange(12))

    def orders(key: int) -> list[list[int]]:
        return [cut.episode.tolist() for cut in minibatches_of(batch.replace(key=key), epochs=2, minibatches=3)]

    assert orders(1) == orders(1)
    assert orders(1) != orders(2)
    assert orders(1)[:3] != orders(1)[3:]


# Settings that cannot work


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GRPO(group_size=1), "grpo needs at least 2"),
        (lambda: RLOO(group_size=1), "rloo needs at least 2"),
        (lambda: Reinforce(ema_beta=1.0), "algorithm.ema_beta is 1.0"),
        (lambda: Reinforce(epochs=2), "no ratio"),
        (lambda: RLOO(minibatches=2), "no ratio"),
        (lambda: Supervised(epochs=0), "algorithm.epochs is 0"),
    ],
)
def test_refusals(make, message: str) -> None:
    with pytest.raises(LmgymError, match=message):
        make()
