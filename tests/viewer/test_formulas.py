"""What the page says of a loss is what the algorithm computes: each formula against `loss`, each push against its
gradient."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmgym.algorithms.base import Algorithm
from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.algorithms.grpo.former import in_former_keys
from lmgym.batch import Batch, PolicyOutputs
from lmgym.config.build import plain
from lmgym.core import registry
from lmgym.logs.traces.trace import TraceEpisode, TraceRow, TraceStep, TraceTurn
from lmgym.viewer.arithmetic import compute, names_in
from lmgym.viewer.explain import constant, explanation, push_of, symbol_values
from lmgym.viewer.formulas import FAMILIES
from tests.family import grpo

KL = {"kl_coefficient": 0.3, "kl_in": "loss"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {}),
    ("grpo", {"dual_clip": 1.2, "scale_rewards": "batch"}),
    ("grpo", {**KL, "entropy_coefficient": 0.01, "squared_log_ratio_coefficient": 0.2}),
    ("grpo", {**KL, "kl_estimator": "k2", "importance_cap": 1.1}),
    *(("grpo", {"preset": name}) for name in ("paper", "dr_grpo", "dapo", "cispo", "sapo", "dppo")),
    *(("grpo", {"preset": name}) for name in ("icepop", "gspo_token", "vespo", "ce_gppo", "ipo_mask", "gpg", "opo")),
    ("grpo", {"importance_floor": 0.95, "mismatch_bound": 1.1, "off_policy_threshold": 0.05}),
    ("grpo", {"objective": "dppo", "ratio_to": "sampler", **KL}),
    ("replay", {}),
    ("replay", {"truncate": 1.1, **KL}),
    ("ppo", {"entropy_coefficient": 0.01}),
    ("nlpo", {}),
    ("a2c", {"whiten": "batch", **KL}),
    ("reinforce", {"baseline": "scst"}),
    ("reinforce", {"baseline": "mean", **KL}),
    ("rloo", {}),
    ("reinforce_pp", {"baseline": "group", "group_size": 3, **KL}),
    ("reinforce_stable", {}),
    ("raft", {"group_size": 3}),
    ("distill", {"teacher": "a", "gamma": 0.5}),
    ("gkd", {"teacher": "a", "reward_coefficient": 0.5, "group_size": 3}),
]


def made(name: str, fields: dict[str, Any]) -> Algorithm:
    kind = registry.get("algorithm", name)
    return grpo(kind=kind, **fields) if issubclass(kind, GRPO) else kind(**fields)


def random_batch(seed: int = 0) -> tuple[Batch, PolicyOutputs]:
    """Two groups of three answers of up to four tokens in one or two turns, and what the policy says after a step."""
    generator = torch.Generator().manual_seed(seed)

    def numbers() -> Tensor:
        return torch.rand(6, 6, generator=generator, dtype=torch.float64)

    actions = torch.tensor([[0, 1, 1, 0, 1, 1], [0, 1, 1, 1, 0, 0]] * 3).bool()
    turn = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0]] * 3)
    old = -2 * numbers()
    batch = Batch(
        tokens=torch.ones(6, 6).long(), mask=torch.ones(6, 6).bool(), actions=actions, rewards=numbers() * actions,
        score=torch.rand(6, generator=generator, dtype=torch.float64), episode=torch.arange(6),
        group=torch.tensor([0, 0, 0, 1, 1, 1]), version=torch.zeros(6).long(), terminated=torch.ones(6).bool(),
        limit=5, turn=turn, logprobs_sampler=old + 0.2 * numbers(), logprobs_old=old, logprobs_ref=old - numbers(),
        logprobs_teacher=old + numbers(), values=numbers(), last_values=torch.zeros(6).double(),
        baseline=torch.rand(6, generator=generator, dtype=torch.float64), squared_probabilities=numbers(),
    )  # fmt: skip
    now = (old + 1.2 * (numbers() - 0.5)).requires_grad_()
    return batch, PolicyOutputs(logprobs=now, entropy=numbers(), values=batch.values, divergence=numbers())


def row_of(batch: Batch, new: PolicyOutputs, columns: dict[str, Tensor], number: int) -> TraceRow:
    """A row as training/tracing.py leaves it, in fp64 so that only the formulas differ."""
    names = ("advantages", "returns", "values", "logprobs_old", "logprobs_ref", "logprobs_teacher", "logprobs_sampler")
    known = {name: column for name in names if (column := getattr(batch, name)) is not None}
    known |= {"logprobs": new.logprobs, "entropy": new.entropy, **columns}
    places = batch.actions[number].nonzero()[:, 0].numpy()
    own = {name: column.detach().broadcast_to(6, 6)[number].numpy()[places] for name, column in known.items()}
    turns = batch.turn[number].numpy()[places]
    return TraceRow(tokens=np.ones(6, np.int32), actions=places.astype(np.int32), turn=turns, columns=own)


def close(one: Any, other: Any) -> bool:
    return np.allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("name", "fields"), CASES)
def test_the_formulas_are_those_of_the_loss(name: str, fields: dict[str, Any]) -> None:
    algorithm = made(name, fields)
    batch, new = random_batch()
    batch = algorithm.advantages(batch)
    terms, metrics = algorithm.loss(batch, new)
    numbers_of = in_former_keys(plain(algorithm)) | {"limit": batch.limit}
    described = FAMILIES[name].terms(in_former_keys(plain(algorithm)))
    assert [term.name for term in described] == [*terms] or {term.name for term in described} == {*terms}
    columns = {f"loss/{own}": term for own, (term, _) in terms.items()} | dict(metrics)
    for term in described:
        total = terms[term.name][0].sum() + 0 * new.logprobs.sum()  # an entropy or a value has no gradient here
        slope = torch.autograd.grad(total, new.logprobs, retain_graph=True)[0]
        for number in range(6):
            row = row_of(batch, new, columns, number)
            values: dict[str, Any] = dict(symbol_values(row, numbers_of, np.bincount(row.turn)))
            numbers = {own: constant(own, term, numbers_of) for own in names_in(term.formula)}
            values |= {own: value for own, value in numbers.items() if value is not None}
            values |= {"c": values["c_entropy"]} if term.name == "entropy" else {}
            assert close(compute(term.formula, values), row.columns[f"loss/{term.name}"]), term
            pushed = push_of(term, values, numbers_of)
            if term.push:
                assert pushed is not None and close(pushed, -slope[number].numpy()[row.actions]), term


@pytest.mark.parametrize("preset", ["gspo", "gmpo", "luspo"])
def test_the_ratio_of_a_sequence_is_pushed_as_a_whole(preset: str) -> None:
    algorithm = made("grpo", {"preset": preset, "clip_high": 10.0, "clip_low": 0.9})
    batch, new = random_batch()
    batch = algorithm.advantages(batch)
    terms, metrics = algorithm.loss(batch, new)
    # The mean over a row's tokens, as reduction: sequence weighs them, is what a token's own log-probability moves.
    slope = torch.autograd.grad((terms["policy"][0] * batch.actions).sum(), new.logprobs)[0]
    (term,) = FAMILIES["grpo"].terms(in_former_keys(plain(algorithm)))
    for number in range(6):
        row = row_of(batch, new, dict(metrics), number)
        pushed = push_of(
            term,
            symbol_values(row, in_former_keys(plain(algorithm)), np.bincount(row.turn)),
            in_former_keys(plain(algorithm)),
        )
        assert close(pushed, -slope[number].numpy()[row.actions])


CREDIT: Sequence[tuple[str, dict[str, Any]]] = [
    ("grpo", {}), ("grpo", {"scale_rewards": "group"}), ("grpo", {"scale_rewards": "batch"}), ("rloo", {}),
    ("reinforce", {"baseline": "none"}), ("reinforce", {"baseline": "mean"}), ("reinforce", {"baseline": "scst"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields"), CREDIT)
def test_the_formula_of_an_advantage_gives_it(name: str, fields: dict[str, Any]) -> None:
    algorithm = made(name, fields)
    batch, new = random_batch()
    batch = algorithm.advantages(batch)
    columns = {"index": list(range(6)), "group": batch.group.tolist(), "score": batch.score.tolist()}
    trace = TraceStep(
        stage=0, stage_name="rl", step=0, algorithm=name, fields=in_former_keys(plain(algorithm)),
        episodes=columns | {"selected": [True] * 6},
    )  # fmt: skip
    for number in range(6):
        row = row_of(batch, new, {}, number)
        episode = TraceEpisode(
            index=number, group=columns["group"][number], example={}, messages=[], score=columns["score"][number],
            reward_components={}, baseline=float(batch.baseline[number]), terminated=True, error="", version=0,
            selected=True, turns=[TraceTurn(text="a"), TraceTurn(text="b")], rows=[row],
        )  # fmt: skip
        credit = explanation(trace, episode)["credit"]
        value = compute(credit["formula"], {symbol["name"]: symbol["value"] for symbol in credit["symbols"]})
        assert close(value, row.columns["advantages"][0])


def test_every_algorithm_that_is_built_in_has_a_family() -> None:
    assert set(FAMILIES) == set(registry.BUILTIN["algorithm"])


@pytest.mark.parametrize("formula", ["__import__('os')", "r.real", "[r]", "r if r else 1", "lambda: 1", "abs(r)"])
def test_a_formula_is_arithmetic_and_nothing_else(formula: str) -> None:
    with pytest.raises((ValueError, KeyError)):
        compute(formula, {"r": 1.0})
