"""Drawing tokens from logits: the inverse of their distribution at one uniform number a row."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lmgym.functional.truncation import Candidates

BLOCK = 256  # logits per block of the two-level inverse CDF
TILE = 2**18  # logits in one pass on a CPU, whose cache they fit


def draw(
    logits: Float[Tensor, "R V"], temperature: float, uniform: Float[Tensor, " R"]
) -> tuple[Int[Tensor, " R"], Float[Tensor, " R"]]:
    """One token per row by inverse CDF, and its log-probability; temperature 0 takes the most likely token.

    One uniform number per row decides, so a row's draw does not depend on its neighbours. Two levels (the sums of
    blocks of the vocabulary, then one block) save a running sum over all of it.
    """
    if temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
    highest, sums = _blocks(logits, temperature)
    wide = torch.float32 if logits.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    sums = sums.to(wide)
    running = sums.cumsum(-1)
    total = running[:, -1:]
    # Below the total also where the product rounds up to it: the last blocks may hold excluded tokens only.
    target = torch.minimum(uniform[:, None] * total, total * (1 - torch.finfo(wide).eps))
    block = torch.searchsorted(running, target, right=True).clamp(max=running.shape[1] - 1)
    share = ((target - running.gather(1, block)) / sums.gather(1, block) + 1).clamp(0, 1 - torch.finfo(wide).eps)
    ids = block * BLOCK + torch.arange(BLOCK, device=logits.device)
    inside = ids < logits.shape[1]
    own = _at_temperature(logits.gather(1, ids.clamp(max=logits.shape[1] - 1)), temperature) - highest  # [R BLOCK]
    inner = own.exp().masked_fill(~inside, 0.0).to(wide).cumsum(-1)
    within = torch.searchsorted(inner, share * inner[:, -1:], right=True)
    logprobs = own.gather(1, within)[:, 0] - running[:, -1].log().to(logits.dtype)
    return (block * BLOCK + within)[:, 0], logprobs


def draw_among(
    logits: Float[Tensor, "R V"], candidates: Candidates, temperature: float, uniform: Float[Tensor, " R"]
) -> tuple[Int[Tensor, " R"], Float[Tensor, " R"]]:
    """`draw` from each row's candidates only, with their log-probabilities renormalised on them."""
    ids, inside = candidates
    places, logprobs = draw(logits.gather(1, ids).masked_fill(~inside, float("-inf")), temperature, uniform)
    return ids.gather(1, places[:, None])[:, 0], logprobs


def _blocks(logits: Float[Tensor, "R V"], temperature: float) -> tuple[Float[Tensor, "R 1"], Float[Tensor, "R B"]]:
    """The highest logit of each row at this temperature, and the sums of exp(logit - highest) over each block of its
    vocabulary. On a CPU in tiles of rows, whose exponentials share one buffer that fits the cache."""
    rows, vocabulary = logits.shape
    count, tile = -(-vocabulary // BLOCK), rows if logits.device.type != "cpu" else max(TILE // vocabulary, 1)
    room = logits.new_zeros(min(tile, rows), count * BLOCK)  # what is behind the vocabulary stays 0
    highest, sums = logits.new_empty(rows, 1), logits.new_empty(rows, count)
    for start in range(0, rows, tile):
        part = slice(start, start + tile)
        scaled = _at_temperature(logits[part], temperature)
        mass = room[: len(scaled)]
        torch.amax(scaled, -1, keepdim=True, out=highest[part])
        torch.sub(scaled, highest[part], out=mass[:, :vocabulary]).exp_()
        torch.sum(mass.view(-1, count, BLOCK), -1, out=sums[part])
    return highest, sums


def _at_temperature(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1 else logits / temperature
