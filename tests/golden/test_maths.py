"""lmgym.functional against numbers worked by hand and by the systems that lmgym replaces."""

import math
import warnings

import pytest
import torch
from torch import Tensor, tensor

from lmgym.functional import advantages, kl, losses, reductions
from lmgym.updates.optimizer import OptimizerSection
from lmgym.updates.prepare import batch_metrics
from tests import models

EPISODES = torch.arange(4)
ONE_GROUP = torch.zeros(4, dtype=torch.long)


def close(ours: Tensor, expected: list, tolerance: float = 5e-7) -> bool:
    return torch.allclose(ours.double(), tensor(expected, dtype=torch.float64), rtol=0, atol=tolerance)


# Advantages


def test_group_advantages_of_one_group() -> None:
    score = tensor([1.0, 0.5, 0.0, 0.5])
    assert close(advantages.group_centred(score, EPISODES, ONE_GROUP), [0.5, 0, -0.5, 0])
    assert close(advantages.leave_one_out(score, EPISODES, ONE_GROUP), [2 / 3, 0, -2 / 3, 0])
    # Standard deviation .408248 with n - 1, to which Michael-JB's GRPO adds 1e-6 and TRL (our default) 1e-4.
    scaled = advantages.group_centred(score, EPISODES, ONE_GROUP, scale="group", epsilon=1e-6)
    assert close(scaled, [1.224742, 0, -1.224742, 0])
    assert close(
        advantages.group_centred(score, EPISODES, ONE_GROUP, scale="group"), [0.5 / 0.4083483, 0, -0.5 / 0.4083483, 0]
    )


def test_group_advantages_by_hand_for_unequal_groups() -> None:
    """Groups {1, 3, 2} and {10, 20}, mixed up, and a group of one."""
    score = tensor([1.0, 10.0, 3.0, 20.0, 2.0, 7.0])
    episode, group = torch.arange(6), tensor([4, 9, 4, 9, 4, 0])
    assert close(advantages.group_means(score, episode, group), [2, 15, 2, 15, 2, 7])
    assert close(advantages.group_centred(score, episode, group), [-1, -5, 1, 5, 0, 0])
    assert close(advantages.leave_one_out(score, episode, group), [-1.5, -10, 1.5, 10, 0, 0])
    scaled = advantages.group_centred(score, episode, group, scale="group", epsilon=0.0)
    assert close(scaled[:5], [-1, -0.7071068, 1, 0.7071068, 0])
    assert close(advantages.group_centred(score, episode, group, scale="group")[5:], [0])


def test_an_episode_of_two_rows_counts_once_in_every_mean() -> None:
    """Rows of episodes 5, 5, 8: scores 1, 1, 0; the mean is 1/2 and not 2/3."""
    score, episode, group = tensor([1.0, 1.0, 0.0]), tensor([5, 5, 8]), tensor([0, 0, 0])
    assert advantages.first_rows(episode).tolist() == [True, False, True]
    assert float(advantages.batch_mean(score, episode)) == 0.5
    assert close(advantages.group_centred(score, episode, group), [0.5, 0.5, -0.5])
    assert close(advantages.leave_one_out(score, episode, group), [1, 1, -1])
    assert close(
        advantages.group_centred(score, episode, group, scale="group", epsilon=0.0), [0.7071068, 0.7071068, -0.7071068]
    )


def test_discounted_returns_of_llm_rl() -> None:
    every = torch.ones(1, 4, dtype=torch.bool)
    assert close(advantages.discounted_returns(tensor([[0.0, 0, 0, 1]]), every, 0.99), [[0.970299, 0.9801, 0.99, 1]])
    assert close(advantages.discounted_returns(tensor([[0.2, 0.4, 1.0]]), every[:, :3], 0.9), [[1.37, 1.3, 1]])


def test_only_actions_discount() -> None:
    """Prompt, two actions, three environment tokens, an action that earns 1, padding."""
    rewards = tensor([[0, 0, 0.5, 0, 0, 0, 1.0, 0]])
    actions = tensor([[0, 1, 1, 0, 0, 0, 1, 0]]).bool()
    expected = [[0, 0.9 * (0.5 + 0.9), 0.5 + 0.9, 0, 0, 0, 1, 0]]
    assert close(advantages.discounted_returns(rewards, actions, 0.9), expected)


# Losses


