"""Advantages, value losses, KL controllers and trust regions against numbers worked by hand and recorded from others.

actor_critic.json holds what stable-baselines3, sb3-contrib and TRL's PPOTrainer made of random fp64 numbers with their
own code; record_actor_critic.py wrote it and says how.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmgym.functional import advantages, kl, losses, reductions, trust_region

RECORD = json.loads(Path(__file__).with_name("actor_critic.json").read_text())
SB3, TRL = RECORD["sb3"], RECORD["trl"]


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def line(values: list[float]) -> Tensor:
    """A recorded column as one row [1 T]."""
    return tensor([values])


def close(ours: Tensor, expected: Any, tolerance: float = 1e-12) -> bool:
    return torch.allclose(ours, tensor(expected), rtol=0, atol=tolerance)


def every(values: Tensor) -> Tensor:
    return torch.ones_like(values, dtype=torch.bool)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Generalised advantages


def test_gae_of_one_terminated_episode() -> None:
    """RL4LMs' buffer: gamma .99, lambda .95."""
    rewards, values = tensor([[-0.01, 0, 0.02, 1]]), tensor([[0.1, 0.2, 0.3, 0.4]])
    credit, returns = advantages.gae(rewards, values, every(values), tensor([0.0]), 0.99, 0.95)
    assert close(credit, [[0.780981, 0.736822, 0.6803, 0.6]], 5e-7)
    assert close(returns, [[0.880981, 0.936822, 0.9803, 1]], 5e-7)
    normalised = advantages.whiten(credit, every(credit))
    assert close(normalised, [[1.042901, 0.477517, -0.246155, -1.274262]], 1e-6)  # theirs is fp32


def test_gae_stops_at_the_end_of_an_episode() -> None:
    """RL4LMs keeps two episodes in one line, r 0 1 0 .5, V .5 .6 .2 .3, starts 1 0 1 0; here each has its own."""
    rewards, values = tensor([[0, 1], [0, 0.5]]), tensor([[0.5, 0.6], [0.2, 0.3]])
    credit, _ = advantages.gae(rewards, values, every(values), tensor([0.0, 0.0]), 0.99, 0.95)
    assert close(credit, [[0.4702, 0.4], [0.2851, 0.2]])


def test_a_cut_off_episode_ends_in_its_last_value() -> None:
    """r 0 1, V .5 .6, then .8: delta 1 + .9 * .8 - .6 = 1.12, before it .9 * .6 - .5 + .45 * 1.12 = .544.

    The second row has one step; what stands behind it, NaN too, is not read.
    """
    steps = torch.tensor([[True, True], [True, False]])
    rewards, values = tensor([[0, 1], [1, math.nan]]), tensor([[0.5, 0.6], [0.5, math.nan]])
    credit, returns = advantages.gae(rewards, values, steps, tensor([0.8, 2.0]), 0.9, 0.5)
    assert close(credit, [[0.544, 1.12], [1 + 0.9 * 2 - 0.5, 0]])
    assert close(returns, [[1.044, 1.72], [2.8, 0]])


def test_without_a_critic_and_at_lambda_1_gae_is_the_discounted_return() -> None:
    """LLM_RL's returns."""
    for rewards, gamma, expected in (
        ([0, 0, 0, 1], 0.99, [0.970299, 0.9801, 0.99, 1]),
        ([0.2, 0.4, 1], 0.9, [1.37, 1.3, 1]),
    ):
        earned = line(rewards)
        nothing = torch.zeros_like(earned)
        for found in advantages.gae(earned, nothing, every(earned), tensor([0.0]), gamma, 1.0):
            assert close(found, [expected])
            assert close(found, advantages.discounted_returns(earned, every(earned), gamma).tolist())


