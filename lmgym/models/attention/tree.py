"""Attention over a prefix tree (models/prefix_trees.py): each token attends to those before it on its own way.

The layouts of packed.py know one shared beginning for each row, its prompt. Here beginnings share beginnings, to any
depth. No layer computes a shared token twice, and the gradients of all that follows are summed in it."""

from functools import cached_property

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from lmgym.models.attention import cpu, flex, rules
from lmgym.models.attention.cpu import Block, Blocks
from lmgym.models.attention.packed import per_query_head
from lmgym.models.attention.rules import Asked, Rule
from lmgym.models.attention.segments import Span, runs
from lmgym.models.prefix_trees import PrefixTree

EVERYTHING = Rule()


class TreeRows:
    """The tree's tokens as one row of L. A token's position is its place in its own row, so windows are right.

    Here each tail attends to its whole row, whose keys and values are copied for it: for layers with a rule.

    Example: TreeRows(tree, torch.device("cpu")).positions of the tree in prefix_trees.py -> [0, 1, 2, 2, 3, 3]"""

    def __init__(self, tree: PrefixTree, device: torch.device) -> None:
        self.tree, self.device = tree, device
        places = zip(tree.shared, tree.lengths, strict=True)
        self.positions = torch.cat([torch.arange(*tail) for tail in places]).to(device)  # [L]

    @cached_property
    def rows(self) -> list[tuple[slice, Tensor]]:
        """Each tail, and the places of its row's tokens."""
        spans = zip(self.tree.offsets, self.tree.tails, self.tree.places.to(self.device), strict=True)
        ends = self.tree.lengths
        return [
            (slice(offset, offset + tail), places[:end])
            for (offset, tail, places), end in zip(spans, ends, strict=True)
            if tail
        ]

    @property
    def reach(self) -> int:
        return max(self.tree.lengths)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        rule, outputs = asked.rule or EVERYTHING, []
        for tail, row in self.rows:
            keys, values = per_query_head(query, key.index_select(2, row), value.index_select(2, row))
            seen = rule.sees(self.positions[tail][:, None], torch.arange(len(row), device=self.device))
            outputs.append(rules.attention(query[:, :, tail], keys, values, seen, asked))
        return torch.cat(outputs, 2).transpose(1, 2)


class BlockTree(TreeRows):
    """TreeRows through torch's fused CPU kernel (cpu.py): each tail attends to itself, and all that follows a shared
    run attends to it as one row of queries. In preorder these are all slices: nothing is padded, masked or copied."""

    @cached_property
    def blocks(self) -> Blocks:
        own = cpu.causal_blocks(self.tree.offsets, self.tree.tails)
        return Blocks(own, [Block(queries, keys, 1, causal=False) for keys, queries in self.tree.readers])

    @property
    def segments(self) -> list[list[Span]]:
        """What each tail sees (segments.py)."""
        own = [(tail, row, tail.stop - tail.start) for tail, row in self.rows]
        return [[*runs(row[: len(row) - count]), (tail.start, count)] for tail, row, count in own]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        if asked.rule is not None or query.shape[-1] != value.shape[-1]:
            return super().attend(layer, query, key, value, asked)
        return cpu.attend_blocks(query, key, value, self.blocks, asked.scale)


class FlexTree(TreeRows):
    """TreeRows through flex attention (flex.py)."""

    @cached_property
    def allowed(self) -> BlockMask | Bool[Tensor, "1 1 L L"]:
        until = self.tree.until.to(self.device)

        def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < until[key])

        return flex.mask_of(allowed, len(until), self.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        if asked.rule is not None:
            return super().attend(layer, query, key, value, asked)
        return flex.attend_masked(query, key, value, self.allowed, asked.scale)
