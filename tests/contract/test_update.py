"""What the loop asks of an update: the driver that an algorithm names, the algorithm's own metrics, one clear error."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lmgym.algorithms.base import Algorithm
from lmgym.algorithms.distill import Distill
from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.algorithms.grpo.group_relative import GroupRelative
from lmgym.algorithms.grpo.surrogate import Clip
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
from tests import models, runs


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


# What an algorithm's methods return


@dataclass(kw_only=True)
class Returns(GroupRelative):
    """One of its methods returns what it should not."""

    method: ClassVar[str]
    value: ClassVar[Callable[..., Any]]
    group_size: int = 4

    def loss(self, batch: Batch, new: PolicyOutputs) -> Any:
        return {"policy": (-batch.require("advantages") * new.logprobs, "token")}, {}


class Whole(Returns):
    def batch_loss(self, batch: Batch, new: PolicyOutputs) -> Any:
        return {"policy": term(batch, new).sum()}, {}


def term(batch: Batch, new: PolicyOutputs) -> Any:
    return -batch.require("advantages") * new.logprobs


MISTAKES: list[tuple[type[Returns], str, Callable[..., Any], str]] = [
    (Returns, "loss", lambda own, b, n: None, "loss returned None; return two dictionaries"),
    (Returns, "loss", lambda own, b, n: {"policy": (term(b, n), "token")}, "loss returned a dict; return two"),
    (Returns, "loss", lambda own, b, n: ({}, {}), "loss returned nothing to minimise"),
    (Returns, "loss", lambda own, b, n: ({"policy": term(b, n)}, {}), "the term 'policy' as a tensor .* its reduction"),
    (
        Returns,
        "loss",
        lambda own, b, n: ({"policy": (term(b, n).mean(), "token")}, {}),
        r"a tensor \[\] of float\d+, not",
    ),
    (Returns, "loss", lambda own, b, n: ({"policy": (term(b, n).sum(1), "sequence")}, {}), "a number for each token"),
    (Returns, "loss", lambda own, b, n: ({"policy": (term(b, n), "mean")}, {}), "reduction 'mean'; write 'token' or"),
    (Returns, "loss", lambda own, b, n: ({"policy": (term(b, n).detach(), "token")}, {}), "does not depend on what"),
    (Returns, "loss", lambda own, b, n: ({"p": (term(b, n), "token")}, {"x": 1.0}), "the metric 'x' as a float"),
    (
        Returns,
        "loss",
        lambda own, b, n: ({"p": (term(b, n), "token")}, {"tokens": term(b, n)}),
        "metric 'tokens', and its",
    ),
    (Returns, "advantages", lambda own, b: None, "advantages returned None; return the batch"),
    (Returns, "advantages", lambda own, b: b.replace(advantages=b.score), r"not \[N T\] .* batch\.per_token"),
    (
        Returns,
        "advantages",
        lambda own, b: b.replace(advantages=b.actions.long()),
        r"of torch\.int64; make them floating",
    ),
    (Returns, "before_scoring", lambda own, b: None, "before_scoring returned None"),
    (Returns, "before_minibatch", lambda own, b: None, "before_minibatch returned None"),
    (Returns, "active", lambda own, b: [True] * len(b), "active returned a list; return a tensor of bool"),
    (Returns, "metrics", lambda own, b: None, "metrics returned None; return a dictionary of numbers"),
    (Returns, "metrics", lambda own, b: {"x": b.score}, r"metrics returned the metric 'x' as a tensor \[12\]"),
    (Returns, "metrics", lambda own, b: {"gradient_norm": 1.0}, "metric 'gradient_norm', and its driver has"),
    (Whole, "batch_loss", lambda own, b, n: term(b, n).mean(), r"batch_loss returned a tensor \[\]"),
    (
        Whole,
        "batch_loss",
        lambda own, b, n: ({"policy": term(b, n)}, {}),
        "the loss 'policy' as a tensor .* return one",
    ),
    (Whole, "batch_loss", lambda own, b, n: ({"policy": 0.5}, {}), "the loss 'policy' as a float; return one number"),
    (
        Whole,
        "batch_loss",
        lambda own, b, n: ({"policy": term(b, n).sum()}, {"sampler_logprob_gap": 0.0}),
        "metric 'sampler_logprob_gap', and its",
    ),
]


@pytest.mark.parametrize(("base", "method", "value", "said"), MISTAKES)
def test_what_a_method_should_not_return_is_one_sentence(
    base: type[Returns], method: str, value: Callable[..., Any], said: str
) -> None:
    own = dataclass(kw_only=True)(type("Own", (base,), {method: value, "__annotations__": {}}))
    with pytest.raises(LmgymError, match=rf"^Own(\.| has a ).*{said}"):
        updated(own())


@dataclass(kw_only=True)
class OneForEachRow(Returns):
    def advantages(self, batch: Batch) -> Batch:
        return batch.replace(advantages=super().advantages(batch).require("advantages").sum(1, keepdim=True))


def test_one_number_for_each_row_is_one_for_each_of_its_tokens() -> None:
    class OverTokens(OneForEachRow):
        def advantages(self, batch: Batch) -> Batch:
            return batch.replace(advantages=batch.per_token(super().advantages(batch).require("advantages")[:, 0]))

    (rows, of_rows), (tokens, of_tokens) = updated(OneForEachRow()), updated(OverTokens())
    assert of_rows == of_tokens and rows.require("advantages").equal(tokens.require("advantages"))


def test_a_term_for_each_row_weighs_as_one_for_each_of_its_tokens() -> None:
    class OverTokens(Returns):
        def loss(self, batch: Batch, new: PolicyOutputs) -> Any:
            return {"policy": (term(batch, new), "sequence")}, {}

    class OverRows(Returns):
        def loss(self, batch: Batch, new: PolicyOutputs) -> Any:
            mean = (term(batch, new) * batch.actions).sum(1, keepdim=True) / batch.actions.sum(1, keepdim=True)
            return {"policy": (mean, "sequence")}, {}

    by_row, by_token = updated(OverRows())[1], updated(OverTokens())[1]
    assert by_row == pytest.approx(by_token, rel=1e-5)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda term: None, "term returned a NoneType; return the term"),
        (lambda term: term, "term returned a Tensor; return the term"),
        (lambda term: (term.mean(), {}), r"term returned a term of shape \[\], not one number"),
    ],
)
def test_a_surrogate_returns_a_number_for_each_token_and_metrics(returned: Callable[..., Any], said: str) -> None:
    class Own(Clip):
        def term(self, *given: Any) -> Any:
            return returned(super().term(*given)[0])

    with pytest.raises(LmgymError, match=rf"^Own\.{said}"):
        updated(GRPO(group_size=4, surrogate=Own()))


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        (GRPO(group_size=4, kl_coefficient=0.1), r"^GRPO needs a frozen model, .* no 'reference'; .*copies\.frozen"),
        (Distill(teacher="builtin:tiny"), "^Distill needs a frozen model, .* no 'teacher'; .*load_policy"),
    ],
)
def test_a_frozen_model_that_nobody_gave_is_named(algorithm: Algorithm, said: str) -> None:
    with pytest.raises(LmgymError, match=said):
        updated(algorithm)


@pytest.mark.parametrize("name", ["reward", "step", "learning_rate"])
def test_a_metric_does_not_take_the_place_of_what_a_step_record_holds(name: str, tmp_path: Path) -> None:
    algorithm = {"name": "tests.contract.test_update:Named", "group_size": 2, "metric": name}
    with pytest.raises(LmgymError, match=f"^Named has a metric '{name}', and the step's record has a '{name}' already"):
        runs.run(tmp_path / "run", algorithm=algorithm, steps=1, prompts_per_step=1)


@dataclass(kw_only=True)
class Named(GRPO):
    metric: str = "own"

    def metrics(self, batch: Batch) -> dict[str, float]:
        return {self.metric: 77.0}
