"""Members of GRPO's family that no pinned library has, or has otherwise: against the papers' formulas, written down for
one token or answer at a time in plain Python, in fp64. (What TRL has is in test_grpo_family.py.)"""

import math
from itertools import accumulate, combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor

from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.algorithms.grpo.tokens import KlCov
from lmgym.algorithms.replay import Replay
from lmgym.batch import Batch, PolicyOutputs, collate
from lmgym.core.errors import LmgymError
from lmgym.functional import clips, group_advantages, importance, token_baseline, token_selection
from lmgym.functional.turn_discounts import turn_returns
from lmgym.functional.turn_groups import turn_group_advantages
from lmgym.types import Episode, Example, Turn
from tests import rounding
from tests.family import grpo
from tests.golden.record_grpo_family import LIMIT, SIZE, Inputs
from tests.golden.test_grpo_family import group_advantages as scaled
from tests.golden.test_grpo_family import ours, place, preset, same

SEEDS = (3, 4)
every_seed = pytest.mark.parametrize("seed", SEEDS)


def answers_of(inputs: Inputs, scale: bool) -> list[tuple[int, float]]:
    """Each answer's number and advantage."""
    found = []
    for first in range(0, len(inputs.lengths), SIZE):
        credits = scaled(inputs.rewards[first : first + SIZE, 0].tolist(), scaled=scale)
        found += list(zip(range(first, first + SIZE), credits, strict=True))
    return found


def numbers(column: Tensor, row: int, inputs: Inputs) -> list[float]:
    return column[row, : inputs.lengths[row]].tolist()


def loss_by_numbers(inputs: Inputs, weigh: Any, scale: bool = True) -> tuple[float, Tensor]:
    """The mean over tokens of the terms that `weigh(A, new, old, sampler, row)` gives, and its gradient: weigh returns
    a term and its derivative by log pi."""
    tokens, total, slopes = sum(inputs.lengths), 0.0, []
    for row, credit in answers_of(inputs, scale):
        for t in range(inputs.lengths[row]):
            term, slope = weigh(
                credit, float(inputs.new[row, t]), float(inputs.old[row, t]), float(inputs.sampler[row, t]), row
            )
            total += term
            slopes.append(slope / tokens)
    return total / tokens, tensor(slopes, dtype=torch.float64)


# Importance correction


@every_seed
def test_rows_whose_mean_ratio_is_off_are_rejected(seed: int) -> None:
    """exp(mean of log pi_old - log mu) outside of [1 / 1.1, 1.1]: the row weighs 0, T counts it all the same."""
    inputs, rejected = Inputs(seed), set()
    for row in range(len(inputs.lengths)):
        likelihoods = [math.prod(map(math.exp, numbers(one, row, inputs))) for one in (inputs.old, inputs.sampler)]
        mean = (likelihoods[0] / likelihoods[1]) ** (1 / inputs.lengths[row])
        if not 1 / 1.1 <= mean <= 1.1:
            rejected.add(row)
    assert 0 < len(rejected) < len(inputs.lengths)

    def weigh(credit: float, new: float, old: float, sampler: float, row: int) -> tuple[float, float]:
        ratio = math.exp(new - old)
        term = min(ratio * credit, min(max(ratio, 0.8), 1.28) * credit)
        moved = term == ratio * credit
        return (0.0, 0.0) if row in rejected else (-term, -ratio * credit * moved)

    expected, slopes = loss_by_numbers(inputs, weigh)
    loss, gradient, batch = ours(preset("dapo", mismatch_bound=1.1), inputs)
    assert float(loss) == pytest.approx(expected, rel=1e-12) and same(gradient, slopes)
    _, metrics = preset("dapo", mismatch_bound=1.1).loss(batch, PolicyOutputs(place(batch, inputs.new)))
    left_out = {row for row in range(len(inputs.lengths)) if metrics["importance/left_out"][row].any()}
    assert left_out == rejected and torch.equal(metrics["importance/mean"], 1 - metrics["importance/left_out"])


def test_off_policy_rows_have_a_negative_advantage_and_have_become_unlikely() -> None:
    """Means of log mu - log pi: 1 (of 2 and 0), .5, 1. Threshold .6; the last has A > 0."""
    new = tensor([[-3.0, -1.0], [-1.5, -1.5], [-3.0, -1.0]])
    sampler, credit = torch.full((3, 2), -1.0), tensor([[-1.0], [-1.0], [1.0]]).expand(3, 2)
    every = torch.ones(3, 2, dtype=torch.bool)
    rows = importance.off_policy_rows(new, sampler, credit, every, 0.6)
    assert rows.tolist() == [[True, True], [False, False], [False, False]]
    half = every & tensor([[True, False]])  # the second token is no action: the mean is 2
    assert importance.off_policy_rows(new, sampler, credit, half, 1.5)[0].tolist() == [True, False]
    assert not importance.off_policy_rows(new, sampler, credit, half, 2.0).any()  # equality stays in


# Trust regions


