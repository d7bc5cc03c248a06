"""The properties of test_gradient.py, for the members of GRPO's family: what must not move the gradient, and what must.

Its own tests run, on batches that also have what only these members read: parts of the score, a token limit, answers
that were cut off. Tolerance and models are theirs.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.algorithms.replay import Replay
from lmgym.batch import Batch
from lmgym.types import Episode
from lmgym.updates.first_order import minibatches_of
from tests import models
from tests.family import grpo
from tests.property import test_gradient as general


def preset(name: str, **changes: Any) -> GRPO:
    return grpo(name, **{"group_size": 4, **changes})


# Old log-probabilities drift by up to .3 in these batches, so GSPO's own clip would leave no gradient.
FAMILY: dict[str, Callable[[], GRPO]] = {
    "paper, kl": lambda: preset("paper"),
    "dr_grpo": lambda: preset("dr_grpo"),
    "dapo": lambda: preset("dapo", overlong=0.0),
    "gspo": lambda: preset("gspo", clip_low=0.2, clip_high=0.2),
    "cispo": lambda: preset("cispo", clip_high=0.1),
    "sapo": lambda: preset("sapo"),
    "dppo": lambda: preset("dppo", clip_low=0.01, clip_high=0.01, squared_log_ratio_coefficient=0.1),
    "parts, masked": lambda: grpo(group_size=4, normalise_parts=True, mask_truncated=True),
    "weighted, batch": lambda: grpo(group_size=4, importance_cap=1.1, scale_rewards="batch", dual_clip=1.5),
    "weighted sequences": lambda: grpo(group_size=4, importance_cap=1.1, importance_level="sequence"),
    "replay, sapo": lambda: grpo(kind=Replay, group_size=4, objective="sapo"),
    "icepop": lambda: preset("icepop", importance_floor=5e-3, importance_cap=1.5),
    "off policy": lambda: preset("dapo", overlong=0.0, mismatch_bound=1e3, off_policy_threshold=4.5),
    "gspo_token": lambda: preset("gspo_token", clip_low=0.2, clip_high=0.2),
    "gmpo": lambda: preset("gmpo", clip_low=0.1, clip_high=0.1),
    "vespo": lambda: preset("vespo"),
    "ce_gppo": lambda: preset("ce_gppo", clip_low=0.1, clip_high=0.1),
    "gpg, shortest": lambda: preset("gpg", keep=3),
    "opo": lambda: preset("opo"),
    "otb": lambda: preset("otb"),
    "self_certainty": lambda: grpo(group_size=4, credit={"name": "self_certainty"}),
    "pass_at_k": lambda: preset("pass_at_k", pass_at=2),
    "hgpo": lambda: preset("hgpo"),
    "gigpo": lambda: preset("gigpo", turn_coefficient=0.5),
    "top_entropy": lambda: preset("top_entropy", top_entropy=0.5),
    "clip_cov": lambda: preset("clip_cov", covariance_share=0.2, covariance_low=0.0, covariance_high=9.0),
    "kl_cov": lambda: preset("kl_cov", covariance_share=0.2),
}
# Of these an answer may have credit where its score is its group's mean, or none where it is not.
OTHER_BASELINES = ("gpg, shortest", "opo", "otb", "self_certainty", "pass_at_k", "gigpo", "hgpo")
SOME_TOKENS = ("top_entropy", "clip_cov", "gigpo", "hgpo", "otb")  # of a row need not have any credit
# It matters where a conversation is cut if a ratio is a row's; on the first optimizer step only if the ratio is that to
# the sampler.
BY_ROW = ("gspo", "gspo_token", "gmpo", "vespo")
BY_ROW_TO_SAMPLER = ("weighted sequences", "off policy")
WEIGHTS = {"right": 1.0, "brief": 0.5}

few = settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
every_member = pytest.mark.parametrize("name", FAMILY)
every_model = pytest.mark.parametrize("model", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])


def dressed(conversations: list[Episode]) -> list[Episode]:
    """With parts, of which the environment pays what the two rewards leave of the score, and some cut off."""
    for place, episode in enumerate(conversations):
        equal = episode.group == conversations[-1].group
        episode.reward_components = {
            "right": 0.5 if equal else float(place % 3),
            "brief": 0.25 if equal else float(place % 2),
        }
        episode.terminated = place % 5 != 0
    return conversations


def batch_of(conversations: list[Episode], **settings: Any) -> Batch:
    batch = models.batch_of(dressed(conversations), limit=16, weights=WEIGHTS, **settings)
    assert batch.reward_components is not None
    return batch.replace(reward_components=batch.reward_components.double())


def ready(name: str, model: str, seed: int, **settings: Any) -> tuple[GRPO, Batch]:
    algorithm = FAMILY[name]()
    batch = batch_of(models.episodes(seed, restarts=True), **settings)
    return algorithm, models.prepared(batch, algorithm, general.policy_of(model), general.policy_of(model, 1))


def with_padding(batch: Batch, columns: int) -> Batch:
    return replace(padded(batch.replace(reward_components=None), columns), reward_components=batch.reward_components)


padded = general.with_padding


@pytest.fixture(autouse=True)
def family(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """test_gradient.py builds its batches and algorithms with these."""
    for name, make in FAMILY.items():
        monkeypatch.setitem(general.ALGORITHMS, name, make)
    monkeypatch.setattr(general, "ready", ready)
    monkeypatch.setattr(general, "with_padding", with_padding)
    yield


def body(test: Callable[..., None]) -> Callable[..., None]:
    """What hypothesis calls."""
    return test.hypothesis.inner_test  # type: ignore[attr-defined, no-any-return]


seeds = st.integers(0, 2**31)


@pytest.mark.slow
@every_model
@every_member
@few
@given(seed=seeds, tokens=st.integers(1, 60), first=st.booleans())
def test_micro_batches(name: str, model: str, seed: int, tokens: int, first: bool) -> None:
    body(general.test_micro_batches)(name, model, seed, tokens, first)


@every_model
@every_member
@few
@given(seed=seeds, columns=st.integers(1, 9), fast=st.booleans())
def test_padding(name: str, model: str, seed: int, columns: int, fast: bool) -> None:
    body(general.test_padding)(name, model, seed, columns, fast)


@every_model
@every_member
@few
@given(seed=seeds, order=st.randoms(use_true_random=False))
def test_row_order(name: str, model: str, seed: int, order: Any) -> None:
    body(general.test_row_order)(name, model, seed, order)


def change_by_splitting(name: str, model: str, seed: int, first: bool = False) -> float:
    """How far a member's gradient moves, relatively, if each turn of a conversation is a row of its own. On the first
    optimizer step the old policy is the new one."""
    policy, reference = general.policy_of(model), general.policy_of(model, 1)
    gradients = []
    for conversations in (models.episodes(seed), [general.apart(episode) for episode in models.episodes(seed)]):
        algorithm = FAMILY[name]()
        batch = models.prepared(batch_of(conversations), algorithm, policy, reference, drift=0.0 if first else 0.3)
        if not bool(algorithm.active(batch).any()):  # 1 seed in 4096 has equal scores in every group
            return 0.0
        gradients.append(models.gradient(algorithm, policy, batch, first)[0])
    return models.relative(*gradients)


@every_model
@pytest.mark.parametrize("name", [name for name in FAMILY if name not in BY_ROW_TO_SAMPLER])
@few
@given(seed=seeds)
def test_splitting_a_conversation_into_rows(name: str, model: str, seed: int) -> None:
    """Does not matter; but where a ratio is a row's it may, off the first optimizer step."""
    assert change_by_splitting(name, model, seed, first=name in BY_ROW) < general.TOLERANCE


