"""Whether what is sampled is, to the bit, what is scored: `policy.parity: exact` promises it, and is held to it here.

Answers of different lengths to prompts of different lengths are sampled, so that slots come and go, and scored in
several ways: as the update does, with gradients, row by row, and a few rows at a time in another order."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lmgym.batch import Batch, collate
from lmgym.core import seeds
from lmgym.inference.base import Engine, Request, Sampling
from lmgym.models.policy import Policy
from lmgym.types import Episode, Example, Turn

LENGTHS = (70, 33, 9, 9, 1)  # tokens of the trial's prompts: below and above tiles of rows and of keys
ANSWERS = (40, 7)  # tokens of the answers to each


@dataclass(frozen=True)
class Parity:
    """Sampled tokens, ways in which they were scored, and how many of these log-probabilities have other bits than the
    sampler's. Example: Parity(tokens=235, ways=4, differing=0).sentence"""

    tokens: int
    ways: int
    differing: int

    @property
    def sentence(self) -> str:
        return (
            f"parity: of {self.tokens:,} sampled log-probabilities, each scored in {self.ways} ways, {self.differing:,}"
            " scored ones have other bits"
        )


def trial(policy: Policy, engine: Engine[Policy], ordinary: list[int]) -> Batch:
    """Answers of several lengths to prompts of several lengths, of `ordinary` ids; two prompts are of one length."""
    new = max(ANSWERS) if policy.context is None else max(min(max(ANSWERS), policy.context // 2), 1)
    room = 2**62 if policy.context is None else policy.context - new
    requests = list[Request]()
    for index, wanted in enumerate(LENGTHS):
        drawn = seeds.uniforms([seeds.key("parity", "prompt", index)], 0, max(min(wanted, room), 1))[0] * len(ordinary)
        prompt = tuple(ordinary[int(place)] for place in drawn)
        for answer in ANSWERS:
            requests.append(Request(prompt, seeds.key("parity", "answer", len(requests)), pause=min(answer, new)))
    sampling, episodes = Sampling(max_new_tokens=new), []
    for index, completion in enumerate(engine.generate(requests, sampling)):
        turn = Turn(list(requests[index].prompt_ids), completion.ids, completion.logprobs)
        episodes.append(Episode(Example(f"parity/{index}", ""), index // len(ANSWERS), index, [turn]))
    return collate(episodes, policy.pad_id)


def parity_of(policy: Policy, batch: Batch) -> Parity:
    """Score what was sampled in several ways, and count the log-probabilities whose bits are not the sampler's."""
    sampled, counts = batch.require("logprobs_sampler"), []
    for _, scored in scored_in_ways(policy, batch):
        counts.append(differing(scored, sampled, batch))
    return Parity(int(batch.actions.sum()), len(counts), sum(counts))


def scored_in_ways(policy: Policy, batch: Batch) -> Iterator[tuple[str, Float[Tensor, "N T"]]]:
    """The name of each way of scoring, and the log-probabilities that it gives."""
    everything = torch.arange(len(batch))
    yield "micro-batches", policy.compute_logprobs_no_grad(batch).logprobs
    yield "gradients", _put_together(batch, policy.micro_batches(batch), lambda part: _with_gradient(policy, part))
    few = everything.flip(0).split(3)
    yield "threes", _put_together(batch, few, lambda part: policy.compute_logprobs_no_grad(part).logprobs)
    alone = everything.split(1)
    yield "alone", _put_together(batch, alone, lambda part: policy.compute_logprobs_no_grad(part).logprobs)


def differing(one: Float[Tensor, "N T"], other: Float[Tensor, "N T"], batch: Batch) -> int:
    """The actions whose numbers have other bits."""
    bits = (numbers.float().contiguous().view(torch.int32) for numbers in (one, other))
    return int((torch.ne(*bits) & batch.actions).sum())


def _with_gradient(policy: Policy, batch: Batch) -> Tensor:
    with torch.enable_grad():
        return policy.compute_logprobs(batch).logprobs.detach()


def _put_together(batch: Batch, rows: "list[Tensor] | tuple[Tensor, ...]", score: Callable[[Batch], Tensor]) -> Tensor:
    together = torch.zeros(batch.tokens.shape)
    for part in rows:
        scored = score(batch[part]).float().cpu()
        together[part, : scored.shape[1]] = scored
    return together
