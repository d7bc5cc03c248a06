"""GRPO's family: against what TRL 1.16 made of the same numbers (record_grpo_family.py), against the papers' formulas
in fp64, and against numbers worked by hand.

The KL penalty's estimators and controllers are here too, as GRPO, RLOO and REINFORCE use them: cases 1 and 2 are worked
numbers of RL4LMs and TRL.
"""

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor

from lmgym.algorithms.actor_critic import PPO
from lmgym.algorithms.base import Algorithm
from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.algorithms.grpo.credit import GroupMean, PassAtK
from lmgym.algorithms.grpo.members import MEMBERS as PRESETS
from lmgym.algorithms.regularised import Regularised
from lmgym.algorithms.reinforce import RLOO, Reinforce
from lmgym.algorithms.replay import Replay
from lmgym.batch import Batch, PolicyOutputs, collate
from lmgym.config.build import build_config, resolved
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.functional import losses
from lmgym.functional.group_advantages import gdpo_advantages
from lmgym.rewards.base import call_reward
from lmgym.rewards.building import build_rewards
from lmgym.types import Episode, Example, Turn
from tests.family import grpo
from tests.golden.record_grpo_family import EOS, IMPORTANCE_CAP, LIMIT, OVERLONG, RECORD, SEEDS, SIZE, WEIGHTS, Inputs
from tests.golden.record_grpo_family import GMPO as GMPO_SETTINGS
from tests.golden.record_grpo_family import GRPO as SETTINGS
from tests.models import loss_of

TRL = json.loads(RECORD.read_text())


def preset(name: str, **changes: Any) -> GRPO:
    return grpo(name, **{"group_size": SIZE, **changes})


# What each of TRL's settings is called here. A preset stands where TRL has the whole of it; a clip range of GSPO's or
# CISPO's own would bind everywhere or nowhere on these numbers, and TRL has SAPO's temperatures in fp32.
IN_FP32 = float(tensor(1.05))
OURS: dict[str, GRPO] = {
    "grpo": preset("paper", clip_high=0.28, kl_coefficient=0.0),
    "bnpo": grpo(group_size=SIZE, scale_rewards="group"),
    "dapo": preset("dapo"),
    "dr_grpo": preset("dr_grpo"),
    "cispo": preset("cispo", clip_high=0.3),
    "sapo": preset("sapo", sapo_negative=IN_FP32),
    "gspo": preset("gspo", clip_low=0.03, clip_high=0.04),
    "grpo, beta": preset("paper", clip_high=0.28, kl_coefficient=0.05),
    "bnpo, beta": grpo(group_size=SIZE, scale_rewards="group", kl_coefficient=0.05),
    "dapo, beta": preset("dapo", kl_coefficient=0.05),
    "dr_grpo, beta": preset("dr_grpo", kl_coefficient=0.05),
    "cispo, beta": preset("cispo", clip_high=0.3, kl_coefficient=0.05),
    "sapo, beta": preset("sapo", sapo_negative=IN_FP32, kl_coefficient=0.05),
    "scaled by the batch": grpo(group_size=SIZE, scale_rewards="batch"),
    "dual clip": preset("dapo", dual_clip=1.4),
    "truncated tokens": preset("dapo", importance_cap=IMPORTANCE_CAP),
    "truncated sequences": preset("dapo", importance_cap=IMPORTANCE_CAP, importance_level="sequence"),
    "masked, tokens": preset("dapo", mask_truncated=True),
    "masked, sequences": preset("paper", clip_high=0.28, kl_coefficient=0.0, mask_truncated=True),
    "masked, constant": preset("dr_grpo", clip_high=0.28, scale_rewards="group", mask_truncated=True),
    "parts": grpo(group_size=SIZE, normalise_parts=True),
    "left out: tokens": preset("dapo", importance_cap=IMPORTANCE_CAP, importance_outside="mask"),
    "left out: sequences": preset(
        "dapo", importance_cap=IMPORTANCE_CAP, importance_outside="mask", importance_level="sequence"
    ),
    "bounded on both sides": preset("dapo", importance_cap=IMPORTANCE_CAP, importance_floor=0.9),
    "left out on both sides": preset("icepop", importance_cap=IMPORTANCE_CAP, importance_floor=0.9),
    "off policy of the sampler": preset("dapo", importance_cap=IMPORTANCE_CAP, off_policy_threshold=0.05),
    "luspo": preset("luspo", clip_low=0.03, clip_high=0.04),
    "vespo": preset("vespo"),
    "top entropy": preset("top_entropy", top_entropy=0.3),
    "top entropy, sequences": preset("paper", clip_high=0.28, kl_coefficient=0.0, top_entropy=0.3),
}
GMPO = {"gmpo": preset("gmpo"), "gmpo, narrow": preset("gmpo", clip_low=0.2, clip_high=0.28)}
ELSEWHERE = {"gspo, beta", "plain k3", "off policy"}  # where this library differs on purpose; tests of their own


def same(ours: Tensor, theirs: Any, tolerance: float = 1e-9) -> bool:
    theirs = torch.as_tensor(theirs, dtype=torch.float64)
    return float((ours - theirs).norm()) <= tolerance * max(float(theirs.norm()), 1e-3)


def place(batch: Batch, rows: Tensor) -> Tensor:
    """[N, answer] numbers to the action columns of [N, T]."""
    real = torch.arange(rows.shape[1]) < batch.actions.sum(1)[:, None]
    empty = torch.zeros(batch.tokens.shape, dtype=rows.dtype)
    return empty.index_put(tuple(batch.actions.nonzero(as_tuple=True)), rows[real])