@pytest.mark.parametrize("case", SB3["gae"], ids=lambda case: f"{case['gamma']}-{case['gae_lambda']}")
def test_gae_of_stable_baselines3(case: dict) -> None:
    """Its streams [time, environment] cut into episodes; all but the last of a stream have terminated."""
    streams = {name: tensor(case[name]).T for name in ("rewards", "values", "advantages", "returns")}
    starts = tensor(case["episode_starts"]).T.bool()
    episode = (starts.long().cumsum(1) + 100 * torch.arange(len(starts))[:, None]).flatten()
    actions = torch.ones(len(episode), 1, dtype=torch.bool)  # one row for each step: episodes of many rows
    row, column, steps = advantages.episode_steps(actions, episode)
    dense = {name: stream.reshape(-1, 1)[row, column] for name, stream in streams.items()}
    last_values = torch.zeros(len(steps), dtype=torch.float64)
    for stream, (value, done) in enumerate(zip(case["last_values"], case["dones"], strict=True)):
        last = torch.unique(episode).tolist().index(int(episode.view(starts.shape)[stream, -1]))
        last_values[last] = 0.0 if done else value
    assert len(steps) > 3 and int(last_values.count_nonzero()) == 2
    credit, returns = advantages.gae(
        dense["rewards"], dense["values"], steps, last_values, case["gamma"], case["gae_lambda"]
    )
    assert torch.allclose(credit, dense["advantages"] * steps, rtol=0, atol=1e-12)
    assert torch.allclose(returns, dense["returns"] * steps, rtol=0, atol=1e-12)
    back = advantages.scatter_steps(credit, row, column, steps, (len(episode), 1))
    assert torch.allclose(back.view(starts.shape), streams["advantages"], rtol=0, atol=1e-12)


def test_rows_of_an_episode_are_chained_in_order() -> None:
    """Episode 7 in the rows 0 and 2, episode 3 in row 1; prompts and tokens of the environment are left out."""
    actions = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0], [1, 0, 0, 1]]).bool()
    row, column, steps = advantages.episode_steps(actions, torch.tensor([7, 3, 7]))
    assert steps.tolist() == [[True, False, False, False], [True] * 4]
    assert (row[steps].tolist(), column[steps].tolist()) == ([1, 0, 0, 2, 2], [1, 1, 2, 0, 3])
    values = torch.arange(12.0).view(3, 4)
    dense = values[row, column]
    assert dense[1].tolist() == [1, 2, 8, 11] and dense[0, 0] == 5
    assert torch.equal(advantages.scatter_steps(dense, row, column, steps, (3, 4)), values * actions)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.data())
def test_there_and_back(data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    flags = st.lists(st.booleans(), min_size=width, max_size=width)
    actions = torch.tensor(data.draw(st.lists(flags, min_size=rows, max_size=rows)))
    episode = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows)))
    row, column, steps = advantages.episode_steps(actions, episode)
    assert len(steps) == len(torch.unique(episode)) and int(steps.sum()) == int(actions.sum())
    assert torch.equal(steps, steps.long().cummin(1).values.bool())  # no gap
    for e, number in enumerate(torch.unique(episode)):
        places = [(r, c) for r in range(rows) for c in range(width) if episode[r] == number and actions[r, c]]
        assert list(zip(row[e][steps[e]].tolist(), column[e][steps[e]].tolist(), strict=True)) == places
    values = torch.arange(1.0, 1 + rows * width).view(rows, width)
    back = advantages.scatter_steps(values[row, column], row, column, steps, (rows, width))
    assert torch.equal(back, values * actions)


# Whitening and explained variance


def test_norm_reward_of_rl4lms() -> None:
    """Population standard deviation."""
    rewards = tensor([0, 0, 1, -0.1])
    expected = [-0.500773, -0.500773, 1.724886, -0.723339]
    assert close(advantages.whiten(rewards, every(rewards), unbiased=False), expected, 5e-7)


def test_whiten_by_hand() -> None:
    """1, 2, 3: mean 2, unbiased variance 1. The masked 100 counts nowhere."""
    values, mask = tensor([[1, 2], [3, 100]]), torch.tensor([[True, True], [True, False]])
    assert close(advantages.whiten(values, mask, epsilon=0.0), [[-1, 0], [1, 0]])
    assert close(advantages.whiten(values, mask, epsilon=1.0), [[-0.5, 0], [0.5, 0]])
    root = 0.25**-0.5  # 1 / sqrt(1 - .75)
    assert close(advantages.whiten(values, mask, epsilon=-0.75, inside_root=True), [[-root, 0], [root, 0]])
    assert close(advantages.whiten(values * 3, mask, shift_mean=False, epsilon=0.0), [[5, 6], [7, 0]])


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("inside_root", [True, False])
def test_values_that_do_not_differ_become_zero(unbiased: bool, inside_root: bool) -> None:
    for values, mask in (
        (tensor([3.0, 7.0]), torch.tensor([True, False])),
        (tensor([3.0, 3.0]), torch.tensor([True, True])),
        (tensor([3.0, 3.0]), torch.tensor([False, False])),
    ):
        assert advantages.whiten(values, mask, True, unbiased, 1e-8, inside_root).tolist() == [0, 0]
    for value, count in ((-0.1, 640), (0.7, 256), (-3.3, 640), (0.1, 128), (-0.7, 50)):  # whose fp32 mean is another
        equal = torch.full((count,), value)
        assert not advantages.whiten(equal, equal < 9, True, unbiased, 1e-8, inside_root).any()


