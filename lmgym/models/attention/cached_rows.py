"""The layouts (packed.py) that write to the sampler's cache of keys and values, and attend to what is in it."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lmgym.models.attention import rules
from lmgym.models.attention.kv_cache import KeyValueCache, excluded_after, scores_of
from lmgym.models.attention.packed import PackedRows, per_query_head
from lmgym.models.attention.rules import Asked, Rule
from lmgym.models.attention.tree import BlockTree
from lmgym.models.prefix_trees import PrefixTree


class PrefilledRows(PackedRows):
    """PackedRows whose keys and values are also stored: those of row `source[i]` in slot `slots[i]` of the cache. So a
    prompt is computed once and stored for each of its answers."""

    def __init__(
        self, lengths: Sequence[int], cache: KeyValueCache, source: Int[Tensor, " S"], slots: Int[Tensor, " S"]
    ) -> None:
        super().__init__(lengths, slots.device)
        self.cache, self.source, self.slots = cache, source, slots

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        keys, values = self.pad(key), self.pad(value)
        self.cache.write(layer, self.slots, keys[self.source], values[self.source])
        return self.attend_padded(query, keys, values, asked)


class PrefilledTree(BlockTree):
    """PrefilledRows of prompts that begin alike: what they share is computed once, and stored for each of them."""

    def __init__(
        self, tree: PrefixTree, cache: KeyValueCache, source: Int[Tensor, " S"], slots: Int[Tensor, " S"]
    ) -> None:
        super().__init__(tree, slots.device)
        self.cache, self.source, self.slots = cache, source, slots
        self.places = torch.empty_like(tree.places)  # of each prompt's tokens in the tree; behind its end any of them
        self.places[list(tree.rows)] = tree.places.clamp(max=tree.tokens - 1)
        last = torch.empty(len(tree.rows), dtype=torch.long)
        last[list(tree.rows)] = torch.tensor(tree.lengths) - 1
        self.ends = self.places.gather(1, last[:, None])[:, 0]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        keys, values = (one[0][:, self.places].transpose(0, 1) for one in (key, value))
        self.cache.write(layer, self.slots, keys[self.source], values[self.source])
        return super().attend(layer, query, key, value, asked)


class ExtendedRows:
    """New tokens of N cached sequences, packed as one row of L: the next prompts of conversations. They are written
    behind the cached tokens, and attend to these and causally to themselves. `before` are the cached tokens of each
    sequence, `lengths` its new ones, `slots` its slot in the cache."""

    def __init__(
        self, cache: KeyValueCache, before: Int[Tensor, " N"], lengths: Sequence[int], slots: Int[Tensor, " N"]
    ) -> None:
        device = before.device
        self.new, self.cache, self.slots = PackedRows(lengths, device), cache, slots
        span = slice(int(slots[0]), int(slots[0]) + len(slots))
        adjacent = torch.equal(slots, torch.arange(span.start, span.stop, device=device))
        self.read: slice | Tensor = span if adjacent else slots  # a slice copies nothing
        self.row = self.new.row
        self.positions = before[self.row] + self.new.positions  # [L]
        self.width = int(self.positions.max()) + 1
        self.places = before[:, None] + torch.arange(self.new.longest, device=device)  # [N longest]
        self.mask = (torch.arange(self.width, device=device) <= self.places[:, :, None])[:, None]  # [N 1 longest W]

    @property
    def reach(self) -> int:
        return self.width

    @property
    def ends(self) -> Int[Tensor, " N"]:
        return self.new.ends

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        # Write the new keys and values, then read those of whole sequences.
        self.write(layer, key, value)
        both = (self.cache.keys[layer], self.cache.values[layer])
        keys, values = (cached[self.read, :, : self.width].to(query.dtype) for cached in both)
        seen = self.mask
        if asked.rule is not None:
            seen = asked.rule.sees(self.places[:, :, None], torch.arange(self.width, device=query.device))[:, None]
        return self.new.unpad(rules.attention(self.new.pad(query), *per_query_head(query, keys, values), seen, asked))

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store the new keys and values behind those of their sequences."""
        for cached, new in ((self.cache.keys[layer], key), (self.cache.values[layer], value)):
            cached[self.slots[self.row], :, self.positions] = new[0].transpose(0, 1).to(cached.dtype)