def batch_of(inputs: Inputs, parts: bool = False) -> Batch:
    """The inputs as episodes, collated; all columns in fp64."""
    episodes = []
    for row, ids in enumerate(inputs.answers()):
        rewards = dict(zip(("first", "second"), inputs.rewards[row].tolist(), strict=True))
        score = sum(w * r for w, r in zip(WEIGHTS, rewards.values(), strict=True)) if parts else rewards["first"]
        turn = Turn([9] * inputs.prompt_lengths[row], ids, [-1.0] * len(ids))
        episode = Episode(
            Example("x", "?"), row // SIZE, row, [turn], inputs.ended[row], reward_components=rewards, score=score
        )
        episodes.append(episode)
    weights = dict(zip(("first", "second"), WEIGHTS, strict=True))
    batch = collate(episodes, stop_ids=[EOS], limit=LIMIT, weights=weights if parts else None)
    columns = {"score": torch.tensor([episode.score for episode in episodes], dtype=torch.float64)}
    if batch.reward_components is not None:
        columns["reward_components"] = torch.cat([inputs.rewards, batch.reward_components[:, 2:].double()], 1)
    named = {"logprobs_old": inputs.old, "logprobs_ref": inputs.reference, "logprobs_sampler": inputs.sampler}
    return batch.replace(**columns, **{name: place(batch, rows) for name, rows in named.items()})


def ours(algorithm: Algorithm, inputs: Inputs, parts: bool = False) -> tuple[Tensor, Tensor, Batch]:
    """lmgym's loss, its gradient at the log-probabilities of the answers, and the batch with its advantages."""
    before = batch_of(inputs, parts)
    batch = algorithm.advantages(before)
    leaf = inputs.new.clone().requires_grad_()
    if algorithm.whole_batch:
        said = PolicyOutputs(place(before, leaf), entropy=place(before, inputs.entropy))
        loss = torch.stack([*algorithm.batch_loss(batch, said)[0].values()]).sum()
    else:
        loss = loss_of(algorithm, batch, place(before, leaf))
    gradient = torch.autograd.grad(loss, leaf)[0]
    real = torch.arange(inputs.width) < torch.tensor(inputs.lengths)[:, None]
    return loss.detach(), gradient[real], batch


def flat(rows: list[list[float]]) -> Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=torch.float64)


# Against TRL


def test_every_setting_of_trl_has_a_name_here() -> None:
    assert {*OURS, *ELSEWHERE} == set(SETTINGS) == set(TRL["grpo"])
    assert set(GMPO) == set(GMPO_SETTINGS) == set(TRL["gmpo"])
    assert TRL["trl"] == "1.16.0"


@pytest.mark.parametrize("place_in_record", range(len(SEEDS)))
@pytest.mark.parametrize("name", [*OURS, *GMPO])
def test_loss_gradient_and_advantages_are_trls(name: str, place_in_record: int) -> None:
    algorithm = {**OURS, **GMPO}[name]
    record = {**TRL["grpo"], **TRL["gmpo"]}[name][place_in_record]
    inputs = Inputs(record["seed"])
    loss, gradient, batch = ours(algorithm, inputs, parts=name == "parts")
    ended = [True] * len(inputs.ended) if not algorithm.mask_truncated else inputs.ended
    per_row = [float(row[mask][0]) for row, mask in zip(batch.advantages, batch.actions, strict=True) if mask.any()]
    expected = [value for value, end in zip(record["advantages"], ended, strict=True) if end]
    assert same(tensor(per_row, dtype=torch.float64), expected)
    assert same(loss, record["loss"])
    assert float(flat(record["gradient"]).norm()) > 0
    assert same(gradient, flat(record["gradient"]))


def test_the_settings_differ() -> None:
    """No two are the same numbers by accident, but for bnpo and dapo, which are one formula here."""
    found = [(TRL["grpo"][name][0]["loss"], *TRL["grpo"][name][0]["gradient"][4]) for name in OURS]
    assert len(set(found)) == len(found) - 2


@pytest.mark.parametrize("place_in_record", range(len(SEEDS)))
def test_the_penalty_beside_a_sequence_ratio_keeps_the_tokens_ratio(place_in_record: int) -> None:
    """TRL multiplies k3 by GSPO's ratio of the answer, which is no importance weight; here it is the token's own, as
    in TRL's GRPO: so GSPO with beta is its GSPO without, plus what beta adds to its GRPO."""
    inputs = Inputs(TRL["grpo"]["gspo"][place_in_record]["seed"])
    found = ours(preset("gspo", clip_low=0.03, clip_high=0.04, kl_coefficient=0.05), inputs)
    plain, without, penalised, theirs = (
        TRL["grpo"][name][place_in_record] for name in ("gspo", "grpo", "grpo, beta", "gspo, beta")
    )
    assert same(found[0], plain["loss"] + penalised["loss"] - without["loss"])
    added = flat(penalised["gradient"]) - flat(without["gradient"])
    assert same(found[1], flat(plain["gradient"]) + added)
    assert not same(found[1], flat(theirs["gradient"]), 1e-3)


