"""What the loop asks of an update: the driver that an algorithm names, the algorithm's own metrics, one clear error."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.batch import Batch, PolicyOutputs
from lmgym.config.schema import Config, Stage
from lmgym.config.together import check_together
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.models.policy import Policy
from lmgym.updates.first_order import first_order
from lmgym.updates.optimizer import OptimizerSection, make_optimizer
from lmgym.updates.prepare import prepare
from lmgym.updates.update import update
from tests import models


@dataclass(kw_only=True)
class Mine(GRPO):
    group_size: int = 4
    driver = "mine"

    def metrics(self, batch: Batch) -> dict[str, float]:
        return {**super().metrics(batch), "mine/rows": float(len(batch))}


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    registry._registered["driver"].pop("mine", None)


def updated(algorithm: Any) -> tuple[Batch, dict[str, float]]:
    policy = Policy(models.gpt2(), models.tokenizer())
    batch = prepare(models.batch_of(models.episodes(0)), policy, {}, algorithm)
    optimizer = make_optimizer(algorithm, policy, OptimizerSection(learning_rate=1e-2))
    return batch, update(algorithm, policy, batch, optimizer)


def test_a_driver_of_ones_own_and_the_algorithms_metrics() -> None:
    @registry.register("driver", "mine")
    def mine(*arguments: Any) -> dict[str, float]:
        return first_order(*arguments) | {"mine/driver": 1.0}

    batch, metrics = updated(Mine())
    assert metrics["mine/driver"] == metrics["updates"] == 1 and metrics["mine/rows"] == len(batch)
    assert metrics["gradient_norm"] == updated(GRPO(group_size=4))[1]["gradient_norm"]


def test_an_unknown_driver_is_refused_with_the_valid_names() -> None:
    with pytest.raises(LmgymError, match=r"unknown driver 'mine'; Valid: first_order, trust_region"):
        updated(Mine())
    with pytest.raises(LmgymError, match="unknown driver 'mine'"):  # in a run, before anything begins
        stage = Stage(task={"name": "arithmetic"}, rewards={"final_answer": 1.0}, algorithm=Mine())
        check_together(Config(stages=[stage]))


def test_the_trust_region_is_for_trpo() -> None:
    algorithm = Mine()
    algorithm.driver = "trust_region"
    with pytest.raises(LmgymError, match="reads TRPO's fields, and Mine has none; let it extend TRPO"):
        updated(algorithm)


def test_a_column_that_nobody_filled_in_is_named() -> None:
    batch = models.batch_of(models.episodes(0))
    with pytest.raises(LmgymError, match="Batch has no column 'advantages'"):
        batch.require("advantages")
    with pytest.raises(LmgymError, match="PolicyOutputs has no column 'entropy'"):
        PolicyOutputs(batch.rewards).require("entropy")


@pytest.mark.parametrize("tokens_per_forward", [4096, 16])
def test_what_an_update_reports_are_means_over_the_tokens_of_the_whole_step(tokens_per_forward: int) -> None:
    """Entropy and the sampler's gap, from the policy before the step; however the rows are cut."""
    algorithm = GRPO(group_size=4, entropy_coefficient=0.1)
    policy = Policy(models.gpt2(), models.tokenizer(), tokens_per_forward=tokens_per_forward)
    batch = prepare(models.batch_of(models.episodes(0)), policy, {}, algorithm)
    said = policy.compute_logprobs_no_grad(batch, entropy=True)
    gap = (said.logprobs - batch.require("logprobs_sampler")).abs()[batch.actions].mean()
    entropy = said.require("entropy")[batch.actions].mean()
    metrics = update(algorithm, policy, batch, make_optimizer(algorithm, policy, OptimizerSection(learning_rate=1e-2)))
    assert metrics["entropy"] == pytest.approx(float(entropy), rel=1e-5)
    assert metrics["sampler_logprob_gap"] == pytest.approx(float(gap), rel=1e-5)
