"""Keys and values that lmgym keeps while it samples, and attention over them. Pure torch, no model code.

A prompt is stored once for all of its answers (`SharedPrompts`); what each answer has behind it has a slot of its own.
"""

from collections.abc import Sequence
from itertools import zip_longest

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from lmgym.models.attention.packed import PackedRows, per_query_head


class KeyValueCache:
    """Preallocated keys and values of S sequences, written in place.

    One pair of tensors [S K C D] per layer: S slots, K key-value heads, capacity C tokens, head size D; made at the
    first write, when the shapes are known. With `prompts` a slot holds only what stands behind its prompt.
    """

    def __init__(self, slots: int, capacity: int, prompts: "SharedPrompts | None" = None) -> None:
        self.slots, self.capacity, self.prompts = slots, capacity, prompts
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def grow(self, slots: int, capacity: int) -> None:
        """Make room for more slots and longer ones; what is written stays."""
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                tensors[layer] = old.new_zeros(slots, old.shape[1], capacity, old.shape[3])
                tensors[layer][: self.slots, :, : self.capacity] = old
        self.slots, self.capacity = slots, capacity

    def exchange(self, one: int, other: int, length: int) -> None:
        """Let two slots change places, as far as `length` tokens."""
        for tensor in (*self.keys, *self.values):
            tensor[[one, other], :, :length] = tensor[[other, one], :, :length]

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
        if self.prompts is not None:
            self.prompts.keep(slots)

    def unshare(self, lengths: Int[Tensor, " S"]) -> Int[Tensor, " S"]:
        """Put each slot's shared prompt before its own tokens, of which there are `lengths`. Returns what the lengths
        are then."""
        prompts = self.prompts
        assert prompts is not None
        self.keys = [self._joined(*both, lengths) for both in zip_longest(prompts.cache.keys, self.keys)]
        self.values = [self._joined(*both, lengths) for both in zip_longest(prompts.cache.values, self.values)]
        self.capacity, self.prompts = self.capacity + int(prompts.before.max()), None
        return lengths + prompts.before

    def _joined(
        self, shared: Float[Tensor, "P K C1 D"], own: Float[Tensor, "S K C2 D"] | None, lengths: Int[Tensor, " S"]
    ) -> Float[Tensor, "S K C1+C2 D"]:
        """One layer of `unshare`. `own` is None where nothing has been written behind any prompt yet."""
        assert self.prompts is not None
        before, of_slot = self.prompts.before.tolist(), self.prompts.of_slot.tolist()
        joined = shared.new_zeros(self.slots, shared.shape[1], max(before) + self.capacity, shared.shape[3])
        for slot, (place, cut, count) in enumerate(zip(of_slot, before, lengths.tolist(), strict=True)):
            joined[slot, :, :cut] = shared[place, :, :cut]
            if own is not None:
                joined[slot, :, cut : cut + count] = own[slot, :, :count]
        return joined


