"""Kept sets: the tokens that truncated or restricted sampling (top-k, top-p, min-p) may draw, and how to store them.

A set is stored as a row of an array. uint8: one bit for each token of the vocabulary. int32: the ids themselves, with
the first one repeated to fill the row. The smaller form is used, so a set takes min(4 * its size, ceil(V / 8)) bytes.
In a batch all sets have one form, and none takes more than ceil(V / 8) bytes."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int, Int32, UInt8
from torch import Tensor

FEW = 128  # tokens that top_p sorts first
Sets = npt.NDArray[np.uint8] | npt.NDArray[np.int32]  # [sets, width]


class Candidates(NamedTuple):
    """The tokens that each of R rows may draw, as a table of C columns, where C is the size of the largest set.

    Example: Candidates(ids=[[4, 9], [2, 2]], inside=[[1, 1], [1, 0]]): tokens 4 and 9, or token 2"""

    ids: Int[Tensor, "R C"]
    inside: Bool[Tensor, "R C"]  # False: padding of the table


def truncated(
    logits: Float[Tensor, "R V"], top_k: int | None = None, top_p: float | None = None, min_p: float | None = None
) -> Candidates:
    """The tokens that top-k, then top-p of what remains, then min-p keep (the order of Hugging Face's `generate`).

        top-k   l_i >= the k-th highest logit
        top-p   all likelier tokens together have less than p     (arXiv 1904.09751, section 3.1)
        min-p   p_i >= min_p * max p                              (arXiv 2407.01082, equation 2)

    Each rule is a lower bound on the logit, so equally likely tokens are kept or dropped together (as in Hugging Face's
    top-k and min-p; of a tie its top-p keeps the tokens that its sort puts first). Tokens at -inf are never kept.

    Example:
        >>> logits = torch.tensor([[.4, .3, .2, .1]]).log()
        >>> [column.tolist() for column in truncated(logits, top_k=3, top_p=0.7)]
        [[[0, 1, 2]], [[True, True, False]]]
    """
    possible, ids = torch.finfo(logits.dtype).min, None
    if top_k is not None and top_k < logits.shape[1]:
        edge = logits.topk(top_k, dim=-1).values[:, -1:]
        ids, inside = from_mask(~(logits < edge.clamp(min=possible)))  # NaN stays, and is reported elsewhere
        logits = logits.gather(1, ids).masked_fill(~inside, float("-inf"))
    lowest = torch.full_like(logits[:, 0], possible)
    if top_p is not None and top_p < 1:
        lowest = torch.maximum(lowest, _crossing(logits, top_p, 1))
    if min_p:
        lowest = torch.maximum(lowest, logits.amax(-1) + math.log(min_p))
    inside = ~(logits < lowest[:, None])
    return from_mask(inside) if ids is None else Candidates(ids, inside)


def from_mask(mask: Bool[Tensor, "R V"]) -> Candidates:
    """The columns that are True in each row, in order.

    Example:
        >>> [column.tolist() for column in from_mask(torch.tensor([[False, True, True], [True, False, False]]))]
        [[[1, 2], [0, 0]], [[True, True], [True, False]]]
    """
    count, vocabulary = mask.shape
    if mask.device.type == "cpu":  # ten times as fast as torch's own
        flat = torch.from_numpy(np.flatnonzero(mask.numpy()))
        rows, columns = flat // vocabulary, flat % vocabulary
    else:
        rows, columns = mask.nonzero(as_tuple=True)
    sizes = torch.bincount(rows, minlength=count)
    rank = torch.arange(len(rows), device=rows.device) - (sizes.cumsum(0) - sizes)[rows]
    ids = rows.new_zeros(count, max(int(sizes.max()), 1))
    ids[rows, rank] = columns
    return Candidates(ids, torch.arange(ids.shape[1], device=rows.device) < sizes[:, None])


def top_p(logits: Float[Tensor, "R V"], amount: float, least: int = 1) -> Bool[Tensor, "R V"]:
    """The most likely tokens whose total probability reaches `amount`, at least `least` tokens.

    Nucleus sampling, arXiv 1904.09751, section 3.1; the token that crosses `amount` is included. Equally likely tokens
    are kept or dropped together.

    Example: top_p(torch.tensor([[.1, .4, .3, .2]]).log(), 0.6).int() -> tensor([[0, 1, 1, 0]], dtype=torch.int32)"""
    if amount >= 1:  # by rounding, the cumulative sum could reach 1 too early
        return torch.ones_like(logits, dtype=torch.bool)
    return logits >= _crossing(logits, amount, least)[:, None]


def top_k(logits: Float[Tensor, "R V"], amount: int, least: int = 1) -> Bool[Tensor, "R V"]:
    """The `amount` most likely tokens, at least `least`; more only if the last ones are equally likely.

    Example: top_k(torch.tensor([[.1, .5, .4]]).log(), 2).int() -> tensor([[0, 1, 1]], dtype=torch.int32)"""
    count = min(max(amount, least, 1), logits.shape[1])
    return logits >= logits.topk(count, dim=-1).values[:, -1:]


def _crossing(logits: Float[Tensor, "R V"], amount: float, least: int) -> Float[Tensor, " R"]:
    """The logit of the least likely token that top_p keeps. In a trained model few tokens have most of the probability.
    So the top FEW are sorted first, then 8 times more as long as these are not enough: sorting a vocabulary of 50,000
    would cost as much as a small model's forward pass."""
    normaliser = logits.logsumexp(-1, keepdim=True)
    lowest = torch.empty_like(logits[:, 0])
    rows, count = torch.arange(len(logits), device=logits.device), FEW  # rows that are not finished
    while len(rows):
        count = min(max(count, least), logits.shape[1])
        ordered = logits[rows].topk(count, dim=-1).values
        mass = (ordered - normaliser[rows]).exp().cumsum(-1)
        inside = torch.nn.functional.pad(mass[:, :-1], (1, 0)) < amount  # the mass of all tokens before this one
        number = inside.sum(-1).clamp(min=min(max(least, 1), count))
        done = ~inside[:, -1] | (count == logits.shape[1])
        lowest[rows[done]] = ordered.gather(1, number[:, None] - 1)[done, 0]
        rows, count = rows[~done], 8 * count
    return lowest


def packed_bytes(vocabulary: int) -> int:
    """Bytes of a kept set that is stored as bits, one for each token of the vocabulary: packed_bytes(20) -> 3"""
    return -(-vocabulary // 8)


def to_arrays(candidates: Candidates, vocabulary: int) -> list[Sets]:
    """Each row's set as an array of one row, in its smaller form (bits or ids)."""
    width, inside = packed_bytes(vocabulary), candidates.inside.cpu().numpy()
    sizes = inside.sum(1)
    ends, flat = sizes.cumsum(), candidates.ids.cpu().numpy().astype(np.int32)[inside]
    large = np.flatnonzero(4 * sizes >= width)
    mask = np.zeros((len(large), 8 * width), bool)
    mask[np.repeat(np.arange(len(large)), sizes[large]), flat[np.repeat(4 * sizes >= width, sizes)]] = True
    bits = iter(np.packbits(mask, axis=1, bitorder="little")[:, None])
    return [
        next(bits) if 4 * size >= width else flat[None, end - size : end] for size, end in zip(sizes, ends, strict=True)
    ]


def concatenate(arrays: Sequence[Sets]) -> Sets:
    """The sets of several arrays in one: as ids if all of them are ids, else as bits.

    Example:
        >>> concatenate([np.array([[3, 5]], np.int32), np.array([[7]], np.int32)])
        array([[3, 5],
               [7, 7]], dtype=int32)
    """
    widths = [array.shape[1] for array in arrays if array.dtype == np.uint8]
    if widths:
        return np.concatenate([array if array.dtype == np.uint8 else as_bits(array, widths[0]) for array in arrays])
    width = max(array.shape[1] for array in arrays)
    fill = [np.repeat(array[:, :1], width - array.shape[1], axis=1) for array in arrays]
    return np.concatenate([np.concatenate(pair, axis=1) for pair in zip(arrays, fill, strict=True)])


def as_bits(ids: npt.NDArray[np.integer], width: int) -> npt.NDArray[np.uint8]:
    """Sets of ids [T C] as bits [T width]: token i is bit i % 8 of byte i // 8."""
    mask = np.zeros((len(ids), 8 * width), bool)
    np.put_along_axis(mask, ids, True, axis=1)
    return np.packbits(mask, axis=1, bitorder="little")


def unpack(sets: UInt8[Tensor, "R W"] | Int32[Tensor, "R W"], vocabulary: int) -> Bool[Tensor, "R V"]:
    """A mask of the tokens of each set, from either form."""
    if sets.dtype == torch.int32:
        mask = torch.zeros(len(sets), vocabulary, dtype=torch.bool, device=sets.device)
        return mask.scatter_(1, sets.long(), True)
    if sets.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(sets.numpy(), axis=1, count=vocabulary, bitorder="little").view(bool))
    powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=sets.device)
    return (sets[:, :, None] & powers).bool().flatten(1)[:, :vocabulary]


def sizes(sets: UInt8[Tensor, "R W"] | Int32[Tensor, "R W"]) -> Int[Tensor, " R"]:
    """Number of tokens in each set."""
    if sets.dtype == torch.int32:
        return 1 + (sets[:, 1:] != sets[:, :1]).sum(1).cpu()
    counts = [np.bitwise_count(part.numpy()).sum(1, dtype=np.int64) for part in torch.split(sets.cpu(), 1024)]
    return torch.from_numpy(np.concatenate(counts))
