"""`check_algorithm` passes every algorithm of lmgym and finds what breaks the contract; losses over the whole batch."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lmgym
from lmgym.algorithms.base import Algorithm
from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.algorithms.reinforce import Reinforce
from lmgym.batch import Batch, PolicyOutputs
from lmgym.config.build import build_config
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.functional.reductions import masked_mean, tokens_of_episode, totals, weights
from lmgym.models.policy import Policy
from lmgym.training.algorithm_check import check_algorithm
from tests import models, runs

NEEDED: dict[str, dict[str, Any]] = {name: {"teacher": "builtin:tiny"} for name in ("distill", "gkd")}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(registry.names("algorithm")))
def test_every_algorithm_keeps_the_contract(name: str) -> None:
    section = {"name": name, **NEEDED.get(name, {})}
    check_algorithm(build_config(runs.tiny(algorithm=section)).stages[0].algorithm)


# What breaks it


@dataclass(kw_only=True)
class LooksAtItsMicroBatch(GRPO):
    def loss(self, batch: Batch, new: PolicyOutputs) -> Any:
        spread = new.logprobs[batch.actions].detach().mean()
        return {"policy": (-batch.advantages * (new.logprobs - spread) * spread, "token")}, {}


@dataclass(kw_only=True)
class LooksAtThePadding(GRPO):
    def loss(self, batch: Batch, new: PolicyOutputs) -> Any:
        return {"policy": (-batch.advantages * new.logprobs / batch.tokens.shape[1], "token")}, {}


@dataclass(kw_only=True)
class WritesIntoItsBatch(GRPO):
    def advantages(self, batch: Batch) -> Batch:
        batch.rewards.mul_(2.0)
        return super().advantages(batch)


@dataclass(kw_only=True)
class WritesIntoTheScores(GRPO):
    def advantages(self, batch: Batch) -> Batch:
        batch.score.clamp_(0.0, 0.3)
        return super().advantages(batch)


@dataclass(kw_only=True)
class DividesByNothing(GRPO):
    where: str = "loss"

    def advantages(self, batch: Batch) -> Batch:
        zero = batch.score - batch.score
        return (
            batch.replace(advantages=batch.per_token(zero / zero))
            if self.where == "advantages"
            else super().advantages(batch)
        )

    def loss(self, batch: Batch, new: PolicyOutputs) -> Any:
        zero = new.logprobs - new.logprobs
        return {"policy": (-batch.advantages * zero / zero, "token")}, {}


@dataclass(kw_only=True)
class ForgetsItsParents(GRPO):
    def state_dict(self) -> dict[str, Any]:
        return {}


@dataclass(kw_only=True)
class KeepsATensor(Reinforce):
    def state_dict(self) -> dict[str, Any]:
        return {"mean": torch.zeros(2)}


@dataclass(kw_only=True)
class ForgetsItsState(Reinforce):
    seen: int = field(default=3, init=False)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "id": id(self)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (LooksAtItsMicroBatch(group_size=4), "computed row by row differs"),
        (LooksAtThePadding(group_size=4), "differs"),
        (WritesIntoItsBatch(group_size=4), "writes into the column 'rewards'"),
        (WritesIntoTheScores(group_size=4), "writes into the column 'score'"),
        (DividesByNothing(group_size=4), "the loss has a gradient that is not finite"),
        (DividesByNothing(group_size=4, where="advantages"), r"\.advantages gives advantages that are not finite"),
        (ForgetsItsParents(group_size=4), r"does not take what state_dict returned .* super\(\)\.state_dict"),
        (KeepsATensor(), "state_dict\\(\\) is no plain JSON"),
        (ForgetsItsState(), "does not take over"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_it_finds_what_breaks_the_contract(algorithm: Algorithm, said: str) -> None:
    with pytest.raises(LmgymError, match=said):
        check_algorithm(algorithm)


@dataclass(kw_only=True)
class OneForEachRow(Reinforce):
    """Advantages, a term and a metric with one number for each row."""

    def advantages(self, batch: Batch) -> Batch:
        return batch.replace(advantages=(batch.score - batch.score.mean())[:, None])

    def loss(self, batch: Batch, new: PolicyOutputs) -> Any:
        weight = batch.require("advantages").sum(1)
        mean = (new.logprobs * batch.actions).sum(1) / batch.actions.sum(1)
        return {"policy": (-(weight * mean)[:, None], "sequence")}, {"mean": mean[:, None]}


@dataclass(kw_only=True)
class TellsWhatItSaw(Reinforce):
    def before_minibatch(self, batch: Batch) -> Batch:
        self.seen = len(batch)
        return batch

    def metrics(self, batch: Batch) -> dict[str, float]:
        return {"seen": self.seen}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [OneForEachRow(), TellsWhatItSaw()], ids=lambda value: type(value).__name__)
def test_it_passes_what_keeps_the_contract(algorithm: Algorithm) -> None:
    assert "keeps its contract" in check_algorithm(algorithm)


# Losses over the whole batch


@dataclass(kw_only=True)
class WholeGRPO(GRPO):
    """GRPO's loss, asked for at once."""

    def batch_loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Mapping[str, Tensor], Mapping[str, float]]:
        terms, _ = self.loss(batch, new)
        counts, total = tokens_of_episode(batch.actions, batch.episode), totals(batch.actions, batch.episode)
        weight = {how: weights(how, batch.actions, counts, total) for _, how in terms.values()}
        summed = {name: (weight[how] * term).sum() for name, (term, how) in terms.items()}
        return summed, {"seen": float(len(batch))}