class SharedPrompts:
    """Keys and values of up to P distinct prompts, and which of them stands before each of S slots.

    A step of decoding reads each prompt once for all the answers to it: their queries are put together, as one query of
    several tokens (as in Hydragen, arXiv 2402.05099). `members` [P M] are the slots of each prompt's answers, filled up
    with slot 0, and `place` [S] says where a slot stands in them.

    Example: eight prompts with eight answers each: SharedPrompts(prompts=8, slots=64, capacity=512, device=device)
    """

    def __init__(self, prompts: int, slots: int, capacity: int, device: torch.device) -> None:
        self.cache = KeyValueCache(prompts, capacity)
        self.lengths = torch.zeros(prompts, dtype=torch.long, device=device)
        self.of_slot = torch.zeros(slots, dtype=torch.long, device=device)
        self.place_of: dict[tuple[int, ...], int] = {}

    def seat(
        self, prompts: Sequence[tuple[tuple[int, ...], Sequence[int]]], live: Sequence[int]
    ) -> tuple[Int[Tensor, " N"], Int[Tensor, " N"]]:
        """Give slots their prompts: (ids, slots of its answers) each. `live` are slots whose prompts must stay. Returns
        which of these prompts are not here yet, and the places that their keys and values are to be written to."""
        here = {self.place_of[ids] for ids, _ in prompts if ids in self.place_of}
        taken = here | set(self.of_slot[list(live)].tolist())
        free = iter([place for place in range(len(self.lengths)) if place not in taken])
        new, places = [], []
        for number, (ids, slots) in enumerate(prompts):
            if ids not in self.place_of:
                place = next(free)
                self.place_of = {other: at for other, at in self.place_of.items() if at != place} | {ids: place}
                self.lengths[place] = len(ids)
                new.append(number)
                places.append(place)
            self.of_slot[list(slots)] = self.place_of[ids]
        self._arrange()
        device = self.lengths.device
        return torch.tensor(new, device=device, dtype=torch.long), torch.tensor(places, device=device, dtype=torch.long)

    def keep(self, slots: Int[Tensor, " S"]) -> None:
        """Drop all slots but these, and the prompts that stand before none of them. No others come after that."""
        used, self.of_slot = torch.unique(self.of_slot[slots], return_inverse=True)
        self.cache.keep(used)
        self.lengths = self.lengths[used]
        self._arrange()

    @property
    def before(self) -> Int[Tensor, " S"]:
        """Tokens of the prompt before each slot."""
        return self.lengths[self.of_slot]

    @property
    def saved(self) -> int:
        """Tokens that would be held more than once without sharing."""
        return int(self.before.sum() - self.lengths.sum())

    def scores(self, layer: int, query: Float[Tensor, "SK G D"]) -> Float[Tensor, "SK G W"]:
        """Products of queries (G to a key head) with the keys of their prompts, -inf behind a prompt's end."""
        heads = self.cache.keys[layer].shape[1]
        keys = self.cache.keys[layer].flatten(0, 1)[:, : self.width]
        return self._by_slot(_scores(self._by_prompt(query, heads), keys, self.behind), heads)

    def mixed(self, layer: int, shares: Float[Tensor, "SK G W"]) -> Float[Tensor, "SK G D"]:
        """The prompts' values, weighted."""
        heads = self.cache.values[layer].shape[1]
        values = self.cache.values[layer].flatten(0, 1)[:, : self.width]
        return self._by_slot(torch.bmm(self._by_prompt(shares, heads), values), heads)

    def _arrange(self) -> None:
        order = torch.argsort(self.of_slot, stable=True)
        counts = torch.bincount(self.of_slot, minlength=len(self.lengths))
        rank = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[self.of_slot[order]]
        self.most, self.width = int(counts.max()), int(self.lengths.max())
        self.place = torch.empty_like(order).index_copy_(0, order, self.of_slot[order] * self.most + rank)
        members = torch.zeros(len(self.lengths) * self.most, dtype=torch.long, device=order.device)
        self.members = members.index_copy_(0, self.place, torch.arange(len(order), device=order.device))
        self.in_order = torch.equal(self.place, torch.arange(len(members), device=order.device))
        self.behind = _excluded(self.lengths, self.width)

    def _by_prompt(self, rows: Float[Tensor, "SK G X"], heads: int) -> Float[Tensor, "PK MG X"]:
        _, queries, size = rows.shape
        if not self.in_order:
            rows = rows.reshape(-1, heads, queries, size).index_select(0, self.members)
        together = rows.reshape(-1, self.most, heads, queries, size)
        return together.transpose(1, 2).reshape(-1, self.most * queries, size)

    def _by_slot(self, rows: Float[Tensor, "PK MG X"], heads: int) -> Float[Tensor, "SK G X"]:
        _, queries, size = rows.shape
        apart = rows.view(-1, heads, self.most, queries // self.most, size).transpose(1, 2)
        if not self.in_order:
            apart = apart.flatten(0, 1).index_select(0, self.place)
        return apart.reshape(-1, queries // self.most, size)


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
        row = slice(int(slots[0]), int(slots[0]) + len(slots))
        in_a_row = torch.equal(slots, torch.arange(row.start, row.stop, device=device))
        self.read: slice | Tensor = row if in_a_row else slots  # a slice copies nothing
        self.row = self.new.places // self.new.longest
        self.positions = before[self.row] + self.new.positions  # [L]
        self.width = int(self.positions.max()) + 1
        reach = before[:, None] + torch.arange(self.new.longest, device=device)  # [N longest]
        self.mask = (torch.arange(self.width, device=device) <= reach[:, :, None])[:, None]  # [N 1 longest W]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.slots[self.row], :, self.positions] = key[0].transpose(0, 1).to(keys.dtype)
        values[self.slots[self.row], :, self.positions] = value[0].transpose(0, 1).to(values.dtype)
        own = [cached[self.read, :, : self.width].to(query.dtype) for cached in (keys, values)]
        own_keys, own_values = per_query_head(query, *own)
        out = F.scaled_dot_product_attention(
            self.new.pad(query), own_keys, own_values, attn_mask=self.mask, scale=scale
        )
        return self.new.unpad(out)


class CachedRows:
    """One new token for each of the first S cached sequences: written to its place, then attending to all before it,
    the shared prompt included. `lengths` are the tokens in each slot; attention looks at the first `width` of each,
    which have to be more than the longest has.

    On a CPU the cache is fp32 whatever the keys are, and attention plain products: for a single query the fused kernel
    is slower (bf16: 5.1 ms against 1.5, 64 rows of 228 tokens, 6 heads of 48), and bf16 products round the scores.
    """

    def __init__(self, cache: KeyValueCache, lengths: Int[Tensor, " S"], width: int) -> None:
        self.cache, self.lengths, self.width = cache, lengths, width
        self.positions = lengths if cache.prompts is None else lengths + cache.prompts.before
        if lengths.device.type == "cpu":
            self.behind = _excluded(lengths + 1, width)
        else:
            self.mask = (torch.arange(width, device=lengths.device) <= lengths[:, None])[:, None, None]  # [S 1 1 W]
        self._places: Tensor | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        self.cache.allocate(layer, key)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        self._write(keys, key)
        self._write(values, value)
        slots, heads, _, size = query.shape
        # Query heads that share a key head become queries of one row: keys are read once, nothing is repeated.
        shared = heads // keys.shape[1]
        if query.device.type != "cpu":
            keys, values = keys[:slots, :, : self.width], values[:slots, :, : self.width]
            query = query.reshape(slots, -1, shared, size)
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=self.mask, scale=scale)
            return out.reshape(slots, 1, heads, size)
        # Few and plain calls: for a small model they are what a step costs. Slots and key heads are one dimension.
        rows = slots * keys.shape[1]
        keys, values = keys.flatten(0, 1)[:rows, : self.width], values.flatten(0, 1)[:rows, : self.width]
        grouped = query.reshape(rows, shared, size).to(keys.dtype) * (size**-0.5 if scale is None else scale)
        scores, prompts = _scores(grouped, keys, self.behind), self.cache.prompts
        if prompts is None:
            out = torch.bmm(scores.softmax(-1), values)
        else:
            shares = torch.cat([prompts.scores(layer, grouped), scores], -1).softmax(-1)
            before, own = shares.split([prompts.width, self.width], -1)
            out = torch.baddbmm(prompts.mixed(layer, before), own, values)
        return out.to(query.dtype).view(slots, 1, heads, size)

    def _write(self, cached: Float[Tensor, "S K C D"], new: Float[Tensor, "S K 1 D"]) -> None:
        _, heads, capacity, size = cached.shape
        if self._places is None or len(self._places) != len(new) * heads:  # else the same as in the layer before
            rows = torch.arange(len(new) * heads, device=cached.device).view(len(new), heads)
            self._places = (rows * capacity + self.lengths[:, None]).flatten()
        cached.view(-1, size).index_copy_(0, self._places, new.reshape(-1, size).to(cached.dtype))


def _scores(
    query: Float[Tensor, "RK G D"], keys: Float[Tensor, "RK W D"], behind: Float[Tensor, "R 1 1 W"] | None
) -> Float[Tensor, "RK G W"]:
    """Products of each row's queries with its keys, plus what is `behind` of the rows before they had K heads."""
    scores = torch.bmm(query, keys.transpose(1, 2))
    if behind is not None:
        scores.view(len(behind), -1, *scores.shape[1:]).add_(behind)
    return scores


def _excluded(lengths: Int[Tensor, " R"], width: int) -> Float[Tensor, "R 1 1 W"] | None:
    """What is added to the scores of R rows of `width` keys: -inf behind a row's length; None if none is shorter."""
    behind = torch.arange(width, device=lengths.device) >= lengths[:, None]
    if not bool(behind.any()):
        return None
    return torch.zeros(behind.shape, device=lengths.device).masked_fill_(behind, float("-inf"))[:, None, None]