@pytest.mark.parametrize("case", SB3["explained_variance"])
def test_explained_variance_of_stable_baselines3(case: dict) -> None:
    values, returns = tensor(case["values"]), tensor(case["returns"])
    assert close(advantages.explained_variance(values, returns, every(values)), case["result"])
    padded = [torch.cat([column, tensor([1e3, -1e3])]) for column in (values, returns)]
    mask = torch.cat([every(values), torch.tensor([False, False])])
    assert close(advantages.explained_variance(*padded, mask), case["result"])


def test_explained_variance_is_undefined_for_equal_returns() -> None:
    """Seven times .1, whose mean in floating point is not .1."""
    returns = tensor([0.1] * 7)
    assert torch.isnan(advantages.explained_variance(returns, returns, every(returns)))
    assert torch.isnan(advantages.explained_variance(returns, returns, ~every(returns)))


# Losses


def test_value_losses_of_rl4lms() -> None:
    """V 1, .5, before .5, .6, returns 1.2, .4; the first is cut to .7."""
    new, old, returns = tensor([[1, 0.5]]), tensor([[0.5, 0.6]]), tensor([[1.2, 0.4]])
    assert close(losses.value_loss(new, old, returns).mean(), 0.025)
    assert close(losses.value_loss(new, old, returns, 0.2, "clipped"), [[0.25, 0.01]])
    assert close(losses.value_loss(new, old, returns, 0.2, "clipped").mean(), 0.13)


@pytest.mark.parametrize(
    ("value", "clipped", "largest", "slope_clipped", "slope_largest"),
    [
        (0.1, 0.81, 0.81, -1.8, -1.8),  # within .2 of the old value 0, target 1
        (0.5, 0.64, 0.64, 0.0, 0.0),  # too far the right way: no gradient
        (-0.5, 1.44, 2.25, 0.0, -3.0),  # too far the wrong way: only `max` leads back
        (2.5, 0.64, 2.25, 0.0, 3.0),  # past the target
    ],
)
def test_where_a_clipped_value_has_a_gradient(
    value: float, clipped: float, largest: float, slope_clipped: float, slope_largest: float
) -> None:
    for form, expected, slope in (("clipped", clipped, slope_clipped), ("max", largest, slope_largest)):
        new = tensor([[value]]).requires_grad_()
        error = losses.value_loss(new, tensor([[0.0]]), tensor([[1.0]]), 0.2, form)
        error.sum().backward()
        assert close(error, [[expected]]) and close(new.grad, [[slope]])


def test_a2c_policy_loss_of_rl4lms() -> None:
    assert close(losses.policy_gradient(tensor([[-1, -2, -0.5]]), tensor([[1, -1, 0.5]])).mean(), -0.25)


def test_actor_critic_of_nanorl() -> None:
    """Answers of 2 and 3 tokens, R 1 and 0: actor .8 (mean of sums), critic .222 (mean over tokens), total .911."""
    mask = torch.tensor([[True, True, False], [True, True, True]])
    logprobs, values = tensor([[-1, -2, 0], [-0.5, -0.5, -1]]), tensor([[0.2, 0.4, 0], [0.1, 0.1, 0.3]])
    score, episode = tensor([[1], [0]]) * mask, torch.arange(2)
    total, count = reductions.totals(mask, episode), reductions.tokens_of_episode(mask, episode)
    actor = losses.policy_gradient(logprobs, score - values) * reductions.weights("constant", mask, count, total)
    critic = losses.value_loss(values, values, score) * reductions.weights("token", mask, count, total)
    assert close(actor.sum(), 0.8) and close(critic.sum(), 0.222)
    assert close(actor.sum() + 0.5 * critic.sum(), 0.911)


