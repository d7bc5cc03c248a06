"""REINFORCE++ against its formula in plain numpy, and LLM_RL's ReinforceStable against worked numbers of its code."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, tensor

from lmgym.algorithms.reinforce_pp import ReinforcePlusPlus
from lmgym.algorithms.reinforce_stable import ReinforceStable
from lmgym.algorithms.requirements import Requirements
from lmgym.batch import Batch, PolicyOutputs, collate
from lmgym.config.build import build_config
from lmgym.core.errors import LmgymError
from lmgym.functional.turn_discounts import per_turn, turn_lengths, turn_returns
from lmgym.models.builtin import builtin_model
from lmgym.types import Episode, Example, Turn
from tests import models, rounding, runs
from tests.models import loss_of
from tests.parity.test_resume import Interrupting
from tests.parity.test_resume_models import assert_equal_folders


def conversation(turns: list[tuple[int, float]], group: int = 0, index: int = 0, restart: bool = False) -> Episode:
    """An episode of (actions, reward) turns, each behind a prompt of one token."""
    made = [Turn([9], [5] * length, reward=reward, restart=restart) for length, reward in turns]
    return Episode(Example("x", "?"), group, index, made, score=sum(reward for _, reward in turns))


def in_double(*episodes: Episode) -> Batch:
    batch = collate(episodes)
    return batch.replace(score=batch.score.double(), rewards=batch.rewards.double())


def on_actions(batch: Batch, column: Tensor) -> list[list[float]]:
    return [row[mask].tolist() for row, mask in zip(column, batch.actions, strict=True)]


# Turns


@pytest.mark.parametrize("restart", [False, True], ids=["one row", "a row for each turn"])
@pytest.mark.parametrize(
    ("rewards", "gamma", "expected"),
    [([0, 0, 0, 1], 0.99, [0.970299, 0.9801, 0.99, 1]), ([0.2, 0.4, 1], 0.9, [1.37, 1.3, 1])],
)
def test_stepwise_returns_of_llm_rl(rewards: list[float], gamma: float, expected: list[float], restart: bool) -> None:
    """Case 19 of the seed study, run with LLM_RL's compute_returns: a step is a turn, however many tokens it has."""
    lengths = [3, 1, 2, 4][: len(rewards)]
    other = conversation([(2, 0.7)], index=1)
    batch = in_double(conversation(list(zip(lengths, rewards, strict=True)), restart=restart), other)
    algorithm = ReinforceStable(gamma=gamma, kl_coefficient=0.0)
    rows = on_actions(batch, algorithm.advantages(batch).advantages)
    flat = [value for row in rows for value in row]
    wanted = [value for value, length in zip(expected, lengths, strict=False) for _ in range(length)]
    loose = rounding.rounding(len(rewards))  # the rewards have been fp32
    assert flat == pytest.approx([*wanted, 0.7, 0.7], rel=0, abs=loose)


def test_two_turns_without_a_token_between_them_are_two_steps() -> None:
    """As reinforce_stable.md says: an environment may hear a line and say nothing. What continues an unfinished line
    (behind a calculator's result, say) belongs to it."""
    first, silent = Turn([9], [5, 5]), Turn([], [5], reward=1.0)
    for unfinished, returns, lengths in ((False, [0.5, 0.5, 1.0], [2, 2, 1]), (True, [1.0] * 3, [3] * 3)):
        first.unfinished = unfinished
        batch = in_double(Episode(Example("x", "?"), 0, 0, [first, silent], score=1.0))
        assert batch.actions.tolist() == [[False, True, True, True]]
        algorithm = ReinforceStable(gamma=0.5, kl_coefficient=0.0)
        assert on_actions(batch, algorithm.advantages(batch).advantages) == [returns]
        assert on_actions(batch, turn_lengths(batch.actions, batch.turn, batch.episode)) == [lengths]


