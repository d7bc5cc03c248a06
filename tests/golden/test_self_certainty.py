"""Self-certainty (credit self_certainty), against the relative entropy of full distributions, written out in numpy."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from lmgym.algorithms.requirements import Requirements
from lmgym.core.errors import LmgymError
from lmgym.functional.answer_means import shared_by_equals
from lmgym.functional.distribution_sums import SUMS
from lmgym.models.policy import Policy
from lmgym.updates.prepare import prepare
from tests import models, runs
from tests.family import grpo
from tests.rounding import rounding

NAMES = tuple(SUMS)


def policy() -> Policy:
    return Policy(models.in_double(models.llama()), models.tokenizer(), compute=torch.float64)


def divergences(own: Policy, batch: Any) -> np.ndarray:
    """KL(U || p) at each action, the sum of U log(U / p), from a full pass over the text before it alone."""
    found = np.zeros(batch.tokens.shape)
    for row, column in batch.actions.nonzero().tolist():
        with torch.no_grad():
            logits = own.model(batch.tokens[row : row + 1, :column]).logits[0, -1].numpy() / batch.temperature
        kept = np.ones(len(logits), bool)
        if batch.stop_excluded is not None and batch.stop_excluded[row, column]:
            kept[list(batch.stop_ids)] = False
        share = np.exp(logits[kept]) / np.exp(logits[kept]).sum()
        uniform = 1 / kept.sum()
        found[row, column] = (uniform * np.log(uniform / share)).sum()
    return found


@pytest.mark.parametrize(("minimum", "temperature"), [(0, 1.0), (2, 0.7)])
def test_the_sums_are_those_of_full_distributions(minimum: int, temperature: float) -> None:
    """In fp64 259 terms of up to some tens are added, so they agree to 1e-10 of themselves."""
    own, batch = policy(), models.batch_of(models.episodes(3, minimum=minimum), temperature=temperature)
    found = own.compute_logprobs(batch, sums=NAMES).require("distribution_sums")[..., NAMES.index("uniform_divergence")]
    wanted = divergences(own, batch)
    assert found.numpy() == pytest.approx(wanted, rel=1e-10, abs=1e-12)
    assert wanted[batch.actions.numpy()].std() > 0.05


def test_a_certain_token_is_far_from_uniform_and_a_uniform_one_is_not() -> None:
    """By hand, in nats: of probabilities .7, .2, .1 it is -log 3 - (log .7 + log .2 + log .1) / 3. In fp64 some eight
    roundings of numbers below 6.2 are at most 1e-14."""
    of, some = SUMS["uniform_divergence"].of, torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64).log()
    assert of(some) == pytest.approx(0.32428703)
    even = torch.tensor([[5.0, 5.0, 5.0], [5.0, 5.0, -torch.inf]], dtype=torch.float64)
    assert of(even).tolist() == pytest.approx([0.0, 0.0], abs=1e-14)
    assert of(torch.tensor([[9.0, 0.0, 0.0]])) > of(torch.tensor([[3.0, 0.0, 0.0]]))
    assert SUMS["squared_probabilities"].of(some) == pytest.approx(0.54)


@pytest.mark.parametrize("coefficient", [1.0, 0.25])
@pytest.mark.parametrize("compared_by", ["group", "leave_one_out"])
def test_advantages_are_those_of_numpy(coefficient: float, compared_by: str) -> None:
    """Score plus coefficient times the mean divergence, less the mean of the group (or of the others); divided by the
    unbiased deviation + 1e-4 where the group's scale says so, the default (arXiv 2402.03300, section 4.1.2)."""
    credit = {"name": "self_certainty", "coefficient": coefficient}
    algorithm = grpo(group_size=4, credit=credit | ({} if compared_by == "group" else {"compared_by": compared_by}))
    own, batch = policy(), models.batch_of(models.episodes(5, restarts=True))
    prepared = prepare(batch, own, {}, algorithm)
    table, actions = divergences(own, batch), batch.actions.numpy()
    answers = {
        e: [row for row, one in enumerate(batch.episode.tolist()) if one == e] for e in set(batch.episode.tolist())
    }
    sure = {e: table[rows].sum() / actions[rows].sum() for e, rows in answers.items()}
    total = {e: float(batch.score[rows[0]]) + coefficient * sure[e] for e, rows in answers.items()}
    for e, rows in answers.items():
        group = np.array(
            [total[one] for one, others in answers.items() if batch.group[others[0]] == batch.group[rows[0]]]
        )
        wanted = (total[e] - group.mean()) / (group.std(ddof=1) + 1e-4)
        if compared_by == "leave_one_out":
            wanted = total[e] - (group.sum() - total[e]) / (len(group) - 1)
        for row in rows:  # the columns of `prepare` are fp32
            assert prepared.require("advantages")[row][batch.actions[row]].numpy() == pytest.approx(wanted, rel=1e-4)
    logged = algorithm.metrics(prepared)["self_certainty"]
    assert logged == pytest.approx(table[actions].mean(), rel=rounding(int(actions.sum())))
    assert not prepared.require("advantages")[~batch.actions].any()


