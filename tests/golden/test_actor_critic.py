"""PPO and A2C through the methods that the trainer calls, against recorded runs of stable-baselines3 and TRL and worked
numbers of RL4LMs, NanoRL and LLM_RL (shared/reference/seed_systems.md section 5, by case number)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmgym.algorithms.actor_critic import A2C, PPO, ActorCritic
from lmgym.batch import Batch, PolicyOutputs, collate
from lmgym.core.errors import LmgymError
from lmgym.functional import kl
from lmgym.functional.losses import policy_gradient
from lmgym.functional.reductions import tokens_of_episode, totals, weights
from lmgym.types import Episode, Example, Turn
from tests import runs

RECORD = json.loads((Path(__file__).parent / "actor_critic.json").read_text())


def batch_of(lengths: list[int], **columns: list[list[float]]) -> Batch:
    """One episode a length, its only turn behind a prompt of one token; `columns` are numbers per action."""
    rows = [Episode(Example("x", "?"), i, i, [Turn([9], [5] * n, [-1.0] * n)]) for i, n in enumerate(lengths)]
    batch = collate(rows)
    return batch.replace(**{name: placed(batch, values) for name, values in columns.items()})


def placed(batch: Batch, values: list[list[float]]) -> Tensor:
    """Numbers per action, written to their columns in fp64."""
    result = torch.zeros(batch.actions.shape, dtype=torch.float64)
    result[batch.actions] = torch.tensor([v for row in values for v in row], dtype=torch.float64)
    return result


def minimised(algorithm: ActorCritic, batch: Batch, new: PolicyOutputs) -> tuple[Tensor, dict[str, Tensor]]:
    """What an optimizer step minimises, whole and by term."""
    terms, _ = algorithm.loss(batch, new)
    total, counts = totals(batch.actions, batch.episode), tokens_of_episode(batch.actions, batch.episode)
    sums = {name: (weights(how, batch.actions, counts, total) * term).sum() for name, (term, how) in terms.items()}
    return torch.stack(list(sums.values())).sum(), sums


def gradient(of: Tensor, batch: Batch) -> list[float]:
    assert of.grad is not None
    return of.grad[batch.actions].tolist()


@pytest.mark.parametrize("case", RECORD["sb3"]["ppo"])
def test_ppo_is_that_of_stable_baselines3(case: dict[str, Any]) -> None:
    """Its loss, both parts, the KL that would stop it early, and both gradients of one step of its PPO.train."""
    clip = case["clip_range"]
    algorithm = PPO(
        clip_low=clip,
        clip_high=clip,
        value_coefficient=case["vf_coef"],
        value_clip=case["clip_range_vf"],
        value_clip_form="clipped",
        whiten="minibatch" if case["normalise"] else "none",
        epochs=1,
    )
    columns = {"logprobs_old": "old_log_prob", "values": "old_values", "advantages": "advantages", "returns": "returns"}
    batch = batch_of([len(case["log_prob"])], **{ours: [case[theirs]] for ours, theirs in columns.items()})
    batch = algorithm.before_minibatch(batch)
    logprobs, values = (placed(batch, [case[name]]).requires_grad_() for name in ("log_prob", "values"))
    loss, sums = minimised(algorithm, batch, PolicyOutputs(logprobs, values=values))
    loss.backward()
    log = case["log"]
    assert float(sums["policy"]) == pytest.approx(log["policy_gradient_loss"], abs=1e-12)
    assert float(sums["value"]) == pytest.approx(case["vf_coef"] * log["value_loss"], abs=1e-12)
    assert float(loss) == pytest.approx(log["loss"], abs=1e-12)
    assert gradient(logprobs, batch) == pytest.approx(case["log_prob_grad"], abs=1e-12)
    assert gradient(values, batch) == pytest.approx(case["values_grad"], abs=1e-12)
    kl_old = algorithm.loss(batch, PolicyOutputs(logprobs, values=values))[1]["kl/old"][batch.actions].mean()
    assert float(kl_old) == pytest.approx(log["approx_kl"], abs=1e-12)


@pytest.mark.parametrize("case", RECORD["sb3"]["a2c"])
def test_a2c_is_that_of_stable_baselines3(case: dict[str, Any]) -> None:
    columns = {"values": "old_values", "advantages": "advantages", "returns": "returns"}
    batch = batch_of([len(case["log_prob"])], **{ours: [case[theirs]] for ours, theirs in columns.items()})
    if case["normalise"]:  # A2C.advantages whitens over the batch, which here is the buffer
        from lmgym.functional.advantages import whiten

        assert batch.advantages is not None
        batch = batch.replace(advantages=whiten(batch.advantages, batch.actions))
    logprobs, values = (placed(batch, [case[name]]).requires_grad_() for name in ("log_prob", "values"))
    loss, sums = minimised(A2C(value_coefficient=case["vf_coef"]), batch, PolicyOutputs(logprobs, values=values))
    loss.backward()
    assert float(sums["policy"]) == pytest.approx(case["log"]["policy_loss"], abs=1e-12)
    assert gradient(logprobs, batch) == pytest.approx(case["log_prob_grad"], abs=1e-12)
    assert gradient(values, batch) == pytest.approx(case["values_grad"], abs=1e-12)


@pytest.mark.parametrize("case", [c for c in RECORD["trl"]["ppo"] if c["kl_estimator"] == "k1"])
def test_ppo_is_that_of_trl(case: dict[str, Any]) -> None:
    """From the score to the gradients of one step of TRL 1.12's PPOTrainer.train, with the preset's own numbers.

    Only answers that fill the width are taken: behind shorter ones TRL trains the value of one more step.
    """
    width = len(case["old"][0])
    full = [row for row, length in enumerate(case["lengths"]) if length == width]
    assert full
    algorithm = PPO(
        **{**PPO.presets["trl"], "gamma": case["gamma"], "gae_lambda": case["lam"]},
        clip_low=case["cliprange"],
        whiten="none",
    )
    assert (algorithm.kl_coefficient, algorithm.value_clip) == (case["kl_coef"], case["cliprange_value"])
    assert algorithm.value_coefficient == 0.5 * case["vf_coef"] and algorithm.clip_high == case["cliprange"]
    names = {"logprobs_old": "old", "logprobs_ref": "reference", "values": "values"}
    columns = {ours: [case[theirs][row] for row in full] for ours, theirs in names.items()}
    batch = batch_of([width] * len(full), **columns)
    rewards = torch.zeros(batch.actions.shape, dtype=torch.float64)
    rewards[:, -1] = torch.tensor([case["scores"][row] for row in full], dtype=torch.float64)
    batch = batch.replace(rewards=rewards, last_values=torch.ones(len(full), dtype=torch.float64))
    batch = algorithm.advantages(batch)
    assert batch.advantages is not None
    for place, row in enumerate(full):
        assert batch.advantages[place][batch.actions[place]].tolist() == pytest.approx(
            case["advantages"][row], abs=1e-12
        )


def test_kl_penalty_and_gae_from_rewards_to_advantages() -> None:
    """Cases 2 and 3: beta .1 and log-ratios .2, -.05, .1; GAE of r = [-.01, 0, .02, 1], gamma .99, lambda .95."""
    algorithm = PPO(kl_coefficient=0.1, gamma=0.99, gae_lambda=0.95, whiten="none")
    batch = batch_of(
        [4],
        rewards=[[0.01, -0.005, 0.03, 1.0]],  # with the penalty: -.01, 0, .02, 1
        logprobs_old=[[-1.0, -1.0, -1.0, -1.0]],
        logprobs_ref=[[-1.2, -0.95, -1.1, -1.0]],
        values=[[0.1, 0.2, 0.3, 0.4]],
    ).replace(last_values=torch.tensor([7.0], dtype=torch.float64))  # not read: the episode has ended
    batch = algorithm.advantages(batch)
    assert batch.advantages is not None and batch.returns is not None
    assert batch.advantages[0, 1:].tolist() == pytest.approx([0.780981, 0.736822, 0.6803, 0.6], abs=1e-6)
    assert batch.returns[0, 1:].tolist() == pytest.approx([0.880981, 0.936822, 0.9803, 1.0], abs=1e-6)
    whitened = PPO(kl_coefficient=0.1, gamma=0.99, gae_lambda=0.95).advantages(batch).advantages
    assert whitened is not None
    assert whitened[0, 1:].tolist() == pytest.approx([1.042901, 0.477517, -0.246155, -1.274262], abs=2e-6)


def test_kl_controllers_move_after_use() -> None:
    """Case 1: RL4LMs' rule from .1 at KL -.2, .3, .4, .1; TRL's from .2 at 3 and 12 nats per answer, 16 answers."""

    def after(algorithm: PPO, answers: int, per_token: float) -> float:
        ratio = [[per_token]] * answers
        zero = [[0.0]] * answers
        batch = batch_of([1] * answers, logprobs_old=ratio, logprobs_ref=zero, values=zero)
        algorithm.advantages(batch.replace(last_values=torch.zeros(answers, dtype=torch.float64)))
        return algorithm.beta

    ours = PPO(kl_coefficient=0.1, kl_target=0.1)
    assert [after(ours, 3, value) for value in (-0.2, 0.3, 0.4, 0.1)] == pytest.approx(
        [0.098, 0.09996, 0.1019592, 0.1019592], abs=1e-9
    )
    ours = PPO(kl_coefficient=0.2, kl_target=6.0, kl_controller="horizon")
    assert [after(ours, 16, value) for value in (3.0, 12.0)] == pytest.approx([0.199936, 0.19999998], abs=1e-8)
    state = ours.state_dict()
    other = PPO(kl_coefficient=0.2, kl_target=6.0, kl_controller="horizon")
    other.load_state_dict(json.loads(json.dumps(state)))
    assert other.beta == ours.beta != other.kl_coefficient


@pytest.mark.slow
def test_schedules_fall_linearly_over_the_stage(tmp_path: Path) -> None:
    """Half way to 0, clip range and entropy bonus are half of what they were; the trainer says how far a stage is."""
    new, old, advantages = [[-1.0, -2.0, -0.5]], [[-1.4, -1.5, -0.5]], [[1.0, -1.0, 0.5]]
    batch = batch_of([3], logprobs_old=old, values=[[0.0] * 3])
    batch = batch.replace(advantages=placed(batch, advantages), returns=placed(batch, [[0.0] * 3]))
    said = PolicyOutputs(
        placed(batch, new), entropy=placed(batch, [[1.0, 2.0, 3.0]]), values=placed(batch, [[0.0] * 3])
    )
    falling = PPO(
        clip_low=0.2, clip_high=0.4, clip_final_fraction=0.0, entropy_coefficient=0.1, entropy_final_fraction=0
    )
    falling.progress = 0.5
    expected = minimised(PPO(clip_low=0.1, clip_high=0.2, entropy_coefficient=0.05), batch, said)[1]
    assert minimised(falling, batch, said)[1] == expected
    falling.progress = 0.0
    assert minimised(falling, batch, said)[1] != expected

    seen = []
    with pytest.MonkeyPatch.context() as patch:
        metrics = PPO.metrics
        patch.setattr(PPO, "metrics", lambda self, batch: seen.append(self.progress) or metrics(self, batch))
        runs.run(tmp_path / "run", algorithm={"name": "ppo"}, steps=4, evaluation={"every": 0}, logs={"samples": 0})
    assert seen == [0, 0.25, 0.5, 0.75]


def test_a_run_stops_a_steps_updates_once_the_policy_has_moved_by_1_5_times_target_kl(tmp_path: Path) -> None:
    """The same run three times: without a target its first step takes all eight updates, and the log says how far the
    policy had moved on average. With a target far above that nothing changes; with one far below, the update after the
    first one is left out, and so are those after it."""

    def steps(folder: str, **changes: Any) -> list[dict[str, Any]]:
        run = runs.run(
            tmp_path / folder,
            algorithm={"name": "ppo", "epochs": 4, "minibatches": 2, **changes},
            optimizer={"learning_rate": 0.02, "warmup": 0},
            steps=2,
            evaluation={"every": 0},
            logs={"samples": 0},
        )
        return [record for record in runs.records(run / "metrics.jsonl") if record["kind"] == "train"]

    free = steps("free")
    moved = free[0]["kl/old"]
    assert [step["updates"] for step in free] == [8, 8] and moved > 0
    assert steps("far", target_kl=1000 * moved) == free
    near = steps("near", target_kl=moved / 1000)
    assert [step["updates"] for step in near] == [1, 1]
    assert all(step["kl/old"] > 1.5 * moved / 1000 for step in near)  # the mean with the update that was left out


def test_norm_reward_comes_before_gae() -> None:
    """Case 5: [0, 0, 1, -.1] -> [-.500773, -.500773, 1.724886, -.723339]; with gamma 0 the returns are the rewards."""
    batch = batch_of([4], rewards=[[0.0, 0.0, 1.0, -0.1]], logprobs_old=[[0.0] * 4], values=[[0.0] * 4])
    batch = batch.replace(last_values=torch.zeros(1, dtype=torch.float64))
    returns = PPO(norm_reward=True, gamma=0.0).advantages(batch).returns
    assert returns is not None
    assert returns[0, 1:].tolist() == pytest.approx([-0.500773, -0.500773, 1.724886, -0.723339], abs=1e-6)


def test_actor_critic_of_nanorl() -> None:
    """Case 17: A = R - V, a policy term summed over each answer, a value term over tokens: .8, .222, .911."""
    algorithm = A2C(**A2C.presets["nanorl"])
    logprobs, values = [[-1.0, -2.0], [-0.5, -0.5, -1.0]], [[0.2, 0.4], [0.1, 0.1, 0.3]]
    batch = batch_of([2, 3], values=values, logprobs_old=logprobs, rewards=[[0.0, 1.0], [0.0, 0.0, 0.0]])
    batch = algorithm.advantages(batch.replace(last_values=torch.zeros(2, dtype=torch.float64)))
    loss, sums = minimised(algorithm, batch, PolicyOutputs(placed(batch, logprobs), values=placed(batch, values)))
    assert float(sums["policy"]) == pytest.approx(0.8, abs=1e-9)
    assert float(sums["value"]) == pytest.approx(0.5 * 0.222, abs=1e-9)
    assert float(loss) == pytest.approx(0.911, abs=1e-9)


def test_returns_are_discounted_over_actions() -> None:
    """Case 19: [0, 0, 0, 1] at .99 and [.2, .4, 1] at .9, which GAE gives at lambda 1 without a critic."""
    for gamma, rewards, expected in (
        (0.99, [0.0, 0.0, 0.0, 1.0], [0.970299, 0.9801, 0.99, 1.0]),
        (0.9, [0.2, 0.4, 1.0], [1.37, 1.3, 1.0]),
    ):
        zero = [[0.0] * len(rewards)]
        batch = batch_of([len(rewards)], rewards=[rewards], logprobs_old=zero, values=zero)
        batch = batch.replace(last_values=torch.zeros(1, dtype=torch.float64))
        returns = A2C(gamma=gamma).advantages(batch).returns
        assert returns is not None and returns[0, 1:].tolist() == pytest.approx(expected, abs=1e-9)


def test_kl_of_reinforce_stable_without_its_stray_gradient() -> None:
    """Case 20: lp [-1, -2], reference [-1.5, -1.5], G .99, k .25, both over T = 2: loss 1.51625. The penalty is part of
    the credit, so it is not differentiated: [-.46375, -.52625] (LLM_RL: [-.52625, -.65125]), and zero at the
    reference with G = 0 (LLM_RL: [-.0625, -.125])."""
    reference = torch.tensor([[-1.5, -1.5]], dtype=torch.float64) / 2
    for start, goal, loss, expected in (
        ([-1.0, -2.0], 0.99, 1.51625, [-0.46375, -0.52625]),
        ([-1.5, -1.5], 0.0, 0.0, [0.0, 0.0]),
    ):
        logprobs = torch.tensor([start], dtype=torch.float64, requires_grad=True)
        mean = logprobs / 2
        credit = goal - 0.25 * kl.k1(mean.detach(), reference)
        value = policy_gradient(mean, credit).sum()
        value.backward()
        assert float(value) == pytest.approx(loss, abs=1e-9)
        assert logprobs.grad is not None and logprobs.grad[0].tolist() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("bootstrap", "expected"), [(False, [-0.5, 0.0]), (True, [3.5, 4.0])])
def test_only_a_cut_off_episode_is_bootstrapped_and_only_if_asked(bootstrap: bool, expected: list[float]) -> None:
    """Two actions, no reward, V = [.5, 0], a value of 4 behind the last: gamma = lambda = 1."""
    algorithm = A2C(bootstrap=bootstrap)
    batch = batch_of([2, 2], values=[[0.5, 0.0]] * 2, logprobs_old=[[0.0, 0.0]] * 2)
    batch = batch.replace(last_values=torch.full((2,), 4.0).double(), terminated=torch.tensor([False, True]))
    advantages = algorithm.advantages(batch).advantages
    assert advantages is not None
    assert advantages[0, 1:].tolist() == expected and advantages[1, 1:].tolist() == [-0.5, 0.0]


def test_what_cannot_be_is_refused_in_a_sentence() -> None:
    for arguments, words in (
        ({"gamma": 1.5}, "gamma is 1.5"),
        ({"kl_target": 0.1}, "kl_target needs a reference"),
        ({"value_clip": 0.0}, "value_clip is 0.0"),
        ({"value_coefficient": -1.0}, "value_coefficient is -1.0"),
        ({"clip_final_fraction": 1.5}, "clip_final_fraction is 1.5"),
        ({"entropy_final_fraction": -0.1}, "entropy_final_fraction is -0.1"),
        ({"kl_coefficient": 0.1, "kl_in": "loss", "kl_estimator": "k1"}, "gradient in a loss is zero on average"),
    ):
        with pytest.raises(LmgymError, match=words):
            PPO(**arguments)  # type: ignore[arg-type]
    with pytest.raises(LmgymError, match="no ratio to correct a second step"):
        A2C(epochs=2)