def test_a_turn_in_two_rows_has_one_length_whatever_rows_are_computed_together() -> None:
    """An encoder-decoder reads a calculator's result in a row of its own; the line goes on."""
    begun = Turn([0], [5, 6, 7], text="2*3=", continuation="6>>", unfinished=True, source_ids=[3])
    ended = Turn([0], [8], reward=1.0, restart=True, source_ids=[3, 4])
    algorithm = ReinforceStable(kl_coefficient=0.0)
    batch = in_double(Episode(Example("x", "?"), 0, 0, [begun, ended], score=1.0))
    batch = algorithm.advantages(batch).replace(logprobs_old=batch.rewards * 0)
    assert len(batch) == 2 and on_actions(batch, batch.turn_lengths) == [[4, 4, 4], [4]]
    logprobs = batch.actions * -0.5
    whole = algorithm.loss(batch, PolicyOutputs(logprobs))[0]["policy"][0]
    for row in range(2):
        part = batch[tensor([row])]
        width = part.tokens.shape[1]
        alone = algorithm.loss(part, PolicyOutputs(logprobs[row : row + 1, :width]))[0]["policy"][0]
        assert alone.any() and torch.equal(alone, whole[row : row + 1, :width])


@given(seed=st.integers(0, 2**31), gamma=st.floats(0, 1))
def test_turn_returns_and_lengths_are_those_of_the_episodes(seed: int, gamma: float) -> None:
    """Against Python lists, over conversations with and without rewritten prompts."""
    conversations = models.episodes(seed, restarts=True)
    random = np.random.default_rng(seed)
    for episode in conversations:
        for turn in episode.turns:
            turn.reward = float(random.normal())
    batch = in_double(*conversations)
    assert per_turn(torch.tensor([[0, 0, 1]]), gamma, torch.float64).tolist() == [[1.0, gamma, gamma]]  # not in fp32
    returns = turn_returns(batch.rewards, batch.actions, batch.turn, batch.episode, gamma)
    lengths = turn_lengths(batch.actions, batch.turn, batch.episode)
    wanted_returns, wanted_lengths = [], []
    for episode in conversations:
        following, each = 0.0, []
        for turn in reversed(episode.turns):
            following = turn.reward + gamma * following
            each.append(following)
        for turn, value in zip(episode.turns, reversed(each), strict=True):
            wanted_returns += [value] * len(turn.action_ids)
            wanted_lengths += [len(turn.action_ids)] * len(turn.action_ids)
    largest = max(sum(abs(turn.reward) for turn in episode.turns) for episode in conversations)
    loose = rounding.rounding(2 * 3, largest)  # rewards and discounts of three turns are fp32
    assert returns[batch.actions].tolist() == pytest.approx(wanted_returns, rel=0, abs=loose)
    assert lengths[batch.actions].tolist() == wanted_lengths
    assert not returns[~batch.actions].any() and not lengths[~batch.actions].any()


# ReinforceStable: case 20 of the seed study, run with LLM_RL's loss in torch. T is 2, the action's number of tokens.

LOGPROBS, REFERENCE = [-1.0, -2.0], [-1.5, -1.5]


def step_of(score: float, reference: list[float] = REFERENCE) -> Batch:
    """One episode of one turn of two tokens."""
    batch = in_double(conversation([(2, score)]))
    return batch.replace(logprobs_ref=tensor([[0.0, *reference]], dtype=torch.float64), logprobs_old=batch.rewards * 0)


def value_and_gradient(algorithm: Any, batch: Batch, logprobs: list[float] = LOGPROBS) -> tuple[float, list[float]]:
    """What the first optimizer step minimises, and its gradient by each log-probability."""
    leaf = tensor([[0.0, *logprobs]], dtype=torch.float64, requires_grad=True)
    batch = algorithm.advantages(batch).replace(logprobs_old=leaf.detach())
    loss = loss_of(algorithm, batch, leaf)
    loss.backward()
    assert float(leaf.grad[0, 0]) == 0
    return float(loss.detach()), leaf.grad[0, 1:].tolist()


def test_llm_rl_loss_and_gradient_under_compat() -> None:
    algorithm = ReinforceStable(kl_coefficient=0.25, compat="llm_rl")
    loss, gradient = value_and_gradient(algorithm, step_of(0.99))
    assert loss == pytest.approx(1.51625) and gradient == pytest.approx([-0.52625, -0.65125])


