"""The layouts of packed.py through torch's flex attention (arXiv 2412.05496): one kernel over the packed row.

It skips blocks of tokens that belong to other rows: no padding, no copied prompts. Made for GPUs, where the kernel is
compiled. Elsewhere torch has no gradient of it, so the whole mask goes to torch's usual kernel, in time and memory that
grow with the square of the packed row; that is enough for tests."""

from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

from lmgym.models.attention.packed import PackedGroups, PackedRows, per_query_head
from lmgym.models.attention.rules import Asked


class FlexRows(PackedRows):
    """PackedRows through flex attention."""

    @cached_property
    def allowed(self) -> BlockMask | Bool[Tensor, "1 1 L L"]:
        return _mask(self.row, self.row)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        if asked.rule is not None:
            return super().attend(layer, query, key, value, asked)
        return attend_masked(query, key, value, self.allowed, asked.scale)


class FlexGroups(PackedGroups):
    """PackedGroups through flex attention: answers read the keys and values of their prompt in place."""

    @cached_property
    def allowed(self) -> BlockMask | Bool[Tensor, "1 1 L L"]:
        prompt, answer = self.prompts.row, self.answers.row
        row = torch.cat([prompt, answer + self.prompts.rows])
        return _mask(row, torch.cat([prompt, self.prompt_of_row[answer]]))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        if asked.rule is not None:
            return super().attend(layer, query, key, value, asked)
        return attend_masked(query, key, value, self.allowed, asked.scale)


def _mask(row: Int[Tensor, " L"], prompt: Int[Tensor, " L"]) -> BlockMask | Bool[Tensor, "1 1 L L"]:
    """A token may see the tokens of its own row and of its prompt, up to itself. `row` [L] is the row of each token,
    `prompt` [L] the row that is its prompt (for a prompt, its own row)."""

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & ((row[key] == row[query]) | (row[key] == prompt[query]))

    return mask_of(allowed, len(row), row.device)


def mask_of(allowed: Callable[..., Tensor], tokens: int, device: torch.device) -> BlockMask | Bool[Tensor, "1 1 L L"]:
    """What `allowed` says of each query and key of a packed row of so many tokens."""
    if device.type == "cuda":
        return _compiled(create_block_mask)(allowed, None, None, tokens, tokens, device=device)
    return create_mask(allowed, None, None, tokens, tokens, device=device)


def attend_masked(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask | Bool[Tensor, "1 1 L L"], scale: float | None
) -> Tensor:
    """Attention with a mask of the packed row: query [1 H L D], key and value [1 K L D] -> [1 L H D]."""
    if isinstance(mask, BlockMask):
        # As autocast does for torch's own attention: in bf16 the rotary positions leave queries and keys in fp32.
        query, key = query.to(value.dtype), key.to(value.dtype)
        shared = query.shape[1] != key.shape[1]
        out = _compiled(flex_attention)(query, key, value, block_mask=mask, scale=scale, enable_gqa=shared)
    else:
        keys, values = per_query_head(query, key, value)
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    return out.transpose(1, 2)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)  # type: ignore[no-any-return]
