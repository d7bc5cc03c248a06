"""How long a small random model takes on the fast path and on the plain one: columns of the table of families.

python -m benchmarks.path_speed llama gpt_oss        these model_types, on standard output

A step of RL: 4 prompts of 16 to 19 tokens, 4 answers of 16 tokens to each, then log-probabilities of all answers and
their gradient. Both paths have the same weights (small_configs.py, wide: 256 numbers a token, windows of 64) and take
turns; the median of REPEATS steps counts. fp32, one thread.
"""

import statistics
import sys
import time
from collections.abc import Sequence

import torch
import transformers

from benchmarks.small_configs import small_model
from lmgym.batch import collate
from lmgym.core.errors import LmgymError
from lmgym.inference.base import Request, Sampling
from lmgym.inference.sampler import Sampler
from lmgym.models.builtin import byte_tokenizer
from lmgym.models.families import context_length
from lmgym.models.fast_path import route_of
from lmgym.models.policy import Policy
from lmgym.types import Episode, Example, Turn

PROMPTS, ANSWERS, NEW, SHORTEST, REPEATS = 4, 4, 16, 16, 3


def milliseconds(model: transformers.PreTrainedModel) -> tuple[float, float]:
    """The median milliseconds of a step on the fast path and on the plain one. Raises LmgymError for a model without a
    fast path, and for one that cannot read the rows."""
    plain = Policy(model, byte_tokenizer(), fast=False)
    policies = [plain.but(**vars(route_of(plain))), plain]
    if not policies[0].fast:
        raise LmgymError(policies[0].plain_because)
    context = context_length(model)
    if context is not None and context < SHORTEST + PROMPTS + NEW:
        raise LmgymError(f"its rows have room for {context} tokens")
    seconds: list[list[float]] = [[], []]
    for repeat in range(1 + REPEATS):
        for policy, own in zip(policies, seconds, strict=True):
            begin = time.perf_counter()
            step(policy)
            if repeat:  # the first one warms up
                own.append(time.perf_counter() - begin)
    fast, plain = (1000 * statistics.median(own) for own in seconds)
    return fast, plain


def step(policy: Policy) -> None:
    """Sample answers, score them, and compute the gradient."""
    prompts = [[3 + (7 * place + 11 * token) % 250 for token in range(SHORTEST + place)] for place in range(PROMPTS)]
    requests = [Request(tuple(prompts[index // ANSWERS]), key=index) for index in range(PROMPTS * ANSWERS)]
    sampling = Sampling(max_new_tokens=NEW, min_new_tokens=NEW)
    episodes = []
    for index, answer in enumerate(Sampler(policy).generate(requests, sampling)):
        turn = Turn(prompts[index // ANSWERS], answer.ids, answer.logprobs, min_new_tokens=NEW)
        episodes.append(Episode(Example(f"speed/{index // ANSWERS}", ""), index // ANSWERS, index, [turn]))
    batch = collate(episodes, policy.pad_id, stop_ids=policy.stop_ids)
    for rows in policy.micro_batches(batch):
        policy.compute_logprobs(batch[rows]).logprobs.sum().backward()
    policy.model.zero_grad()


def main(names: Sequence[str]) -> None:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for name in names:
        fast, plain = milliseconds(small_model("causal", name, wide=True))
        print(f"{name}: fast {fast:.0f} ms, plain {plain:.0f} ms ({plain / fast:.1f}x)")


if __name__ == "__main__":
    main(sys.argv[1:])