@every_seed
def test_gspo_token_moves_each_token_by_its_own_advantage(seed: int) -> None:
    """arXiv 2507.18071, where tokens have advantages of their own: the value is GSPO's s_i A_it, and the
    derivative by one token's log pi is s_i A_it, not the mean over the row that GSPO has."""
    inputs, generator = Inputs(seed), torch.Generator().manual_seed(seed)
    algorithm = preset("gspo_token", clip_low=9.0, clip_high=9.0)
    batch = ours(algorithm, inputs)[2]
    credits = torch.randn(batch.tokens.shape, generator=generator, dtype=torch.float64) * batch.actions
    batch = batch.replace(advantages=credits)
    leaf = place(batch, inputs.new).requires_grad_()
    term = algorithm.loss(batch, PolicyOutputs(leaf))[0]["policy"][0]
    found = torch.autograd.grad(term.sum(), leaf)[0]
    for row, length in enumerate(inputs.lengths):
        logs = [math.fsum(numbers(column, row, inputs)) for column in (inputs.new, inputs.old)]
        ratio = math.exp((logs[0] - logs[1]) / length)
        mask = batch.actions[row]
        assert torch.allclose(term[row][mask], -ratio * credits[row][mask], rtol=1e-12)
        assert torch.allclose(found[row][mask], -ratio * credits[row][mask], rtol=1e-12)


@every_seed
def test_gspo_token_is_gspo_where_a_row_shares_its_advantage(seed: int) -> None:
    found = [ours(preset(name, clip_low=0.03, clip_high=0.04), Inputs(seed)) for name in ("gspo", "gspo_token")]
    assert same(found[0][0], found[1][0]) and same(found[0][1], found[1][1])


@every_seed
def test_ce_gppo_keeps_a_bounded_gradient_outside_of_the_clip(seed: int) -> None:
    """arXiv 2509.20712: r A inside; beta_1 (1 - low) A below with A < 0; beta_2 (1 + high) A above with A > 0;
    the derivative by log pi is the same number."""
    seen = set()

    def weigh(credit: float, new: float, old: float, sampler: float, row: int) -> tuple[float, float]:
        ratio = math.exp(new - old)
        if ratio < 0.8 and credit < 0:
            seen.add("below")
            ratio = 0.75 * 0.8
        elif ratio > 1.28 and credit > 0:
            seen.add("above")
            ratio = 1.0 * 1.28
        return -ratio * credit, -ratio * credit

    expected, slopes = loss_by_numbers(Inputs(seed), weigh)
    loss, gradient, _ = ours(preset("ce_gppo"), Inputs(seed))
    assert seen == {"below", "above"}
    assert float(loss) == pytest.approx(expected, rel=1e-12) and same(gradient, slopes)


def test_ce_gppo_without_what_it_keeps_has_ppos_gradient() -> None:
    found = ours(preset("ce_gppo", keep_below=0.0, keep_above=0.0), Inputs(3))
    assert same(found[1], ours(grpo(group_size=SIZE, scale_rewards="group"), Inputs(3))[1])


@every_seed
def test_the_ipo_mask_has_two_sides(seed: int) -> None:
    """prime-rl's `ipo`: -r A where |pi - mu| <= .1, whatever the sign of A, and .001 (log r)^2, r = pi / mu."""
    inputs, masked = Inputs(seed), []
    inputs.new += 1.0  # likelier tokens, so that probabilities change by more than the bound
    inputs.sampler += 1.0

    def weigh(credit: float, new: float, old: float, sampler: float, row: int) -> tuple[float, float]:
        out = abs(math.exp(new) - math.exp(sampler)) > 0.1
        masked.append((out, (new > sampler) == (credit > 0)))
        ratio = math.exp(new - sampler) * (not out)
        drift = 1e-3 * (credit != 0)
        return -ratio * credit + drift * (new - sampler) ** 2, -ratio * credit + 2 * drift * (new - sampler)

    expected, slopes = loss_by_numbers(inputs, weigh, scale=False)
    loss, gradient, _ = ours(preset("ipo_mask"), inputs)
    assert {(True, True), (True, False), (False, True), (False, False)} <= set(masked)
    assert float(loss) == pytest.approx(expected, rel=1e-12) and same(gradient, slopes)


def test_gmpo_cuts_before_the_mean_and_only_on_the_side_where_the_step_goes() -> None:
    """Log-ratios .2, .8, -.9 with A > 0: (.2 + .4 - .9) / 3; with A < 0: (.2 + .8 - .4) / 3."""
    logs, every = tensor([[0.2, 0.8, -0.9]]), torch.ones(1, 3).bool()
    for sign, mean, cut in ((1.0, -0.1, [False, True, False]), (-1.0, 0.2, [False, False, True])):
        ratio, where = clips.geometric_mean_ratio(logs, sign * torch.ones(1, 3), every, 0.4, 0.4)
        assert ratio[0].tolist() == pytest.approx([math.exp(mean)] * 3) and where[0].tolist() == cut


