"""Sampling tokens from logits: the inverse cumulative distribution (CDF) at one uniform number per row."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lmgym.functional.pieces import in_pieces
from lmgym.functional.truncation import Candidates

BLOCK = 256  # logits per block of the two-level inverse CDF
TILE = 2**18  # logits per elementwise operation on a CPU, so that they fit its cache


def draw(
    logits: Float[Tensor, "R V"], temperature: float, uniform: Float[Tensor, " R"], exact: bool = False
) -> tuple[Int[Tensor, " R"], Float[Tensor, " R"]]:
    """One token per row by inverse CDF, and its log-probability (nats); temperature 0 takes the most likely token.
    Narrower logits than fp32 give what their copies in fp32 would give. With `exact` the log-probability is that of
    `exact_logprobs` to the bit.

    Each row has one uniform number in [0, 1), so its token does not depend on the other rows. Two levels (first sums of
    blocks of the vocabulary, then one block) avoid a cumulative sum over the whole vocabulary.

    Example: draw(torch.tensor([[.25, .75]]).log(), 1.0, torch.tensor([.5])) -> (tensor([1]), tensor([-0.2877]))"""
    if temperature == 0:
        logits = fp32_or_wider(logits)
        tokens = logits.argmax(-1)
        if exact:
            return tokens, exact_logprobs(logits, tokens)[0]
        return tokens, logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
    # 1. Choose a block, by its share of the probability.
    highest, sums = _block_sums(logits, temperature, exact)
    wide = torch.float32 if logits.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    sums = sums.to(wide)
    running = sums.cumsum(-1)
    total = running[:, -1:]
    # Keep it below the total even if the product rounds up to it: the last blocks may hold excluded tokens only.
    target = torch.minimum(uniform[:, None] * total, total * (1 - torch.finfo(wide).eps))
    block = torch.searchsorted(running, target, right=True).clamp(max=running.shape[1] - 1)
    # 2. Choose a token of the block, with what remains of the uniform number.
    share = ((target - running.gather(1, block)) / sums.gather(1, block) + 1).clamp(0, 1 - torch.finfo(wide).eps)
    ids = block * BLOCK + torch.arange(BLOCK, device=logits.device)
    inside = ids < logits.shape[1]
    inside_logits = fp32_or_wider(logits.gather(1, ids.clamp(max=logits.shape[1] - 1)))
    chosen = _at_temperature(inside_logits, temperature) - highest  # [R BLOCK]
    inner = chosen.exp().masked_fill(~inside, 0.0).to(wide).cumsum(-1)
    within = torch.searchsorted(inner, share * inner[:, -1:], right=True)
    normaliser = in_pieces(torch.log, running[:, -1]) if exact else running[:, -1].log()
    return (block * BLOCK + within)[:, 0], chosen.gather(1, within)[:, 0] - normaliser.to(chosen.dtype)


def exact_logprobs(
    logits: Float[Tensor, "R V"], tokens: Int[Tensor, " R"]
) -> tuple[Float[Tensor, " R"], Float[Tensor, " R"]]:
    """The log-probability of each row's token, and the logarithm of the sum over exp(logits), in nats. Their bits
    depend on the row alone, and are those of what `draw` says with `exact` of logits at its temperature."""
    highest, sums = _block_sums(logits, 1.0, exact=True)
    total = sums.to(torch.float64).cumsum(-1)[:, -1]
    chosen, rest = fp32_or_wider(logits.gather(1, tokens[:, None])) - highest, in_pieces(torch.log, total)
    rest = rest.to(chosen.dtype)
    return chosen[:, 0] - rest, highest[:, 0] + rest


def draw_among(
    logits: Float[Tensor, "R V"],
    candidates: Candidates,
    temperature: float,
    uniform: Float[Tensor, " R"],
    exact: bool = False,
) -> tuple[Int[Tensor, " R"], Float[Tensor, " R"]]:
    """`draw` from each row's candidates only; log-probabilities are renormalised on them. With `exact` all tokens keep
    their places, as in the scorer."""
    ids, inside = candidates
    if exact:
        left = torch.zeros_like(logits, dtype=torch.int8).scatter_add_(1, ids, inside.to(torch.int8)) > 0
        return draw(logits.masked_fill(~left, float("-inf")), temperature, uniform, exact)
    index, logprobs = draw(logits.gather(1, ids).masked_fill(~inside, float("-inf")), temperature, uniform)
    return ids.gather(1, index[:, None])[:, 0], logprobs


def _block_sums(
    logits: Float[Tensor, "R V"], temperature: float, exact: bool
) -> tuple[Float[Tensor, "R 1"], Float[Tensor, "R B"]]:
    """The highest logit of each row at this temperature, and the sum of exp(logit - highest) over each block. On a CPU
    it works in tiles of rows, with one buffer for the exponentials that fits the processor's cache. With `exact` an
    exponential does not depend on where its logit stands."""
    rows, vocabulary = logits.shape
    count, tile = -(-vocabulary // BLOCK), rows if logits.device.type != "cpu" else max(TILE // vocabulary, 1)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    # The columns after the vocabulary stay 0.
    buffer = logits.new_zeros(min(tile, rows), count * BLOCK, dtype=dtype)
    highest, sums = logits.new_empty(rows, 1, dtype=dtype), logits.new_empty(rows, count, dtype=dtype)
    for start in range(0, rows, tile):
        part = slice(start, start + tile)
        scaled = logits[part]
        mass = buffer[: len(scaled)]
        if scaled.dtype != dtype:
            scaled = mass[:, :vocabulary].copy_(scaled)
        scaled = _at_temperature(scaled, temperature)
        torch.amax(scaled, -1, keepdim=True, out=highest[part])
        torch.sub(scaled, highest[part], out=mass[:, :vocabulary])
        if exact:
            mass[:, vocabulary:] = float("-inf")
            mass = in_pieces(torch.exp_, mass)
        else:
            mass[:, :vocabulary].exp_()
        torch.sum(mass.view(-1, count, BLOCK), -1, out=sums[part])
    return highest, sums


def fp32_or_wider(logits: Tensor) -> Tensor:
    """The logits, as fp32 if they are narrower."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _at_temperature(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1 else logits / temperature
