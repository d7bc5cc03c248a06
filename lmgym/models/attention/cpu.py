"""attention.py's layouts of packed tokens through torch's fused CPU kernel, one block after the other: nothing is
padded, nothing masked, no prompt is expanded to its answers.

A block is a set of equally long rows of queries with their equally long rows of keys. What stands behind a prompt
attends in two blocks, to the prompt and to itself; their results are one softmax once each is weighted with its share
of the normaliser. Backward hands the kernel the outputs and normalisers of both parts together: each block's gradient
is then its part of the whole one (as in ring attention, arXiv 2310.01889; Hydragen, arXiv 2402.05099, for prompts).
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lmgym.models.attention.packed import PackedGroups, PackedRows, per_query_head

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Block(NamedTuple):
    """Rows of a packed row of tokens, all of one length, and what their queries attend to.

    Example: two rows of three tokens behind ten of a prompt: Block(slice(10, 16), slice(10, 16), 2, causal=True) to
    themselves, Block(slice(10, 16), slice(0, 10), 1, causal=False) to the prompt, as six queries of one row.
    """

    queries: "slice | Int[Tensor, ' Q']"
    keys: "slice | Int[Tensor, ' C']"
    rows: int
    causal: bool


class Blocks(NamedTuple):
    """Every query stands in one of the `first` blocks, and perhaps in one of the `second`."""

    first: list[Block]
    second: list[Block]


class BlockRows(PackedRows):
    """PackedRows of scoring: no cache."""

    @cached_property
    def blocks(self) -> Blocks:
        return Blocks(_causal(self.offsets.tolist(), self.lengths), [])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        return _attend(query, key, value, self.blocks, scale)


class BlockGroups(PackedGroups):
    """PackedGroups: own tokens see their prompt where it stands."""

    @cached_property
    def blocks(self) -> Blocks:
        starts, cut = self.prompts.offsets.tolist(), self.prompt_tokens
        own_starts, own_lengths = (self.own.offsets + cut).tolist(), self.own.lengths
        first = _causal(starts, self.prompts.lengths)
        behind: dict[int, list[tuple[int, int]]] = {}
        for prompt, start, length in zip(self.prompt_of_row.tolist(), own_starts, own_lengths, strict=True):
            behind.setdefault(prompt, []).append((start, length))
        alike: dict[tuple[int, int], list[int]] = {}
        for prompt, rows in behind.items():
            alike.setdefault((self.prompts.lengths[prompt], sum(length for _, length in rows)), []).append(prompt)
        for (length, count), prompts in alike.items():
            if count:
                queries = _places(row for prompt in prompts for row in behind[prompt])
                keys = _places((starts[prompt], length) for prompt in prompts)
                first.append(Block(queries, keys, len(prompts), causal=False))
        return Blocks(first, _causal(own_starts, own_lengths))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        return _attend(query, key, value, self.blocks, scale)


def _causal(starts: Sequence[int], lengths: Sequence[int]) -> list[Block]:
    """Rows that attend causally to themselves, those of one length together."""
    alike: dict[int, list[int]] = {}
    for start, length in zip(starts, lengths, strict=True):
        alike.setdefault(length, []).append(start)
    places = {length: _places((start, length) for start in own) for length, own in alike.items() if length}
    return [Block(at, at, len(alike[length]), causal=True) for length, at in places.items()]


def _places(spans: Iterable[tuple[int, int]]) -> "slice | Int[Tensor, ' L']":
    """The places of (start, length), end to end; a slice, which copies nothing, where they are side by side."""
    spans = [span for span in spans if span[1]]
    begin, count = spans[0][0], sum(length for _, length in spans)
    if all(start + length == after for (start, length), (after, _) in pairwise(spans)):
        return slice(begin, begin + count)
    return torch.cat([torch.arange(start, start + length) for start, length in spans])


def _attend(query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, scale: float | None) -> Tensor:
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast positions may have been applied in fp32
    key, value = per_query_head(query, key, value)
    packed = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return Merged.apply(*packed, blocks, scale)[None]  # type: ignore[no-any-return]


class Merged(torch.autograd.Function):
    """Attention of packed tokens [L H D] by blocks -> [L H D]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Float[Tensor, "L H D"],
        key: Float[Tensor, "L H D"],
        value: Float[Tensor, "L H D"],
        blocks: Blocks,
        scale: float | None,
    ) -> Float[Tensor, "L H D"]:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        normaliser = out.new_empty(out.shape[:2], dtype=torch.promote_types(out.dtype, torch.float32))  # logarithms
        for block in blocks.first:
            out[block.queries], normaliser[block.queries] = _of_block(query, key, value, block, scale)
        for block in blocks.second:
            before, own = out[block.queries], normaliser[block.queries]
            more, of_more = _of_block(query, key, value, block, scale)
            # By softmax and not by exp: torch takes another exp behind the last whole vector of its numbers, and the
            # last bit of a token's result would depend on where it stands.
            both = torch.stack([own, of_more], -1)
            shares = both.softmax(-1)[..., None]
            out[block.queries] = (before * shares[..., 0, :] + more * shares[..., 1, :]).to(out.dtype)
            normaliser[block.queries] = own - both.log_softmax(-1)[..., 0]
        ctx.save_for_backward(query, key, value, out, normaliser)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, normaliser = ctx.saved_tensors
        (gradient,) = gradients
        found = [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value)]
        for block in (*ctx.blocks.first, *ctx.blocks.second):
            queries, keys, rows = block.queries, block.keys, block.rows
            places = (queries, queries, keys, keys, queries, queries)
            whole = (gradient, query, key, value, out, normaliser)
            parts = [_rows(tensor[at], rows) for tensor, at in zip(whole, places, strict=True)]
            of_block = _backward(*parts, 0.0, block.causal, scale=ctx.scale)
            for total, part, at in zip(found, of_block, (queries, keys, keys), strict=True):
                total[at] += part.transpose(1, 2).flatten(0, 1)
        return (*found, None, None)


def _of_block(
    query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float | None
) -> tuple[Float[Tensor, "Q H D"], Float[Tensor, "Q H"]]:
    queries, keys = block.queries, block.keys
    parts = (_rows(tensor[at], block.rows) for tensor, at in ((query, queries), (key, keys), (value, keys)))
    out, normaliser = _forward(*parts, 0.0, block.causal, scale=scale)
    return out.transpose(1, 2).flatten(0, 1), normaliser.transpose(1, 2).flatten(0, 1)


def _rows(packed: Float[Tensor, "RT H *D"], rows: int) -> Float[Tensor, "R H T *D"]:
    return packed.unflatten(0, (rows, -1)).transpose(1, 2)