@dataclass(kw_only=True)
class HighestEntropies(GRPO):
    """The example of `Algorithm.batch_loss`, with the entropies trained as well."""

    @property
    def requirements(self) -> Any:
        return replace(super().requirements, entropy=True)

    def batch_loss(self, batch: Batch, new: PolicyOutputs) -> tuple[Mapping[str, Tensor], Mapping[str, float]]:
        entropies = new.require("entropy")
        chosen = batch.actions & (entropies.detach() >= entropies.detach()[batch.actions].median())
        bonus = -0.1 * masked_mean(entropies, batch.actions)
        return {"policy": masked_mean(-batch.require("advantages") * new.logprobs, chosen), "entropy": bonus}, {}


@functools.cache
def prepared() -> tuple[Any, Batch]:
    policy = models.with_value_head(in_double())
    batch = models.batch_of(models.episodes(7, groups=4))
    return policy, models.prepared(batch, GRPO(group_size=4), policy)


def in_double() -> Any:
    return Policy(models.in_double(models.llama()), models.tokenizer(), compute=torch.float64)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("reduction", ["token", "sequence", "constant"])
def test_a_loss_of_the_whole_batch_has_the_gradient_of_the_same_loss_by_tokens(first: bool, reduction: Any) -> None:
    """Its coefficients pass through fp32 columns, hence the tolerance: 2^-23 for each, and the sums are in fp64."""
    policy, batch = prepared()
    settings = {"group_size": 4, "reduction": reduction}
    usual, metrics = models.gradient(GRPO(**settings), policy, batch, first)
    whole, found = models.gradient(WholeGRPO(**settings), policy, batch, first)
    assert float(usual.norm()) > 0
    assert models.relative(usual, whole) < 1e-6
    # Rounded to fp32, a log-probability is off by 2^-24 of itself, and so is a ratio by as much times its size.
    said, old, credit = batch.require("logprobs_sampler"), batch.require("logprobs_old"), batch.require("advantages")
    ratio = float((old - said).abs().max().exp()) + 1.0
    near = 4 * 2.0**-23 * ratio * float(credit.abs().max()) * (1.0 + float(old.abs().max()))
    assert abs(found["loss/policy"] - metrics["loss/policy"]) < near
    assert found["seen"] == len(batch)


def test_a_loss_over_quantiles_does_not_depend_on_the_cut() -> None:
    policy, batch = prepared()
    usual, metrics = models.gradient(HighestEntropies(group_size=4), policy, batch)
    small = in_double()
    small.value_head, small.tokens_per_forward = policy.value_head, 1
    rows, _ = models.gradient(HighestEntropies(group_size=4), small, batch)
    assert len(small.micro_batches(batch)) > 4
    assert models.relative(usual, rows) < 1e-6
    assert metrics["entropy"] > 0


@pytest.mark.slow
def test_own_losses_of_the_whole_batch_keep_the_contract() -> None:
    said = check_algorithm(WholeGRPO(group_size=4))
    assert said.startswith("WholeGRPO keeps its contract for 16 answers to 4 prompts: the gradient is the same")
    check_algorithm(HighestEntropies(group_size=4))
    assert lmgym.check_algorithm is check_algorithm
    assert WholeGRPO().whole_batch and not GRPO().whole_batch