def test_gmpos_mean_is_over_the_tokens_that_train() -> None:
    """A token without advantage is not in the mean, has no gradient, and does not loosen the bound."""
    logs = tensor([[0.1, 5.0], [0.3, 5.0]], requires_grad=True)
    credits, every = tensor([[1.0, 0.0], [0.0, 0.0]]), torch.ones(2, 2).bool()
    ratio, _ = clips.geometric_mean_ratio(logs, credits, every, 0.4, 0.4)
    assert ratio[0].tolist() == pytest.approx([math.exp(0.1)] * 2)
    assert ratio[1].tolist() == pytest.approx([math.exp(2.65)] * 2, rel=1e-6)  # a row that earns nothing: of all tokens
    (ratio * credits).sum().backward()
    assert logs.grad is not None
    assert logs.grad[0].tolist() == pytest.approx([math.exp(0.1), 0.0]) and not logs.grad[1].any()


@every_seed
def test_gmpo_on_the_tokens_of_large_entropy_gives_the_others_no_gradient(seed: int) -> None:
    inputs = Inputs(seed)
    _, gradient, batch = ours(preset("gmpo", top_entropy=0.3), inputs)
    entropy = torch.cat([row[:length] for row, length in zip(inputs.entropy, inputs.lengths, strict=True)])
    chosen = entropy >= torch.quantile(entropy, 0.7)
    credit = torch.cat([row[mask] for row, mask in zip(batch.advantages, batch.actions, strict=True)])
    assert not gradient[~chosen].any() and gradient[chosen & (credit != 0)].any()


def test_vespos_weight_is_one_at_one_and_falls_on_both_sides() -> None:
    """w^k exp(lambda (1 - w)); its largest value is at w = k / lambda."""
    every, logs = torch.ones(5, 1).bool(), tensor([0.1, 2 / 3, 1.0, 1.5, 3.0], dtype=torch.float64).log()[:, None]
    up = clips.gamma_weight(logs, torch.ones(5, 1), every, (2.0, 3.0), (3.0, 2.0))[:, 0].tolist()
    down = clips.gamma_weight(logs, -torch.ones(5, 1), every, (2.0, 3.0), (3.0, 2.0))[:, 0].tolist()
    assert up == pytest.approx([w**2 * math.exp(3 - 3 * w) for w in (0.1, 2 / 3, 1.0, 1.5, 3.0)])
    assert down == pytest.approx([w**3 * math.exp(2 - 2 * w) for w in (0.1, 2 / 3, 1.0, 1.5, 3.0)])
    assert max(up) == up[1] and max(down) == down[3]


# Advantages


def credits_of(algorithm: GRPO, inputs: Inputs) -> list[float]:
    batch = ours(algorithm, inputs)[2]
    return [float(row[mask][0]) for row, mask in zip(batch.advantages, batch.actions, strict=True)]


def groups_of(inputs: Inputs) -> list[tuple[list[float], list[int]]]:
    """The scores and the lengths of each group."""
    scores = inputs.rewards[:, 0].tolist()
    starts = range(0, len(scores), SIZE)
    return [(scores[first : first + SIZE], inputs.lengths[first : first + SIZE]) for first in starts]


@every_seed
def test_maxrl_is_the_gradient_of_log_pass_rate_with_a_baseline(seed: int) -> None:
    """arXiv 2602.02710: 1/K sum over right answers of S_i - 1/N sum of S_i, K right of N; so A / N with A as below. In
    the first two groups K is 0 and N."""
    inputs = Inputs(seed)
    right = [[0.0] * SIZE, [1.0] * SIZE, [1.0, 0.0, 0.0, 0.0]]
    inputs.rewards[:, 0] = tensor([one for scores in right for one in scores], dtype=torch.float64)
    expected = []
    for scores in right:
        mixed = 0 < sum(scores) < SIZE
        expected += [SIZE * (s / sum(scores) - 1 / SIZE) if mixed else 0.0 for s in scores]
    assert credits_of(preset("maxrl"), inputs) == pytest.approx(expected, abs=1e-12)
    assert expected[-4:] == [3.0, -1.0, -1.0, -1.0]
    inputs.rewards[0, 0] = -0.5
    with pytest.raises(LmgymError, match=r"credit is mean_scaled, and an answer's score is -0\.5; only scores of 0 or"):
        ours(preset("maxrl"), inputs)


@every_seed
def test_gpg_makes_up_for_groups_of_equal_scores(seed: int) -> None:
    """arXiv 2504.02546: alpha (R - mean), alpha = answers / answers in groups that differ: 12 / 8 here.
    The loss is -A log pi; with a ratio of 1 it has the gradient of -r A."""
    inputs = Inputs(seed)
    expected = [12 / 8 * credit for _, credit in answers_of(inputs, scale=False)]
    assert credits_of(preset("gpg"), inputs) == pytest.approx(expected, rel=1e-12)
    inputs.new = inputs.old.clone()
    tokens = sum(inputs.lengths)
    slopes = [-expected[row] / tokens for row, n in enumerate(inputs.lengths) for _ in range(n)]
    assert same(ours(preset("gpg"), inputs)[1], slopes)