@pytest.mark.parametrize("case", SB3["ppo"])
def test_ppo_of_stable_baselines3(case: dict) -> None:
    """Loss, both of its parts, the approximate KL and the gradient of one step of its PPO.train."""
    new, values = line(case["log_prob"]).requires_grad_(), line(case["values"]).requires_grad_()
    old, credit, clip = line(case["old_log_prob"]), line(case["advantages"]), case["clip_range"]
    if case["normalise"]:
        credit = advantages.whiten(credit, every(credit))
    difference = losses.log_ratio(new, old)
    policy = losses.clipped_surrogate(difference.exp(), credit, clip, clip).mean()
    value = losses.value_loss(
        values, line(case["old_values"]), line(case["returns"]), case["clip_range_vf"], "clipped"
    ).mean()
    loss = policy + case["vf_coef"] * value
    loss.backward()
    log = case["log"]
    assert close(policy, log["policy_gradient_loss"]) and close(value, log["value_loss"]) and close(loss, log["loss"])
    assert close(kl.k3(old, new).mean(), log["approx_kl"])  # exp(d) - 1 - d, d = new - old
    assert close(new.grad, [case["log_prob_grad"]]) and close(values.grad, [case["values_grad"]])
    assert 0 in case["log_prob_grad"]  # something was clipped


@pytest.mark.parametrize("case", SB3["a2c"])
def test_a2c_of_stable_baselines3(case: dict) -> None:
    new, values = line(case["log_prob"]).requires_grad_(), line(case["values"]).requires_grad_()
    credit = line(case["advantages"])
    if case["normalise"]:
        credit = advantages.whiten(credit, every(credit))
    policy = losses.policy_gradient(new, credit).mean()
    value = losses.value_loss(values, values, line(case["returns"])).mean()
    (policy + case["vf_coef"] * value).backward()
    assert close(policy, case["log"]["policy_loss"]) and close(value, case["log"]["value_loss"])
    assert close(new.grad, [case["log_prob_grad"]]) and close(values.grad, [case["values_grad"]])


@pytest.mark.parametrize("case", TRL["ppo"], ids=lambda case: case["kl_estimator"])
def test_ppo_of_trl(case: dict) -> None:
    """Rewards, advantages, loss and gradients of one step of TRL 1.12's PPOTrainer.train.

    TRL adds a step behind each answer that does not fill the width: the score is paid there, and its value is trained.
    """
    old, reference, values = (tensor(case[name]) for name in ("old", "reference", "values"))
    lengths, place = torch.tensor(case["lengths"]), torch.arange(old.shape[1])
    actions, steps = place < lengths[:, None], place <= lengths[:, None]
    penalty = {"k1": kl.k1, "k3": kl.k3}[case["kl_estimator"]](old, reference)
    rewards = -case["kl_coef"] * penalty * actions
    rewards[torch.arange(len(lengths)), lengths.clamp(max=len(place) - 1)] += tensor(case["scores"])
    if case["whiten_rewards"]:
        rewards = advantages.whiten(rewards, steps, shift_mean=False, inside_root=True)
        assert torch.allclose(rewards, tensor(case["rewards_whitened"]) * steps, rtol=0, atol=1e-12)
    nothing = torch.zeros(len(lengths), dtype=torch.float64)
    credit, returns = advantages.gae(rewards, values, steps, nothing, case["gamma"], case["lam"])
    assert close(credit, case["advantages"])
    credit = advantages.whiten(credit, actions, inside_root=True)
    assert torch.allclose(credit, tensor(case["whitened"]) * actions, rtol=0, atol=1e-12)

    new, new_values = tensor(case["new"]).requires_grad_(), tensor(case["new_values"]).requires_grad_()
    ratio = losses.log_ratio(new, old).exp()
    surrogate = losses.clipped_surrogate(ratio, credit, case["cliprange"], case["cliprange"])
    error = losses.value_loss(new_values, values, returns, case["cliprange_value"], "max")
    policy, value = reductions.masked_mean(surrogate, actions), 0.5 * reductions.masked_mean(error, steps)
    (policy + case["vf_coef"] * value).backward()
    log = case["log"]
    assert close(policy, log["loss/policy_avg"]) and close(value, log["loss/value_avg"])
    assert close(policy + case["vf_coef"] * value, case["loss"])
    assert close(new.grad, case["new_grad"]) and close(new_values.grad, case["new_values_grad"])
    clipped = losses.clipped(ratio, credit, case["cliprange"], case["cliprange"])
    assert close(reductions.masked_mean(clipped, actions), log["policy/clipfrac_avg"], 1e-7)


# KL penalty and its controllers


def test_kl_reward_of_rl4lms() -> None:
    ratio = tensor([[0.2, -0.05, 0.1]])
    assert close(-0.1 * kl.k1(ratio, torch.zeros_like(ratio)), [[-0.02, 0.005, -0.01]])


