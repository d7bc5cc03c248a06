"""`lmgym why`: what moved an answer; sums, order beside groups that are really left out, refusals."""

import copy
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from lmgym.algorithms.dpo import DPO
from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.batch import Batch, collate
from lmgym.cli.main import main
from lmgym.core.errors import LmgymError
from lmgym.experiments.what_if.question import ask
from lmgym.experiments.why.influence import Influences, active_where, influences
from lmgym.experiments.why.why import Why, why
from lmgym.models.policy import Policy
from lmgym.types import Episode, Example, Turn
from lmgym.updates.first_order import optimizer_step
from lmgym.updates.optimizer import Optimizer, OptimizerSection
from lmgym.updates.prepare import prepare
from tests import models, runs
from tests.runs import complaint

ALGORITHM = {"name": "grpo", "group_size": 4, "kl_coefficient": 0.0}


def row(prompt: list[int], answer: list[int], group: int = 0, index: int = 0, score: float = 0.0) -> Episode:
    turn = Turn(prompt, answer, [-1.0] * len(answer), reward=score)
    return Episode(Example(f"x/{group}", "?"), group, index, [turn], score=score)


def stand() -> tuple[Policy, GRPO, Batch, Optimizer, Batch]:
    """A policy with moments of two steps, a batch of four groups of which the last has equal scores, and an answer that
    the second group's winner gives to the same prompt."""
    policy = Policy(models.llama(0), models.tokenizer())
    episodes = [
        row([5 + group, 6], [20 + group, 30 + answer], group, 3 * group + answer, float(answer == 0 and group < 3))
        for group in range(4)
        for answer in range(3)
    ]
    algorithm = GRPO(group_size=3, kl_coefficient=0.0)
    optimizer = Optimizer(policy.parameters(), OptimizerSection(learning_rate=1e-4, max_gradient_norm=0.1))
    optimizer.set_step(10, 100)
    batch = prepare(collate(episodes), policy, {}, algorithm)
    for _ in range(2):
        optimizer_step(algorithm, policy, batch, optimizer, first=True)
    return (
        policy,
        algorithm,
        prepare(collate(episodes), policy, {}, algorithm),
        optimizer,
        collate([row([6, 6], [21, 30])]),
    )


def said(policy: Policy, asked: Batch) -> float:
    return float(policy.compute_logprobs_no_grad(asked).logprobs.double().sum())


def test_groups_momentum_and_decay_add_up_to_what_a_small_step_does() -> None:
    """Curvature is what first order leaves out: with a hundredth of the rate it is a hundredth of the change."""
    policy, algorithm, batch, optimizer, asked = stand()
    for group in optimizer.torch.param_groups:
        group["lr"] *= 0.01
    before, weights = said(policy, asked), [p.detach().clone() for p in policy.parameters()]
    found = influences(algorithm, policy, batch, optimizer, asked)
    assert all(torch.equal(p, own) for p, own in zip(policy.parameters(), weights, strict=True))
    assert all(p.grad is None for p in policy.parameters())
    optimizer_step(algorithm, policy, batch, optimizer, first=True)
    assert found.preconditioned and found.momentum != 0 != found.decay
    assert said(policy, asked) - before == pytest.approx(found.total, rel=0.05)
    assert found.groups[3] == 0.0  # equal scores teach nothing


def test_tokens_add_up_to_the_answer() -> None:
    """The gradient of a sum is the sum of the gradients. Each number is a float32 sum of half a million terms."""
    policy, algorithm, batch, optimizer, asked = stand()
    whole = influences(algorithm, policy, batch, optimizer, asked)
    places = asked.actions.nonzero()
    each = [
        influences(algorithm, policy, batch, optimizer, asked.replace(actions=torch.zeros_like(asked.actions).index_put(
            (place[:1], place[1:]), torch.tensor(True))))
        for place in places
    ]  # fmt: skip
    assert len(each) == 2
    for group, influence in whole.groups.items():
        assert sum(one.groups[group] for one in each) == pytest.approx(influence, rel=1e-4, abs=1e-9)
    assert sum(one.momentum for one in each) == pytest.approx(whole.momentum, rel=1e-4)


