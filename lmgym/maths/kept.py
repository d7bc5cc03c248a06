"""Kept sets: which tokens of the vocabulary a restricted step may choose from, as booleans and as packed bits."""

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

FEW = 1024  # tokens that top_p sorts at first


def top_p(logits: Float[Tensor, "R V"], amount: float, least: int = 1) -> Bool[Tensor, "R V"]:
    """The most likely tokens whose mass reaches `amount`, the one that crosses it included; `least` at least.

    Nucleus sampling, arXiv 1904.09751, section 3.1. Equally likely tokens stay or go together.

    Example:
        >>> top_p(torch.tensor([[.05, .4, .3, .15, .07, .03]]).log(), 0.6).int()
        tensor([[0, 1, 1, 0, 0, 0]], dtype=torch.int32)
    """
    if amount >= 1:  # rounding would lose the last ones
        return torch.ones_like(logits, dtype=torch.bool)
    return logits >= _crossing(logits, amount, least)[:, None]


def top_k(logits: Float[Tensor, "R V"], amount: int, least: int = 1) -> Bool[Tensor, "R V"]:
    """The `amount` most likely tokens (all, where the vocabulary is smaller), `least` at least; more only where the
    last of them are equally likely.

    Example:
        >>> top_k(torch.tensor([[.1, .5, .4]]).log(), 2).int()
        tensor([[0, 1, 1]], dtype=torch.int32)
    """
    count = min(max(amount, least, 1), logits.shape[1])
    return logits >= logits.topk(count, dim=-1).values[:, -1:]


def _crossing(logits: Float[Tensor, "R V"], amount: float, least: int) -> Float[Tensor, " R"]:
    """The logit of the least likely token that top_p keeps.

    Few tokens hold the mass of a trained model, so a few are sorted first, and more only in rows where these do not
    reach: sorting a vocabulary of 50,000 for each token would cost as much as a small model's forward pass.
    """
    normaliser = logits.logsumexp(-1, keepdim=True)
    lowest = torch.empty_like(logits[:, 0])
    left, count = torch.arange(len(logits), device=logits.device), FEW
    while len(left):
        count = min(max(count, least), logits.shape[1])
        ordered = logits[left].topk(count, dim=-1).values
        mass = (ordered - normaliser[left]).exp().cumsum(-1)
        inside = torch.nn.functional.pad(mass[:, :-1], (1, 0)) < amount  # of those before a token
        number = inside.sum(-1).clamp(min=min(max(least, 1), count))
        done = ~inside[:, -1] | (count == logits.shape[1])
        lowest[left[done]] = ordered.gather(1, number[:, None] - 1)[done, 0]
        left, count = left[~done], 8 * count
    return lowest


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


def _powers(device: torch.device) -> UInt8[Tensor, " 8"]:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)