def test_kl_controllers() -> None:
    """RL4LMs: beta .1, target .1. TRL: beta .2, target 6, horizon 10,000, 16 answers."""
    coefficient, seen = 0.1, []
    for divergence in (-0.2, 0.3, 0.4, 0.1):
        coefficient = kl.proportional_update(coefficient, divergence, target=0.1)
        seen.append(coefficient)
    assert seen == pytest.approx([0.098, 0.09996, 0.1019592, 0.1019592], abs=1e-12)
    coefficient, seen = 0.2, []
    for divergence in (3.0, 12.0):
        coefficient = kl.horizon_update(coefficient, divergence, target=6.0, horizon=10_000, samples=16)
        seen.append(coefficient)
    assert seen == pytest.approx([0.199936, 0.19999998], abs=5e-9)


def test_a_small_error_moves_the_coefficient_in_proportion() -> None:
    """KL .11 at target .1: e = .1. Bounds and rates are the caller's."""
    assert kl.proportional_update(1.0, 0.11, 0.1) == pytest.approx(1.01)
    assert kl.proportional_update(1.0, 0.2, 0.1, rate=0.5, bound=0.6) == pytest.approx(1.3)
    assert kl.horizon_update(1.0, 5.4, 6.0, horizon=100, samples=10) == pytest.approx(0.99)
    assert kl.horizon_update(1.0, 12.0, 6.0, horizon=100, samples=10, bound=2.0) == pytest.approx(1.1)


# Trust region


def test_trpo_step_of_rl4lms() -> None:
    """F = diag(2, 1), damping .1, g = (1, 1), delta .01."""
    fisher = tensor([2.1, 1.1])
    direction, left = trust_region.conjugate_gradient(lambda v: fisher * v, tensor([1, 1]), 15)
    size = trust_region.step_size(0.01, direction @ (fisher * direction))
    assert close(direction, [0.47619, 0.90909], 5e-6) and float(left) < 1e-12
    assert close(size, 0.1201561, 5e-8) and close(size * direction, [0.0572172, 0.1092329], 5e-8)


@pytest.mark.parametrize("case", SB3["conjugate_gradient"], ids=lambda case: str(case["iterations"]))
def test_conjugate_gradient_of_sb3_contrib(case: dict) -> None:
    """Ended early and at the end: each iterate is theirs; what is left over is what the product says."""
    matrix, target = tensor(case["matrix"]), tensor(case["target"])
    solution, left = trust_region.conjugate_gradient(lambda v: matrix @ v, target, case["iterations"])
    assert close(solution, case["solution"], 1e-9)
    assert torch.allclose(left, (target - matrix @ solution).norm(), rtol=0, atol=1e-9)


def test_conjugate_gradient_ends() -> None:
    calls = []

    def product(vector: Tensor) -> Tensor:
        calls.append(vector)
        return 2 * vector

    zero = torch.zeros(3, dtype=torch.float64)
    assert trust_region.conjugate_gradient(product, zero, 10)[0].tolist() == [0, 0, 0] and not calls
    assert close(trust_region.conjugate_gradient(product, tensor([2, 4]), 10)[0], [1, 2]) and len(calls) == 1
    # Without curvature along the target there is nothing to solve; the zero step is the answer.
    solution, left = trust_region.conjugate_gradient(lambda v: 0 * v, tensor([3, 4]), 10)
    assert solution.tolist() == [0, 0] and float(left) == 5
    assert float(trust_region.step_size(0.01, solution @ solution)) == 0
    # One direction of two is found in one product; a tolerance of its squared error (1/4) is met there.
    fisher, target = tensor([1, 3]), tensor([1, 1])
    loose, left = trust_region.conjugate_gradient(lambda v: fisher * v, target, 10, tolerance=0.51)
    assert close(loose, [0.5, 0.5]) and close(left, 0.5**0.5)


