"""What the sampler keeps of conversations between their turns, so that each token is read once."""

from collections.abc import Sequence

from lmgym.core.errors import LmgymError
from lmgym.models.attention.kv_cache import KeyValueCache


class HeldConversations:
    """Keys and values of conversations, which stay where they were decoded: a slot each, in caches that outlive a call
    (one cache for each model that reads). The slots in front are those being decoded; who has to make room there for
    others changes places with one behind.

    Example: held.reach(7, prompt_ids) -> 41, the tokens of the prompt that need not be read again
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._caches: list[KeyValueCache] = []
        self._owners: list[int | None] = []  # the conversation in each slot
        self._tokens: dict[int, tuple[int, ...]] = {}  # of each conversation: those in the caches
        self._longest = 0

    def forget(self, conversations: Sequence[int]) -> None:
        over = set(conversations)
        self._tokens = {number: tokens for number, tokens in self._tokens.items() if number not in over}
        self._owners = [None if owner in over else owner for owner in self._owners]
        if not self._tokens:
            self.clear()

    def caches(self, conversations: Sequence[int | None], capacity: int, models: int) -> list[KeyValueCache]:
        """Caches with a slot of `capacity` tokens at least for each of a call's requests, beside those held. Another
        number of models than before makes all be forgotten. Raises LmgymError where a conversation is asked twice."""
        named = [conversation for conversation in conversations if conversation is not None]
        if len(set(named)) < len(named):
            twice = next(one for one in named if named.count(one) > 1)
            raise LmgymError(f"requests: conversation {twice} is asked twice in one call; its turns go one by one")
        if len(self._caches) != models:
            self.clear()
            self._caches = [KeyValueCache(0, 0) for _ in range(models)]
        others = {owner for owner in self._owners if owner is not None}.difference(conversations)
        self._longest = max(self._longest, capacity)
        slots, now = len(others) + len(conversations), self._caches[0]
        if slots > now.slots or self._longest > now.capacity:
            slots, room = _grown(now.slots, slots), _grown(now.capacity, self._longest)
            for cache in self._caches:
                cache.grow(slots, room)
            self._owners += [None] * (slots - len(self._owners))
        return self._caches

    def reach(self, conversation: int | None, prompt: tuple[int, ...]) -> int:
        """How many of a prompt's first tokens are held: all of the conversation so far, or 0 where the prompt does not
        begin with it. One token at least is left to read."""
        tokens = self._tokens.get(conversation, ()) if conversation is not None else ()
        return len(tokens) if len(tokens) < len(prompt) and prompt[: len(tokens)] == tokens else 0

    def seat(self, conversations: Sequence[int | None], free: Sequence[int], rows: int) -> list[int]:
        """A slot among the `free` of the first `rows` for each of these: its own, if it has one there, else an empty
        one, else one whose owner moves behind."""
        places = {owner: slot for slot, owner in enumerate(self._owners) if owner is not None}
        own = [None if conversation is None else places.get(conversation) for conversation in conversations]
        own = [slot if slot in free else None for slot in own]
        left = iter(sorted(set(free).difference(own), key=lambda slot: (self._owners[slot] is not None, slot)))
        slots = [next(left) if slot is None else slot for slot in own]
        for conversation, slot in zip(conversations, slots, strict=True):
            if conversation is not None and conversation in self._owners:
                self._exchange(slot, self._owners.index(conversation))
            elif self._owners[slot] is not None:
                self._exchange(slot, self._owners.index(None, rows))
            self._owners[slot] = conversation
        return slots

    def hold(self, conversation: int, tokens: tuple[int, ...]) -> None:
        """These are the conversation's tokens in the caches: none while it is being read anew, so that a call which
        does not come to its end leaves nothing wrong behind; all but the last when its turn has ended."""
        self._tokens[conversation] = tokens

    def bring_forward(self, slots: Sequence[int]) -> list[int]:
        """Make these the first slots. Returns which of them each is now."""
        order = list(range(len(slots)))
        holes = iter([slot for slot in order if slot not in set(slots)])
        for slot in slots:
            if slot >= len(slots):
                hole = next(holes)
                self._exchange(hole, slot)
                order[hole] = slot
        return order

    def _exchange(self, one: int, other: int) -> None:
        if one == other:
            return
        for cache in self._caches:
            cache.exchange(one, other, self._longest)
        self._owners[one], self._owners[other] = self._owners[other], self._owners[one]


def _grown(old: int, needed: int) -> int:
    """What grows turn by turn grows by half at least, so that moving it costs no more than reading it did."""
    return old if needed <= old else max(needed, old * 3 // 2)
