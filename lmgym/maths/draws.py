"""Drawing tokens from logits: the inverse of their distribution at one uniform number a row."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lmgym.maths.kept import Candidates

BLOCK = 256  # logits per block of the two-level inverse CDF
TILE = 2**18  # logits that are drawn from in one go on a CPU, whose cache they fit


def draw(
    logits: Float[Tensor, "R V"], temperature: float, uniform: Float[Tensor, " R"]
) -> tuple[Int[Tensor, " R"], Float[Tensor, " R"]]:
    """One token per row by inverse CDF, and its log-probability; temperature 0 takes the most likely token.

    One uniform number per row decides, so a row's draw does not depend on its neighbours. Two levels (the sums of
    blocks of the vocabulary, then one block) save a running sum over all of it; tiles of rows that fit the cache make
    it three times as fast (64 rows of 32,000: 2.0 ms against 6.3, one core).
    """
    if temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
    rows = max(TILE // logits.shape[1], 1) if logits.device.type == "cpu" else len(logits)
    drawn = [_draw(*part, temperature) for part in zip(logits.split(rows), uniform.split(rows), strict=True)]
    return torch.cat([tokens for tokens, _ in drawn]), torch.cat([logprobs for _, logprobs in drawn])


def draw_among(
    logits: Float[Tensor, "R V"], candidates: Candidates, temperature: float, uniform: Float[Tensor, " R"]
) -> tuple[Int[Tensor, " R"], Float[Tensor, " R"]]:
    """`draw` from each row's candidates only, with their log-probabilities renormalised on them."""
    ids, inside = candidates
    places, logprobs = draw(logits.gather(1, ids).masked_fill(~inside, float("-inf")), temperature, uniform)
    return ids.gather(1, places[:, None])[:, 0], logprobs


def _draw(
    logits: Float[Tensor, "R V"], uniform: Float[Tensor, " R"], temperature: float
) -> tuple[Int[Tensor, " R"], Float[Tensor, " R"]]:
    scaled = logits if temperature == 1 else logits / temperature
    rows, vocabulary = scaled.shape
    highest = scaled.amax(-1, keepdim=True)
    mass = (scaled - highest).exp_()
    if vocabulary % BLOCK:
        mass = torch.nn.functional.pad(mass, (0, -vocabulary % BLOCK))
    mass = mass.view(rows, -1, BLOCK)
    wide = torch.float32 if mass.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    sums = mass.sum(-1).to(wide)
    running = sums.cumsum(-1)
    total = running[:, -1:]
    # Below the total also where the product rounds up to it: the last blocks may hold excluded tokens only.
    target = torch.minimum(uniform[:, None] * total, total * (1 - torch.finfo(wide).eps))
    block = torch.searchsorted(running, target, right=True).clamp(max=running.shape[1] - 1)
    share = ((target - running.gather(1, block)) / sums.gather(1, block) + 1).clamp(0, 1 - torch.finfo(wide).eps)
    inner = mass[torch.arange(rows, device=mass.device), block[:, 0]].to(wide).cumsum(-1)
    within = torch.searchsorted(inner, share * inner[:, -1:], right=True)
    tokens = (block * BLOCK + within)[:, 0]
    logprobs = scaled.gather(1, tokens[:, None])[:, 0] - highest[:, 0] - running[:, -1].log().to(scaled.dtype)
    return tokens, logprobs
