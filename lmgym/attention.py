"""Attention over rows without padding, and over a cache that lmgym owns. Pure torch, no model code.

Hugging Face models hand queries, keys and values (positions already applied) to a registered attention function.
Ours, `attend`, passes them to a layout: `PackedRows` while scoring and prefilling, `CachedRows` while decoding.
Everything that works token by token (embeddings, norms, MLPs, projections: most of the work) then runs on real
tokens only.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

NAME = "lmgym"  # under which policies/policy.py registers `attend` with transformers


class Layout(Protocol):
    """Where the tokens of one forward pass stand."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """query [B H L D], key and value [B K L D] (K key-value heads) -> [B L H D]."""
        ...


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The function that transformers calls in every layer; `lmgym_layout` comes through the model's keyword arguments."""
    layout: Layout = kwargs["lmgym_layout"]
    return layout.attend(module.layer_idx, query, key, value, scaling), None


class KeyValueCache:
    """Preallocated keys and values of S sequences, written in place.

    One pair of tensors [S K C D] per layer: S slots, K key-value heads, capacity C tokens, head size D; made at the
    first write, when the shapes are known.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        self.slots, self.capacity = slots, capacity
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def allocate(self, layer: int, like: Tensor) -> None:
        while len(self.keys) <= layer:
            size = (self.slots, like.shape[1], self.capacity, like.shape[3])
            self.keys.append(like.new_zeros(size))
            self.values.append(like.new_zeros(size))

    def keep(self, slots: Int[Tensor, " S"]) -> None:
        """Drop all slots but these."""
        self.keys = [keys[slots] for keys in self.keys]
        self.values = [values[slots] for values in self.values]
        self.slots = len(slots)


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
        cache: KeyValueCache | None = None,
        source: Int[Tensor, " S"] | None = None,
        slots: Int[Tensor, " S"] | None = None,
    ) -> None:
        self.rows, self.longest, total = len(lengths), max(lengths), sum(lengths)
        counts = torch.tensor(lengths)
        self.offsets = torch.cumsum(counts, 0) - counts  # where each row begins, [N]
        row = torch.repeat_interleave(torch.arange(self.rows), counts)
        self.positions = (torch.arange(total) - self.offsets[row]).to(device)  # [L]
        self.dense = total == self.rows * self.longest
        self.places = (row.to(device) * self.longest) + self.positions  # [L] into the padded rows
        self.cache, self.source, self.slots = cache, source, slots

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        padded_key, padded_value = self._pad(key), self._pad(value)
        if self.cache is not None:
            self.cache.allocate(layer, padded_key)
            self.cache.keys[layer][self.slots, :, : self.longest] = padded_key[self.source]
            self.cache.values[layer][self.slots, :, : self.longest] = padded_value[self.source]
        heads = query.shape[1] // key.shape[1]
        if heads > 1:
            padded_key = padded_key.repeat_interleave(heads, 1)
            padded_value = padded_value.repeat_interleave(heads, 1)
        out = F.scaled_dot_product_attention(self._pad(query), padded_key, padded_value, is_causal=True, scale=scale)
        flat = out.transpose(1, 2).reshape(self.rows * self.longest, out.shape[1], out.shape[3])
        return (flat if self.dense else flat[self.places])[None]

    def _pad(self, packed: Float[Tensor, "1 H L D"]) -> Float[Tensor, "N H longest D"]:
        tokens = packed[0].transpose(0, 1)
        if not self.dense:
            padded = tokens.new_zeros(self.rows * self.longest, *tokens.shape[1:])
            tokens = padded.index_copy(0, self.places, tokens)
        return tokens.reshape(self.rows, self.longest, *tokens.shape[1:]).transpose(1, 2)


class CachedRows:
    """One new token for each of S cached sequences: written to its place, then attending to all before it."""

    def __init__(self, cache: KeyValueCache, lengths: Int[Tensor, " S"], longest: int) -> None:
        self.cache, self.positions = cache, lengths
        self.rows = torch.arange(len(lengths), device=lengths.device)
        self.width = longest + 1
        self.mask = (torch.arange(self.width, device=lengths.device) <= lengths[:, None])[:, None, None]  # [S 1 1 W]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.rows, :, self.positions] = key[:, :, 0]
        values[self.rows, :, self.positions] = value[:, :, 0]
        slots, heads, _, size = query.shape
        # Query heads that share a key head become queries of one row: keys are read once, nothing is repeated.
        grouped = query.reshape(slots, keys.shape[1], heads // keys.shape[1], size)
        out = F.scaled_dot_product_attention(
            grouped, keys[:, :, : self.width], values[:, :, : self.width], attn_mask=self.mask, scale=scale
        )
        return out.reshape(slots, 1, heads, size)