def test_equal_answers_earn_the_same_to_the_last_bit() -> None:
    """What a model says of equal answers differs by rounding, and a deviation of rounding errors would make advantages
    of order one of them."""
    own = models.episodes(1, groups=1, size=4)
    for episode in own:
        episode.turns = [dataclasses.replace(turn) for turn in own[0].turns]
        episode.score = 0.5
    batch = models.batch_of(own)
    noise = 1e-6 * torch.arange(len(batch))
    column = (2.0 + noise[:, None]) * batch.actions
    batch = batch.replace(distribution_sums=column[:, :, None], sum_names=("uniform_divergence",))
    algorithm = grpo(group_size=4, credit={"name": "self_certainty"})
    assert not algorithm.advantages(batch).require("advantages").any()
    different = batch.replace(tokens=batch.tokens + (torch.arange(len(batch)) == 2)[:, None])
    assert algorithm.advantages(different).require("advantages").any(1).all()
    tokens = torch.tensor([[5, 6], [5, 7], [5, 6], [5, 6]])
    mask = torch.tensor([[True, True], [True, False], [True, False], [True, True]])
    ids, group = torch.arange(4), torch.tensor([0, 0, 0, 1])
    shared = shared_by_equals(torch.tensor([1.0, 2.0, 4.0, 8.0]), tokens, mask, ids, group)
    assert shared.tolist() == [1.0, 3.0, 3.0, 8.0]


def test_any_cut_of_the_batch_gives_the_same_columns() -> None:
    own, batch = policy(), models.batch_of(models.episodes(8))
    whole = own.compute_logprobs_no_grad(batch, sums=NAMES).require("distribution_sums")
    own.tokens_per_forward = 1
    assert len(own.micro_batches(batch)) == len(batch)
    cut = own.compute_logprobs_no_grad(batch, sums=NAMES).require("distribution_sums")
    assert cut.numpy() == pytest.approx(whole.numpy(), rel=1e-6, abs=1e-7)  # fp64, written as fp32
    assert whole.shape == (*batch.tokens.shape, len(NAMES)) and not whole[~batch.actions].any()


def test_what_does_not_go_together_is_refused() -> None:
    for keys, why in (
        ({"compared_by": {"name": "each_reward"}}, "compared_by is each_reward, and self_certainty gives each answer"),
        ({"compared_by": {"name": "token_baseline"}}, "compared_by is token_baseline, and self_certainty gives"),
        ({"coefficient": 0.0}, r"algorithm\.credit\.coefficient"),
    ):
        with pytest.raises(LmgymError, match=why):
            grpo(group_size=4, credit={"name": "self_certainty", **keys})
    with pytest.raises(LmgymError, match="dynamic_sampling chooses groups by their rewards, and this credit pays"):
        grpo("dapo", group_size=4, credit={"name": "self_certainty"})
    with pytest.raises(LmgymError, match="there is no 'squared'; Valid: squared_probabilities, uniform"):
        Requirements(distribution_sums=("squared",))
    batch = models.batch_of(models.episodes(0))
    with pytest.raises(LmgymError, match="no column 'distribution_sums'"):
        batch.distribution_sum("uniform_divergence")
    with pytest.raises(LmgymError, match="no distribution sum 'uniform_divergence'"):
        batch.replace(distribution_sums=torch.zeros(1, 1, 1), sum_names=("other",)).distribution_sum(
            "uniform_divergence"
        )


def test_a_run_without_rewards_warns_once_and_trains(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from lmgym.logs.console import Console

    changes: dict[str, Any] = {"algorithm": {"name": "grpo", "group_size": 4, "credit": {"name": "self_certainty"}}}
    changes |= {"rewards": None, "steps": 2, "evaluation": {"metrics": {"final_answer": 0}}}
    folder = runs.run(tmp_path / "run", Console(), **changes)
    said = capsys.readouterr().out
    assert said.count("pays the policy for being sure, and not for being right") == 1
    steps = [record for record in runs.records(folder / "metrics.jsonl") if record["kind"] == "train"]
    assert len(steps) == 2 and all(one["self_certainty"] > 0 and one["gradient_norm"] > 0 for one in steps)
    assert "reward" not in steps[0]
    with pytest.raises(LmgymError, match=r"grpo reads the policy's whole distributions .*top_k, top_p and min_p cut"):
        runs.run(tmp_path / "none", **changes, sampling={"top_p": 0.9})