@pytest.mark.parametrize("place_in_record", range(len(SEEDS)))
def test_off_policy_rows_are_trls_where_the_sampler_is_the_old_policy(place_in_record: int) -> None:
    """Without vLLM, TRL measures what has drifted since the batch's own old log-probabilities; here it is always the
    sampler's. Where the two are the same numbers, so are the losses."""
    record = TRL["grpo"]["off policy"][place_in_record]
    inputs = Inputs(record["seed"])
    inputs.sampler = inputs.old
    loss, gradient, _ = ours(preset("dapo", off_policy_threshold=0.05), inputs)
    assert same(loss, record["loss"]) and same(gradient, flat(record["gradient"]))
    assert not same(gradient, flat(TRL["grpo"]["dapo"][place_in_record]["gradient"]), 1e-3)


def test_without_its_ratio_k3_differs() -> None:
    """TRL's older default, whose gradient is biased, is not offered."""
    found = ours(OURS["grpo, beta"], Inputs(SEEDS[0]))
    assert not same(found[1], flat(TRL["grpo"]["plain k3"][0]["gradient"]), 1e-3)


@pytest.mark.parametrize("place_in_record", range(len(SEEDS)))
def test_rloo_with_its_penalty(place_in_record: int) -> None:
    """TRL: beta .05 times the sum over the answer of log pi_old - log pi_ref comes off the reward, then leave one out.
    Its ratio of whole answers is 1 here, so the gradients agree; the values differ by a constant."""
    record = TRL["rloo"][place_in_record]
    _, gradient, batch = ours(RLOO(group_size=SIZE, kl_coefficient=0.05), Inputs(record["seed"], drift=0.0))
    per_row = [float(row[mask][0]) for row, mask in zip(batch.advantages, batch.actions, strict=True)]
    assert same(tensor(per_row, dtype=torch.float64), record["advantages"])
    assert same(gradient, flat(record["gradient"]))


