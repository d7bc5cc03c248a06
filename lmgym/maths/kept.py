"""Kept sets: which tokens of the vocabulary a restricted step may choose from, as booleans and as packed bits."""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor


def top_p(logits: Float[Tensor, "R V"], amount: float, least: int = 1) -> Bool[Tensor, "R V"]:
    """The most likely tokens whose mass reaches `amount`, the one that crosses it included; `least` at least.

    Nucleus sampling, arXiv 1904.09751, section 3.1. Of equally likely tokens the lower ids come first.

    Example:
        >>> top_p(torch.tensor([[.05, .4, .3, .15, .07, .03]]).log(), 0.6).int()
        tensor([[0, 1, 1, 0, 0, 0]], dtype=torch.int32)
    """
    if amount >= 1:  # rounding would lose the last ones
        return torch.ones_like(logits, dtype=torch.bool)
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    inside = before < amount
    inside[:, : max(least, 1)] = True
    return torch.zeros_like(inside).scatter(1, order, inside)


def top_k(logits: Float[Tensor, "R V"], amount: int, least: int = 1) -> Bool[Tensor, "R V"]:
    """The `amount` most likely tokens (all, where the vocabulary is smaller), `least` at least.

    Example:
        >>> top_k(torch.tensor([[.1, .5, .4]]).log(), 2).int()
        tensor([[0, 1, 1]], dtype=torch.int32)
    """
    count = min(max(amount, least, 1), logits.shape[1])
    chosen = logits.topk(count, dim=-1).indices
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)


def packed_bytes(vocabulary: int) -> int:
    """Bytes that one token's kept set takes: one bit for each token of the vocabulary."""
    return -(-vocabulary // 8)


def pack(kept: Bool[Tensor, "R V"]) -> UInt8[Tensor, "R W"]:
    """One bit a token, W = packed_bytes(V); token i is bit i % 8 of byte i // 8."""
    rows, vocabulary = kept.shape
    padded = torch.nn.functional.pad(kept, (0, -vocabulary % 8)).view(rows, -1, 8)
    return (padded * _powers(kept.device)).sum(-1).to(torch.uint8)


def unpack(bits: UInt8[Tensor, "R W"], vocabulary: int) -> Bool[Tensor, "R V"]:
    """The inverse of `pack`."""
    return (bits[:, :, None] & _powers(bits.device)).bool().flatten(1)[:, :vocabulary]


def sizes(bits: UInt8[Tensor, "R W"]) -> Int[Tensor, " R"]:
    """Number of tokens in each packed set."""
    return torch.from_numpy(np.bitwise_count(bits.cpu().numpy()).sum(1, dtype=np.int64))


def _powers(device: torch.device) -> Int[Tensor, " 8"]:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)