@pytest.mark.parametrize("name", sorted([*BY_ROW, *BY_ROW_TO_SAMPLER]))
def test_a_ratio_of_rows_is_another_one_when_conversations_are_split(name: str) -> None:
    assert max(change_by_splitting(name, "llama", seed) for seed in range(3)) > general.TOLERANCE


@every_model
@every_member
@few
@given(seed=seeds)
def test_rows_without_credit_cost_nothing(name: str, model: str, seed: int) -> None:
    """Groups of equal scores (and parts), and answers that are masked, are not computed, and would add nothing."""
    algorithm, batch = ready(name, model, seed)
    policy = general.policy_of(model)
    found, metrics = models.gradient(algorithm, policy, batch)

    class Everything(type(algorithm)):  # type: ignore[misc]
        def active(self, batch: Batch) -> Tensor:
            return batch.actions.any(1)

    everything = Everything.__new__(Everything)
    everything.__dict__.update(vars(algorithm))
    full, _ = models.gradient(everything, policy, batch)
    assert models.relative(found, full) < general.TOLERANCE
    if name not in ("gigpo", "hgpo"):  # turns of equal scores may have different returns
        assert (metrics["rows/computed"] == 1.0) == (name in ("paper, kl", "self_certainty"))


@every_member
@few
@given(seed=seeds)
def test_the_ratio_of_the_first_step_is_exactly_one(name: str, seed: int) -> None:
    """But where it is to the sampler, whose log-probabilities these batches have at random."""
    algorithm, batch = ready(name, "gpt2", seed)
    for minibatch in minibatches_of(batch, algorithm.epochs, algorithm.minibatches):
        if bool(algorithm.active(minibatch).any()):
            _, metrics = models.gradient(algorithm, general.policy_of("gpt2"), minibatch, first=True)
            own = not algorithm.correction.ratio_to_sampler
            assert (metrics["ratio/mean"] == 1.0) == own
            if own:
                assert metrics["kl/old"] == 0.0 and metrics.get("ratio/gate", 1.0) == 1.0
                assert metrics.get("ratio/clipped", 0.0) == 0.0


