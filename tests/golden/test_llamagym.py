"""LlamaGym's numbers and TRL 0.7's defaults; the ratio of an episode that an older policy has sampled."""

import math

import pytest
import torch

from lmgym.batch import PolicyOutputs, collate
from lmgym.compat.llamagym import credited, samples_of
from lmgym.compat.llamagym_settings import settings_of
from lmgym.functional.kl import horizon_update
from lmgym.types import Episode, Example, Turn


# LlamaGym's split of a sparse reward over the answers of an episode, as its code (0.1.1) was run: it counts the system
# message as half an answer, and rounds to half precision. `shared` divides by the answers.
@pytest.mark.parametrize(
    ("rewards", "llamagym", "shared"),
    [
        ([1], [0.6665], [1]),
        ([0, 0, 1], [0.28564] * 3, [1 / 3] * 3),
        ([0, -1], [-0.3999] * 2, [-0.5] * 2),
        ([0, 1, 0], [0, 1, 0], [0, 1, 0]),
    ],
)
def test_credit_as_llamagym_and_fairly(rewards: list[float], llamagym: list[float], shared: list[float]) -> None:
    assert credited(rewards, "llamagym") == pytest.approx(llamagym, abs=5e-5)
    assert credited(rewards, "shared") == pytest.approx(shared)
    assert credited(rewards, "returns") == rewards


def test_llamagyms_split_loses_a_part_of_the_reward_and_ours_does_not() -> None:
    assert sum(credited([0, 0, 1], "llamagym")) == pytest.approx(0.857, abs=5e-4)
    assert sum(credited([0, 0, 1], "shared")) == pytest.approx(1.0)


def episode(version: int = 0) -> Episode:
    turns = [Turn([5, 6], [7, 2], [-0.5, -0.1]), Turn([8], [9], [-0.7], stop="length", reward=1.0)]
    return Episode(Example("x", ""), 0, 0, turns, version=version, score=1.0)


def test_with_shared_credit_each_answer_is_a_sample_behind_all_that_stands_before_it() -> None:
    samples = samples_of(episode(), "shared")
    assert [(s.turns[0].prompt_ids, s.turns[0].action_ids, s.turns[0].reward) for s in samples] == [
        ([5, 6], [7, 2], 0.5),
        ([5, 6, 7, 2, 8], [9], 0.5),
    ]
    for index, sample in enumerate(samples):
        sample.index = sample.group = index
    batch = collate(samples)
    ppo = settings_of({"gamma": 1.0, "lam": 1.0}).ppo
    ppo.whiten = "none"
    zero = torch.zeros(batch.tokens.shape)
    done = ppo.advantages(batch.replace(logprobs_old=zero, values=zero, last_values=torch.zeros(2)))
    assert done.returns is not None
    # one answer's reward reaches its own tokens and no other answer's: 0.5 everywhere, and not 1 in the first
    assert done.returns[batch.actions].tolist() == pytest.approx([0.5, 0.5, 0.5])


def test_the_defaults_are_those_that_llamagym_inherits_from_trl() -> None:
    settings = settings_of({})
    ppo, optimizer = settings.ppo, settings.optimizer
    assert (settings.batch_size, ppo.epochs, ppo.minibatches) == (16, 4, 1)
    assert (optimizer.learning_rate, optimizer.weight_decay, optimizer.max_gradient_norm) == (1.41e-5, 0.0, 0.0)
    assert [optimizer.at(step, 10) for step in (0, 9)] == [1.41e-5] * 2
    assert (ppo.kl_coefficient, ppo.kl_target, ppo.kl_controller, ppo.kl_horizon) == (0.2, 6.0, "horizon", 10_000.0)
    assert (ppo.gamma, ppo.gae_lambda, ppo.clip_low, ppo.clip_high, ppo.value_clip) == (1.0, 0.95, 0.2, 0.2, 0.2)
    assert ppo.value_coefficient == 0.05  # vf_coef 0.1, and the half that stands in TRL's value loss
    assert ppo.target_kl is None
    # TRL's controller from there, 16 answers with a KL of 3 nats each: .2 (1 - .2 * 16 / 10000)
    assert ppo.kl_target is not None
    assert horizon_update(ppo.kl_coefficient, 3.0, ppo.kl_target, ppo.kl_horizon, 16) == pytest.approx(0.199936)


def test_the_ratio_of_a_kept_episode_is_to_the_weights_that_sampled_it() -> None:
    """Two episodes of the same tokens, one sampled by the present weights (version 1) and one by older ones (0). The
    present policy says log .5 for each token and then, after a step, log .55. Sampled at log .4: the kept one's ratio
    is .55 / .4 = 1.375, the fresh one's .55 / .5 = 1.1."""
    sampled = [math.log(0.4)]
    episodes = [
        Episode(Example("x", ""), n, n, [Turn([5], [7], sampled)], version=version) for n, version in ((0, 1), (1, 0))
    ]
    ppo = settings_of({"cliprange": 0.2}).ppo
    ppo.version, ppo.value_coefficient = 1, 0.0
    batch = collate(episodes)
    old, new = (batch.actions * math.log(p) for p in (0.5, 0.55))
    batch = batch.replace(
        logprobs_old=old,
        advantages=batch.actions * 1.0,
        values=torch.zeros(old.shape),
        returns=torch.zeros(old.shape),
    )
    terms, metrics = ppo.loss(batch, PolicyOutputs(new, values=torch.zeros(old.shape)))
    assert metrics["ratio/mean"][:, 1].tolist() == pytest.approx([1.1, 1.375])
    assert terms["policy"][0][:, 1].tolist() == pytest.approx([-1.1, -1.2])  # -min(r A, 1.2 A)
    assert metrics["ratio/clipped"][:, 1].tolist() == [0, 1]