def test_overlong_is_trls() -> None:
    arguments = {name: OVERLONG[name] for name in ("max_tokens", "buffer")}
    (reward,) = build_rewards({"overlong": arguments})
    cut = [[length // 2, length - length // 2] for length in OVERLONG["lengths"]]  # over two turns
    answers = [Episode(Example("x", "?"), 0, 0, [Turn([1], [5] * n) for n in turns]) for turns in cut]
    assert call_reward(reward, answers) == pytest.approx(TRL["overlong"], abs=1e-12)


# Against the papers' formulas, transcribed for one token or answer at a time


def group_advantages(rewards: list[float], scaled: bool) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return [0.0 if deviation == 0 else (r - mean) / (deviation + 1e-4 if scaled else 1.0) for r in rewards]


@pytest.mark.parametrize("seed", [3, 4])
def test_dppo_is_the_papers_mask_and_prime_rls_square(seed: int) -> None:
    """arXiv 2602.04879: -M r A, M = 0 where |pi - mu| of the token exceeds the bound and r has already gone A's way;
    arXiv 2602.02276 by way of prime-rl: + tau (log r)^2; r = pi / mu, over the number of tokens. Its tau also covers
    answers without advantage, which prime-rl filters out."""
    inputs = Inputs(seed)
    inputs.new += 1.0  # likelier tokens, so that probabilities change by more than the bound
    inputs.sampler += 1.0
    total, masked, tokens = 0.0, 0, sum(inputs.lengths)
    for first in range(0, len(inputs.lengths), SIZE):
        credits = group_advantages(inputs.rewards[first : first + SIZE, 0].tolist(), scaled=False)
        for row, credit in enumerate(credits, start=first):
            for t in range(inputs.lengths[row] if credit else 0):
                now, then = float(inputs.new[row, t]), float(inputs.sampler[row, t])
                ratio, change = math.exp(now - then), abs(math.exp(now) - math.exp(then))
                keep = not (change > 0.2 and (ratio > 1) == (credit > 0))
                total += -keep * ratio * credit + 1e-3 * (now - then) ** 2
                masked += not keep
    loss, _, batch = ours(preset("dppo"), inputs)
    assert 0 < masked < tokens / 2
    assert float(loss) == pytest.approx(total / tokens, rel=1e-12)
    _, metrics = preset("dppo").loss(batch, PolicyOutputs(place(batch, inputs.new)))
    assert float(metrics["ratio/clipped"][batch.actions].sum()) == masked


def test_dppos_bounds_are_one_for_each_direction() -> None:
    """A probability of 0.5 that has risen by 0.2 and 0.4, and fallen by as much; bounds of 0.1 below and 0.3 above."""
    old = torch.full((2, 4), 0.5).log()
    new = torch.tensor([[0.7, 0.9, 0.3, 0.1]] * 2).log()
    credit = torch.tensor([[1.0], [-1.0]]).expand(2, 4)
    assert losses.dppo_mask(new, old, credit, 0.1, 0.3).tolist() == [
        [False, True, False, False],
        [False, False, True, True],
    ]
    assert losses.dppo_mask(new, old, credit, 0.3, 0.1).tolist() == [
        [True, True, False, False],
        [False, False, False, True],
    ]
    inputs = Inputs(3)
    batch = ours(preset("dppo"), inputs)[2]
    counts = [
        float(preset("dppo", clip_low=low, clip_high=high).loss(batch, PolicyOutputs(place(batch, inputs.new)))[1]
              ["ratio/clipped"].sum())
        for low, high in ((1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.0, 0.0))
    ]  # fmt: skip
    assert counts[0] == 0 < min(counts[1:3]) and counts[3] == counts[1] + counts[2] and counts[1] != counts[2]


def test_gspo_is_the_papers_formula() -> None:
    """arXiv 2507.18071: (1 / G) sum_i min(s_i A_i, clip(s_i) A_i), s_i = (pi(y_i) / pi_old(y_i))^(1 / |y_i|)."""
    inputs, total = Inputs(5), 0.0
    for first in range(0, len(inputs.lengths), SIZE):
        credits = group_advantages(inputs.rewards[first : first + SIZE, 0].tolist(), scaled=True)
        for row, credit in enumerate(credits, start=first):
            n = inputs.lengths[row]
            likelihoods = [
                math.prod(math.exp(p) for p in column[row, :n].tolist()) for column in (inputs.new, inputs.old)
            ]
            s = (likelihoods[0] / likelihoods[1]) ** (1 / n)
            total -= min(s * credit, min(max(s, 1 - 3e-4), 1 + 4e-4) * credit) / len(inputs.lengths)
    assert float(ours(preset("gspo"), inputs)[0]) == pytest.approx(total, rel=1e-9)


def test_each_row_of_an_episode_has_its_own_sequence_ratio() -> None:
    """A conversation whose prompt was rewritten: rows of 2 and 1 actions, log-ratios .3, .1 and -.2. The first row's
    ratio is exp(.2), the second's exp(-.2); an answer in one row would have exp(.2 / 3) everywhere."""
    turns = [Turn([1, 5], [6, 7]), Turn([1, 3], [6], restart=True)]
    other = Episode(Example("x", "?"), 0, 1, [Turn([1, 5], [6, 7, 2])], score=0.0)
    batch = collate([Episode(Example("x", "?"), 0, 0, turns, score=1.0), other])
    algorithm = grpo(group_size=2, ratio="sequence", clip_low=9.0, clip_high=9.0)
    batch = algorithm.advantages(batch.replace(logprobs_old=torch.zeros(batch.tokens.shape)))
    new = place(batch, tensor([[0.3, 0.1, 0.0], [-0.2, 0.0, 0.0], [0.0, 0.0, 0.0]]))
    terms, metrics = algorithm.loss(batch, PolicyOutputs(new))
    ratios = metrics["ratio/mean"][batch.actions].tolist()
    assert ratios == pytest.approx([math.exp(0.2)] * 2 + [math.exp(-0.2)] + [1.0] * 3)
    assert terms["policy"][0][batch.actions].tolist() == pytest.approx([-0.5 * r for r in ratios[:3]] + [0.5] * 3)


@given(data=st.data(), reduction=st.sampled_from(["token", "sequence", "constant"]))
@settings(max_examples=15)
def test_gspo_is_grpo_for_answers_of_one_token(data: Any, reduction: Any) -> None:
    inputs = Inputs(data.draw(st.integers(0, 2**31)), longest=1)
    found = [ours(grpo(group_size=SIZE, ratio=ratio, reduction=reduction), inputs) for ratio in ("token", "sequence")]
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    longer = Inputs(1)
    token, sequence = (ours(grpo(group_size=SIZE, ratio=ratio), longer)[1] for ratio in ("token", "sequence"))
    assert not same(token, sequence, 1e-3)


@given(data=st.data(), size=st.integers(2, 6), groups=st.integers(1, 3))
@settings(max_examples=15)
def test_rloo_is_centring_times_n_over_n_minus_1(data: Any, size: int, groups: int) -> None:
    """As losses: REINFORCE with the others' mean as baseline, and group-centred advantages summed over the answer, on
    the first optimizer step, have gradients that differ by that factor alone."""
    scores = data.draw(st.lists(st.floats(-3, 3), min_size=size * groups, max_size=size * groups))
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=size * groups, max_size=size * groups))
    rows = enumerate(zip(scores, lengths, strict=True))
    batch = collate([Episode(Example("x", "?"), n // size, n, [Turn([9], [5] * k)], score=s) for n, (s, k) in rows])
    batch = batch.replace(score=torch.tensor(scores, dtype=torch.float64))
    gradients = []
    for algorithm in (RLOO(group_size=size), GRPO(group_size=size, reduction="constant")):
        leaf = torch.full(batch.tokens.shape, -1.0, dtype=torch.float64, requires_grad=True)
        prepared = algorithm.advantages(batch).replace(logprobs_old=leaf.detach())
        loss_of(algorithm, prepared, leaf).backward()
        gradients.append(leaf.grad)
    assert torch.allclose(gradients[0], gradients[1] * size / (size - 1), rtol=1e-9, atol=1e-12)


# Pieces, by hand


def test_dual_clip() -> None:
    """c = 3, bounds .8 and 1.28, A = -1 then +1; ratios .5, 1.5, 5: for A = -1 the loss is .8, 1.5 and 3, not 5."""
    ratio, minus = tensor([[0.5, 1.5, 5.0]]), tensor([[-1.0] * 3])
    assert torch.allclose(losses.clipped_surrogate(ratio, minus, 0.2, 0.28, 3.0), tensor([[0.8, 1.5, 3.0]]))
    assert torch.allclose(losses.clipped_surrogate(ratio, minus, 0.2, 0.28), tensor([[0.8, 1.5, 5.0]]))
    assert torch.allclose(losses.clipped_surrogate(ratio, -minus, 0.2, 0.28, 3.0), tensor([[-0.5, -1.28, -1.28]]))
    assert losses.clipped(ratio, minus, 0.2, 0.28, 3.0).tolist() == [[1, 0, 1]]
    assert losses.clipped(ratio, minus, 0.2, 0.28).tolist() == [[1, 0, 0]]


def test_what_clipped_means_for_each_objective() -> None:
    """Ratios .5, 1, 2 of probabilities .4, .2, .1 (changes -.4, 0, +.1) with A = -1, 1, 1."""
    turn = Turn([9], [5, 5, 5], [math.log(0.8), math.log(0.2), math.log(0.05)])
    batch = collate([Episode(Example("x", "?"), 0, 0, [turn])])
    new = place(batch, tensor([[0.4, 0.2, 0.1]]).log())
    batch = batch.replace(logprobs_old=batch.logprobs_sampler, advantages=place(batch, tensor([[-1.0, 1.0, 1.0]])))

    def measured(**fields: Any) -> dict[str, list[float]]:
        high = {} if fields.get("objective") == "sapo" else {"clip_high": 0.2}
        _, metrics = grpo(**high, **fields).loss(batch, PolicyOutputs(new))
        return {name: value[batch.actions].tolist() for name, value in metrics.items()}

    assert measured()["ratio/clipped"] == [1, 0, 1]
    assert measured(objective="cispo")["ratio/clipped"] == [1, 0, 1]
    assert measured(objective="cispo", clip_low=1.0)["ratio/clipped"] == [0, 0, 1]
    assert measured(objective="dppo")["ratio/clipped"] == [1, 0, 0]
    assert measured(ratio="sequence")["ratio/mean"] == pytest.approx([1.0] * 3)
    gates = measured(objective="sapo", sapo_negative=2.0)
    slopes = [4 * s * (1 - s) for s in (1 / (1 + math.exp(1.0)), 0.5, 1 / (1 + math.exp(-1.0)))]
    assert gates["ratio/gate"] == pytest.approx(slopes) and "ratio/clipped" not in gates
    assert measured()["kl/old"] == pytest.approx([0.5 - 1 + math.log(2), 0, 2 - 1 - math.log(2)], abs=1e-6)


def test_the_gates_slope_is_its_derivative() -> None:
    ratio = tensor([[0.2, 1.0, 1.7, 3.0]], dtype=torch.float64).requires_grad_()
    advantages = tensor([[1.0, -1.0, 0.0, 2.0]], dtype=torch.float64)
    gate, slope = losses.soft_gate(ratio, advantages, 1.0, 1.05)
    assert torch.allclose(torch.autograd.grad(gate.sum(), ratio)[0], slope)


def test_importance_weights() -> None:
    """pi_old / mu = e, e^-1, e^.5: cut to 2 they are 2, .37, 1.65; the row's product is e^.5."""
    turn = Turn([9], [5, 5, 5], [-2.0, -1.0, -1.0])
    batch = collate([Episode(Example("x", "?"), 0, 0, [turn])])
    old = place(batch, tensor([[-1.0, -2.0, -0.5]]))
    batch = batch.replace(logprobs_old=old, advantages=place(batch, tensor([[1.0, 1.0, 1.0]])))
    cases = {("token", 2.0): [2.0, math.exp(-1), math.exp(0.5)], ("sequence", 2.0): [math.exp(0.5)] * 3}
    cases[("sequence", 1.5)] = [1.5] * 3
    for (level, cap), expected in cases.items():
        leaf = old.clone().requires_grad_()
        terms, metrics = grpo(importance_cap=cap, importance_level=level).loss(batch, PolicyOutputs(leaf))
        assert metrics["importance/mean"][batch.actions].tolist() == pytest.approx(expected)
        assert metrics["importance/capped"][batch.actions].tolist() == [float(e == cap) for e in expected]
        terms["policy"][0].sum().backward()
        assert (-leaf.grad[batch.actions]).tolist() == pytest.approx(expected)


def test_parts_are_normalised_before_they_are_summed() -> None:
    """GDPO's example (arXiv 2601.05242, figure 2), two rewards of 0 or 1 and two answers: an answer that is better in
    both gets twice the credit of one that is better in one; scaling the sum makes them alike."""
    parts = tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    episode, group = torch.arange(6), torch.arange(6) // 2
    single = 0.5 / (math.sqrt(0.5) + 1e-4)
    before_the_batch = tensor([-single, single, -2 * single, 2 * single, 0.0, 0.0], dtype=torch.float64)
    expected = before_the_batch / (before_the_batch.std() + 1e-4)
    found = gdpo_advantages(parts, tensor([1.0, 1.0], dtype=torch.float64), episode, group)
    assert torch.allclose(found, expected, rtol=1e-12)
    assert found[4:].tolist() == [0.0, 0.0]
    weighted = gdpo_advantages(parts * tensor([1.0, 50.0]), tensor([2.0, -1.0], dtype=torch.float64), episode, group)
    assert weighted[3] / weighted[1] == pytest.approx(0.5, rel=1e-3)  # 2 - 1 to 2: weights count, scales do not


def test_collate_notes_the_parts_and_what_the_environment_paid() -> None:
    turn = Turn([9], [5], reward=1.85)
    episode = Episode(Example("x", "?"), 0, 0, [turn], reward_components={"a": 0.3, "b": 7.0, "c": 0.1}, score=1.85)
    rest = Episode(
        Example("x", "?"), 0, 1, [turn], reward_components={"a": 0.3, "b": 7.0, "c": 0.1}, score=0.5 * 0.3 + 2 * 0.1
    )
    batch = collate([episode, rest], weights={"a": 0.5, "b": 0.0, "c": 2.0})
    assert torch.allclose(batch.reward_components, tensor([[0.3, 0.1, 1.5], [0.3, 0.1, 0.0]]))
    assert float(batch.reward_components[1, 2]) == 0.0 and batch.component_weights == (0.5, 2.0, 1.0)
    assert torch.equal(
        batch[tensor([1])].reward_components, batch.reward_components[1:]
    )  # no column of tokens, so it is not cut
    with pytest.raises(LmgymError, match=r"episode 0 \(example x\) has no part 'd'"):
        collate([episode], weights={"d": 1.0})


def test_dynamic_sampling_draws_until_enough_groups_differ() -> None:
    def group(*scores: float) -> list[Episode]:
        return [Episode(Example("x", "?"), 0, n, score=score) for n, score in enumerate(scores)]

    mixed, equal = group(0.0, 1.0), group(1.0, 1.0)
    dapo = preset("dapo", group_size=2)
    assert dapo.select([mixed, equal], 2) == ([mixed], True)
    assert dapo.select([equal, equal], 1) == ([equal], True)
    assert dapo.select([equal, mixed, group(0.5, 0.4), mixed], 2) == ([mixed, group(0.5, 0.4)], False)
    assert GRPO(group_size=2).select([equal], 4) == ([equal], False)
    # If no group has different scores, the first group is a placeholder: zero advantages, whatever its lengths.
    answers = [Episode(Example("x", "?"), 0, n, [Turn([9], [5] * k)], score=1.0) for n, k in enumerate((10, 4))]
    assert not dapo.advantages(collate(answers, limit=10)).advantages.any()
    answers[1].score = 0.5
    apart = dapo.advantages(collate(answers, limit=10)).advantages
    assert apart.any() and GRPO(group_size=2, overlong=0.2).advantages(collate(answers, limit=10)).advantages.any()
    replay = Replay(group_size=2, dynamic_sampling=True)
    assert replay.select([equal, mixed], 2) == ([mixed], True) and replay.buffer.fresh == [mixed]


def test_whole_numbers_are_scores_as_good_as_others() -> None:
    """A loop of one's own writes 1 and 0."""
    for credit in (GroupMean(scale="batch"), PassAtK(k=2)):
        algorithm, found = GRPO(group_size=4, credit=credit, overlong=0.2), []
        for kind in (int, float):
            episodes = [
                Episode(Example("x", "?"), 0, n, [Turn([9], [5] * (n + 6))], score=kind(n < 2)) for n in range(4)
            ]
            found.append(algorithm.advantages(collate(episodes, limit=10)).advantages)
        assert torch.equal(*found) and found[0].any()


@pytest.mark.parametrize("score", [0.1, 0.7, 1.1])
def test_equal_scores_are_no_credit_whatever_their_mean_rounds_to(score: float) -> None:
    """Seven times 1.1 over seven is not 1.1 in fp32, and what is left would be divided by a deviation as small."""
    batch = collate([Episode(Example("x", "?"), n // 7, n, [Turn([9], [5])], score=score) for n in range(14)])
    for scale in ("none", "group", "batch"):
        algorithm = grpo(group_size=7, scale_rewards=scale)
        prepared = algorithm.advantages(batch)
        assert not prepared.advantages.any() and not algorithm.active(prepared).any()
    assert not RLOO(group_size=7).advantages(batch).advantages.any()


# The KL penalty


def penalised(algorithm: Regularised, ratios: list[float]) -> tuple[Batch, Batch]:
    """One answer whose log pi_old - log pi_ref are these, its answer to a score of 0, and another without any."""
    episodes = [Episode(Example("x", "?"), 0, n, [Turn([9], [5] * len(ratios))]) for n in (0, 1)]
    batch = collate(episodes)
    rows = torch.tensor([ratios, [0.0] * len(ratios)], dtype=torch.float64)
    batch = batch.replace(score=batch.score.double(), rewards=batch.rewards.double())
    return batch.replace(logprobs_old=place(batch, rows - 1), logprobs_ref=place(batch, 0 * rows - 1)), batch


def test_case_2_the_penalty_of_a_token() -> None:
    """beta .1, log-ratios .2, -.05, .1 -> rewards -.02, +.005, -.01; their sum is what an answer's score loses."""
    batch, _ = penalised(Regularised(kl_coefficient=0.1), [0.2, -0.05, 0.1])
    ppo = PPO(kl_coefficient=0.1)
    assert ppo.penalised_rewards(batch)[0, 1:].tolist() == pytest.approx([-0.02, 0.005, -0.01])
    for algorithm in (Reinforce(kl_coefficient=0.1), RLOO(kl_coefficient=0.1)):
        assert algorithm.penalised_score(batch).tolist() == pytest.approx([-0.025, 0.0])
    grpo = GRPO(group_size=2, kl_coefficient=0.1, kl_in="reward")
    assert grpo.advantages(batch).advantages[:, 1].tolist() == pytest.approx([-0.0125, 0.0125])


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_case_1_the_controllers(kl_in: Any) -> None:
    """RL4LMs: beta .1, target .1, KL per token -.2, .3, .4, .1 -> .098, .09996, .1019592, .1019592. TRL: .2, target 6
    per answer, horizon 10,000, 16 answers, KL 3 then 12 -> .199936, .19999998. Wherever the penalty stands."""
    estimator = "k1" if kl_in == "reward" else "k3"
    grpo = GRPO(kl_coefficient=0.1, kl_target=0.1, kl_in=kl_in, kl_estimator=estimator)
    assert grpo.requirements.reference and grpo.requirements.old_logprobs
    for measured, expected in ((-0.2, 0.098), (0.3, 0.09996), (0.4, 0.1019592), (0.1, 0.1019592)):
        batch, _ = penalised(grpo, [measured] * 3)
        first = batch.replace(logprobs_ref=batch.logprobs_old - measured * batch.actions)  # both answers drift alike
        grpo.advantages(first)
        assert grpo.beta == pytest.approx(expected, abs=1e-9)
    horizon = GRPO(kl_coefficient=0.2, kl_target=6.0, kl_controller="horizon", kl_in=kl_in, kl_estimator=estimator)
    for per_answer, expected in ((3.0, 0.199936), (12.0, 0.19999998)):
        batch = collate([Episode(Example("x", "?"), n // 8, n, [Turn([9], [5, 5])]) for n in range(16)])
        old = batch.actions * -1.0
        horizon.advantages(batch.replace(logprobs_old=old, logprobs_ref=old - per_answer / 2 * batch.actions))
        assert horizon.beta == pytest.approx(expected, abs=1e-8)
    # A penalty in the loss weighs what one in the reward does: beta as it was before this step's KL moved it.
    if kl_in == "loss":
        batch, _ = penalised(grpo, [1.0] * 3)
        before, prepared = grpo.beta, grpo.advantages(batch)
        terms = grpo.regularising_terms(prepared, PolicyOutputs(prepared.logprobs_old), "token")
        plain = Regularised(kl_coefficient=before, kl_in="loss", kl_estimator="k3")
        expected = plain.regularising_terms(prepared, PolicyOutputs(prepared.logprobs_old), "token")["kl"][0]
        assert grpo.beta != before and torch.equal(terms["kl"][0], expected)
    state = json.loads(json.dumps(grpo.state_dict()))
    older = {"beta": grpo.beta}  # as checkpoints of older versions have it
    for own, kept, expected in (
        (GRPO(kl_coefficient=0.1, kl_target=1.0), state, grpo.beta),
        (GRPO(kl_coefficient=0.1, kl_target=1.0), older, grpo.beta),
        # What another recipe says of beta, it says: no resume is allowed that, and `lmgym what-if` asks it.
        (GRPO(kl_coefficient=0.5, kl_target=1.0), state, 0.5),
        (GRPO(kl_coefficient=0.5), state, 0.5),
        (GRPO(kl_coefficient=0.5), older, 0.5),
        (GRPO(kl_coefficient=0.5, kl_target=1.0), {"beta": 0.0}, 0.5),
    ):
        own.load_state_dict(kept)
        assert own.beta == own.step_beta == expected != grpo.kl_coefficient


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_in_the_loss_the_penaltys_gradient_is_the_divergences(estimator: Any) -> None:
    """Over all four tokens of a vocabulary, each weighted by pi_old: the gradient of the term's mean is that of
    KL(pi || pi_ref), also where pi has left pi_old. That of k3 without the ratio is another."""
    generator = torch.Generator().manual_seed(0)
    now, old, reference = (torch.randn(4, generator=generator, dtype=torch.float64) for _ in range(3))
    logits = now.clone().requires_grad_()
    logp, logq = logits.log_softmax(0), reference.log_softmax(0)
    expected = torch.autograd.grad((logp.exp() * (logp - logq)).sum(), logits, retain_graph=True)[0]
    batch = collate([Episode(Example("x", "?"), 0, n, [Turn([9], [5])]) for n in range(4)])
    columns = {"logprobs_old": old.log_softmax(0), "logprobs_ref": logq}
    batch = batch.replace(**{name: place(batch, column[:, None]) for name, column in columns.items()})
    algorithm = GRPO(group_size=2, kl_coefficient=1.0, kl_estimator=estimator)
    terms = algorithm.regularising_terms(batch, PolicyOutputs(place(batch, logp[:, None])), "token")
    chances = place(batch, old.softmax(0)[:, None])
    found = torch.autograd.grad((chances * terms["kl"][0]).sum(), logits, retain_graph=True)[0]
    assert torch.allclose(found, expected, rtol=1e-9)
    d = logq - logp
    plain = torch.autograd.grad((old.softmax(0) * (d.exp() - d - 1)).sum(), logits)[0]
    assert not torch.allclose(plain, expected, rtol=0.1)


# Names and mistakes

BASE = {"task": "arithmetic", "rewards": {"final_answer": 1.0}}
FAMILY = tuple(name for name in PRESETS if name != "paper")


@pytest.mark.parametrize("name", FAMILY)
def test_a_preset_is_an_algorithms_name(name: str) -> None:
    (stage,) = build_config(BASE | {"algorithm": {"name": name, "group_size": 12}}).stages
    assert stage.algorithm == GRPO(**{**GRPO.presets[name], "group_size": 12})
    config = build_config(BASE | {"algorithm": name})
    assert config.stages[0].algorithm == GRPO(**GRPO.presets[name])
    assert config == build_config(BASE | {"algorithm": {"name": "grpo", "preset": name}})
    tree = resolved(config)
    assert tree["stages"][0]["algorithm"]["name"] == "grpo" and build_config(tree) == config
    if name != "icepop":  # whose weights replay's ratio has already
        replay = build_config(BASE | {"algorithm": {"name": "replay", "preset": name}}).stages[0].algorithm
        assert type(replay) is Replay and replay.surrogate == stage.algorithm.surrogate
    listed = {row["name"]: row for row in registry.describe("algorithm")}
    assert "grpo, preset" in listed[name]["summary"]


def test_a_plug_in_named_like_a_preset_is_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(GRPO):
        pass

    monkeypatch.setitem(registry._registered["algorithm"], "paper", Mine)
    assert build_config(BASE | {"algorithm": "paper"}).stages[0].algorithm.group_size == 8


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        (
            {"name": "dapo", "surrogate": {"hihg": 0.3}},
            r"unknown key 'hihg' in 'algorithm\.surrogate'; did you mean 'high'\?",
        ),
        ({"name": "dapo", "preset": "gspo"}, r"'algorithm\.preset' is 'gspo', and dapo is a preset of grpo itself"),
        ({"name": "grpo", "preset": "dap"}, r"'algorithm\.preset' is 'dap'; did you mean 'dapo'\?"),
        ({"name": "gsop"}, r"unknown algorithm 'gsop'; did you mean 'gspo'\?"),
        ({"name": "gspo", "group_size": 1}, r"algorithm\.group_size is 1; grpo needs at least 2"),
        (
            {"name": "grpo", "credit": {"scale": "all"}},
            r"key 'algorithm\.credit\.scale': input should be 'none', 'group' or 'batch'",
        ),
        ({"name": "grpo", "surrogate": "clipped"}, r"unknown surrogate 'clipped'; did you mean 'clip'\?"),
        ({"name": "grpo", "objective": "clipped"}, r"algorithm\.objective is 'clipped'; did you mean 'clip'\?"),
        ({"name": "grpo", "clip_low": -0.1}, r"algorithm\.surrogate\.low is -0.1; it must be 0 or more"),
        ({"name": "sapo", "sapo_negative": 0}, r"algorithm\.surrogate\.negative is 0.0; it must be above 0"),
        ({"name": "grpo", "importance_cap": 0}, r"algorithm\.correction\.cap is 0.0; it must be above 0"),
        ({"name": "grpo", "dual_clip": 0.9}, r"algorithm\.surrogate\.dual is 0.9; it bounds a ratio from above"),
        ({"name": "cispo", "dual_clip": 3}, r"dual_clip' is 3, and nothing reads it beside surrogate: cispo"),
        ({"name": "dppo", "ratio": "sequence"}, r"ratio' is sequence, and nothing reads it beside surrogate: dppo"),
        (
            {"name": "dppo", "importance_cap": 2},
            r"importance_cap' is 2, and nothing reads it beside correction: sampler",
        ),
        (
            {"name": "grpo", "length_norm": True},
            r"length_norm' goes with reduction: constant, and reduction is token",
        ),
        (
            {"name": "grpo", "normalise_parts": True, "scale_rewards": "group"},
            r"scale_rewards' is group, and nothing reads it beside credit: each_reward",
        ),
        (
            {"name": "grpo", "normalise_parts": True, "kl_coefficient": 0.1, "kl_in": "reward"},
            r"each_reward, which scales every reward, so a KL penalty in the reward would lose its coefficient",
        ),
        (
            {"name": "replay", "truncate": 2, "objective": "sapo"},
            r"objective' is sapo, and nothing reads it beside surrogate: truncated_weight",
        ),
        (
            {"name": "replay", "importance_cap": 2},
            r"importance_cap' is 2, and nothing reads it beside correction: sampler",
        ),
        ({"name": "grpo", "kl_coefficient": 0.1, "kl_estimator": "k1"}, r"k1, whose gradient in a loss is zero on"),
    ],
)
def test_mistakes_are_named(section: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LmgymError, match=sentence):
        build_config(BASE | {"algorithm": section})


def test_an_overlong_answer_is_punished_once() -> None:
    rewards = {"final_answer": 1.0, "overlong": {"max_tokens": 64, "buffer": 16}}
    with pytest.raises(LmgymError, match=r"overlong and algorithm\.overlong punish the same answers twice; remove the"):
        build_config({**BASE, "rewards": rewards, "algorithm": "dapo"})
    build_config({**BASE, "rewards": rewards, "algorithm": {"name": "dapo", "overlong": 0}})


def test_scale_rewards_says_what_true_and_false_are_called_now() -> None:
    for value in (True, False):
        with pytest.raises(
            LmgymError, match=rf"scale_rewards is {value}; write group for true, none for false, or batch"
        ):
            grpo(scale_rewards=value)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"importance_cap": 2.0}, "needs the sampler's log-probabilities"),
        ({"ratio_to": "sampler"}, "needs the sampler's log-probabilities"),
        ({"length_norm": True, "reduction": "constant"}, r"needs the token limit of an answer; give collate\(limit="),
        ({"normalise_parts": True}, r"needs the parts of the score; give collate\(weights="),
    ],
)
def test_a_batch_of_ones_own_without_the_column_is_refused(fields: dict[str, Any], sentence: str) -> None:
    batch = collate([Episode(Example("x", "?"), 0, n, [Turn([9], [5])]) for n in range(2)])
    with pytest.raises(LmgymError, match=sentence):
        grpo(group_size=2, **fields).advantages(batch)


def test_the_overlong_reward_refuses_a_buffer_that_cannot_be() -> None:
    for buffer, sentence in (
        (0, r"'rewards\.overlong\.buffer' must be above 0"),
        (9, r"is 9, more than max_tokens \(8\)"),
    ):
        (reward,) = build_rewards({"overlong": {"max_tokens": 8, "buffer": buffer}})
        with pytest.raises(LmgymError, match=sentence):
            call_reward(reward, [Episode(Example("x", "?"), 0, 0, [Turn([1], [5])])])