@pytest.mark.parametrize("case", SB3["trpo"], ids=lambda case: str(case["delta"]))
def test_trpo_policy_step_of_sb3_contrib(case: dict) -> None:
    """Its Fisher product is a double backward through the divergence, ours J^T (p (Jv - sum p Jv)): same weights."""
    observations, weight = tensor(case["observations"]), tensor(case["weight"])
    taken = torch.tensor([case["actions"]]).T
    credit = tensor(case["advantages"])[:, None]
    credit = advantages.whiten(credit, every(credit))
    logits = observations @ weight

    def surrogate(new_weight: Tensor) -> Tensor:
        chosen = [(observations @ w).log_softmax(-1).gather(1, taken) for w in (new_weight, weight)]
        return (losses.log_ratio(*chosen).exp() * credit).mean()

    def product(vector: Tensor) -> Tensor:
        changed = trust_region.fisher_of_softmax(logits, observations @ vector.view_as(weight))
        return (observations.T @ changed / len(logits)).flatten() + case["damping"] * vector

    leaf = weight.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(surrogate(leaf), leaf)
    direction, _ = trust_region.conjugate_gradient(product, gradient.flatten(), case["iterations"])
    step = trust_region.step_size(case["delta"], direction @ product(direction)) * direction.view_as(weight)
    for shrunk in [case["shrink"] ** n for n in range(10)]:
        new_weight = weight + shrunk * step
        divergence = trust_region.categorical_kl(observations @ new_weight, logits).mean()  # (new, old), as theirs
        if divergence < case["delta"] and surrogate(new_weight) > surrogate(weight):
            break
    assert close(new_weight, case["new_weight"], 1e-9)
    assert (shrunk < 1) == (case["delta"] == 1.0)  # far from the quadratic model the line search has work to do
    assert close(divergence, case["log"]["kl_divergence_loss"], 1e-9)
    assert close(surrogate(new_weight), case["log"]["policy_objective"], 1e-9)


def test_fisher_is_the_curvature_of_the_divergence() -> None:
    """The second derivative of KL(p || q) at q = p, in either order, against autograd's."""
    logits, tangent = numbers(0, 5), numbers(1, 5)

    def divergence(other: Tensor) -> Tensor:
        return trust_region.categorical_kl(logits[None], other[None])[0]

    def reverse(other: Tensor) -> Tensor:
        return trust_region.categorical_kl(other[None], logits[None])[0]

    ours = trust_region.fisher_of_softmax(logits[None], tangent[None])[0]
    for function in (divergence, reverse):
        curvature = torch.autograd.functional.hessian(function, logits)
        assert torch.allclose(ours, curvature @ tangent, rtol=0, atol=1e-12)


def test_divergence_and_entropy_of_a_restricted_distribution() -> None:
    """p = .5, .3, .15, .05 cut to the first two tokens: .625, .375, entropy .661563 (RL4LMs' NLPO, renormalised)."""
    p, excluded = tensor([[0.5, 0.3, 0.15, 0.05]]).log(), torch.tensor([[False, False, True, True]])
    kept = p.masked_fill(excluded, -math.inf)
    even = torch.zeros_like(p).masked_fill(excluded, -math.inf)
    entropy = math.log(2) - trust_region.categorical_kl(kept, even)
    assert close(entropy, [0.661563], 5e-7)
    # .625 * (-.470004) + .375 * (-.980829), minus the same mean of -.693147 and -1.203973: log(1 / .8)
    assert close(trust_region.categorical_kl(kept, p), [math.log(1.25)])
    fisher = trust_region.fisher_of_softmax(kept, tensor([[1, 0, math.nan, math.inf]]))
    assert close(fisher, [[0.625 * 0.375, -0.625 * 0.375, 0, 0]])


def test_excluded_tokens_have_no_gradient_and_make_no_nan() -> None:
    masked = torch.tensor([[False, True, False, True], [True, False, False, False]])
    p, q = (numbers(seed, 2, 4).masked_fill(masked, -math.inf).requires_grad_() for seed in (2, 3))
    divergence = trust_region.categorical_kl(p, q)
    divergence.sum().backward()
    for row, keep in enumerate(~masked):
        small = trust_region.categorical_kl(p[row, keep][None], q[row, keep][None])
        assert torch.allclose(small, divergence[row], rtol=0, atol=1e-12) and small > 0
    for leaf in (p, q):
        assert torch.isfinite(leaf.grad).all() and not leaf.grad[masked].any() and leaf.grad[~masked].all()
    # q alone excludes a token of p: infinite. p alone: finite. A probability too small for fp64 is zero.
    inf = -math.inf
    assert trust_region.categorical_kl(tensor([[0, 0]]), tensor([[0, inf]])).tolist() == [math.inf]
    assert close(trust_region.categorical_kl(tensor([[0, inf]]), tensor([[0, 0]])), [math.log(2)])
    assert trust_region.categorical_kl(tensor([[0, -2000]]), tensor([[0, inf]])).tolist() == [0]
