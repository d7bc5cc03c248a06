"""Attention over rows without padding, and over a cache that lmgym owns. Pure torch, no model code.

Hugging Face models hand queries, keys and values (positions already applied) to a registered attention function.
Ours, `attend`, passes them to a layout: `PackedRows` and `PackedGroups` while scoring, `PackedRows` while prefilling,
`ExtendedRows` where a conversation goes on, `CachedRows` while decoding.
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


class KeyValueCache:
    """Preallocated keys and values of S sequences, written in place.

    One pair of tensors [S K C D] per layer: S slots, K key-value heads, capacity C tokens, head size D; made at the
    first write, when the shapes are known.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        self.slots, self.capacity = slots, capacity
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def select(self, slots: Int[Tensor, " S"], length: int) -> "KeyValueCache":
        """A copy of these slots, cut to their first `length` tokens."""
        copy = KeyValueCache(len(slots), length)
        copy.keys = [keys[slots, :, :length] for keys in self.keys]
        copy.values = [values[slots, :, :length] for values in self.values]
        return copy

    def put(self, slots: Int[Tensor, " S"], other: "KeyValueCache", sources: Int[Tensor, " S"]) -> None:
        """Copy slots of another cache into these, as far as they reach."""
        length = min(self.capacity, other.capacity)
        for layer, (keys, values) in enumerate(zip(other.keys, other.values, strict=True)):
            self.allocate(layer, keys)
            self.keys[layer][slots, :, :length] = keys[sources, :, :length]
            self.values[layer][slots, :, :length] = values[sources, :, :length]

    def allocate(self, layer: int, like: Tensor) -> None:
        while len(self.keys) <= layer:
            size = (self.slots, like.shape[1], self.capacity, like.shape[3])
            narrow = like.device.type == "cpu" and like.dtype == torch.bfloat16
            dtype = torch.float32 if narrow else like.dtype  # `CachedRows` says why
            self.keys.append(like.new_zeros(size, dtype=dtype))
            self.values.append(like.new_zeros(size, dtype=dtype))

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
        padded_key, padded_value = self.pad(key), self.pad(value)
        if self.cache is not None:
            self.cache.allocate(layer, padded_key)
            keys, values = self.cache.keys[layer], self.cache.values[layer]
            keys[self.slots, :, : self.longest] = padded_key[self.source].to(keys.dtype)
            values[self.slots, :, : self.longest] = padded_value[self.source].to(values.dtype)
        padded_key, padded_value = _per_query_head(query, padded_key, padded_value)
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
        before = torch.arange(self.prompts.longest, device=device) < lengths[:, None]  # [N P]
        causal = torch.ones(self.own.longest, self.own.longest, dtype=torch.bool, device=device).tril()
        before = before[:, None, :].expand(-1, self.own.longest, -1)
        self.mask = torch.cat([before, causal.expand(len(before), -1, -1)], 2)[:, None]  # [N 1 T P+T]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        cut = self.prompt_tokens
        first = self.prompts.attend(layer, query[:, :, :cut], key[:, :, :cut], value[:, :, :cut], scale)
        keys, values = (
            torch.cat(
                [self.prompts.pad(x[:, :, :cut]).index_select(0, self.prompt_of_row), self.own.pad(x[:, :, cut:])], 2
            )
            for x in (key, value)
        )
        keys, values = _per_query_head(query, keys, values)
        out = F.scaled_dot_product_attention(
            self.own.pad(query[:, :, cut:]), keys, values, attn_mask=self.mask, scale=scale
        )
        return torch.cat([first, self.own.unpad(out)], 1)


def _per_query_head(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat the key-value heads that query heads share (grouped-query attention, arXiv 2305.13245)."""
    heads = query.shape[1] // keys.shape[1]
    return (keys, values) if heads == 1 else (keys.repeat_interleave(heads, 1), values.repeat_interleave(heads, 1))


class ExtendedRows:
    """N cached sequences, each with some new tokens: packed as one row of L, written behind what is cached, attending
    to that and causally to themselves. A conversation whose next prompt has come is read this way.

    `before` are the tokens that are cached of each sequence, `lengths` its new ones, `slots` its places in the cache.
    """

    def __init__(
        self, cache: KeyValueCache, before: Int[Tensor, " N"], lengths: Sequence[int], slots: Int[Tensor, " N"]
    ) -> None:
        device = before.device
        self.new, self.cache, self.slots = PackedRows(lengths, device), cache, slots
        self.row = self.new.places // self.new.longest
        self.positions = before[self.row] + self.new.positions  # [L]
        self.width = int(self.positions.max()) + 1
        reach = before[:, None] + torch.arange(self.new.longest, device=device)  # [N longest]
        self.mask = (torch.arange(self.width, device=device) <= reach[:, :, None])[:, None]  # [N 1 longest W]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.slots[self.row], :, self.positions] = key[0].transpose(0, 1).to(keys.dtype)
        values[self.slots[self.row], :, self.positions] = value[0].transpose(0, 1).to(values.dtype)
        own = [cached[self.slots, :, : self.width].to(query.dtype) for cached in (keys, values)]
        own_keys, own_values = _per_query_head(query, *own)
        out = F.scaled_dot_product_attention(
            self.new.pad(query), own_keys, own_values, attn_mask=self.mask, scale=scale
        )
        return self.new.unpad(out)


class CachedRows:
    """One new token for each of S cached sequences: written to its place, then attending to all before it.

    On a CPU the cache is fp32 whatever the keys are, and attention two plain products: for a single query the fused
    kernel is slower (bf16: 5.1 ms against 1.5, 64 rows of 228 tokens, 6 heads of 48), and bf16 products would round the
    scores.
    """

    def __init__(self, cache: KeyValueCache, lengths: Int[Tensor, " S"], longest: int) -> None:
        self.cache, self.positions = cache, lengths
        self.rows = torch.arange(len(lengths), device=lengths.device)
        self.width = longest + 1
        self.mask = (torch.arange(self.width, device=lengths.device) <= lengths[:, None])[:, None, None]  # [S 1 1 W]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.rows, :, self.positions] = key[:, :, 0].to(keys.dtype)
        values[self.rows, :, self.positions] = value[:, :, 0].to(values.dtype)
        slots, heads, _, size = query.shape
        # Query heads that share a key head become queries of one row: keys are read once, nothing is repeated.
        grouped = query.reshape(slots, keys.shape[1], heads // keys.shape[1], size)
        keys, values = keys[:, :, : self.width], values[:, :, : self.width]
        if query.device.type != "cpu":
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self.mask, scale=scale)
            return out.reshape(slots, 1, heads, size)
        scores = torch.matmul(grouped.to(keys.dtype) * (size**-0.5 if scale is None else scale), keys.transpose(2, 3))
        shares = scores.masked_fill(~self.mask, float("-inf")).softmax(-1)
        return torch.matmul(shares, values).to(query.dtype).reshape(slots, 1, heads, size)
