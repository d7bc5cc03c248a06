"""Keys and values that the sampler keeps, and attention over them. Pure torch, no model code.

A prompt is stored once for all of its answers (`SharedPrompts`); each answer has a slot of its own for what follows.
Three layouts (packed.py) write to a cache: PrefilledRows, ExtendedRows and CachedRows.
"""

from collections.abc import Sequence
from itertools import zip_longest

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lmgym.models.attention import rules
from lmgym.models.attention.packed import PackedRows, per_query_head
from lmgym.models.attention.rules import Asked, Rule

LEAST_GROWTH = 32  # tokens by which a slot grows


class KeyValueCache:
    """Preallocated keys and values of S sequences, written in place.

    One pair of tensors [S K C D] per layer: S slots, K key-value heads, capacity C tokens, head size D. They are made
    at the first write, when the shapes are known. With `prompts`, a slot holds only the tokens after its prompt.

    Example: KeyValueCache(slots=64, capacity=512)
    """

    def __init__(self, slots: int, capacity: int, prompts: "SharedPrompts | None" = None) -> None:
        self.slots, self.capacity, self.prompts = slots, capacity, prompts
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def reserve(self, tokens: int, most: int) -> None:
        """Room for so many tokens in each slot. A slot grows by parts, up to `most` tokens: on a CPU a decoding step
        that reads slots which are much longer than what they hold takes up to twice as long (docs/benchmarks.md)."""
        if tokens > self.capacity:
            longer = self.capacity + max(LEAST_GROWTH, self.capacity // 4)
            self.grow(self.slots, max(tokens, min(longer, most)))

    def grow(self, slots: int, capacity: int) -> None:
        """More and longer slots; the contents stay."""
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                tensors[layer] = old.new_zeros(slots, old.shape[1], capacity, old.shape[3])
                tensors[layer][: self.slots, :, : self.capacity] = old
        self.slots, self.capacity = slots, capacity

    def exchange(self, first: int, second: int, length: int) -> None:
        """Swap the first `length` tokens of two slots."""
        for tensor in (*self.keys, *self.values):
            tensor[[first, second], :, :length] = tensor[[second, first], :, :length]

    def allocate(self, layer: int, key: Tensor, value: Tensor) -> None:
        if len(self.keys) > layer:
            return
        for tensors, like in ((self.keys, key), (self.values, value)):
            size = (self.slots, like.shape[1], self.capacity, like.shape[3])
            narrow = like.device.type == "cpu" and like.dtype == torch.bfloat16
            dtype = torch.float32 if narrow else key.dtype  # `CachedRows` says why
            tensors.append(like.new_zeros(size, dtype=dtype))

    def write(
        self, layer: int, slots: Int[Tensor, " N"], keys: Float[Tensor, "N K T D"], values: Float[Tensor, "N K T D"]
    ) -> None:
        """Write whole rows of T tokens to the beginning of these slots."""
        self.allocate(layer, keys, values)
        for cached, new in ((self.keys[layer], keys), (self.values[layer], values)):
            cached[slots, :, : new.shape[2]] = new.to(cached.dtype)

    def keep(self, slots: Int[Tensor, " S"]) -> None:
        """Drop all other slots."""
        self.keys = [keys[slots] for keys in self.keys]
        self.values = [values[slots] for values in self.values]
        self.slots = len(slots)
        if self.prompts is not None:
            self.prompts.keep(slots)

    def unshare(self, lengths: Int[Tensor, " S"]) -> Int[Tensor, " S"]:
        """Copy each slot's shared prompt in front of its own `lengths` tokens; returns the lengths with prompts."""
        prompts = self.prompts
        assert prompts is not None
        self.keys = [self._joined(*both, lengths) for both in zip_longest(prompts.cache.keys, self.keys)]
        self.values = [self._joined(*both, lengths) for both in zip_longest(prompts.cache.values, self.values)]
        self.capacity, self.prompts = self.capacity + int(prompts.before.max()), None
        return lengths + prompts.before

    def _joined(
        self, shared: Float[Tensor, "P K C1 D"], own: Float[Tensor, "S K C2 D"] | None, lengths: Int[Tensor, " S"]
    ) -> Float[Tensor, "S K C1+C2 D"]:
        """One layer of `unshare`. `own` is None if no token after a prompt has been written yet."""
        assert self.prompts is not None
        before, prompt_of_slot = self.prompts.before.tolist(), self.prompts.prompt_of_slot.tolist()
        joined = shared.new_zeros(self.slots, shared.shape[1], max(before) + self.capacity, shared.shape[3])
        for slot, (prompt, cut, count) in enumerate(zip(prompt_of_slot, before, lengths.tolist(), strict=True)):
            joined[slot, :, :cut] = shared[prompt, :, :cut]
            if own is not None:
                joined[slot, :, cut : cut + count] = own[slot, :, :count]
        return joined


class SharedPrompts:
    """Keys and values of up to P distinct prompts, and which of them each of S slots continues.

    A decoding step reads each prompt once for all of its answers: their queries are put together, as one query of
    several tokens (as in Hydragen, arXiv 2402.05099). So the slots are also kept in the order of their prompts: a table
    [P M] with a row for each prompt, where M is the largest number of answers to one prompt.

        slot_at [P*M]     the slot at each entry of the table; unused entries have slot 0
        entry_of_slot [S] the entry of each slot

    Example: eight prompts with eight answers each: SharedPrompts(prompts=8, slots=64, capacity=512, device=device)
    """

    def __init__(self, prompts: int, slots: int, capacity: int, device: torch.device) -> None:
        self.cache = KeyValueCache(prompts, capacity)
        self.lengths = torch.zeros(prompts, dtype=torch.long, device=device)
        self.prompt_of_slot = torch.zeros(slots, dtype=torch.long, device=device)
        self.index_of: dict[tuple[int, ...], int] = {}  # of the ids of a cached prompt

    def assign(
        self, prompts: Sequence[tuple[tuple[int, ...], Sequence[int]]], live: Sequence[int]
    ) -> tuple[Int[Tensor, " N"], Int[Tensor, " N"]]:
        """Give prompts, as pairs (ids, slots of its answers), to their slots. `live` are the other slots in use, whose
        prompts must stay. Returns which of these prompts are not cached yet, as positions in `prompts`, and the indices
        to which their keys and values have to be written."""
        # 1. Free indices: neither these prompts nor those of live slots.
        cached = {self.index_of[ids] for ids, _ in prompts if ids in self.index_of}
        taken = cached | set(self.prompt_of_slot[list(live)].tolist())
        free = iter([index for index in range(len(self.lengths)) if index not in taken])
        # 2. A prompt that is not cached takes a free index; the prompt that was there is forgotten.
        missing, indices = [], []
        for number, (ids, slots) in enumerate(prompts):
            if ids not in self.index_of:
                index = next(free)
                self.index_of = {other: at for other, at in self.index_of.items() if at != index} | {ids: index}
                self.lengths[index] = len(ids)
                missing.append(number)
                indices.append(index)
            self.prompt_of_slot[list(slots)] = self.index_of[ids]
        self._order_slots()
        source, target = torch.tensor([missing, indices], device=self.lengths.device, dtype=torch.long)
        return source, target

    def keep(self, slots: Int[Tensor, " S"]) -> None:
        """Drop all other slots, and the prompts that no slot uses any more. No prompt is added after that."""
        used, self.prompt_of_slot = torch.unique(self.prompt_of_slot[slots], return_inverse=True)
        self.cache.keep(used)
        self.lengths = self.lengths[used]
        self._order_slots()

    @property
    def before(self) -> Int[Tensor, " S"]:
        """Tokens of each slot's prompt."""
        return self.lengths[self.prompt_of_slot]

    @property
    def saved(self) -> int:
        """Tokens that sharing saves: how many more would be stored if each slot had its own copy."""
        return int(self.before.sum() - self.lengths.sum())

    def scores(self, layer: int, query: Float[Tensor, "SK G D"]) -> Float[Tensor, "SK G W"]:
        """Attention scores of queries (G per key head) and the keys of their prompts; -inf after a prompt's end."""
        heads = self.cache.keys[layer].shape[1]
        keys = self.cache.keys[layer].flatten(0, 1)[:, : self.width]
        return self._by_slot(_scores(self._by_prompt(query, heads), keys, self.excluded), heads)

    def weighted_values(self, layer: int, shares: Float[Tensor, "SK G W"]) -> Float[Tensor, "SK G D"]:
        """Sums of the prompts' values, weighted by attention probabilities."""
        heads = self.cache.values[layer].shape[1]
        values = self.cache.values[layer].flatten(0, 1)[:, : self.width]
        return self._by_slot(torch.bmm(self._by_prompt(shares, heads), values), heads)

    def _order_slots(self) -> None:
        """Compute the table of slots by prompt, after a change of prompts or slots."""
        order = torch.argsort(self.prompt_of_slot, stable=True)
        counts = torch.bincount(self.prompt_of_slot, minlength=len(self.lengths))
        rank = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[self.prompt_of_slot[order]]
        self.most, self.width = int(counts.max()), int(self.lengths.max())
        entries = self.prompt_of_slot[order] * self.most + rank
        self.entry_of_slot = torch.empty_like(order).index_copy_(0, order, entries)
        slot_at = torch.zeros(len(self.lengths) * self.most, dtype=torch.long, device=order.device)
        self.slot_at = slot_at.index_copy_(0, self.entry_of_slot, torch.arange(len(order), device=order.device))
        self.in_order = torch.equal(self.entry_of_slot, torch.arange(len(slot_at), device=order.device))
        self.excluded = _excluded(self.lengths, self.width)

    def _by_prompt(self, rows: Float[Tensor, "SK G X"], heads: int) -> Float[Tensor, "PK MG X"]:
        """Rows of slots to rows of prompts: the queries of all slots of a prompt side by side."""
        _, queries, size = rows.shape
        if not self.in_order:
            rows = rows.reshape(-1, heads, queries, size).index_select(0, self.slot_at)
        together = rows.reshape(-1, self.most, heads, queries, size)
        return together.transpose(1, 2).reshape(-1, self.most * queries, size)

    def _by_slot(self, rows: Float[Tensor, "PK MG X"], heads: int) -> Float[Tensor, "SK G X"]:
        """The inverse of `_by_prompt`."""
        _, queries, size = rows.shape
        apart = rows.view(-1, heads, self.most, queries // self.most, size).transpose(1, 2)
        if not self.in_order:
            apart = apart.flatten(0, 1).index_select(0, self.entry_of_slot)
        return apart.reshape(-1, queries // self.most, size)


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

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, asked: Asked) -> Tensor:
        # Write the new keys and values, then read those of whole sequences.
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.slots[self.row], :, self.positions] = key[0].transpose(0, 1).to(keys.dtype)
        values[self.slots[self.row], :, self.positions] = value[0].transpose(0, 1).to(values.dtype)
        keys, values = (cached[self.read, :, : self.width].to(query.dtype) for cached in (keys, values))
        seen = self.mask
        if asked.rule is not None:
            seen = asked.rule.sees(self.places[:, :, None], torch.arange(self.width, device=query.device))[:, None]
        return self.new.unpad(rules.attention(self.new.pad(query), *per_query_head(query, keys, values), seen, asked))


class CachedRows:
    """One new token for each of the first S cached sequences: a decoding step.

    It is written to its slot and attends to all tokens before it, the shared prompt included. `lengths` are the tokens
    in each slot; attention reads the first `width` of each slot, which must be more than the longest length.

    On a CPU the cache is always fp32, and attention is plain matrix products: for a single query the fused kernel is
    slower (bf16: 5.1 ms against 1.5, 64 rows of 228 tokens, 6 heads of 48), and bf16 products round the scores.
    """

    def __init__(self, cache: KeyValueCache, lengths: Int[Tensor, " S"], width: int) -> None:
        self.cache, self.lengths, self.width = cache, lengths, width
        self.positions = lengths if cache.prompts is None else lengths + cache.prompts.before
        self._together: int | None = None  # the length, if all slots have the same one
        if lengths.device.type == "cpu":
            self.excluded = _excluded(lengths + 1, width)
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
        scores, prompts = _scores(grouped, keys, self.excluded), self.cache.prompts
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


def _scores(
    query: Float[Tensor, "RK G D"], keys: Float[Tensor, "RK W D"], excluded: Float[Tensor, "R 1 1 W"] | None
) -> Float[Tensor, "RK G W"]:
    """Products of each row's queries with its keys, plus `excluded` of the row (the K heads of a row share it)."""
    scores = torch.bmm(query, keys.transpose(1, 2))
    if excluded is not None:
        scores.view(len(excluded), -1, *scores.shape[1:]).add_(excluded)
    return scores


def _excluded(lengths: Int[Tensor, " R"], width: int) -> Float[Tensor, "R 1 1 W"] | None:
    """What is added to the scores of R rows of `width` keys: -inf after a row's length. None if all rows are full."""
    after = torch.arange(width, device=lengths.device) >= lengths[:, None]
    if not bool(after.any()):
        return None
    return torch.zeros(after.shape, device=lengths.device).masked_fill_(after, float("-inf"))[:, None, None]
