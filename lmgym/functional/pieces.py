"""Elementwise functions whose result for a number depends on that number alone.

torch computes exp, tanh and others with vectors, and what remains behind the last whole vector of a thread's share with
the C library, which rounds otherwise. So the last bit of a result depends on where the number stands and on how many
stand beside it. Here every call has whole vectors only."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

VECTORS = 64  # numbers: two vectors of the longest registers, in bf16 as well
SHARE = 2**15  # numbers; torch gives no thread fewer


def in_pieces(function: Callable[[Tensor], Tensor], numbers: Float[Tensor, "*N W"]) -> Float[Tensor, "*N W"]:
    """An elementwise function of the numbers, computed in calls in which each thread has whole vectors.

    Example: in_pieces(torch.exp, logits)"""
    width, threads = numbers.shape[-1], torch.get_num_threads()
    padded = F.pad(numbers, (0, -width % VECTORS)) if width % VECTORS else numbers
    flat = padded.reshape(-1)
    if threads == 1 or len(flat) <= SHARE:
        found = function(flat)
    else:
        whole = len(flat) - len(flat) % (SHARE * threads)
        pieces = [*torch.split(flat[:whole], SHARE * threads), *torch.split(flat[whole:], SHARE)]
        found = torch.cat([function(piece) for piece in pieces if len(piece)])
    return found.view(padded.shape)[..., :width]