def test_ppo_clipping_at_equal_bounds() -> None:
    """Log-probabilities -1, -2, -.5, before -1.2, -1.5, -.5; A = 1, -1, .5; epsilon .2."""
    new, old, advantage = tensor([[-1.0, -2.0, -0.5]]), tensor([[-1.2, -1.5, -0.5]]), tensor([[1.0, -1.0, 0.5]])
    difference = losses.log_ratio(new, old)
    ratio = difference.exp()
    terms = losses.clipped_surrogate(ratio, advantage, 0.2, 0.2)
    assert close(terms, [[-1.2, 0.8, -0.5]])  # 1.2214 cut to 1.2; .6065 cut to .8, the larger loss; 1
    assert close(terms.mean(), -0.3)
    assert close(losses.clipped(ratio, advantage, 0.2, 0.2).mean(), 2 / 3)
    assert close((ratio - 1 - difference).mean(), 0.0426445)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "is_clipped", "slope"),
    [
        (1.5, 2.0, -2.56, 1, 0.0),  # above 1.28 and wanted: cut
        (1.25, 2.0, -2.5, 0, -2.0),  # between the bounds
        (1.5, -2.0, 3.0, 0, 2.0),  # above, not wanted: the way back is open
        (0.5, 2.0, -1.0, 0, -2.0),  # below, wanted: the way back is open
        (0.5, -2.0, 1.6, 1, 0.0),  # below .8 and not wanted: cut
        (0.9, -2.0, 1.8, 0, 2.0),
        (1.5, 0.0, 0.0, 0, 0.0),
    ],
)
def test_clipped_surrogate_by_hand(ratio: float, advantage: float, loss: float, is_clipped: int, slope: float) -> None:
    r = tensor([[ratio]], requires_grad=True)
    term = losses.clipped_surrogate(r, tensor([[advantage]]), 0.2, 0.28)
    term.sum().backward()
    assert close(term, [[loss]])
    assert close(r.grad, [[slope]])
    assert losses.clipped(r, tensor([[advantage]]), 0.2, 0.28).item() == is_clipped


def test_log_ratio_is_bounded() -> None:
    ratio = losses.log_ratio(tensor([[-1.0, -500.0, 0.0]]), tensor([[-2.0, -1.0, -300.0]]))
    assert ratio.tolist() == [[1.0, -20.0, 20.0]]
    assert torch.isfinite(ratio.exp()).all()


def test_the_gradient_of_policy_gradient_is_minus_the_advantage() -> None:
    logprobs = tensor([[-1.0, -2.0]], requires_grad=True)
    losses.policy_gradient(logprobs, tensor([[0.5, -3.0]])).sum().backward()
    assert logprobs.grad.tolist() == [[-0.5, 3.0]]


# KL


def test_kl_estimators_by_hand() -> None:
    """p = 1/2, q = 1/4 at the sampled token: log ratio .693147."""
    p, q = tensor([[math.log(0.5)]]), tensor([[math.log(0.25)]])
    assert close(kl.k1(p, q), [[0.693147]])
    assert close(kl.k2(p, q), [[0.240227]])
    assert close(kl.k3(p, q), [[0.5 + 0.693147 - 1]])
    assert close(kl.k1(q, p), [[-0.693147]])
    assert close(kl.k3(q, p), [[2 - 0.693147 - 1]])


def test_k1_and_k3_are_unbiased_and_k2_has_the_gradient() -> None:
    """Expectations over a categorical are exact sums, so no sampling noise hides a bias."""
    logits = tensor([0.3, -1.2, 2.0, 0.5], dtype=torch.float64, requires_grad=True)
    log_p, log_q = logits.log_softmax(0), tensor([1.0, 0.1, -0.4, 0.7], dtype=torch.float64).log_softmax(0)
    p = log_p.exp()
    divergence = (p * (log_p - log_q)).sum()
    (true_gradient,) = torch.autograd.grad(divergence, logits, retain_graph=True)

    def expected(estimator) -> tuple[Tensor, Tensor]:
        """Its mean under p, and the mean under p of its gradient (what a loss term contributes)."""
        value = estimator(log_p[None], log_q[None])[0]
        gradients = torch.autograd.grad((p.detach() * value).sum(), logits, retain_graph=True)[0]
        return (p * value).sum(), gradients

    for estimator in (kl.k1, kl.k3):
        assert torch.allclose(expected(estimator)[0], divergence, rtol=1e-12)
    assert not torch.allclose(expected(kl.k2)[0], divergence, rtol=1e-2)
    assert torch.allclose(expected(kl.k2)[1], true_gradient, rtol=1e-10, atol=1e-14)
    assert not torch.allclose(expected(kl.k3)[1], true_gradient, rtol=1e-2)
    # k3 times the ratio to the (frozen) sampling policy has it again.
    ratio_k3 = ((log_p - log_p.detach()).exp() * kl.k3(log_p[None], log_q[None])[0] * p.detach()).sum()
    assert torch.allclose(torch.autograd.grad(ratio_k3, logits)[0], true_gradient, rtol=1e-10, atol=1e-14)