def test_the_group_that_gives_the_answer_raises_it_most() -> None:
    policy, algorithm, batch, optimizer, asked = stand()
    found = influences(algorithm, policy, batch, optimizer, asked)
    assert max(found.groups, key=lambda group: found.groups[group]) == 1 and found.groups[1] > 0


def test_an_influence_is_what_leaving_the_group_out_changes() -> None:
    """The other groups with the same weights, from the same moments: the sign of each is right, and so is the order."""
    policy, algorithm, batch, optimizer, asked = stand()
    found = influences(algorithm, policy, batch, optimizer, asked)
    weights, moments = copy.deepcopy(policy.model.state_dict()), copy.deepcopy(optimizer.torch.state_dict())

    def after(left_out: int | None) -> float:
        policy.model.load_state_dict(weights)
        optimizer.torch.load_state_dict(copy.deepcopy(moments))
        part = active_where(algorithm, lambda group: group != (-1 if left_out is None else left_out))
        optimizer_step(part, policy, batch, optimizer, first=True)
        return said(policy, asked)

    whole = after(None)
    real = {group: whole - after(group) for group in range(3)}
    order = sorted(real, key=lambda group: real[group])
    assert order == sorted(real, key=lambda group: found.groups[group])
    assert all((real[group] > 0) == (found.groups[group] > 0) for group in real)


@pytest.mark.parametrize("name", ["rmsprop", "adamw"])
def test_other_optimizers_say_that_the_scale_is_theirs(name: Any) -> None:
    policy, algorithm, batch, _, asked = stand()
    optimizer = Optimizer(policy.parameters(), OptimizerSection(learning_rate=1e-4, name=name))
    assert influences(algorithm, policy, batch, optimizer, asked).preconditioned == (name == "adamw")


def test_what_is_no_sum_over_groups_is_refused() -> None:
    policy, _, batch, optimizer, asked = stand()
    with pytest.raises(LmgymError, match=r"the step of DPO is no sum over its groups"):
        influences(DPO(), policy, batch, optimizer, asked)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("why") / "run"
    return runs.run(
        folder, algorithm=ALGORITHM, steps=4, checkpoint={"every": 2, "keep": 4}, logs={"traces": "all"},
        optimizer={"learning_rate": 1e-3, "warmup": 0}, evaluation={"every": 0, "examples": 4},
    )  # fmt: skip


def test_a_run_is_asked_where_its_answer_changed_most(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = why(ask(run, []))
    assert isinstance(found, Why) and [point.steps for point in found.points] == [0, 2, 4]
    changes = [abs(one.logprob - other.logprob) for one, other in pairwise(found.points)]
    assert found.step == (0 if changes[0] >= changes[1] else 2)
    assert len(found.groups) == 4 and isinstance(found.parts, Influences)
    assert sum(group.influence for group in found.groups) == pytest.approx(sum(found.parts.groups.values()))
    assert all(len(group.answers) == 4 for group in found.groups)
    assert found.unlike == [] and found.reason == ""
    assert main(["why", str(run), "--step", "2", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["step"] == 1 and len(tree["groups"]) == 4 and tree["answer"] == found.example.references[0]
    assert main(["why", str(run), "--prompt", "4 + 4", "--answer", "8"]) == 0
    out = capsys.readouterr().out
    assert "example asked, answer '8'" in out and "by first order" in out
    assert main(["why", str(run), "--answer", "12", "--token", "2", "--step", "2"]) == 0
    assert "answer '12' (its token '2')" in capsys.readouterr().out


def test_what_cannot_be_asked_is_a_sentence(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "the run's data have no example 'none'" in complaint(capsys, "why", run, "--example", "none")
    assert "say which answer is meant: --answer TEXT" in complaint(capsys, "why", run, "--prompt", "4 + 4")
    said = complaint(capsys, "why", run, "--answer", "12", "--token", "9")
    assert "--token is 9, and the answer has the tokens 1 to 3: '1', '2'" in said
    assert "has no step 9" in complaint(capsys, "why", run, "--step", "9")
    assert "prompt and answer have" in complaint(capsys, "why", run, "--answer", "8" * 200)
    other = runs.run(tmp_path / "dpo", algorithm="dpo", task=runs.GIVEN["dpo"], rewards=None, steps=1)
    assert "the step of DPO is no sum over its groups" in complaint(capsys, "why", other)