def test_llm_rl_pushes_without_any_reward_under_compat() -> None:
    """Its defect: nothing was earned and the policy is the reference, and yet what was sampled becomes likelier."""
    batch = step_of(0.0, reference=LOGPROBS)
    loss, gradient = value_and_gradient(ReinforceStable(kl_coefficient=0.25, compat="llm_rl"), batch)
    assert loss == pytest.approx(0.0) and gradient == pytest.approx([-0.0625, -0.125])
    loss, gradient = value_and_gradient(ReinforceStable(kl_coefficient=0.25), batch)
    assert loss == pytest.approx(0.0) and gradient == pytest.approx([0.0, 0.0])


def test_the_gradient_with_the_divergence_as_a_number() -> None:
    """The study's "detached": each token's return less 0.25 times its share of the mean KL, taken as a constant."""
    _, gradient = value_and_gradient(ReinforceStable(kl_coefficient=0.25), step_of(0.99))
    assert gradient == pytest.approx([-0.46375, -0.52625])


def test_without_a_divergence_it_is_llm_rl_plain_reinforce() -> None:
    for compat in ("none", "llm_rl"):
        algorithm: Any = ReinforceStable(kl_coefficient=0.0, compat=compat)
        loss, gradient = value_and_gradient(algorithm, step_of(0.99))
        assert loss == pytest.approx(1.485) and gradient == pytest.approx([-0.495, -0.495])


def test_the_divergence_has_the_gradient_of_the_mean_kl() -> None:
    """Over all answers of one token, weighted by their probabilities, the term's gradient is that of
    beta KL(pi || pi_ref), computed from the whole distributions."""
    logits = tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    reference = tensor([-0.5, 0.2, 0.4, 1.0], dtype=torch.float64).log_softmax(0)
    pi = logits.log_softmax(0)
    (wanted,) = torch.autograd.grad(0.25 * (pi.exp() * (pi - reference)).sum(), logits)
    batch = in_double(*(conversation([(1, 0.0)], index=n) for n in range(4)))
    padded = torch.zeros(4, 1, dtype=torch.float64)
    new = torch.cat([padded, logits.log_softmax(0)[:, None]], 1)
    batch = batch.replace(logprobs_ref=torch.cat([padded, reference[:, None]], 1), logprobs_old=new.detach())
    algorithm = ReinforceStable(kl_coefficient=0.25)
    terms, _ = algorithm.loss(algorithm.advantages(batch), PolicyOutputs(new))
    (found,) = torch.autograd.grad((terms["kl"][0][:, 1] * pi.exp().detach()).sum(), logits)
    assert found.tolist() == pytest.approx(wanted.tolist(), abs=1e-12)


def test_returns_are_cut_after_discounting() -> None:
    """LLM_RL clamps what it has summed: [-2, 30, 3] with gamma 0.5 is [13.75, 31.5, 3] -> [10, 10, 3]."""
    batch = in_double(conversation([(1, -2.0), (2, 30.0), (1, 3.0)]), conversation([(1, -4.0)], index=1))
    algorithm = ReinforceStable(gamma=0.5, kl_coefficient=0.0)
    assert on_actions(batch, algorithm.advantages(batch).advantages) == [[10, 10, 10, 3], [0]]
    free = ReinforceStable(gamma=0.5, kl_coefficient=0.0, return_low=None, return_high=None)
    assert on_actions(batch, free.advantages(batch).advantages) == [[13.75, 31.5, 31.5, 3], [-4]]


def test_baselines_count_a_turn_once() -> None:
    """Returns 1 (a turn of three tokens) and 0 (of one), then 0.5 alone in the other group."""
    episodes = [conversation([(3, 1.0)]), conversation([(1, 0.0)], index=1), conversation([(1, 0.5)], 1, 2)]
    batch = in_double(*episodes)
    wanted = {"none": [1.0, 0.0, 0.5], "group": [0.5, -0.5, 0.0], "batch": [0.5, -0.5, 0.0]}
    for baseline, values in wanted.items():
        algorithm: Any = ReinforceStable(baseline=baseline, group_size=2, kl_coefficient=0.0)
        found = on_actions(batch, algorithm.advantages(batch).advantages)
        assert [row[0] for row in found] == pytest.approx(values) and len(set(found[0])) == 1