# Reductions

ACTIONS = tensor([[0, 1, 1, 0, 0], [0, 0, 1, 0, 0], [0, 1, 1, 1, 1]]).bool()
ROWS_OF = tensor([7, 7, 3])  # the first two rows are one episode of 3 actions; the other has 4


@pytest.mark.parametrize(
    ("reduction", "per_row"),
    [("token", [1 / 7, 1 / 7, 1 / 7]), ("sequence", [1 / 6, 1 / 6, 1 / 8]), ("constant", [1 / 2, 1 / 2, 1 / 2])],
)
def test_weights_by_hand(reduction: reductions.Reduction, per_row: list[float]) -> None:
    total = reductions.totals(ACTIONS, ROWS_OF)
    assert total == reductions.Totals(tokens=7, episodes=2)
    episode_tokens = reductions.tokens_of_episode(ACTIONS, ROWS_OF)
    assert episode_tokens.tolist() == [3, 3, 4]
    weights = reductions.weights(reduction, ACTIONS, episode_tokens, total)
    assert weights.dtype == torch.float64
    assert close(weights, (tensor(per_row)[:, None] * ACTIONS).tolist(), 1e-7)
    # Cut up, the weights are those of the whole.
    part = reductions.weights(reduction, ACTIONS[1:2], episode_tokens[1:2], total)
    assert torch.equal(part, weights[1:2])


def test_what_the_reductions_average() -> None:
    """Terms of 1 everywhere: token and sequence give 1, constant gives the mean length, 7 actions / 2 episodes."""
    total, counts = reductions.totals(ACTIONS, ROWS_OF), reductions.tokens_of_episode(ACTIONS, ROWS_OF)
    sums = {
        name: float(reductions.weights(name, ACTIONS, counts, total).sum())
        for name in ("token", "sequence", "constant")
    }
    assert sums == pytest.approx({"token": 1.0, "sequence": 1.0, "constant": 3.5})


def test_masked_mean() -> None:
    values, mask = tensor([[1.0, 2.0, 30.0]]), tensor([[True, True, False]])
    assert float(reductions.masked_mean(values, mask)) == 1.5
    assert float(reductions.masked_mean(values, torch.zeros_like(mask))) == 0.0


# Learning rate


@pytest.mark.parametrize(
    ("section", "steps", "rates"),
    [
        ({"warmup": 0}, 3, [1, 1, 1]),
        ({"warmup": 4}, 6, [0.25, 0.5, 0.75, 1, 1, 1]),
        ({"warmup": 2, "schedule": "linear"}, 6, [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ({"warmup": 0, "schedule": "linear", "final_fraction": 0.2}, 4, [1, 0.8, 0.6, 0.4]),
        ({"warmup": 0, "schedule": "cosine"}, 4, [1, 0.853553, 0.5, 0.146447]),
        ({"warmup": 0, "schedule": "cosine", "final_fraction": 0.1}, 2, [1, 0.55]),
    ],
)
def test_learning_rate_schedules(section: dict, steps: int, rates: list[float]) -> None:
    schedule = OptimizerSection(learning_rate=2.0, **section)
    assert [schedule.at(step, steps) for step in range(steps)] == pytest.approx([2 * rate for rate in rates], abs=1e-6)


def test_a_longer_stage_continues_on_its_own_curve() -> None:
    """Resuming with more steps: constant goes on; linear stands where the longer curve stands."""
    linear = OptimizerSection(learning_rate=1.0, warmup=0, schedule="linear")
    assert (linear.at(3, 4), linear.at(3, 12)) == (0.25, 0.75)
    constant = OptimizerSection(learning_rate=1.0, warmup=2)
    assert [constant.at(step, 4) for step in range(4)] == [constant.at(step, 12) for step in range(4)]


@pytest.mark.parametrize("actions", [0, 1, 2])
def test_advantages_of_few_tokens_have_a_deviation_without_a_warning(actions: int) -> None:
    """A step whose answers are all masked trains nothing, and says so with a 0, not with a complaint of torch."""
    batch = models.batch_of(models.episodes(0))
    kept = batch.actions.flatten().cumsum(0).view(batch.actions.shape) <= actions
    advantages = torch.arange(batch.actions.numel(), dtype=torch.float64).view(batch.actions.shape)
    batch = batch.replace(actions=batch.actions & kept, advantages=advantages)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = batch_metrics(batch.replace(logprobs_sampler=None))["advantage/std"]
    first, second = advantages[batch.actions].tolist() if actions == 2 else (0.0, 0.0)
    assert found == pytest.approx((second - first) / math.sqrt(2))
