"""XPO and Nash-MD against the papers' formulas (as TRL wrote them until 1.15), the mixture that Nash-MD's rival samples
from against plain forward passes, and GKD's mix of the student's and the data's texts."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import logsigmoid

from lmgym.algorithms.gkd import GKD
from lmgym.algorithms.nash_md import NashMD
from lmgym.algorithms.xpo import XPO
from lmgym.batch import Batch, PolicyOutputs, collate
from lmgym.core.errors import LmgymError
from lmgym.inference.base import Request, Sampling
from lmgym.inference.sampler import Sampler
from lmgym.models.load import load_policy
from lmgym.models.policy_section import PolicySection
from lmgym.rollouts.sources import answered_and_given
from lmgym.types import Episode, Example, Turn
from tests import rounding, runs

LENGTH = 3


def batch_of(scores: list[tuple[float, float]], rival: bool) -> Batch:
    """A group for each (score of the policy's answer, score of the rival's)."""
    episodes = []
    for group, (own, other) in enumerate(scores):
        for score in (own, other) if rival else (own,):
            turn = Turn([9], [5] * LENGTH)
            episodes.append(Episode(Example("x", "?"), group, len(episodes), [turn], score=score, baseline=other))
    return collate(episodes)


def numbers(rows: int, seed: int) -> torch.Tensor:
    """Log-probabilities in columns of a batch: a token of a prompt, then the answer."""
    generator = torch.Generator().manual_seed(seed)
    drawn = -2 + 0.5 * torch.randn((rows, LENGTH), generator=generator, dtype=torch.float64)
    return torch.nn.functional.pad(drawn, (1, 0))


@pytest.mark.parametrize("objective", ["sigmoid", "ipo"])
def test_xpo(objective: str) -> None:
    scores = [(1.0, 0.0), (0.2, 0.7), (3.0, 1.0)]
    now, reference = numbers(6, 0).requires_grad_(), numbers(6, 1)
    batch = batch_of(scores, rival=True).replace(logprobs_ref=reference)
    algorithm = XPO(beta=0.3, alpha=0.02, objective=objective)  # type: ignore[arg-type]
    losses, _ = algorithm.batch_loss(batch, PolicyOutputs(now))
    ours = torch.stack(list(losses.values())).sum()
    # The paper, algorithm 1: rows 0, 2, 4 are the policy's answers, 1, 3, 5 those of its beginning.
    own, rival = now.sum(1)[::2], now.sum(1)[1::2]
    own_ref, rival_ref = reference.sum(1)[::2], reference.sum(1)[1::2]
    sign = torch.tensor([1.0 if one > other else -1.0 for one, other in scores], dtype=torch.float64)
    h = sign * ((own - own_ref) - (rival - rival_ref))
    dpo = -logsigmoid(0.3 * h) if objective == "sigmoid" else (h - 1 / 0.6) ** 2
    theirs = (dpo + 0.02 * rival).mean()
    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), rel=1e-12)
    pair = [torch.autograd.grad(one, now, retain_graph=True)[0] for one in (ours, theirs)]
    assert torch.allclose(pair[0][:, 1:], pair[1][:, 1:], atol=1e-14)


def test_xpo_explores_where_scores_are_equal() -> None:
    now, reference = numbers(2, 0).requires_grad_(), numbers(2, 1)
    batch = batch_of([(1.0, 1.0)], rival=True).replace(logprobs_ref=reference)
    losses, _ = XPO(alpha=0.5).batch_loss(batch, PolicyOutputs(now))
    [gradient] = torch.autograd.grad(torch.stack(list(losses.values())).sum(), now)
    assert gradient[0].eq(0).all() and gradient[1, 1:].eq(0.5).all()


@pytest.mark.parametrize("preference", ["sigmoid", "order"])
def test_nash_md(preference: str) -> None:
    scores, beta = [(1.0, 0.0), (0.2, 0.7), (1.0, 1.0)], 0.05
    old, reference = numbers(3, 0), numbers(3, 1)
    batch = batch_of(scores, rival=False)
    batch = batch.replace(logprobs_ref=reference, logprobs_old=old, score=batch.score.double())
    batch = batch.replace(baseline=batch.require("baseline").double())
    algorithm = NashMD(preference=preference, kl_coefficient=beta)  # type: ignore[arg-type]
    found = algorithm.advantages(batch).require("advantages")
    for row, (own, other) in enumerate(scores):
        preferred = 1 / (1 + math.exp(other - own)) if preference == "sigmoid" else (own > other) + 0.5 * (own == other)
        ratio = float((old[row] - reference[row]).sum())  # beta times the rounding of this fp32 sum is far below 1e-6
        assert found[row].tolist() == pytest.approx([0.0] + [preferred - 0.5 - beta * ratio] * LENGTH, abs=1e-6)
    term, reduction = algorithm.loss(batch.replace(advantages=found), PolicyOutputs(old))[0]["policy"]
    assert reduction == "constant" and torch.equal(term, -found * old)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_mixture_is_that_of_the_logits(share: float, temperature: float) -> None:
    section = PolicySection(model="builtin:tiny", device="cpu", architecture=runs.ARCHITECTURE)
    policy, other = load_policy(section, seed=0), load_policy(section, seed=1)
    requests = [Request((5, 6, 7), key=1), Request((8, 9), key=2, conversation=4)]
    sampling = Sampling(temperature=temperature, max_new_tokens=6)
    for request, answer in zip(requests, Sampler(policy).mixed(other, share).generate(requests, sampling), strict=True):
        ids = torch.tensor([[*request.prompt_ids, *answer.ids]])
        with torch.no_grad():
            logits = [one.model(ids).logits[0, len(request.prompt_ids) - 1 : -1].double() for one in (policy, other)]
        mixed = ((1 - share) * logits[0] + share * logits[1]) / temperature
        plain = mixed.log_softmax(-1)[range(len(answer.ids)), answer.ids]
        # Times the temperature they are differences of logits.
        assert rounding.near(policy.model, temperature * torch.tensor(answer.logprobs), temperature * plain)


def test_a_mixture_of_one_is_that_model() -> None:
    section = PolicySection(model="builtin:tiny", device="cpu", architecture=runs.ARCHITECTURE)
    policy, other = load_policy(section, seed=0), load_policy(section, seed=1)
    requests = [Request((5, 6, 7), key=key) for key in range(8)]
    mixed = Sampler(policy).mixed(other, 1.0).generate(requests, Sampling(max_new_tokens=6))
    assert [one.ids for one in mixed] == [
        one.ids for one in Sampler(other).generate(requests, Sampling(max_new_tokens=6))
    ]


def test_the_share_of_given_texts_is_drawn_by_prompt() -> None:
    numbered = [(number, Example(str(number), "?")) for number in range(2000)]
    sampled, given = answered_and_given(numbered, 0.3, (0, "step", 3, 0))
    assert sorted([*sampled, *given], key=lambda one: one[0]) == numbered
    assert len(given) / len(numbered) == pytest.approx(0.3, abs=0.03)
    assert answered_and_given(numbered[:100], 0.3, (0, "step", 3, 0))[1] == [one for one in given if one[0] < 100]
    assert answered_and_given(numbered, 0.3, (0, "step", 4, 0))[1] != given
    assert answered_and_given(numbered, 0.0, (0, "step", 3, 0)) == (numbered, [])


def test_cross_entropy_beside_the_divergence() -> None:
    """OpenRLHF's (1 - kd_coef) * cross-entropy + kd_coef * divergence, at kd_coef 0.4."""
    algorithm = GKD(teacher="x", source="references", divergence_coefficient=0.4, supervised_coefficient=0.6)
    batch, said = batch_of([(0.0, 0.0)], rival=False), numbers(1, 0)
    terms, _ = algorithm.loss(batch, PolicyOutputs(said, divergence=said**2))
    assert {reduction for _, reduction in terms.values()} == {"token"}
    assert torch.allclose(sum(term for term, _ in terms.values()), 0.4 * said**2 - 0.6 * said)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"student_share": 0.5, "source": "references"}, "student_share is 0.5, and source is references"),
        ({"student_share": 0.5, "reward_coefficient": 1.0, "group_size": 2}, "reward_coefficient is for sampled"),
        ({"supervised_coefficient": 0.5}, "would imitate itself; write source: references"),
    ],
)
def test_what_gkd_refuses(fields: dict[str, object], said: str) -> None:
    with pytest.raises(LmgymError, match=said):
        GKD(teacher="x", **fields)  # type: ignore[arg-type]