def test_each_turn_is_the_mean_of_its_tokens() -> None:
    """The loss is -(1/E) sum over episodes and turns of G times the mean log-probability of the turn."""
    batch = in_double(conversation([(2, 0.0), (4, 1.0)]), conversation([(3, 0.5)], index=1))
    batch = batch.replace(logprobs_old=torch.zeros(batch.tokens.shape, dtype=torch.float64))
    logprobs = -torch.arange(1.0, batch.tokens.numel() + 1, dtype=torch.float64).reshape(batch.tokens.shape)
    algorithm = ReinforceStable(gamma=0.9, kl_coefficient=0.0)
    batch = algorithm.advantages(batch).replace(logprobs_old=logprobs)
    first, second = logprobs[0], logprobs[1]
    wanted = 0.9 * first[1:3].mean() + 1.0 * first[4:8].mean() + 0.5 * second[1:4].mean()
    assert float(loss_of(algorithm, batch, logprobs)) == pytest.approx(-float(wanted) / 2)


def test_a_second_step_is_weighted_by_the_ratio() -> None:
    batch = step_of(1.0)
    algorithm = ReinforceStable(kl_coefficient=0.0, minibatches=2)
    leaf = tensor([[0.0, -1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    batch = algorithm.advantages(batch).replace(logprobs_old=tensor([[0.0, -1.5, -1.5]], dtype=torch.float64))
    loss_of(algorithm, batch, leaf).backward()
    assert leaf.grad[0, 1:].tolist() == pytest.approx([-np.exp(0.5) / 2, -np.exp(-0.5) / 2])


def test_a_penalty_in_the_reward_reaches_what_led_to_it() -> None:
    """kl_in reward: the sum of the KL from the token on, discounted from turn to turn, off the cut return."""
    batch = in_double(conversation([(2, 0.0), (1, 1.0)]))
    old = tensor([[0.0, -1.0, -2.0, 0.0, -1.0]], dtype=torch.float64)
    batch = batch.replace(logprobs_old=old, logprobs_ref=old - tensor([[0.0, 0.4, 0.2, 0.0, 0.1]], dtype=torch.float64))
    algorithm = ReinforceStable(gamma=0.5, kl_in="reward", kl_coefficient=2.0)
    found = on_actions(batch, algorithm.advantages(batch).advantages)[0]
    assert found == pytest.approx([0.5 - 2 * (0.4 + 0.2 + 0.5 * 0.1), 0.5 - 2 * (0.2 + 0.5 * 0.1), 1 - 2 * 0.1])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"gamma": 1.5}, "algorithm.gamma is 1.5"),
        ({"refresh_every": 0}, "algorithm.refresh_every is 0"),
        ({"return_low": 2.0, "return_high": 1.0}, "algorithm.return_low is 2.0 and algorithm.return_high 1.0"),
        ({"baseline": "group"}, "algorithm.group_size is 1"),
        ({"compat": "llm_rl", "baseline": "batch"}, "algorithm.compat is llm_rl"),
        ({"compat": "llm_rl", "kl_in": "reward"}, "algorithm.compat is llm_rl"),
    ],
)
def test_what_reinforce_stable_refuses(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(LmgymError, match=said):
        ReinforceStable(**fields)


# The refreshed reference in a run


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", [{}, pytest.param({"lora_rank": 2}, marks=pytest.mark.slow)], ids=["whole", "adapters"]
)
def test_a_reference_that_was_refreshed_before_and_after(policy: dict[str, Any], tmp_path: Path) -> None:
    """Taken at 0 (with adapters: the model before them), 2, 4 and 6, interrupted at 3 and 5: each time the reference
    that was in use is read back. The run is the whole one, bit for bit."""
    if "lora_rank" in policy:
        pytest.importorskip("peft")
    changes = {
        "algorithm": {"name": "reinforce_stable", "kl_coefficient": 5.0},
        "policy": {**runs.TINY["policy"], **policy},
        "optimizer": {"learning_rate": 0.03, "warmup": 0},
        "steps": 7,
    }
    whole = runs.run(tmp_path / "whole", **changes)
    parts = runs.run(tmp_path / "parts", Interrupting(at=3), **changes)
    assert runs.state(parts)["copies"] == {"reference": 2}
    runs.run(parts, Interrupting(at=2), **changes)
    assert runs.state(parts)["copies"] == {"reference": 4}
    runs.run(parts, **changes)
    assert runs.state(parts)["copies"] == runs.state(whole)["copies"] == {"reference": 6}
    assert_equal_folders(whole, parts)
    trained = [record for record in runs.records(whole / "metrics.jsonl") if record["kind"] == "train"]
    divergence = [record["kl/reference"] for record in trained]
    architecture = builtin_model("builtin:tiny", models.tokenizer(), runs.ARCHITECTURE, 0)
    loose = rounding.typical_tolerance(architecture)
    assert all(abs(divergence[step]) < loose for step in (0, 2, 4, 6))  # the policy is the reference's copy
    assert all(abs(divergence[step]) > 10 * loose for step in (1, 3, 5))


