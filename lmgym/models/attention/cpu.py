"""The layouts of packed.py through torch's fused CPU kernel, block by block: no padding, no mask, no copied prompts.

A block is a set of query rows of one length with their key rows of one length. An answer attends in two blocks, to its
prompt and to itself. The two results are merged into one softmax: each is weighted by its share of the normaliser.
Backward gives the kernel the merged outputs and normalisers, so each block's gradient is its part of the whole one
(as in ring attention, arXiv 2310.01889; Hydragen, arXiv 2402.05099, for prompts)."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lmgym.models.attention.packed import PackedGroups, PackedRows, per_query_head
from lmgym.models.attention.rules import Asked
from lmgym.models.attention.segments import Span

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
SHORT = 192  # queries of a row; in bf16 the kernel's backward of shorter ones takes up to twice as long as in fp32


class Block(NamedTuple):
    """Query rows of one length and the key rows that they attend to, as indices of packed tokens.

    Example: two answers of three tokens behind a prompt of ten: Block(slice(10, 16), slice(10, 16), 2, causal=True) to
    themselves, Block(slice(10, 16), slice(0, 10), 1, causal=False) to the prompt, as one row of six queries."""

    queries: "slice | Int[Tensor, ' Q']"
    keys: "slice | Int[Tensor, ' C']"
    rows: int
    causal: bool


class Blocks(NamedTuple):
    """Every query is in one of the `first` blocks; the `second` are merged into it one after the other."""

    first: list[Block]
    second: list[Block]


class BlockRows(PackedRows):
    """PackedRows in blocks: the rows of one length are one block."""

    @cached_property
    def blocks(self) -> Blocks:
        return Blocks(causal_blocks(self.offsets.tolist(), self.lengths), [])

    @property
    def segments(self) -> list[list[Span]]:
        """What each row sees (segments.py)."""
        return [[span] for span in zip(self.offsets.tolist(), self.lengths, strict=True) if span[1]]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        if asked.rule is not None or query.shape[-1] != value.shape[-1]:  # the kernel has one size for both
            return super().attend(layer, query, key, value, asked)
        return attend_blocks(query, key, value, self.blocks, asked.scale)


class BlockGroups(PackedGroups):
    """PackedGroups in blocks: answers read the keys and values of their prompt in place."""

    @cached_property
    def blocks(self) -> Blocks:
        starts, cut = self.prompts.offsets.tolist(), self.prompt_tokens
        answer_starts, answer_lengths = (self.answers.offsets + cut).tolist(), self.answers.lengths
        # 1. Prompts attend to themselves.
        first = causal_blocks(starts, self.prompts.lengths)
        # 2. All answers to a prompt attend to it together; prompts of one length with as many queries make a block.
        answers_to: dict[int, list[tuple[int, int]]] = {}
        for prompt, start, length in zip(self.prompt_of_row.tolist(), answer_starts, answer_lengths, strict=True):
            answers_to.setdefault(prompt, []).append((start, length))
        alike: dict[tuple[int, int], list[int]] = {}
        for prompt, answers in answers_to.items():
            alike.setdefault((self.prompts.lengths[prompt], sum(length for _, length in answers)), []).append(prompt)
        for (length, count), prompts in alike.items():
            if count:
                queries = _indices(answer for prompt in prompts for answer in answers_to[prompt])
                keys = _indices((starts[prompt], length) for prompt in prompts)
                first.append(Block(queries, keys, len(prompts), causal=False))
        # 3. Answers attend to themselves.
        return Blocks(first, causal_blocks(answer_starts, answer_lengths))

    @property
    def segments(self) -> list[list[Span]]:
        """What each prompt and each answer sees (segments.py)."""
        prompts = list(zip(self.prompts.offsets.tolist(), self.prompts.lengths, strict=True))
        starts, lengths = (self.answers.offsets + self.prompt_tokens).tolist(), self.answers.lengths
        answers = zip(self.prompt_of_row.tolist(), starts, lengths, strict=True)
        seen = [[prompts[prompt], (start, length)] for prompt, start, length in answers if length]
        return [*([span] for span in prompts if span[1]), *seen]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        if asked.rule is not None or query.shape[-1] != value.shape[-1]:
            return super().attend(layer, query, key, value, asked)
        return attend_blocks(query, key, value, self.blocks, asked.scale)


def causal_blocks(starts: Sequence[int], lengths: Sequence[int]) -> list[Block]:
    """Rows that attend causally to themselves: one block for each length."""
    alike: dict[int, list[int]] = {}
    for start, length in zip(starts, lengths, strict=True):
        alike.setdefault(length, []).append(start)
    spans = {length: _indices((start, length) for start in begins) for length, begins in alike.items() if length}
    return [Block(tokens, tokens, len(alike[length]), causal=True) for length, tokens in spans.items()]


def _indices(spans: Iterable[tuple[int, int]]) -> "slice | Int[Tensor, ' L']":
    """The token indices of spans (start, length), in order: a slice, which needs no copy, if the spans are adjacent."""
    spans = [span for span in spans if span[1]]
    begin, count = spans[0][0], sum(length for _, length in spans)
    if all(start + length == after for (start, length), (after, _) in pairwise(spans)):
        return slice(begin, begin + count)
    return torch.cat([torch.arange(start, start + length) for start, length in spans])


def attend_blocks(query: Tensor, key: Tensor, value: Tensor, blocks: Blocks, scale: float | None) -> Tensor:
    """Attention by blocks: query [1 H L D], key and value [1 K L D] -> [1 L H D]."""
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
        # Outputs round to bf16 once, however many blocks are merged; normalisers are logarithms.
        precise = torch.promote_types(query.dtype, torch.float32)
        out = torch.empty_like(query, dtype=precise, memory_format=torch.contiguous_format)
        normaliser = out.new_empty(out.shape[:2])
        for block in blocks.first:
            block_out, normaliser[block.queries] = _attend_block(query, key, value, block, scale)
            out[block.queries] = block_out.to(precise)
        for block in blocks.second:
            first_out, first_normaliser = out[block.queries], normaliser[block.queries]
            second_out, second_normaliser = _attend_block(query, key, value, block, scale)
            # By softmax and not by exp: torch computes exp differently for the numbers after the last whole vector, so
            # the last bit of a token's result would depend on its index.
            normalisers = torch.stack([first_normaliser, second_normaliser], -1)
            shares = normalisers.softmax(-1)[..., None]
            out[block.queries] = first_out * shares[..., 0, :] + second_out * shares[..., 1, :]
            normaliser[block.queries] = first_normaliser - normalisers.log_softmax(-1)[..., 0]
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, normaliser)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, normaliser = ctx.saved_tensors
        (gradient,) = gradients
        totals = [torch.zeros_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value)]
        for block in (*ctx.blocks.first, *ctx.blocks.second):
            queries, keys, rows = block.queries, block.keys, block.rows
            indices = (queries, queries, keys, keys, queries, queries)
            tensors = (gradient, query, key, value, out, normaliser)
            arguments = [_rows(tensor[index], rows) for tensor, index in zip(tensors, indices, strict=True)]
            if arguments[1].shape[2] <= SHORT:
                arguments = [tensor.to(normaliser.dtype) for tensor in arguments]
            block_gradients = _backward(*arguments, 0.0, block.causal, scale=ctx.scale)
            for total, block_gradient, index in zip(totals, block_gradients, (queries, keys, keys), strict=True):
                total[index] += block_gradient.transpose(1, 2).flatten(0, 1).to(total.dtype)
        return (*totals, None, None)


def _attend_block(
    query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float | None
) -> tuple[Float[Tensor, "Q H D"], Float[Tensor, "Q H"]]:
    queries, keys = block.queries, block.keys
    arguments = (_rows(tensor[index], block.rows) for tensor, index in ((query, queries), (key, keys), (value, keys)))
    out, normaliser = _forward(*arguments, 0.0, block.causal, scale=scale)
    return out.transpose(1, 2).flatten(0, 1), normaliser.transpose(1, 2).flatten(0, 1)


def _rows(packed: Float[Tensor, "RT H *D"], rows: int) -> Float[Tensor, "R H T *D"]:
    return packed.unflatten(0, (rows, -1)).transpose(1, 2)
