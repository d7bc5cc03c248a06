"""What the sampler keeps of conversations between their turns, so that each token is read once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from lmgym.cache import KeyValueCache


@dataclass(frozen=True)
class _Held:
    """One conversation: its tokens, and where their keys and values are (one cache for each model that reads)."""

    tokens: tuple[int, ...]
    caches: tuple[KeyValueCache, ...]
    slot: int


class HeldConversations:
    """Keys and values by conversation. Those of answers that ended in the same step lie in one cache; it goes when the
    last of them is forgotten or has grown.

    Example: held.reach(7, prompt_ids) -> 41, the tokens of the prompt that need not be read again
    """

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}

    def hold(self, caches: Sequence[KeyValueCache], slots: Sequence[int], tokens: dict[int, tuple[int, ...]]) -> None:
        """Keep the slots of these conversations: `tokens` are those in the cache, in the order of `slots`."""
        longest = max(map(len, tokens.values()))
        places = torch.tensor(slots, device=caches[0].keys[0].device)
        copies = tuple(cache.select(places, longest) for cache in caches)
        for slot, (conversation, own) in enumerate(tokens.items()):
            self._held[conversation] = _Held(own, copies, slot)

    def reach(self, conversation: int | None, prompt: tuple[int, ...], models: int) -> int:
        """How many of a prompt's first tokens are held: all of the conversation so far, or 0 where the prompt does not
        begin with it or another number of models is to read it. One token at least is left to read."""
        held = self._held.get(conversation) if conversation is not None else None
        if held is None or len(held.caches) != models or len(held.tokens) >= len(prompt):
            return 0
        return len(held.tokens) if prompt[: len(held.tokens)] == held.tokens else 0

    def restore(self, conversations: Sequence[int], caches: Sequence[KeyValueCache], slots: Int[Tensor, " S"]) -> None:
        """Put what is held of these conversations into slots of other caches."""
        together: dict[int, list[int]] = {}
        for place, conversation in enumerate(conversations):
            together.setdefault(id(self._held[conversation].caches), []).append(place)
        for places in together.values():
            members = [self._held[conversations[place]] for place in places]
            sources = torch.tensor([one.slot for one in members], device=slots.device)
            for cache, copy in zip(caches, members[0].caches, strict=True):
                cache.put(slots[places], copy, sources)

    def forget(self, conversations: Sequence[int]) -> None:
        for conversation in conversations:
            self._held.pop(conversation, None)

    def clear(self) -> None:
        self._held.clear()
