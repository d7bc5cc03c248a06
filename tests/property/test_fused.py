"""The fused LM head against autograd over the same formula, in fp64: any chunk, temperature, exclusion and kept set."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmgym.batch import Batch, SamplingMask
from lmgym.models.distributions import action_logits, logprobs_of_logits
from lmgym.models.kernels import fused_logprobs
from tests import models, rounding


def restricted(batch: Batch, seed: int, vocabulary: int) -> Batch:
    """The batch with random kept sets that hold the actions themselves."""
    generator = torch.Generator().manual_seed(seed)
    count = int(batch.actions.sum())
    sets = torch.rand(count, vocabulary, generator=generator) < 0.3
    sets[torch.arange(count), batch.tokens[batch.actions]] = True
    index = torch.zeros(batch.actions.shape, dtype=torch.long)
    index[batch.actions] = torch.arange(count)
    return batch.replace(sampling_mask=SamplingMask(models.bits_of(sets)), kept=index)


@pytest.mark.slow
@given(
    st.integers(0, 50),
    st.sampled_from([0.0, 0.7, 1.0, 1.6]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(1, 40),
    st.sampled_from([300, 2**20]),
)
def test_fused_is_the_formula_and_its_gradient(seed, temperature, minimum, sets, biased, chunk, tile) -> None:
    conversations = models.episodes(seed, minimum=2 if minimum else 0)
    batch = models.batch_of(conversations, temperature=temperature)
    if sets:
        batch = restricted(batch, seed, models.VOCABULARY)
    row, column = batch.actions.nonzero(as_tuple=True)
    generator = torch.Generator().manual_seed(seed)

    def noise(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    hidden, weight = noise(len(row), 5).requires_grad_(), noise(models.VOCABULARY, 5).requires_grad_()
    bias = noise(models.VOCABULARY) if biased else None
    by_logprob, by_entropy = noise(len(row)), noise(len(row))
    targets = batch.tokens[row, column]

    logits = hidden @ weight.T + (0.0 if bias is None else bias)
    expected = logprobs_of_logits(logits, batch, row, column, entropy=True)
    wanted = torch.autograd.grad(expected, [hidden, weight], [by_logprob, by_entropy])
    scale = 1.0 if temperature == 0 else 1 / temperature
    usual, fused_logprobs.TILE = fused_logprobs.TILE, tile
    try:
        found = fused_logprobs.FusedLogprobs.apply(
            hidden, weight, bias, targets, lambda z, part: action_logits(z, batch, row[part], column[part]), scale,
            True, chunk,
        )  # fmt: skip
        gradients = torch.autograd.grad(found, [hidden, weight], [by_logprob, by_entropy])
    finally:
        fused_logprobs.TILE = usual
    for ours, theirs in zip([*found, *gradients], [*expected, *wanted], strict=True):
        assert torch.isfinite(ours).all()
        assert models.relative(ours, theirs) < 1e-12


@pytest.mark.slow
@given(
    st.integers(0, 50), st.sampled_from([0.7, 1.0]), st.booleans(), st.integers(1, 40), st.sampled_from([300, 2**20])
)
def test_a_kept_promise_changes_no_bit_and_a_broken_one_nothing(seed, temperature, minimum, chunk, tile) -> None:
    """Forward that is told what backward will bring, against forward and backward as usual."""
    batch = models.batch_of(models.episodes(seed, minimum=2 if minimum else 0), temperature=temperature)
    row, column = batch.actions.nonzero(as_tuple=True)
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (
        torch.randn(size, 5, generator=generator).requires_grad_() for size in (len(row), models.VOCABULARY)
    )
    brought, other = torch.randn(2, len(row), generator=generator)
    targets, usual = batch.tokens[row, column], fused_logprobs.TILE

    def both(logprob_gradient: torch.Tensor | None) -> list[torch.Tensor]:
        logprobs, _ = fused_logprobs.FusedLogprobs.apply(
            hidden, weight, None, targets, lambda z, part: action_logits(z, batch, row[part], column[part]),
            1 / temperature, False, chunk, logprob_gradient,
        )  # fmt: skip
        return [logprobs, *torch.autograd.grad(logprobs, [hidden, weight], brought)]

    fused_logprobs.TILE = tile
    try:
        wanted, kept_promise, broken = both(None), both(brought.clone()), both(other)
    finally:
        fused_logprobs.TILE = usual
    for expected, one, two in zip(wanted, kept_promise, broken, strict=True):
        assert torch.equal(expected, one) and torch.equal(expected, two)


def test_frozen_head_gets_no_gradient() -> None:
    """Under LoRA the head does not train, and its gradient, which is as large as the head, is not made."""
    batch = models.batch_of(models.episodes(0))
    row, column = batch.actions.nonzero(as_tuple=True)
    hidden, weight = torch.randn(len(row), 5, requires_grad=True), torch.randn(models.VOCABULARY, 5)
    logprobs, entropy = fused_logprobs.FusedLogprobs.apply(
        hidden, weight, None, batch.tokens[row, column], lambda z, part: z, 1.0, False, 7
    )
    assert len(entropy) == 0
    logprobs.sum().backward()
    assert weight.grad is None and hidden.grad is not None and float(hidden.grad.norm()) > 0


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_precision_of_the_products_and_of_the_rest(compute: torch.dtype) -> None:
    """Log-probabilities come in fp32 whatever the product was computed in, and agree with one product for all."""
    hidden, weight = torch.randn(9, 16).to(compute), torch.randn(50, 16)
    targets = torch.arange(9)
    logprobs, _ = fused_logprobs.FusedLogprobs.apply(hidden, weight, None, targets, lambda z, part: z, 1.0, False, 4)
    expected = (hidden @ weight.to(compute).T).float().log_softmax(-1)[torch.arange(9), targets]
    # Products are sums of 16 terms and round to `compute`, the softmax is over 50; a logit weighs twice, as what is
    # asked for and in the sum.
    size = float((hidden.float().abs() @ weight.abs().T).max())
    tolerance = 2 * (rounding.rounding(16 + 50, size) + rounding.rounding(1, size, compute))
    assert logprobs.dtype == torch.float32 and torch.allclose(logprobs, expected, rtol=0, atol=tolerance)