@every_seed
def test_opos_baseline_weighs_by_length(seed: int) -> None:
    """arXiv 2505.23585: b = sum l R / sum l."""
    inputs, expected = Inputs(seed), []
    for scores, lengths in groups_of(inputs):
        baseline = math.fsum(s * n for s, n in zip(scores, lengths, strict=True)) / sum(lengths)
        expected += [score - baseline if len(set(scores)) > 1 else 0.0 for score in scores]
    assert credits_of(preset("opo"), inputs) == pytest.approx(expected, rel=1e-12)


def test_the_squared_gradient_by_the_logits() -> None:
    """1 - 2 pi(y) + sum pi(v)^2 is the squared norm of what autograd finds, and 0 for a token that is certain."""
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[4, 0] = 500.0
    chosen = torch.tensor([0, 3, 8, 1, 0])
    leaf = logits.clone().requires_grad_()
    logprobs = leaf.log_softmax(-1)[torch.arange(5), chosen]
    (slopes,) = torch.autograd.grad(logprobs.sum(), leaf)
    squares = logits.softmax(-1).square().sum(-1)
    (found,) = token_baseline.squared_logit_gradient(logprobs.detach()[None], squares[None])
    assert torch.allclose(found, slopes.square().sum(-1), rtol=1e-12, atol=1e-15) and found[4] == 0


@given(data=st.data())
@settings(max_examples=30)
def test_the_optimal_token_baseline_by_a_table(data: Any) -> None:
    """verl 0.6's optimal_token_baseline, B_t = sum W_t R / sum W_t over a prompt's answers, for one token at a time;
    conversations in one row or several."""
    draw, episodes = data.draw, []
    for index in range(draw(st.integers(1, 7))):
        turns = draw(
            st.lists(st.tuples(st.just([3]), st.sampled_from([[5], [6, 5, 7]]), st.just(0)), min_size=1, max_size=3)
        )
        episode = conversation(index, [(g, s, 0.0) for g, s, _ in turns], index % 2)
        episode.score = draw(st.sampled_from([0.0, 1.0, 0.25, -2.0]))
        for one in episode.turns[1:]:
            one.restart = draw(st.booleans())
        episodes.append(episode)
    batch = collate(episodes)
    random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    said, squared = (torch.rand(batch.tokens.shape, generator=random, dtype=torch.float64) for _ in range(2))
    batch = batch.replace(
        logprobs_old=-said,
        distribution_sums=squared[:, :, None],
        sum_names=("squared_probabilities",),
        score=batch.score.double(),
    )
    found = preset("otb").advantages(batch).require("advantages")
    lines: dict[int, list[float]] = {}
    for index in range(len(episodes)):
        own = (batch.episode == index)[:, None] & batch.actions
        steps = [1 - 2 * math.exp(-a) + b for a, b in zip(said[own].tolist(), squared[own].tolist(), strict=True)]
        lines[index] = list(accumulate(max(step, 0.0) for step in steps))
    for index, episode in enumerate(episodes):
        others = [one.index for one in episodes if one.group == episode.group]
        credits = found[(batch.episode == index)[:, None] & batch.actions].tolist()
        for t, credit in enumerate(credits):
            long = [one for one in others if len(lines[one]) > t]
            weight = math.fsum(lines[one][t] for one in long)
            if len(long) < 2 or len({episodes[one].score for one in others}) < 2:
                assert credit == 0.0
                continue
            least = min(episodes[one].score for one in others)
            earned = math.fsum(lines[one][t] * (episodes[one].score - least) for one in long)
            baseline = least + (earned / weight if weight else 0.0)
            assert credit == pytest.approx(episode.score - baseline, rel=1e-9, abs=1e-9)
    assert not found[~batch.actions].any()
    for fields in ({"scale_rewards": "group"}, {"keep": 2}):
        with pytest.raises(LmgymError, match="beside credit: token_baseline"):
            preset("otb", **fields)


@given(
    scores=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.1, -2.0]), min_size=2, max_size=7),
    k=st.integers(2, 5),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=60)
def test_pass_at_k_counts_every_set_of_k(scores: list[float], k: int, order: Any) -> None:
    """PKPO, arXiv 2505.15201, by enumeration of the sets; rows in any order."""
    n, expected = len(scores), []
    for i in range(n):
        own = [subset for subset in combinations(range(n), k) if i in subset]
        leads = [max(scores[j] for j in subset) - max(scores[j] for j in subset if j != i) for subset in own]
        expected.append(n * math.fsum(leads) / math.comb(n, k) if own else 0.0)
    rows = list(range(n))
    order.shuffle(rows)
    found = group_advantages.pass_at_k(
        tensor([scores[row] for row in rows], dtype=torch.float64), tensor(rows), torch.zeros(n).long(), k
    )
    assert found.tolist() == pytest.approx([expected[row] for row in rows], abs=1e-12)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_credit_of_pass_at_k_has_the_gradient_of_pass_at_k(rate: float) -> None:
    """One parameter, the chance p = sigmoid(theta) of a right answer, and all 2^4 outcomes of four answers: the mean of
    1/n sum A_i d log p_i is d/dtheta of 1 - (1 - p)^3."""
    total = 0.0
    for bits in range(16):
        scores = [float(bits >> i & 1) for i in range(4)]
        chance = math.prod(rate if s else 1 - rate for s in scores)
        credit = group_advantages.pass_at_k(
            tensor(scores, dtype=torch.float64), torch.arange(4), torch.zeros(4).long(), 3
        ).tolist()
        slope = [(1 - rate) if s else -rate for s in scores]
        total += chance * math.fsum(a * d for a, d in zip(credit, slope, strict=True)) / 4
    assert total == pytest.approx(3 * (1 - rate) ** 2 * rate * (1 - rate), rel=1e-12)