def test_what_a_run_of_each_trains_on(tmp_path: Path) -> None:
    """The reward that is logged is the policy's; rollouts.jsonl says who wrote what."""
    logs = {"logs": {"rollouts": "all", "samples": 0}, "steps": 2}
    runs.run(tmp_path / "xpo", algorithm={"name": "xpo"}, **logs)
    rows = [row for row in runs.records(tmp_path / "xpo/rollouts.jsonl") if row["kind"] == "train"]
    assert {row.get("by", "") for row in rows} == {"", "rival"}
    first = [row for row in rows if row["step"] == 0]
    assert len(first) == 2 * len({row["group"] for row in first})
    own = [row["score"] for row in first if "by" not in row]
    [record, _] = [one for one in runs.records(tmp_path / "xpo/metrics.jsonl") if one["kind"] == "train"]
    assert record["reward"] == pytest.approx(sum(own) / len(own)) and record["answers"] == len(own)
    mixed = {"name": "gkd", "teacher": "builtin:tiny", "student_share": 0.5}
    runs.run(tmp_path / "gkd", algorithm=mixed, **logs)
    rows = [row for row in runs.records(tmp_path / "gkd/rollouts.jsonl") if row["kind"] == "train"]
    assert {row.get("by", "") for row in rows} == {"", "data"}
    given = [row for row in rows if "by" in row]
    assert all(row["turns"][0]["text"] in row["references"] for row in given)


def test_an_engine_that_cannot_mix_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Sampler, "mixed")
    with pytest.raises(LmgymError, match="cannot sample from a mixture of two models"):
        runs.run(tmp_path / "run", algorithm={"name": "nash_md"}, steps=1)


@pytest.mark.parametrize("engine", [{"unit": 2}, {"name": "pool"}])
def test_an_engine_that_cannot_mix_is_refused_before_anything_is_sampled(
    engine: dict[str, object], tmp_path: Path
) -> None:
    with pytest.raises(LmgymError, match=f"^engine.{next(iter(engine))}.* cannot sample from a mixture of two models"):
        runs.run(tmp_path / "run", algorithm={"name": "nash_md"}, engine=engine, steps=1)
    assert not (tmp_path / "run").exists()


def test_xpo_takes_one_answer() -> None:
    with pytest.raises(LmgymError, match="a pair of xpo has one answer of the policy"):
        XPO(group_size=2)
    assert replace(XPO()).requirements.rival is not None