@every_member
@few
@given(seed=seeds)
@example(seed=1764485)  # no answer that was cut off has any credit
def test_only_actions_get_gradient(name: str, seed: int) -> None:
    """The loss as a function of a log-probability in every column, prompts and padding included."""
    algorithm, conversations = FAMILY[name](), models.episodes(seed, restarts=True)
    scores = [[one.score for one in conversations if one.group == episode.group] for episode in conversations]
    credited = [episode.score != statistics.fmean(own) for episode, own in zip(conversations, scores, strict=True)]
    assume(any(credited))  # 1 seed in 4096 has equal scores in every group
    batch = batch_of(conversations)
    sampled, random = batch.actions, torch.Generator().manual_seed(seed)

    def column() -> Tensor:
        return -torch.rand(batch.tokens.shape, generator=random, dtype=torch.float64)

    old = column()
    batch = batch.replace(logprobs_old=old, logprobs_sampler=old, logprobs_ref=column())
    sums = torch.stack([-column() for _ in algorithm.requirements.distribution_sums or "-"], -1)
    batch = batch.replace(distribution_sums=sums, sum_names=algorithm.requirements.distribution_sums)
    batch = algorithm.advantages(batch)
    leaf = (old + 0.002 * column()).requires_grad_()  # inside every clip
    models.loss_of(algorithm, batch, leaf).backward()
    trained = batch.actions & algorithm.active(batch)[:, None]
    penalised = sampled if name == "kl_cov" else trained  # its penalty is on tokens of any credit
    assert leaf.grad is not None and bool((leaf.grad[~penalised] == 0).all())
    moved = leaf.grad[trained] != 0
    assert bool(moved.any() if name in SOME_TOKENS else moved.all()) and bool(trained.any())
    if name in OTHER_BASELINES:
        return
    cut = (sampled & ~batch.terminated[:, None]).any(1)
    # In some draws each answer that was cut off has the mean score of its group; only a divergence trains it then.
    credits_cut = any(own and not episode.terminated for own, episode in zip(credited, conversations, strict=True))
    trains_cut = not algorithm.mask_truncated and (credits_cut or algorithm.kl_coefficient > 0)
    assert bool((trained & cut[:, None]).any()) == trains_cut
