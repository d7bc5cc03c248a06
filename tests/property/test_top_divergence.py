"""Divergences over a teacher's K most likely tokens and one bucket for all others, in fp64."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from lmgym.functional.divergences import SMALLEST_REST, Divergence, with_rest
from tests import rounding

FORMS = [Divergence("forward_kl"), Divergence("reverse_kl"), Divergence("jsd"), Divergence("jsd", 0.1)]
ROWS, VOCABULARY = 5, 12
SEEDS, SPREADS = st.integers(0, 1000), st.sampled_from([0.1, 1.0, 2.5])


def drawn(seed: int, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of a student and the log-probabilities of a teacher."""
    student, teacher = torch.randn(2, ROWS, VOCABULARY, generator=torch.Generator().manual_seed(seed)).double() * spread
    return student, teacher.log_softmax(-1)


def grouped(divergence: Divergence, student: torch.Tensor, teacher: torch.Tensor, top_k: int) -> Any:
    top = teacher.topk(top_k)
    return divergence.of_top(student.log_softmax(-1), top.indices, with_rest(top.values))


def error(*logprobs: torch.Tensor) -> float:
    """What sums over the vocabulary of p times a difference of log-probabilities may be wrong by. The others of a
    teacher come from 1 less a sum, which the logarithm makes larger by their inverse."""
    least = min(float(one.min()) for one in logprobs)
    return rounding.rounding(VOCABULARY, 1 - least + 1 / math.exp(least), torch.float64)


@given(SEEDS, SPREADS, st.sampled_from(FORMS))
def test_more_tokens_by_name_never_make_it_smaller_and_all_of_them_make_it_the_divergence(
    seed: int, spread: float, divergence: Divergence
) -> None:
    student, teacher = drawn(seed, spread)
    assume(float(teacher.min()) > math.log(SMALLEST_REST))  # else the others get more than they have
    near = error(student.log_softmax(-1), teacher)
    whole, by_logits = divergence.of(student.log_softmax(-1), teacher)
    last = torch.zeros(ROWS, dtype=torch.float64)
    for top_k in range(1, VOCABULARY + 1):
        value, gradient = grouped(divergence, student, teacher, top_k)
        assert bool((value >= last - near).all() and (value <= whole + near).all())
        last = value
    assert torch.allclose(value, whole, rtol=0, atol=near)  # also one less: a bucket of one token is that token
    assert torch.allclose(gradient, by_logits, rtol=0, atol=near)


@given(SEEDS, SPREADS, st.sampled_from(FORMS), st.integers(1, VOCABULARY))
def test_its_gradient_is_that_of_its_definition(seed: int, spread: float, divergence: Divergence, top_k: int) -> None:
    """Autograd over the K + 1 outcomes, where the student's others are 1 less the K."""
    student, teacher = drawn(seed, spread)
    value, gradient = grouped(divergence, student, teacher, top_k)
    top = teacher.topk(top_k)
    leaf = student.clone().requires_grad_()
    p = leaf.softmax(-1).gather(1, top.indices)
    q = with_rest(top.values).exp()[:, :top_k]
    if top_k < VOCABULARY:
        inside = torch.zeros(ROWS, VOCABULARY).scatter(1, top.indices, 1.0).bool()
        p = torch.cat([p, leaf.softmax(-1).masked_fill(inside, 0.0).sum(-1, keepdim=True)], 1)
        q = with_rest(top.values).exp()
    if divergence.name == "forward_kl":
        expected = (q * (q / p).log()).sum(-1)
    elif divergence.name == "reverse_kl":
        expected = (p * (p / q).log()).sum(-1)
    else:
        beta = divergence.beta
        m = beta * q + (1 - beta) * p
        expected = (beta * q * (q / m).log() + (1 - beta) * p * (p / m).log()).sum(-1)
    near = error(student.log_softmax(-1), teacher)
    assert torch.allclose(value, expected, rtol=0, atol=near)
    assert torch.allclose(gradient, torch.autograd.grad(expected.sum(), leaf)[0], rtol=0, atol=near)
    assert torch.allclose(gradient.sum(-1), torch.zeros(ROWS).double(), atol=near)  # a common shift changes nothing


def test_the_bucket_by_hand() -> None:
    """p = (1/2, 1/4, 1/4) and q = (1/4, 1/4, 1/2), of which the last is named: (1/4, 3/4) against (1/2, 1/2)."""
    p, q = torch.tensor([[0.5, 0.25, 0.25]]).double().log(), torch.tensor([[0.5]]).double().log()
    assert with_rest(q).exp().tolist() == [[0.5, pytest.approx(0.5, rel=1e-15)]]
    value, gradient = Divergence("reverse_kl").of_top(p, torch.tensor([[2]]), with_rest(q))
    assert value.item() == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), rel=1e-14)
    # d/dz of the named token: p (log p/q - D); the others share the rest of it as their probabilities, 2 to 1.
    named = 0.25 * (math.log(0.5) - value.item())
    assert gradient[0].tolist() == pytest.approx([-named * 2 / 3, -named / 3, named], rel=1e-13)


@pytest.mark.parametrize("excess", [0.0, 1e-7, -1e-9])
def test_a_teacher_that_is_certain_finds_the_others_almost_impossible(excess: float) -> None:
    """In single precision the K probabilities may add up to 1 or more: neither value nor gradient becomes infinite."""
    logprobs = torch.tensor([[math.log1p(excess), -30.0]])
    assert with_rest(logprobs)[0, -1].item() == pytest.approx(math.log(SMALLEST_REST), rel=1e-6)
    student = torch.tensor([[-40.0, 0.0, 3.0, 5.0]]).log_softmax(-1)
    for divergence in FORMS:
        value, gradient = divergence.of_top(student, torch.tensor([[0, 1]]), with_rest(logprobs))
        assert bool(value.isfinite().all() and gradient.isfinite().all()) and value.item() > 0