def test_cut_returns_are_counted(tmp_path: Path) -> None:
    """An answer with a digit earns up to 1.5, others up to 1: with a bound of 1 some tokens' returns are cut."""
    algorithm = {"name": "reinforce_stable", "return_high": 1.0}
    changes = {"algorithm": algorithm, "prompts_per_step": 16, "steps": 2, "checkpoint": {"every": 0}}
    folder = runs.run(tmp_path / "run", **changes)
    trained = [record for record in runs.records(folder / "metrics.jsonl") if record["kind"] == "train"]
    assert all(0 < record["return/clamped"] < 1 for record in trained)


# REINFORCE++


def by_formula(
    rewards: list[np.ndarray], divergences: list[np.ndarray], baselines: list[float], beta: float, gamma: float
) -> list[np.ndarray]:
    """arXiv 2501.03262: A_t = sum over s >= t of gamma^(s - t) (reward_s - beta KL_s), normalised over all tokens."""
    returns = []
    for reward, divergence, baseline in zip(rewards, divergences, baselines, strict=True):
        earned = reward - beta * divergence
        earned[-1] -= baseline
        powers = [[gamma ** (s - t) if s >= t else 0.0 for s in range(len(earned))] for t in range(len(earned))]
        returns.append(np.array(powers) @ earned)
    every = np.concatenate(returns)
    return [(one - every.mean()) / np.sqrt(every.var() + 1e-8) for one in returns]


@pytest.mark.slow
@pytest.mark.parametrize("baseline", ["none", "group"])
@given(seed=st.integers(0, 2**31), gamma=st.sampled_from([1.0, 0.9]))
def test_advantages_against_the_formula(baseline: str, seed: int, gamma: float) -> None:
    conversations = models.episodes(seed, restarts=True)
    batch = models.batch_of(conversations)
    random = torch.Generator().manual_seed(seed)
    old, reference = (-torch.rand(batch.tokens.shape, generator=random, dtype=torch.float64) for _ in range(2))
    batch = batch.replace(logprobs_old=old * batch.actions, logprobs_ref=reference * batch.actions)
    algorithm: Any = ReinforcePlusPlus(baseline=baseline, group_size=4, gamma=gamma, kl_coefficient=0.3)
    found = algorithm.advantages(batch).advantages

    numbers = batch.episode.unique().tolist()
    mine = [[(n, t) for n, t in batch.actions.nonzero().tolist() if batch.episode[n] == e] for e in numbers]
    column = {name: [np.array([float(getattr(batch, name)[place]) for place in places]) for places in mine]
              for name in ("rewards", "logprobs_old", "logprobs_ref")}  # fmt: skip
    divergences = [one - other for one, other in zip(column["logprobs_old"], column["logprobs_ref"], strict=True)]
    groups: dict[int, list[float]] = {}
    for episode in conversations:
        groups.setdefault(episode.group, []).append(episode.score)
    means = {group: float(np.mean(scores)) if baseline == "group" else 0.0 for group, scores in groups.items()}
    baselines = [means[episode.group] for episode in sorted(conversations, key=lambda one: one.index)]
    wanted = by_formula(column["rewards"], divergences, baselines, 0.3, gamma)
    for places, values in zip(mine, wanted, strict=True):
        assert [float(found[place]) for place in places] == pytest.approx(values.tolist(), abs=1e-9)
    assert not found[~batch.actions].any()


