"""Attention over rows without padding. Pure torch, no model code.

Hugging Face models hand queries, keys and values (positions already applied) to a registered attention function.
Ours, `attend`, passes them to a layout: `PackedRows` and `PackedGroups` while scoring (on a CPU those of blocks.py,
with flex attention those of flex.py), `PackedRows` while prefilling; `ExtendedRows` where a conversation goes on and
`CachedRows` while decoding are in cache.py.
Everything that works token by token (embeddings, norms, MLPs, projections: most of the work) then runs on real
tokens only.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from lmgym.models.attention.kv_cache import KeyValueCache

NAME = "lmgym"  # under which models/policy.py registers `attend` with transformers


class Layout(Protocol):
    """Where the tokens of one forward pass stand."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """query [B H L D], key and value [B K L D] (K key-value heads) -> [B L H D]."""
        ...


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every layer; `lmgym_layout` comes through the model's keyword
    arguments."""
    layout: Layout = kwargs["lmgym_layout"]
    return layout.attend(module.layer_idx, query, key, value, scaling), None


class PackedRows:
    """N rows of different lengths laid end to end as one row of L tokens, each attending causally to itself.

    Right-padded causal attention needs no mask: padding stands behind every real query. So only the attention kernel
    itself sees padding, and only up to the longest of the rows. With `cache`, the keys and values of row
    `source[i]` are written to slot `slots[i]` (the prompt of a group is computed once and stored for each member).
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        cache: "KeyValueCache | None" = None,
        source: Int[Tensor, " S"] | None = None,
        slots: Int[Tensor, " S"] | None = None,
    ) -> None:
        self.lengths, self.rows, self.longest, total = list(lengths), len(lengths), max(lengths), sum(lengths)
        counts = torch.tensor(lengths)
        self.offsets = torch.cumsum(counts, 0) - counts  # where each row begins, [N]
        row = torch.repeat_interleave(torch.arange(self.rows), counts)
        self.positions = (torch.arange(total) - self.offsets[row]).to(device)  # [L]
        self.dense = total == self.rows * self.longest
        self.places = (row.to(device) * self.longest) + self.positions  # [L] into the padded rows
        self.cache, self.source, self.slots = cache, source, slots

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        padded_key, padded_value = self.pad(key), self.pad(value)
        if self.cache is not None:
            self.cache.allocate(layer, padded_key)
            keys, values = self.cache.keys[layer], self.cache.values[layer]
            keys[self.slots, :, : self.longest] = padded_key[self.source].to(keys.dtype)
            values[self.slots, :, : self.longest] = padded_value[self.source].to(values.dtype)
        padded_key, padded_value = per_query_head(query, padded_key, padded_value)
        out = F.scaled_dot_product_attention(self.pad(query), padded_key, padded_value, is_causal=True, scale=scale)
        return self.unpad(out)

    def pad(self, packed: Float[Tensor, "1 H L D"]) -> Float[Tensor, "N H longest D"]:
        """Packed tokens to right-padded rows."""
        tokens = packed[0].transpose(0, 1)
        if not self.dense:
            padded = tokens.new_zeros(self.rows * self.longest, *tokens.shape[1:])
            tokens = padded.index_copy(0, self.places, tokens)
        return tokens.reshape(self.rows, self.longest, *tokens.shape[1:]).transpose(1, 2)

    def unpad(self, padded: Float[Tensor, "N H longest D"]) -> Float[Tensor, "1 L H D"]:
        """The real tokens of padded rows, packed again."""
        flat = padded.transpose(1, 2).reshape(self.rows * self.longest, padded.shape[1], padded.shape[3])
        return (flat if self.dense else flat.index_select(0, self.places))[None]


class PackedGroups:
    """Rows that share prompts: each distinct prompt once, then what each row has behind its prompt, all as one row.

    The packed order is prompt 0, prompt 1, ..., then the own tokens of row 0, row 1, ... A prompt attends to itself;
    own tokens attend to their prompt, whose keys and values are expanded to them, and to themselves. Nothing
    position-wise is computed twice, and gradients of all rows meet in the prompt.
    """

    def __init__(
        self,
        prompt_lengths: Sequence[int],
        own_lengths: Sequence[int],
        prompt_of_row: Int[Tensor, " N"],
        device: torch.device,
    ) -> None:
        self.prompts, self.prompt_tokens = PackedRows(prompt_lengths, device), sum(prompt_lengths)
        self.own = PackedRows(own_lengths, device)
        self.prompt_of_row = prompt_of_row.to(device)
        lengths = torch.tensor(prompt_lengths, device=device)[self.prompt_of_row]
        self.positions = torch.cat(
            [self.prompts.positions, lengths[self.own.places // self.own.longest] + self.own.positions]
        )
        self.before = lengths

    @cached_property
    def mask(self) -> Bool[Tensor, "N 1 T P+T"]:
        """Which tokens of its prompt and its row each own token may see."""
        own, device = self.own.longest, self.before.device
        before = torch.arange(self.prompts.longest, device=device) < self.before[:, None]  # [N P]
        causal = torch.ones(own, own, dtype=torch.bool, device=device).tril()
        return torch.cat([before[:, None].expand(-1, own, -1), causal.expand(len(before), -1, -1)], 2)[:, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        cut = self.prompt_tokens
        first = self.prompts.attend(layer, query[:, :, :cut], key[:, :, :cut], value[:, :, :cut], scale)
        keys, values = (
            torch.cat(
                [self.prompts.pad(x[:, :, :cut]).index_select(0, self.prompt_of_row), self.own.pad(x[:, :, cut:])], 2
            )
            for x in (key, value)
        )
        keys, values = per_query_head(query, keys, values)
        out = F.scaled_dot_product_attention(
            self.own.pad(query[:, :, cut:]), keys, values, attn_mask=self.mask, scale=scale
        )
        return torch.cat([first, self.own.unpad(out)], 1)


def per_query_head(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the key-value heads that query heads share (grouped-query attention, arXiv 2305.13245)."""
    heads = query.shape[1] // keys.shape[1]
    return (keys, values) if heads == 1 else (keys.repeat_interleave(heads, 1), values.repeat_interleave(heads, 1))
