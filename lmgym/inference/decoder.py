"""One call of the sampler: prompts are read into slots of a cache, answers grow side by side, token by token.

A distinct prompt is computed once and its keys and values are stored for each of its answers; the cache is
preallocated and written in place; a finished answer leaves and a waiting one takes its slot; a conversation's next
turn reads only what is new.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lmgym.core import seeds
from lmgym.functional import truncation
from lmgym.functional.sampling import draw, draw_among
from lmgym.inference.base import Completion, Request, Sampling
from lmgym.inference.completions import Answers
from lmgym.inference.conversation_cache import HeldConversations
from lmgym.inference.cuda_graphs import CapturedSteps
from lmgym.inference.hf_cache import EncoderDecoderReader, PlainReader
from lmgym.inference.mkl_linear import PreparedLayers
from lmgym.models.attention.kv_cache import CachedRows, ExtendedRows, KeyValueCache, PrefilledRows, SharedPrompts
from lmgym.types import Restriction

WORTH_SHARING = 1024  # tokens: sharing prompts doubles the calls of attention, which is what few short rows cost


@dataclass
class Live:
    """The answers being decoded, one per slot, as columns of length S."""

    request: list[int]  # place in the list of requests
    lengths: Int[Tensor, " S"]  # tokens in the slot
    last: Int[Tensor, " S"]  # the token sampled last, not yet in the cache


class Decoder:
    """The state of one `generate` call."""

    def __init__(
        self,
        policy: Any,
        requests: list[Request],
        sampling: Sampling,
        rows: int,
        restriction: Restriction | None,
        held: HeldConversations,
        captured: bool = False,
        ended: Callable[[int, list[int]], None] | None = None,
    ) -> None:
        self.policy, self.requests, self.sampling, self.rows = policy, requests, sampling, min(rows, len(requests))
        self.captured, self.captures, self.ended = captured, list[CapturedSteps](), ended
        self.restriction, self.held = restriction, held
        self.conversing = any(request.conversation is not None for request in requests)
        # Who reads the answers back: the sampled policy and, where another restricts it, that one beside it.
        guide = restriction.policy if restriction else None
        self.policies = [policy] if guide is None else [policy, guide]
        self.device, self.prepared = policy.device, PreparedLayers(policy)
        self.answers = Answers(policy, requests, sampling)
        self.ids, self.stops = self.answers.ids, self.answers.stops
        keys = [request.key for request in requests]
        self.uniforms = torch.from_numpy(seeds.uniforms(keys, 0, sampling.max_new_tokens))
        self.stops_at = torch.tensor(sorted(self.answers.stop_ids), device=self.device)

    def finish(self) -> list[Completion]:
        try:
            self._decode_all()
        finally:
            self.prepared.release()
        return self.answers.completions()

    def _decode_all(self) -> None:
        if self.policy.encoder_decoder:
            # Sources of like length side by side: the encoder and the cross-attention see little padding.
            order = sorted(range(len(self.requests)), key=lambda request: len(self.requests[request].source_ids))
            self._decode_blocks(order, EncoderDecoderReader)
        elif all(policy.fast for policy in self.policies):
            self._decode()
        else:
            by_length: dict[int, list[int]] = {}
            for request, one in enumerate(self.requests):
                by_length.setdefault(len(one.prompt_ids), []).append(request)
            for same in by_length.values():
                self._decode_blocks(same, PlainReader)

    def _decode(self) -> None:
        caches = self._caches()
        waiting, free = list(range(len(self.requests))), list(range(self.rows))
        live = Live(
            [-1] * self.rows, torch.zeros(self.rows, dtype=torch.long), torch.zeros(self.rows, dtype=torch.long)
        )
        while True:
            if waiting and len(free) >= min(len(waiting), max(1, self.rows // 4)):
                admitted, waiting = waiting[: len(free)], waiting[len(free) :]
                self._admit(admitted, free, live, caches)
                free = [slot for slot, request in enumerate(live.request) if request < 0]
                continue  # some may have ended with their first token
            active = len(live.request) - len(free)
            if active == 0 and not waiting:
                return
            if not waiting and active <= 0.75 * len(live.request):
                self._compact(live, caches)
            self._step(live, caches)
            free = [slot for slot, request in enumerate(live.request) if request < 0]

    def _caches(self) -> list[KeyValueCache]:
        """Room for the answers behind their shared prompts. A conversation's slot holds its prompt too, since it is
        held as a whole; so it does where the kernel that reads the cache is not ours (`CachedRows`), and where nothing
        is shared."""
        prompts = {request.prompt_ids for request in self.requests}
        limits = zip(self.requests, self.answers.limits, strict=True)
        whole = max(len(request.prompt_ids) + limit for request, limit in limits)
        if self.conversing:
            conversations = [request.conversation for request in self.requests]
            return self.held.caches(conversations, whole, len(self.policies))
        if self.device.type != "cpu" or len(prompts) == len(self.requests):
            return [KeyValueCache(self.rows, whole) for _ in self.policies]
        count, longest, own = min(len(prompts), self.rows), max(map(len, prompts)), max(self.answers.limits)
        shared = [SharedPrompts(count, self.rows, longest, self.device) for _ in self.policies]
        return [KeyValueCache(self.rows, own, prompts) for prompts in shared]

    def _admit(self, requests: list[int], free: list[int], live: Live, caches: list[KeyValueCache]) -> None:
        """Read the prompts of these requests into free slots, as far as that is not done, and sample their first
        tokens."""
        slots = free[: len(requests)]
        if self.conversing:
            slots = self.held.seat([self.requests[request].conversation for request in requests], free, self.rows)
        place = dict(zip(requests, slots, strict=True))
        shared = caches[0].prompts is not None
        for request, slot in place.items():
            live.request[slot] = request
            live.lengths[slot] = 0 if shared else len(self.requests[request].prompt_ids)
        reach = {request: self._reach(request) for request in requests}
        members: dict[tuple[int, ...], list[int]] = {}
        for request in requests:
            if not reach[request]:
                members.setdefault(self.requests[request].prompt_ids, []).append(request)
                if (conversation := self.requests[request].conversation) is not None:
                    self.held.hold(conversation, ())
        for chunk in _chunks(list(members), self.policy.tokens_per_forward):
            self._begin([(prompt, [place[request] for request in members[prompt]]) for prompt in chunk], live, caches)
        going_on = sorted((request for request in requests if reach[request]), key=lambda request: place[request])
        fresh = [self.requests[request].prompt_ids[reach[request] :] for request in going_on]
        done = 0
        for prompts in _chunks(fresh, self.policy.tokens_per_forward):
            chosen = going_on[done : done + len(prompts)]
            self._continue(prompts, [place[request] for request in chosen], live, caches)
            done += len(prompts)

    def _reach(self, request: int) -> int:
        """Tokens of a prompt whose keys and values are held."""
        one = self.requests[request]
        return self.held.reach(one.conversation, one.prompt_ids) if self.conversing else 0

    def _begin(self, prompts: list[tuple[tuple[int, ...], list[int]]], live: Live, caches: list[KeyValueCache]) -> None:
        """Prefill distinct prompts, each for all the slots that begin with it."""
        slots = [slot for _, own in prompts for slot in own]
        others = [slot for slot, request in enumerate(live.request) if request >= 0 and slot not in set(slots)]
        source = torch.tensor([i for i, (_, own) in enumerate(prompts) for _ in own], device=self.device)
        ids = torch.tensor([token for prompt, _ in prompts for token in prompt], device=self.device)
        lengths = [len(prompt) for prompt, _ in prompts]
        ends = (torch.tensor(lengths).cumsum(0) - 1).to(self.device)
        logits = []
        for policy, cache in zip(self.policies, caches, strict=True):
            if cache.prompts is None:
                layout = PrefilledRows(lengths, cache, source, torch.tensor(slots, device=self.device))
            else:
                layout = PrefilledRows(lengths, cache.prompts.cache, *cache.prompts.assign(prompts, others))
            hidden = policy.forward_hidden(ids[None], layout.positions[None], layout)[0]
            logits.append(policy.head(hidden[ends])[source])
        self._take(logits, slots, live, caches)

    def _continue(
        self, fresh: list[tuple[int, ...]], slots: list[int], live: Live, caches: list[KeyValueCache]
    ) -> None:
        """Read what is new in the prompts of conversations that go on."""
        into = torch.tensor(slots, device=self.device)
        ids = torch.tensor([token for tokens in fresh for token in tokens], device=self.device)
        lengths = [len(tokens) for tokens in fresh]
        ends = (torch.tensor(lengths).cumsum(0) - 1).to(self.device)
        before = (live.lengths[slots] - torch.tensor(lengths)).to(self.device)
        logits = []
        for policy, cache in zip(self.policies, caches, strict=True):
            layout = ExtendedRows(cache, before, lengths, into)
            hidden = policy.forward_hidden(ids[None], layout.positions[None], layout)[0]
            logits.append(policy.head(hidden[ends]))
        self._take(logits, slots, live, caches)

    def _step(self, live: Live, caches: list[KeyValueCache]) -> None:
        """One token for each live slot; free slots are computed along, and their tokens are thrown away."""
        slots = [slot for slot, request in enumerate(live.request) if request >= 0]
        self.prepared.expect(len(live.request))
        if self.captured:
            self.captures = self.captures or [
                CapturedSteps(*both, len(live.request)) for both in zip(self.policies, caches, strict=True)
            ]
            of_all = [steps.logits(live.last, live.lengths) for steps in self.captures]
            logits = of_all if len(slots) == len(live.request) else [one[slots] for one in of_all]
        else:
            logits = [self._read(*both, live, slots) for both in zip(self.policies, caches, strict=True)]
        live.lengths[slots] += 1
        self._take(logits, slots, live, caches)

    def _read(self, policy: Any, cache: KeyValueCache, live: Live, slots: list[int]) -> Float[Tensor, "R V"]:
        layout = CachedRows(cache, live.lengths.to(self.device), int(live.lengths.max()) + 1)
        hidden = policy.forward_hidden(live.last.to(self.device)[:, None], layout.positions[:, None], layout)
        logits: Tensor = policy.head(hidden[:, 0])
        return logits if len(slots) == len(logits) else logits[slots]

    def _take(
        self, logits: list[Float[Tensor, "R V"]], slots: list[int], live: Live, caches: list[KeyValueCache]
    ) -> None:
        """Sample one token per slot, keep it with its log-probability, and free the slots of ended answers; those of
        conversations are held for the next turn."""
        requests = [live.request[slot] for slot in slots]
        live.last[slots] = torch.tensor(self._draw(logits, requests))
        for request, slot in zip(requests, slots, strict=True):
            if not self.stops[request]:
                continue
            live.request[slot] = -1
            conversation = self.requests[request].conversation
            if conversation is None:
                live.lengths[slot] = 0
            else:  # the length stays: what is computed along for free slots is written behind what is held
                self.held.hold(conversation, (*self.requests[request].prompt_ids, *self.ids[request][:-1]))

    def _draw(self, logits: list[Float[Tensor, "R V"]], requests: list[int]) -> list[int]:
        """Sample the next token of these answers, all of them open, from the policies' logits, and keep it."""
        counts = [len(self.ids[request]) for request in requests]
        early = torch.tensor([count < self.sampling.min_new_tokens for count in counts])
        if bool(early.any()):
            for one in logits:  # in place: they are ours, and a mask of [R V] would be ten times the work
                one[:, self.stops_at] = one[:, self.stops_at].masked_fill(early.to(self.device)[:, None], float("-inf"))
        uniform = self.uniforms[requests, counts].to(self.device, torch.float32 if self.device.type == "mps" else None)
        temperature = self.sampling.temperature
        if self.restriction is None and not self.sampling.truncates:
            tokens, logprobs = draw(logits[0], temperature, uniform)
        else:
            candidates = self._candidates(logits[-1] if temperature in (0, 1) else logits[-1] / temperature)
            self.answers.add_sets(requests, candidates)
            tokens, logprobs = draw_among(logits[0], candidates, temperature, uniform)
        for request, token, logprob in zip(requests, tokens.tolist(), logprobs.tolist(), strict=True):
            self.answers.add(request, token, logprob)
            if self.stops[request] and self.ended is not None:
                self.ended(request, self.ids[request])
        return tokens.tolist()

    def _candidates(self, logits: Float[Tensor, "R V"]) -> truncation.Candidates:
        """What each row may be drawn from, by the logits of who decides it, at the sampling temperature."""
        sampling, rule = self.sampling, self.restriction
        if rule is None:
            return truncation.truncated(logits, sampling.top_k, sampling.top_p, sampling.min_p)
        least = rule.least
        mask = (
            truncation.top_p(logits, rule.amount, least)
            if rule.rule == "top_p"
            else truncation.top_k(logits, int(rule.amount), least)
        )
        mask[:, list(self.policy.special_ids)] = True  # whatever the rule says
        return truncation.members(mask)

    def _compact(self, live: Live, caches: list[KeyValueCache]) -> None:
        slots = [slot for slot, request in enumerate(live.request) if request >= 0]
        if self.conversing:
            slots = self.held.bring_forward(slots)
        else:
            for cache in caches:
                cache.keep(torch.tensor(slots, device=self.device))
        self.captures = []
        live.request = [live.request[slot] for slot in slots]
        live.lengths, live.last = live.lengths[slots], live.last[slots]
        shared = caches[0].prompts
        if shared is not None and shared.saved <= WORTH_SHARING:
            (live.lengths, *_) = [cache.unshare(live.lengths) for cache in caches]

    def _decode_blocks(self, order: list[int], make: type[PlainReader] | type[EncoderDecoderReader]) -> None:
        """Answers in blocks that begin together, through Hugging Face's own caches."""
        for start in range(0, len(order), self.rows):
            block = order[start : start + self.rows]
            readers = [make(policy, [self.requests[request] for request in block]) for policy in self.policies]
            leaving = [reader for reader in readers if isinstance(reader, EncoderDecoderReader)]
            tokens = None
            while True:
                if tokens is not None:
                    self.prepared.expect(len(block))
                logits = [reader.step(tokens) for reader in readers]
                still = [place for place, request in enumerate(block) if not self.stops[request]]
                drawn = self._draw([one[still] for one in logits], [block[place] for place in still])
                tokens = torch.full((len(block),), self.policy.pad_id, device=self.device)  # ended ones are fed padding
                tokens[still] = torch.tensor(drawn, device=self.device)
                still = [place for place in still if not self.stops[block[place]]]
                if not still:
                    break
                if leaving and len(still) <= 0.75 * len(block):
                    block, places = [block[place] for place in still], torch.tensor(still, device=self.device)
                    tokens = tokens[places]
                    for reader in leaving:
                        reader.keep(places)


def _chunks(prompts: list[tuple[int, ...]], budget: int) -> list[list[tuple[int, ...]]]:
    """Prompts in order, cut where the padded size would pass the budget."""
    chunks: list[list[tuple[int, ...]]] = []
    for prompt in prompts:
        if chunks and (len(chunks[-1]) + 1) * max(map(len, [*chunks[-1], prompt])) <= budget:
            chunks[-1].append(prompt)
        else:
            chunks.append([prompt])
    return chunks