@every_seed
@pytest.mark.parametrize("by", ["length", "score_per_token"])
def test_gfpo_trains_the_chosen_answers_of_each_group(seed: int, by: Any) -> None:
    """arXiv 2508.09726: mean and deviation over the chosen ones, 0 for the others, and T counts all."""
    inputs, expected = Inputs(seed), []
    for scores, lengths in groups_of(inputs):
        order = sorted(range(SIZE), key=lambda i: lengths[i] if by == "length" else -scores[i] / lengths[i])
        chosen = order[:3]
        credits = scaled([scores[i] for i in chosen], scaled=True)
        expected += [credits[chosen.index(i)] if i in chosen else 0.0 for i in range(SIZE)]
    algorithm = preset("gfpo", keep=3, keep_by=by)
    assert credits_of(algorithm, inputs) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    inputs.new = inputs.old.clone()
    slopes = [-expected[row] / sum(inputs.lengths) for row, n in enumerate(inputs.lengths) for _ in range(n)]
    assert same(ours(algorithm, inputs)[1], slopes)


def test_the_overlong_penalty_is_daposs() -> None:
    """arXiv 2503.14476, with a limit of 16 tokens of which the last quarter is the buffer."""
    for length in range(1, 20):
        expected = 0.0 if length <= 12 else (12 - length) / 4 if length <= 16 else -1.0
        found = group_advantages.overlong_penalty(tensor([float(length)]), LIMIT, 0.25)
        assert float(found) == pytest.approx(expected)
    answers = [Episode(Example("x", "?"), 0, n, [Turn([9], [5] * n)], score=1.0) for n in (4, 14)]
    batch = grpo(group_size=2, overlong=0.25).advantages(collate(answers, limit=LIMIT))
    assert batch.advantages[:, 1].tolist() == [0.25, -0.25]  # scores of 1 and .5
    turns = [Turn([9], [5] * n) for n in (10, 12, 14)]  # a conversation is as long as its longest turn
    talk = [Episode(Example("x", "?"), 0, n, turns[: n + 2], score=1.0) for n in (0, 1)]
    assert grpo(group_size=2, overlong=0.25).advantages(collate(talk, limit=LIMIT)).advantages[:, 1].tolist() == [
        0.25,
        -0.25,
    ]
    with pytest.raises(LmgymError, match=r"overlong needs the token limit of an answer; give collate\(limit="):
        grpo(group_size=2, overlong=0.25).advantages(collate(answers))


# Token selection


def whole(algorithm: GRPO, inputs: Inputs) -> tuple[Tensor, Tensor, Batch, Any]:
    """Of `batch_loss`: the loss, its gradient at the answers' log-probabilities, the batch, and the metrics."""
    batch = ours(algorithm, inputs)[2]
    leaf = place(batch, inputs.new).requires_grad_()
    losses, metrics = algorithm.batch_loss(batch, PolicyOutputs(leaf, entropy=place(batch, inputs.entropy)))
    total = torch.stack([*losses.values()]).sum()
    return total.detach(), torch.autograd.grad(total, leaf)[0][batch.actions], batch, metrics


def products(inputs: Inputs, scale: bool = True) -> list[float]:
    """(log pi - mean)(A - mean) of each token of all answers, in their order."""
    logs = [value for row in range(len(inputs.lengths)) for value in numbers(inputs.new, row, inputs)]
    credits = [credit for row, credit in answers_of(inputs, scale) for _ in range(inputs.lengths[row])]
    means = [math.fsum(column) / len(column) for column in (logs, credits)]
    return [(p - means[0]) * (a - means[1]) for p, a in zip(logs, credits, strict=True)]


@every_seed
def test_kl_cov_penalises_the_tokens_of_largest_covariance(seed: int) -> None:
    """arXiv 2505.22617: -r A for all tokens, + |log r| for the chosen tenth (verl's penalty)."""
    inputs = Inputs(seed)
    values = products(inputs)
    count = max(1, int(0.1 * len(values)))
    chosen = set(sorted(range(len(values)), key=lambda i: -values[i])[:count])
    place_of = iter(range(len(values)))

    def weigh(credit: float, new: float, old: float, sampler: float, row: int) -> tuple[float, float]:
        ratio, picked = math.exp(new - old), next(place_of) in chosen
        return -ratio * credit + picked * abs(new - old), -ratio * credit + picked * math.copysign(1, new - old)

    expected, slopes = loss_by_numbers(inputs, weigh)
    loss, gradient, _, metrics = whole(preset("kl_cov", covariance_share=0.1), inputs)
    assert count > 1 and metrics["tokens/chosen"] == pytest.approx(count / len(values))
    assert float(loss) == pytest.approx(expected, rel=1e-12) and same(gradient, slopes)