def test_advantages_worked_by_hand() -> None:
    """Scores 1 and 0 on answers of 1 and 3 tokens: mean 1/4 and variance 3/16 over the four tokens."""
    batch = in_double(conversation([(1, 1.0)]), conversation([(3, 0.0)], index=1))
    found = on_actions(batch, ReinforcePlusPlus().advantages(batch).advantages)
    high, low = 0.75 / np.sqrt(0.1875), -0.25 / np.sqrt(0.1875)
    assert found[0] == pytest.approx([high], abs=1e-6) and found[1] == pytest.approx([low] * 3, abs=1e-6)


def test_a_group_without_difference_has_the_whitened_mean_for_advantage() -> None:
    """The baseline form takes the group's mean off, then whitens over tokens, which shifts equal groups too."""
    episodes = [conversation([(1, 1.0)]), conversation([(2, 0.0)], 0, 1)]
    episodes += [conversation([(1, 0.7)], 1, 2), conversation([(1, 0.7)], 1, 3)]
    batch = in_double(*episodes)
    algorithm = ReinforcePlusPlus(baseline="group", group_size=2)
    centred = np.array([0.5, -0.5, -0.5, 0.0, 0.0])
    wanted = (centred - centred.mean()) / np.sqrt(centred.var() + 1e-8)
    found = [value for row in on_actions(batch, algorithm.advantages(batch).advantages) for value in row]
    assert found == pytest.approx(wanted.tolist(), abs=1e-9)


def test_the_clip_and_the_divergence_in_the_loss() -> None:
    """Two tokens, each weighing 1/2: ratios e^0.5 (clipped at 1.2, A > 0) and e^-0.1; k2 of the preset times the ratio,
    as a number."""
    preset = ReinforcePlusPlus.presets["baseline"]
    algorithm = ReinforcePlusPlus(**{**preset, "kl_coefficient": 0.5})
    batch = in_double(conversation([(2, 0.0)]))
    batch = batch.replace(
        advantages=tensor([[0.0, 2.0, -1.0]], dtype=torch.float64),
        logprobs_old=tensor([[0.0, -1.5, -1.9]], dtype=torch.float64),
        logprobs_ref=tensor([[0.0, -1.5, -1.5]], dtype=torch.float64),
    )
    leaf = tensor([[0.0, -1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    loss = loss_of(algorithm, batch, leaf)
    loss.backward()
    ratios = np.exp([0.5, -0.1])
    policy = (-1.2 * 2.0 + ratios[1] * 1.0) / 2
    divergence = 0.5 * (ratios[0] * 0.5**2 / 2 + ratios[1] * 0.5**2 / 2) / 2
    assert float(loss.detach()) == pytest.approx(policy + divergence)
    wanted = [0.5 * ratios[0] * 0.5 / 2, ratios[1] / 2 + 0.5 * ratios[1] * -0.5 / 2]
    assert leaf.grad[0, 1:].tolist() == pytest.approx(wanted)


def test_presets_of_reinforce_pp() -> None:
    tree = runs.tiny(algorithm={"name": "reinforce_pp", "preset": "baseline", "group_size": 4})
    algorithm: Any = build_config(tree).stages[0].algorithm
    assert (algorithm.baseline, algorithm.group_size, algorithm.kl_in, algorithm.kl_estimator) == (
        "group", 4, "loss", "k2",
    )  # fmt: skip
    assert algorithm.requirements == Requirements(reference=True)
    plain: Any = build_config(runs.tiny(algorithm={"name": "reinforce_pp", "preset": "openrlhf"})).stages[0].algorithm
    assert (plain.baseline, plain.group_size, plain.kl_in, plain.kl_estimator) == ("none", 1, "reward", "k1")
    assert plain.requirements == Requirements(reference=True, old_logprobs=True) and plain.kl_coefficient == 1e-4
    with pytest.raises(LmgymError, match=r"algorithm\.group_size is 1"):
        ReinforcePlusPlus(baseline="group")
