"""One call of the sampler: prompts are prefilled into slots of a cache, then all answers grow by a token per step.

A distinct prompt is computed once for all of its answers, and so is what prompts share at their beginning. The cache is
preallocated and written in place. A waiting request takes the slot of a finished answer. Of a conversation's next
prompt only the new tokens are computed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lmgym.inference.base import Completion, Request, Sampling
from lmgym.inference.completions import Answers
from lmgym.inference.conversation_cache import ConversationCache
from lmgym.inference.drawing import Drawing
from lmgym.inference.hf_cache import EncoderDecoderReader, PlainReader
from lmgym.inference.kernels.cuda_graphs import CapturedSteps
from lmgym.inference.kernels.onednn_layers import prepared_layers
from lmgym.models.attention.cached_rows import CachedRows, ExtendedRows, PrefilledRows, PrefilledTree
from lmgym.models.attention.kv_cache import KeyValueCache, SharedPrompts
from lmgym.models.parity.attention import ExactCached, ExactExtended, ExactPrefilled
from lmgym.models.policy import Policy
from lmgym.models.prefix_trees import OrderedRows, PrefixTree
from lmgym.types import Restriction

FIRST_TOKENS = 32  # of an answer, for which a cache has room from the beginning
WORTH_SHARING = 1024  # tokens saved; below, the second call of attention that shared prompts need costs more


USUAL = PrefilledRows, ExtendedRows, CachedRows
EXACT = ExactPrefilled, ExactExtended, ExactCached


@dataclass
class LiveSlots:
    """The answers being decoded, one per slot, as columns of length S.

    Example: slot 0 decodes request 3, slot 1 is free: LiveSlots([3, -1], *torch.tensor([[17, 0], [42, 0], [0, 0]]))
    """

    request: list[int]  # index in the list of requests; -1: the slot is free
    lengths: Int[Tensor, " S"]  # tokens in the slot
    last: Int[Tensor, " S"]  # the token sampled last, not yet in the cache
    ahead: Int[Tensor, " S"]  # of the next token's index, its place (M-RoPE behind pictures; else 0)


class Decoder:
    """The state of one `generate` call (Sampler.generate describes the arguments).
    Example: Decoder(policy, requests, Sampling(), 256, None, ConversationCache()).finish()"""

    def __init__(
        self,
        policy: Policy,
        requests: list[Request],
        sampling: Sampling,
        rows: int,
        restriction: Restriction | None,
        mask: Policy | None,
        conversations: ConversationCache,
        captured: bool = False,
        ended: Callable[[int, list[int]], None] | None = None,
        mixture: float | None = None,
    ) -> None:
        self.policy, self.sampling, self.rows = policy, sampling, min(rows, len(requests))
        self.captured, self.captures, self.conversations = captured, list[CapturedSteps](), conversations
        self.conversing = any(request.conversation is not None for request in requests)
        # Every model that needs the logits: the sampled policy, and another that restricts its tokens or is mixed in.
        self.policies = [policy] if mask is None else [policy, mask]
        self.device = policy.device
        self.linear_layers = prepared_layers(policy)
        self.answers = Answers(policy, requests, sampling)
        self.ids, self.stops = self.answers.ids, self.answers.stops
        ends = list(zip(requests, self.answers.most, strict=True))
        self.whole = max(len(request.prompt_ids) + most for request, most in ends)  # tokens of the longest row
        self.longest = max(most - len(request.begun) for request, most in ends)  # tokens of the longest new part
        # What an answer has already is read with its prompt.
        self.requests = [
            replace(one, prompt_ids=(*one.prompt_ids, *one.begun)) if one.begun else one for one in requests
        ]
        self.drawing = Drawing(policy, self.answers, restriction, ended, mixture)
        self.prefilled, self.extended, self.cached = EXACT if policy.exact else USUAL

    def finish(self) -> list[Completion]:
        """Decode all requests; returns one completion for each, in order."""
        try:
            if not self.policy.encoder_decoder and not self._plain():
                self._decode()
                return self.answers.completions()
            by_length: dict[int, list[int]] = {}
            for index, request in enumerate(self.requests):
                by_length.setdefault(len(request.prompt_ids), []).append(index)
            for indices in by_length.values():
                if self.policy.encoder_decoder:
                    # Sources of similar length together: little padding in the encoder and the cross-attention.
                    order = sorted(indices, key=lambda request: len(self.requests[request].source_ids))
                    self._decode_blocks(order, EncoderDecoderReader)
                else:
                    self._decode_blocks(indices, PlainReader)
        finally:
            self.linear_layers.release()
        return self.answers.completions()

    def _plain(self) -> bool:
        """Whether a model reads these prompts on the plain path."""
        highest = torch.tensor([max(request.prompt_ids) for request in self.requests])
        return any(policy.reads_plainly(highest) for policy in self.policies)

    def _decode(self) -> None:
        """Decode with lmgym's own caches: admit waiting requests, drop unused slots, one token for each live slot."""
        caches = self._caches()
        waiting, free = list(range(len(self.requests))), list(range(self.rows))
        live = LiveSlots([-1] * self.rows, *torch.zeros(3, self.rows, dtype=torch.long))
        while True:
            # Wait until a quarter of the slots is free: many small prefills would cost more than free slots do.
            if waiting and len(free) >= min(len(waiting), max(1, self.rows // 4)):
                admitted, waiting = waiting[: len(free)], waiting[len(free) :]
                self._admit(admitted, free, live, caches)
                free = [slot for slot, request in enumerate(live.request) if request < 0]
                continue  # some answers may have ended with their first token
            active = len(live.request) - len(free)
            if active == 0 and not waiting:
                return
            if not waiting and active <= 0.75 * len(live.request):
                self._compact(live, caches)
            self._step(live, caches)
            free = [slot for slot, request in enumerate(live.request) if request < 0]

    def _caches(self) -> list[KeyValueCache]:
        """One cache per model, with slots for the answers behind their shared prompts. A slot holds its prompt too if
        it belongs to a conversation (which is kept as a whole), on devices where attention is torch's own kernel
        (`CachedRows`), if no two requests have the same prompt, and for an exact policy."""
        prompts = {request.prompt_ids for request in self.requests}
        longest, whole, answer = max(map(len, prompts)), self.whole, self.longest
        if self.conversing:
            conversations = [request.conversation for request in self.requests]
            return self.conversations.caches(conversations, whole, len(self.policies))
        if self.device.type != "cpu":
            return [KeyValueCache(self.rows, whole) for _ in self.policies]
        # On a CPU the slots grow with the answers, but for steps of fixed shapes.
        first = answer if self.captured else min(FIRST_TOKENS, answer)
        if len(prompts) == len(self.requests) or self.policy.exact:
            return [KeyValueCache(self.rows, min(longest + first, whole)) for _ in self.policies]
        shared = [SharedPrompts(min(len(prompts), self.rows), self.rows, longest, self.device) for _ in self.policies]
        return [KeyValueCache(self.rows, first, prompts) for prompts in shared]

    def _admit(self, requests: list[int], free: list[int], live: LiveSlots, caches: list[KeyValueCache]) -> None:
        """Give these requests free slots, compute what is not cached of their prompts, sample their first tokens."""
        # 1. A slot for each request; a conversation prefers the one that holds its earlier turns.
        slots = free[: len(requests)]
        if self.conversing:
            conversations = [self.requests[request].conversation for request in requests]
            slots = self.conversations.assign_slots(conversations, free, self.rows)
        slot_of = dict(zip(requests, slots, strict=True))
        shared = caches[0].prompts is not None
        for request, slot in slot_of.items():
            live.request[slot] = request
            live.lengths[slot] = 0 if shared else len(self.requests[request].prompt_ids)
        # 2. New prompts: each distinct one is prefilled once, for all requests that have it.
        prompt_of = {request: self.requests[request].prompt_ids for request in requests}
        cached = dict.fromkeys(requests, 0)  # tokens of each prompt whose keys and values are cached
        if self.conversing:
            for request in requests:
                cached[request] = self.conversations.reuse(self.requests[request].conversation, prompt_of[request])
        requests_with: dict[tuple[int, ...], list[int]] = {}
        for request in requests:
            if not cached[request]:
                requests_with.setdefault(prompt_of[request], []).append(request)
        for chunk in _chunks(list(requests_with), self.policy.tokens_per_forward):
            slots_with = [(prompt, [slot_of[request] for request in requests_with[prompt]]) for prompt in chunk]
            self._prefill(slots_with, live, caches)
        # 3. Later turns of cached conversations: only the tokens after the cached ones.
        continued = sorted((request for request in requests if cached[request]), key=lambda request: slot_of[request])
        new_tokens = [prompt_of[request][cached[request] :] for request in continued]
        slots_left = iter([slot_of[request] for request in continued])
        for chunk in _chunks(new_tokens, self.policy.tokens_per_forward):
            self._extend(chunk, [next(slots_left) for _ in chunk], live, caches)

    def _prefill(
        self, prompts: list[tuple[tuple[int, ...], list[int]]], live: LiveSlots, caches: list[KeyValueCache]
    ) -> None:
        """Compute distinct prompts, each for all the slots that begin with it."""
        slots = [slot for _, prompt_slots in prompts for slot in prompt_slots]
        others = [slot for slot, request in enumerate(live.request) if request >= 0 and slot not in set(slots)]
        repeats = torch.tensor([len(prompt_slots) for _, prompt_slots in prompts])
        source = torch.arange(len(prompts)).repeat_interleave(repeats).to(self.device)  # the prompt of each slot
        ids = [prompt for prompt, _ in prompts]
        tree, layouts = self._tree(ids), list[PrefilledRows | PrefilledTree]()
        for cache in caches:
            if cache.prompts is None:
                target = (cache, source, torch.tensor(slots, device=self.device))
            else:
                target = (cache.prompts.cache, *cache.prompts.assign(prompts, others))
            if tree is None:
                layouts.append(self.prefilled(list(map(len, ids)), *target))
            else:
                layouts.append(PrefilledTree(tree, *target))
        tails = ids if tree is None else [ids[row][own:] for row, own in zip(tree.rows, tree.shared, strict=True)]
        logits, ahead = self._last_logits(tails, ids, layouts)
        live.ahead[slots] = ahead[source.cpu()]
        self._take([of_model[source] for of_model in logits], slots, live)

    def _tree(self, prompts: list[tuple[int, ...]]) -> PrefixTree | None:
        """The tree of prompts that begin alike, such as with a system prompt, if it has clearly fewer tokens. None on a
        GPU, for an exact policy (whose sums have one order), and where pictures move places."""
        if self.device.type != "cpu" or self.policy.exact or self.policy.vision is not None or len(prompts) < 2:
            return None
        lengths = list(map(len, prompts))
        ordered = OrderedRows(pad_sequence(list(map(torch.tensor, prompts)), True), lengths)
        return ordered.worthwhile(range(len(prompts)), otherwise=sum(lengths))

    def _extend(
        self, new_tokens: list[tuple[int, ...]], slots: list[int], live: LiveSlots, caches: list[KeyValueCache]
    ) -> None:
        """Compute the new tokens of prompts whose beginnings are cached in these slots."""
        slot_index, lengths = torch.tensor(slots, device=self.device), list(map(len, new_tokens))
        before = (live.lengths[slots] - torch.tensor(lengths)).to(self.device)
        layouts = [self.extended(cache, before, lengths, slot_index) for cache in caches]
        whole = [self.requests[live.request[slot]].prompt_ids for slot in slots]
        logits, live.ahead[slots] = self._last_logits(new_tokens, whole, layouts)
        self._take(logits, slots, live)

    def _last_logits(
        self,
        sequences: list[tuple[int, ...]],
        whole: list[tuple[int, ...]],
        layouts: Sequence[PrefilledRows | PrefilledTree | ExtendedRows],
    ) -> tuple[list[Float[Tensor, "R V"]], Int[Tensor, " R"]]:
        """Each model's logits at the end of these `whole` prompts, of which these sequences are computed, packed as the
        layouts say; and how far the place of what follows each prompt is ahead of its index."""
        ids = torch.tensor([[token for tokens in sequences for token in tokens]], device=self.device)
        ends = layouts[0].ends.to(self.device)
        places, ahead = self.policy.packed_places(whole, list(map(len, sequences)))
        logits = []
        for policy, layout in zip(self.policies, layouts, strict=True):
            hidden = policy.forward_hidden(ids, layout.positions[None] if places is None else places, layout)[0]
            logits.append(policy.head(hidden[ends]))
        return logits, ahead

    def _step(self, live: LiveSlots, caches: list[KeyValueCache]) -> None:
        """One token for each live slot. Free slots are computed too, and their logits are dropped."""
        slots = [slot for slot, request in enumerate(live.request) if request >= 0]
        self.linear_layers.begin_step(len(live.request))
        pairs = zip(self.policies, caches, strict=True)
        if self.captured:
            self.captures = self.captures or [CapturedSteps(*pair, len(live.request)) for pair in pairs]
            logits = [steps.logits(live.last, live.lengths) for steps in self.captures]
            logits = logits if len(slots) == len(live.request) else [of_model[slots] for of_model in logits]
        else:
            logits = [self._step_logits(*pair, live, slots) for pair in pairs]
        live.lengths[slots] += 1
        self._take(logits, slots, live)

    def _step_logits(
        self, policy: Policy, cache: KeyValueCache, live: LiveSlots, slots: list[int]
    ) -> Float[Tensor, "R V"]:
        width = int(live.lengths.max()) + 1
        cache.reserve(width, self.whole if cache.prompts is None else self.longest)
        layout = self.cached(cache, live.lengths.to(self.device), width)
        positions = layout.positions
        if bool(live.ahead.any()):
            positions = positions + live.ahead.to(self.device)
        hidden = policy.forward_hidden(live.last.to(self.device)[:, None], positions[:, None], layout)
        logits: Tensor = policy.head(hidden[:, 0], narrow=True)
        return logits if len(slots) == len(logits) else logits[slots]

    def _take(self, logits: list[Float[Tensor, "R V"]], slots: list[int], live: LiveSlots) -> None:
        """Sample one token per slot, and free the slots of ended answers. Conversations stay cached."""
        requests = [live.request[slot] for slot in slots]
        live.last[slots] = torch.tensor(self.drawing.draw(logits, requests))
        for request, slot in zip(requests, slots, strict=True):
            if not self.stops[request]:
                continue
            live.request[slot] = -1
            conversation = self.requests[request].conversation
            if conversation is None:
                live.lengths[slot] = 0
            else:  # the length stays, so that what steps write to this free slot comes after the cached tokens
                self.conversations.record(conversation, (*self.requests[request].prompt_ids, *self.ids[request][:-1]))

    def _compact(self, live: LiveSlots, caches: list[KeyValueCache]) -> None:
        """Drop the free slots, because no request waits for them."""
        slots = [slot for slot, request in enumerate(live.request) if request >= 0]
        if self.conversing:
            slots = self.conversations.move_to_front(slots)
        else:
            for cache in caches:
                cache.keep(torch.tensor(slots, device=self.device))
        self.captures = []
        live.request = [live.request[slot] for slot in slots]
        live.lengths, live.last, live.ahead = live.lengths[slots], live.last[slots], live.ahead[slots]
        shared = caches[0].prompts
        if shared is not None and shared.saved <= WORTH_SHARING:
            (live.lengths, *_) = [cache.unshare(live.lengths) for cache in caches]

    def _decode_blocks(self, order: list[int], make: type[PlainReader] | type[EncoderDecoderReader]) -> None:
        """Decode with Hugging Face's own caches, in blocks of up to `rows` answers that begin together."""
        for start in range(0, len(order), self.rows):
            block = order[start : start + self.rows]
            readers = [make(policy, [self.requests[request] for request in block]) for policy in self.policies]
            shrinking = [reader for reader in readers if isinstance(reader, EncoderDecoderReader)]
            tokens = None
            while True:
                if tokens is not None:
                    self.linear_layers.begin_step(len(block))
                logits = [reader.step(tokens) for reader in readers]
                unfinished = [row for row, request in enumerate(block) if not self.stops[request]]
                drawn = self.drawing.draw(
                    [of_model[unfinished] for of_model in logits], [block[row] for row in unfinished]
                )
                tokens = torch.full((len(block),), self.policy.pad_id, device=self.device)  # for finished answers
                tokens[unfinished] = torch.tensor(drawn, device=self.device)
                unfinished = [row for row in unfinished if not self.stops[block[row]]]
                if not unfinished:
                    break
                if shrinking and len(unfinished) <= 0.75 * len(block):
                    block, rows = [block[row] for row in unfinished], torch.tensor(unfinished, device=self.device)
                    tokens = tokens[rows]
                    for reader in shrinking:
                        reader.keep(rows)


def _chunks(prompts: list[tuple[int, ...]], budget: int) -> list[list[tuple[int, ...]]]:
    """Prompts in order, in chunks whose padded size is within the budget of tokens (one prompt may exceed it)."""
    chunks: list[list[tuple[int, ...]]] = []
    for prompt in prompts:
        if chunks and (len(chunks[-1]) + 1) * max(map(len, [*chunks[-1], prompt])) <= budget:
            chunks[-1].append(prompt)
        else:
            chunks.append([prompt])
    return chunks