def test_the_penalty_of_kl_cov_is_divided_by_the_limit_as_the_rest_is() -> None:
    inputs = Inputs(0)
    batch = ours(GRPO(), inputs)[2].replace(limit=50)
    outputs = PolicyOutputs(place(batch, inputs.new))
    parts: dict[str, Any] = {"group_size": SIZE, "tokens": KlCov(share=0.1)}
    summed, limited = (GRPO(reduction=how, **parts) for how in ("constant", "limit"))
    whole_sum, each = (one.batch_loss(one.advantages(batch), outputs)[0] for one in (summed, limited))
    assert whole_sum.keys() == each.keys() and len(each) == 2
    for name, term in whole_sum.items():
        assert float(term) != 0 and float(each[name]) == pytest.approx(float(term) / 50, rel=1e-12)


@every_seed
def test_clip_cov_leaves_out_as_many_tokens_of_the_band_as_it_may(seed: int) -> None:
    """arXiv 2505.22617: which ones is drawn, so the rest of the loss must be PPO's, those left out must lie in
    the band, and PPO must not have clipped them already."""
    inputs = Inputs(seed)
    values = tensor(products(inputs), dtype=torch.float64)
    algorithm = preset("clip_cov", covariance_share=0.05, covariance_low=0.02, covariance_high=2.0)
    clip = grpo(group_size=SIZE, scale_rewards="group", clip_high=0.2)
    plain, (_, gradient, batch, metrics) = ours(clip, inputs)[1], whole(algorithm, inputs)
    count, out = int(0.05 * len(values)), (gradient == 0) & (plain != 0)
    assert metrics["tokens/chosen"] == pytest.approx(count / len(values))
    assert 1 <= int(out.sum()) <= count == 2 and torch.equal(gradient[~out], plain[~out])  # some have no credit
    assert bool(((values[out] > 0.02) & (values[out] < 2.0)).all())
    again = whole(algorithm, inputs)[1]
    assert torch.equal(again, gradient)  # a function of the step
    other = algorithm.batch_loss(batch.replace(key=7), PolicyOutputs(place(batch, inputs.new)))
    drawn = {float(algorithm.batch_loss(batch.replace(key=key), PolicyOutputs(place(batch, inputs.new)))[0]["policy"])
             for key in range(8)}  # fmt: skip
    assert len(drawn) > 1 and set(other[0]) == {"policy"}


def test_a_quantile_of_entropies_is_torchs() -> None:
    values = torch.rand(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)[None]
    for share in (0.02, 0.2, 0.5, 0.999, 1.0):
        expected = values >= torch.quantile(values, 1 - share)
        assert torch.equal(token_selection.top_quantile(values, torch.ones(1, 50).bool(), share), expected)