class CachedRows:
    """One new token for each of the first S cached sequences: a decoding step.

    It is written to its slot and attends to all tokens before it, the shared prompt included. `lengths` are the tokens
    in each slot; attention reads the first `width` of each slot, which must be more than the longest length.

    On a CPU a cache in bf16 is read as fp32, but by the fused layers of kernels/fused_layers.py, and attention is plain
    matrix products: for a single query torch's fused kernel is
    slower (bf16: 5.1 ms against 1.5, 64 rows of 228 tokens, 6 heads of 48), and bf16 products round the scores."""

    def __init__(self, cache: KeyValueCache, lengths: Int[Tensor, " S"], width: int) -> None:
        self.cache, self.lengths, self.width = cache, lengths, width
        self.positions = lengths if cache.prompts is None else lengths + cache.prompts.before
        self._together: int | None = None  # the length, if all slots have the same one
        if lengths.device.type == "cpu":
            self.excluded = excluded_after(lengths + 1, width)
            if bool((lengths == lengths[0]).all()):
                self._together = int(lengths[0])
        else:
            self.mask = (torch.arange(width, device=lengths.device) <= lengths[:, None])[:, None, None]  # [S 1 1 W]
        self._write_index: Tensor | None = None
        self._seen: dict[Rule, Tensor] = {}

    @property
    def reach(self) -> int:
        return self.width if self.cache.prompts is None else self.width + self.cache.prompts.width

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        keys, values = self._stored(layer, key, value)
        if asked.rule is not None:
            return self._attend_by(asked.rule, asked, layer, query, keys, values)
        slots, heads, _, size = query.shape
        # Query heads that share a key head become queries of one row: keys are read once, nothing is repeated.
        shared = heads // keys.shape[1]
        if query.device.type != "cpu":
            keys, values = keys[:slots, :, : self.width], values[:slots, :, : self.width]
            query = query.reshape(slots, -1, shared, size)
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=self.mask, scale=asked.scale)
            return out.reshape(slots, 1, heads, -1)
        # On a CPU: few and simple calls, because with a small model their overhead is what a step costs. Slots and key
        # heads are one dimension.
        rows = slots * keys.shape[1]
        keys, values = keys.flatten(0, 1)[:rows, : self.width], values.flatten(0, 1)[:rows, : self.width]
        grouped = query.reshape(rows, shared, size).to(keys.dtype) * asked.scale_of(size)
        scores, prompts = scores_of(grouped, keys, self.excluded), self.cache.prompts
        if prompts is None:
            out = torch.bmm(scores.softmax(-1), values)
        else:  # one softmax over the shared prompt and the slot
            shares = torch.cat([prompts.scores(layer, grouped), scores], -1).softmax(-1)
            prompt_shares, slot_shares = shares.split([prompts.width, self.width], -1)
            out = torch.baddbmm(prompts.weighted_values(layer, prompt_shares), slot_shares, values)
        return out.to(query.dtype).view(slots, 1, heads, -1)

    def _attend_by(self, rule: Rule, asked: Asked, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        slots, heads, _, size = query.shape
        rows, prompts = slots * keys.shape[1], self.cache.prompts
        keys, values = keys.flatten(0, 1)[:rows, : self.width], values.flatten(0, 1)[:rows, : self.width]
        grouped = query.reshape(rows, -1, size).to(keys.dtype) * asked.scale_of(size)
        scores = torch.bmm(grouped, keys.transpose(1, 2))
        if prompts is not None:
            scores = torch.cat([prompts.scores(layer, grouped), scores], -1)
        apart = scores.view(slots, heads, 1, -1)  # a query head for each row of scores
        found = rules.shares(apart, self._seen_by(rule), asked).view(scores.shape)
        out = torch.bmm(found[..., -self.width :], values)
        if prompts is not None:
            out = out + prompts.weighted_values(layer, found[..., : prompts.width])
        return out.to(query.dtype).view(slots, 1, heads, -1)

    def _seen_by(self, rule: Rule) -> Bool[Tensor, "S 1 1 P+W"]:
        """What each slot's new token sees of its prompt (if that is shared) and of its slot; the same in each layer
        with this rule."""
        if rule not in self._seen:
            places, prompts = torch.arange(self.width, device=self.lengths.device)[None], self.cache.prompts
            if prompts is None:
                seen = rule.sees(self.positions[:, None], places)
            else:
                before = prompts.before[:, None]
                shared = torch.arange(prompts.width, device=before.device)[None]
                of_prompt = rule.sees(self.positions[:, None], shared) & (shared < before)
                seen = torch.cat([of_prompt, rule.sees(self.positions[:, None], before + places)], 1)
            self._seen[rule] = seen[:, None, None]
        return self._seen[rule]

    def _stored(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's cache [S K C D], with the new keys and values in it."""
        self.cache.allocate(layer, key, value)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        self._write(keys, key)
        self._write(values, value)
        return keys, values

    def _write(self, cached: Float[Tensor, "S K C D"], new: Float[Tensor, "S K 1 D"]) -> None:
        _, heads, capacity, size = cached.shape
        if self._together is not None:
            cached[: len(new), :, self._together] = new[:, :, 0]
            return
        if self._write_index is None or len(self._write_index) != len(new) * heads:  # else as in the layer before
            rows = torch.arange(len(new) * heads, device=cached.device).view(len(new), heads)
            self._write_index = (rows * capacity + self.lengths[:, None]).flatten()
        cached.view(-1, size).index_copy_(0, self._write_index, new.reshape(-1, size).to(cached.dtype))
