"""Keys and values of conversations, kept between their turns, so that each token is computed once."""

from collections.abc import Sequence

from lmgym.core.errors import LmgymError
from lmgym.models.attention.kv_cache import KeyValueCache


class ConversationCache:
    """A slot for each conversation, in caches that outlive a call of `generate` (one cache for each model that reads).

    The first slots, as many as are decoded at once, belong to the running call. To use one of them for another
    conversation, its contents are swapped with a slot behind them."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._caches: list[KeyValueCache] = []
        self._owners: list[int | None] = []  # the conversation in each slot
        self._tokens: dict[int, tuple[int, ...]] = {}  # the cached tokens of each conversation
        self._read: dict[int, int] = {}  # the length of the prompt that was last read from its beginning
        self._longest = 0

    def forget(self, conversations: Sequence[int]) -> None:
        """Free the slots of conversations that are over."""
        over = set(conversations)
        self._tokens = {number: tokens for number, tokens in self._tokens.items() if number not in over}
        self._read = {number: length for number, length in self._read.items() if number not in over}
        self._owners = [None if owner in over else owner for owner in self._owners]
        if not self._tokens:
            self.clear()

    def caches(self, conversations: Sequence[int | None], capacity: int, models: int) -> list[KeyValueCache]:
        """Caches, one per model, with room for these requests (slots of at least `capacity` tokens) and all other
        conversations. Another number of models clears them. Raises LmgymError if a conversation occurs twice."""
        given = [conversation for conversation in conversations if conversation is not None]
        if len(set(given)) < len(given):
            twice = next(conversation for conversation in given if given.count(conversation) > 1)
            raise LmgymError(f"requests: conversation {twice} is asked twice in one call; its turns go one by one")
        if len(self._caches) != models:
            self.clear()
            self._caches = [KeyValueCache(0, 0) for _ in range(models)]
        others = {owner for owner in self._owners if owner is not None}.difference(conversations)
        self._longest = max(self._longest, capacity)
        slots, current = len(others) + len(conversations), self._caches[0]
        if slots > current.slots or self._longest > current.capacity:
            slots, length = _grown(current.slots, slots), _grown(current.capacity, self._longest)
            for cache in self._caches:
                cache.grow(slots, length)
            self._owners += [None] * (slots - len(self._owners))
        return self._caches

    def reuse(self, conversation: int | None, prompt: tuple[int, ...]) -> int:
        """How many of the prompt's first tokens are cached; the conversation's other tokens are forgotten. At least one
        token is left to compute.

        A conversation that goes on has read all that is cached. One that went back to an earlier turn keeps what comes
        before the fork. But where not even an answer stays, the prompt is read anew, since conversations that begin
        alike can read it together."""
        if conversation is None:
            return 0
        shared = cached = self._tokens.get(conversation, ())
        if len(cached) >= len(prompt) or prompt[: len(cached)] != cached:
            pairs = enumerate(zip(cached, prompt[:-1], strict=False))
            fork = next((place for place, (one, other) in pairs if one != other), len(prompt) - 1)
            shared = prompt[:fork] if fork > self._read[conversation] else ()
        if not shared:
            self._read[conversation] = len(prompt)
        self.record(conversation, shared)
        return len(shared)

    def assign_slots(self, conversations: Sequence[int | None], free: Sequence[int], rows: int) -> list[int]:
        """A slot for each of these conversations, among the `free` ones of the first `rows`: the one that it has
        already, else an empty one, else that of another conversation, which is moved behind the first `rows`."""
        # 1. Keep the slots that are usable as they are.
        slot_of = {owner: slot for slot, owner in enumerate(self._owners) if owner is not None}
        current = [None if conversation is None else slot_of.get(conversation) for conversation in conversations]
        current = [slot if slot in free else None for slot in current]
        # 2. The others get the remaining free slots, empty ones first.
        remaining = set(free).difference(current)
        others = iter(sorted(remaining, key=lambda slot: (self._owners[slot] is not None, slot)))
        slots = [next(others) if slot is None else slot for slot in current]
        # 3. Move keys and values to where they are wanted.
        for conversation, slot in zip(conversations, slots, strict=True):
            if conversation is not None and conversation in self._owners:
                self._exchange(slot, self._owners.index(conversation))
            elif self._owners[slot] is not None:
                self._exchange(slot, self._owners.index(None, rows))
            self._owners[slot] = conversation
        return slots

    def record(self, conversation: int, tokens: tuple[int, ...]) -> None:
        """Note which tokens of a conversation are cached: while its prompt is being computed, those that stay, as the
        call may be interrupted; after its turn, all but the last one, which has not been read."""
        self._tokens[conversation] = tokens

    def move_to_front(self, slots: Sequence[int]) -> list[int]:
        """Make these the first slots. Returns, for each of the first slots, the slot whose contents it has now."""
        order = list(range(len(slots)))
        holes = iter([slot for slot in order if slot not in set(slots)])
        for slot in slots:
            if slot >= len(slots):
                hole = next(holes)
                self._exchange(hole, slot)
                order[hole] = slot
        return order

    def _exchange(self, first: int, second: int) -> None:
        if first == second:
            return
        for cache in self._caches:
            cache.exchange(first, second, self._longest)
        self._owners[first], self._owners[second] = self._owners[second], self._owners[first]


def _grown(old: int, needed: int) -> int:
    """A size that grows turn by turn grows by at least a half, so that copying costs no more than computing did."""
    return old if needed <= old else max(needed, old * 3 // 2)