def test_what_looks_at_the_whole_step_is_computed_so() -> None:
    assert not GRPO().whole_batch and preset("top_entropy").whole_batch and preset("kl_cov").whole_batch
    assert preset("top_entropy").requirements.entropy and not preset("kl_cov").requirements.entropy

    class Own(GRPO):
        def batch_loss(self, batch: Batch, new: PolicyOutputs) -> Any:
            return {}, {}

    assert Own().whole_batch


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"importance_outside": "mask"}, "importance_outside' is mask, and .* beside correction: none"),
        ({"importance_level": "sequence"}, "importance_level' is sequence, and .* beside correction: none"),
        ({"importance_floor": 2.0, "importance_cap": 1.5}, "correction.floor is 2.0 and algorithm.correction.cap 1.5"),
        (
            {"importance_floor": 0.5, "ratio_to": "sampler"},
            "importance_floor' is 0.5, and .* beside correction: sampler",
        ),
        ({"mismatch_bound": 1.0}, "correction.mismatch_bound is 1.0; it bounds a ratio and its inverse"),
        ({"objective": "vespo", "importance_cap": 2.0}, "weighs whole rows by itself; write correction: sampler"),
        ({"objective": "vespo", "ratio": "sequence"}, "ratio' is sequence, and .* beside surrogate: vespo"),
        ({"objective": "gmpo", "ratio": "sequence_token"}, "ratio' is sequence_token, and .* beside surrogate: gmpo"),
        ({"objective": "ipo", "ratio": "sequence"}, "ratio' is sequence, and .* beside surrogate: ipo_mask"),
        ({"pass_at": 9}, "credit.k is 9, and algorithm.group_size is 8; write 8 or less"),
        ({"pass_at": 1}, "credit.k is 1; the best of 1 answer is the answer"),
        ({"keep": 8}, "credit.keep is 8, and algorithm.group_size is 8; write 7 or less"),
        ({"keep": 4, "pass_at": 2}, "keep' is 4, and .* beside credit: pass_at_k"),
        (
            {"baseline": "length", "scale_rewards": "group"},
            "scale_rewards' is group, and .* beside credit: length_weighted",
        ),
        ({"objective": "gmpo", "baseline": "token"}, "credit: token_baseline gives the tokens of a row advantages of"),
        ({"objective": "gmpo", "turn_coefficient": 1.0}, "credit: turns gives the tokens of a row advantages of"),
        ({"ratio": "sequence", "top_entropy": 0.5}, "tokens: top_entropy gives .* write ratio: sequence_token"),
        ({"ratio": "sequence", "turn_coefficient": 1.0}, "credit: turns gives .* write ratio: sequence_token"),
        ({"ratio": "sequence", "baseline": "token"}, "credit: token_baseline gives .* write ratio: sequence_token"),
        ({"scale_rewards": "mean", "overlong": 0.2}, "needs scores of 0 or more, and overlong makes some negative"),
        ({"scale_rewards": "mean", "kl_coefficient": 0.1, "kl_in": "reward"}, "kl_in makes some negative; write kl_in"),
        (
            {"scale_rewards": "mean", "scale_by_mixed": True},
            "scale_by_mixed' is True, and .* beside credit: mean_scaled",
        ),
        ({"normalise_parts": True, "overlong": 0.2}, "take the reward overlong in its place"),
        ({"top_entropy": 0.0}, "tokens.share is 0.0; it is a share of the tokens"),
        ({"top_entropy": 0.5, "covariance": "clip"}, "top_entropy' is 0.5, and .* beside tokens: clip_cov"),
        ({"covariance": "clip", "objective": "none"}, "write surrogate: {name: clip, ratio: token}"),
        ({"covariance": "clip", "covariance_low": 5.0}, "tokens.low is 5.0 and algorithm.tokens.high 5.0"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LmgymError, match=sentence.replace("(", r"\(")):
        grpo(**fields)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"importance_floor": 0.5}, "importance_floor' is 0.5, and .* beside correction: sampler"),
        ({"mismatch_bound": 1.1}, "replay's ratio is to the sampler already"),
        ({"truncate": 2.0, "dual_clip": 3.0}, "dual_clip' is 3.0, and .* beside surrogate: truncated_weight"),
    ],
)
def test_what_replay_has_already_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LmgymError, match=sentence):
        grpo(kind=Replay, **fields)


# Groups of turns


def conversation(index: int, turns: list[tuple[list[int], list[int], float]], group: int = 0) -> Episode:
    """Turns of (text that is given, answer, reward)."""
    own = [Turn(given, said, reward=reward) for given, said, reward in turns]
    return Episode(Example("x", "?"), group, index, own, score=math.fsum(turn.reward for turn in own))


def test_turns_that_answered_the_same_text_are_a_group() -> None:
    """Text [3] comes in three turns, of returns 0, 1 and 4 (gamma .5); [4] in one, which is then no group; in another
    group of conversations [3] is another text. Both answers to [9], the first turn, are one inner group."""
    first = conversation(0, [([9], [5, 5], 0.0), ([3], [6], 0.0), ([4], [7], 0.0)])
    second = conversation(1, [([9], [5], 2.0), ([3], [6], 1.0)])
    third = conversation(2, [([8], [5], 0.0), ([3], [6, 7], 4.0)])
    elsewhere = conversation(3, [([3], [5], 9.0)], group=1)
    batch = collate([first, second, third, elsewhere])
    turn = batch.require("turn")
    returns = turn_returns(batch.rewards, batch.actions, turn, batch.episode, 0.5)
    found = turn_group_advantages(returns, batch.tokens, batch.actions, turn, batch.episode, batch.group)
    means = {9: (0.0 + 2.5) / 2, 3: (0.0 + 1.0 + 4.0) / 3}
    expected = [
        [0.0 - means[9]] * 2 + [0.0 - means[3]] + [0.0],
        [2.5 - means[9], 1.0 - means[3]],
        [0.0] + [4.0 - means[3]] * 2,
        [0.0],
    ]
    # A return adds two rewards, a mean three returns; a division and a difference: seven operations in fp32.
    loose = rounding.rounding(7, size=5.0)
    for row, own in enumerate(expected):
        assert found[row][batch.actions[row]].tolist() == pytest.approx(own, rel=0, abs=loose)
    assert not found[~batch.actions].any()


