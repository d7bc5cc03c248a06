"""Keys and values that the sampler keeps. Pure torch, no model code.

A prompt is stored once for all of its answers (`SharedPrompts`); each answer has a slot of its own for what follows.
The layouts of cached_rows.py write to a cache and read from it."""

from collections.abc import Sequence
from itertools import zip_longest

import torch
from jaxtyping import Float, Int
from torch import Tensor

LEAST_GROWTH = 32  # tokens by which a slot grows


class KeyValueCache:
    """Preallocated keys and values of S sequences, written in place.

    One pair of tensors [S K C D] per layer: S slots, K key-value heads, capacity C tokens, head size D. They are made
    at the first write, when the shapes are known. With `prompts`, a slot holds only the tokens after its prompt.

    Example: KeyValueCache(slots=64, capacity=512)"""

    def __init__(self, slots: int, capacity: int, prompts: "SharedPrompts | None" = None) -> None:
        self.slots, self.capacity, self.prompts = slots, capacity, prompts
        self.widens = True  # bf16 to fp32 on a CPU (`CachedRows` says why); fused layers do not
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def reserve(self, tokens: int, most: int) -> None:
        """Room for so many tokens in each slot. A slot grows by parts, up to `most` tokens: on a CPU a decoding step
        that reads slots much longer than what they hold takes up to twice as long (docs/benchmarks_methods.md)."""
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
            narrow = self.widens and like.device.type == "cpu" and like.dtype == torch.bfloat16
            dtype = torch.float32 if narrow else key.dtype
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

    Example: eight prompts with eight answers each: SharedPrompts(prompts=8, slots=64, capacity=512, device=device)"""

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
        return self._by_slot(scores_of(self._by_prompt(query, heads), keys, self.excluded), heads)

    def weighted_values(self, layer: int, shares: Float[Tensor, "SK G W"]) -> Float[Tensor, "SK G D"]:
        """Sums of the prompts' values, weighted by attention probabilities."""
        heads = self.cache.values[layer].shape[1]
        values = self.cache.values[layer].flatten(0, 1)[:, : self.width]
        return self._by_slot(torch.bmm(self._by_prompt(shares, heads), values), heads)

    def _order_slots(self) -> None:
        """Compute the table of slots by prompt, after a change of prompts or slots."""
        self.order = order = torch.argsort(self.prompt_of_slot, stable=True)
        counts = torch.bincount(self.prompt_of_slot, minlength=len(self.lengths))
        rank = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[self.prompt_of_slot[order]]
        self.most, self.width = int(counts.max()), int(self.lengths.max())
        entries = self.prompt_of_slot[order] * self.most + rank
        self.entry_of_slot = torch.empty_like(order).index_copy_(0, order, entries)
        slot_at = torch.zeros(len(self.lengths) * self.most, dtype=torch.long, device=order.device)
        self.slot_at = slot_at.index_copy_(0, self.entry_of_slot, torch.arange(len(order), device=order.device))
        self.in_order = torch.equal(self.entry_of_slot, torch.arange(len(slot_at), device=order.device))
        self.excluded = excluded_after(self.lengths, self.width)

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


def scores_of(
    query: Float[Tensor, "RK G D"], keys: Float[Tensor, "RK W D"], excluded: Float[Tensor, "R 1 1 W"] | None
) -> Float[Tensor, "RK G W"]:
    """Products of each row's queries with its keys, plus `excluded` of the row (the K heads of a row share it)."""
    scores = torch.bmm(query, keys.transpose(1, 2))
    if excluded is not None:
        scores.view(len(excluded), -1, *scores.shape[1:]).add_(excluded)
    return scores


def excluded_after(lengths: Int[Tensor, " R"], width: int) -> Float[Tensor, "R 1 1 W"] | None:
    """What is added to the scores of R rows of `width` keys: -inf after a row's length. None if all rows are full."""
    after = torch.arange(width, device=lengths.device) >= lengths[:, None]
    if not bool(after.any()):
        return None
    return torch.zeros(after.shape, device=lengths.device).masked_fill_(after, float("-inf"))[:, None, None]