@given(data=st.data(), scaled=st.booleans())
@settings(max_examples=30)
def test_groups_of_turns_by_a_table_of_texts(data: Any, scaled: bool) -> None:
    """Against a dictionary from (group, text) to returns, conversations of few texts in rows of their own or not."""
    draw, episodes, table = data.draw, [], {}
    for index in range(draw(st.integers(1, 6))):
        turns = draw(
            st.lists(
                st.tuples(
                    st.sampled_from([[3], [4, 3], [4]]), st.sampled_from([[5], [6, 5]]), st.sampled_from([0, 1, 3])
                ),
                min_size=1,
                max_size=4,
            )
        )
        group, restart = index % 2, draw(st.booleans())
        episode = conversation(index, [(g, s, float(r)) for g, s, r in turns], group)
        for one in episode.turns[1:]:
            one.restart = restart
        episodes.append(episode)
    own: list[list[tuple[Any, float, int]]] = []
    for episode in episodes:
        ahead, rows = 0.0, []
        for one in reversed(episode.turns):
            ahead = one.reward + 0.5 * ahead
            key = (episode.group, tuple(one.prompt_ids))
            table.setdefault(key, []).append(ahead)
            rows.append((key, ahead, len(one.action_ids)))
        own.append(rows[::-1])
    batch = collate(episodes)
    batch = batch.replace(rewards=batch.rewards.double())
    turn = batch.require("turn")
    returns = turn_returns(batch.rewards, batch.actions, turn, batch.episode, 0.5)
    found = turn_group_advantages(returns, batch.tokens, batch.actions, turn, batch.episode, batch.group, scaled=scaled)
    for index, rows in enumerate(own):
        expected = []
        for key, value, length in rows:
            values = table[key]
            mean = math.fsum(values) / len(values)
            deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1))
            expected += [(value - mean) / (deviation + 1e-4 if scaled else 1.0)] * length
        mine = batch.episode == index
        assert found[mine][batch.actions[mine]].tolist() == pytest.approx(expected, abs=1e-9)


@given(data=st.data(), scaled=st.booleans())
@settings(max_examples=30)
def test_hierarchies_of_groups_by_a_table_of_histories(data: Any, scaled: bool) -> None:
    """HGPO's authors' weights (k + 2)^power over the levels that tell turns apart, against a dictionary from (group,
    texts of the last k + 1 turns) to returns."""
    draw, episodes, table = data.draw, [], {}
    history, power = draw(st.integers(0, 3)), draw(st.sampled_from([0.0, 1.0, 2.5]))
    for index in range(draw(st.integers(1, 6))):
        texts = draw(st.lists(st.sampled_from([[3], [4, 3]]), min_size=1, max_size=4))
        turns = [(text, [5], float(draw(st.sampled_from([0, 1, 3])))) for text in texts]
        episodes.append(conversation(index, turns, index % 2))
        for one in episodes[-1].turns[1:]:
            one.restart = draw(st.booleans())
    own: list[list[tuple[list[Any], float]]] = []
    for episode in episodes:
        ahead, rows = 0.0, []
        texts = [tuple(one.prompt_ids) for one in episode.turns]
        for turn in reversed(range(len(texts))):
            ahead = episode.turns[turn].reward + 0.5 * ahead
            keys = [(episode.group, *texts[turn - k : turn + 1]) for k in range(min(history, turn) + 1)]
            for key in keys:
                table.setdefault(key, []).append(ahead)
            rows.append((keys, ahead))
        own.append(rows[::-1])
    batch = collate(episodes)
    batch = batch.replace(rewards=batch.rewards.double())
    turn = batch.require("turn")
    returns = turn_returns(batch.rewards, batch.actions, turn, batch.episode, 0.5)
    found = turn_group_advantages(
        returns, batch.tokens, batch.actions, turn, batch.episode, batch.group,
        scaled=scaled, history=history, power=power,
    )  # fmt: skip
    for index, rows in enumerate(own):
        expected = []
        for keys, value in rows:
            total, weights = 0.0, 0.0
            for k, key in enumerate(keys):
                values = table[key]
                if len(set(values)) == 1:
                    continue
                mean = math.fsum(values) / len(values)
                deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
                total += (k + 2) ** power * (value - mean) / (deviation + 1e-4 if scaled else 1.0)
                weights += (k + 2) ** power
            expected.append(total / weights if weights else 0.0)
        mine = batch.episode == index
        assert found[mine][batch.actions[mine]].tolist() == pytest.approx(expected, abs=1e-9)
    for fields in ({"turn_history": 2}, {"episode_coefficient": 0.0}):
        with pytest.raises(LmgymError, match="nothing reads it beside credit: group"):
            grpo(**fields)


def test_gigpo_adds_both_advantages() -> None:
    """Scores 4 and 1 in a group: +-1.5 over their deviation; the last turns had the same text, returns 4 and 1."""
    episodes = [conversation(n, [([9], [5], 0.0), ([3], [6], reward)]) for n, reward in enumerate((4.0, 1.0))]
    batch = collate(episodes)
    batch = batch.replace(score=batch.score.double(), rewards=batch.rewards.double())
    found = preset("gigpo", group_size=2).advantages(batch).advantages
    deviation = math.sqrt(2 * 1.5**2) + 1e-4
    first = math.sqrt(2 * (0.95 * 1.5) ** 2) + 1e-4
    expected = [1.5 / deviation + 0.95 * 1.5 / first, 1.5 / deviation + 1.5 / deviation]
    assert found[0][batch.actions[0]].tolist() == pytest.approx(expected)
    assert found[1][batch.actions[1]].tolist() == pytest.approx([-value for value in expected])
    for fields in ({"scale_rewards": "batch"}, {"kl_coefficient": 0.1, "kl_in": "reward"}):
        with pytest.raises(LmgymError, match=r"algorithm\.credit"):
            grpo(turn_coefficient=1.0, **fields)
