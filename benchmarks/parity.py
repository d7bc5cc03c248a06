"""How many sampled log-probabilities have other bits when they are scored, with `policy.parity: exact` and without; and
what exactness costs.

    python -m benchmarks.parity --model FOLDER --tokens 1000000
    python -m benchmarks.parity --model FOLDER --seconds 3

Counting: batches of random prompts (1 to 200 tokens, some shared by several answers) are sampled with 7 to 64 slots and
scored in micro-batches of 300 to 4,096 tokens; every tenth batch in all ways of inference/parity.py, with gradients
among them. Timing: rollout and update (scores and gradients of all answers) of 8 prompts of 100 tokens with 8 answers
each, both modes by turns, medians of so many rounds, in seconds of the processor.
"""

import argparse
import json
import statistics
import time

import numpy as np
import torch

from lmgym.batch import Batch, collate
from lmgym.core import seeds
from lmgym.inference.base import Request, Sampling
from lmgym.inference.parity import differing, parity_of
from lmgym.inference.sampler import Sampler
from lmgym.models.device import prepare_process
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.types import Episode, Example, Turn

SLOTS, PASSES, SETTINGS = (64, 7, 30, 48, 16), (4096, 300, 1000), ({}, {"temperature": 0.7}, {"top_p": 0.9})
EVERY = 10  # batches, of which one is scored in all ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--compute", default="auto")
    parser.add_argument("--parity", default="exact")
    parser.add_argument("--tokens", type=int, default=0, help="sampled tokens to compare (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--seconds", type=int, default=0, help="rounds of the timing (%(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    prepare_process(given.threads)
    if given.tokens:
        count(given)
    if given.seconds:
        timing(given)


def policy_of(given: argparse.Namespace, parity: str) -> Policy:
    return load_policy(PolicySection(model=given.model, device="cpu", compute=given.compute, parity=parity))  # type: ignore[arg-type]


def count(given: argparse.Namespace) -> None:
    """Print, batch by batch, how many numbers were compared so far and how many have other bits."""
    policy, compared, different, gaps, number = policy_of(given, given.parity), 0, 0, list[float](), 0
    print(f"{given.model}, {policy.compute}, parity: {given.parity}, {given.threads} threads", flush=True)
    while compared < given.tokens:
        batch = sampled(policy, number, given.new_tokens)
        policy.tokens_per_forward = PASSES[number % len(PASSES)]
        scored, reported = policy.compute_logprobs_no_grad(batch).logprobs, batch.require("logprobs_sampler")
        compared, different = compared + int(batch.actions.sum()), different + differing(scored, reported, batch)
        gaps.append(float((scored - reported)[batch.actions].abs().max()))
        if number % EVERY == EVERY - 1:
            print(parity_of(policy, batch).sentence, flush=True)
        print(f"{compared:,} tokens, {different:,} differ, by {max(gaps):.3g} nats at most", flush=True)
        number += 1


def sampled(policy: Policy, number: int, new: int) -> Batch:
    """Answers to random prompts: some shared, of many lengths, with few or many slots."""
    random, requests, groups = np.random.default_rng(number), list[Request](), list[int]()
    for group in range(24):
        prompt = tuple(random.integers(3, policy.vocabulary, random.integers(1, 200)).tolist())
        for _ in range(int(random.choice([1, 2, 8]))):
            key = seeds.key("parity", number, len(requests))
            requests.append(Request(prompt, key, pause=int(random.integers(new // 4, new + 1))))
            groups.append(group)
    sampling = Sampling(max_new_tokens=new, min_new_tokens=number % 3, **SETTINGS[number % len(SETTINGS)])
    answers = Sampler(policy, SLOTS[number % len(SLOTS)]).generate(requests, sampling)
    episodes = []
    for index, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        least = sampling.min_new_tokens
        turn = Turn([*request.prompt_ids], answer.ids, answer.logprobs, min_new_tokens=least, kept=answer.kept)
        episodes.append(Episode(Example(f"x/{groups[index]}", ""), groups[index], index, [turn]))
    return collate(episodes, policy.pad_id, temperature=sampling.temperature, stop_ids=policy.stop_ids)


def timing(given: argparse.Namespace) -> None:
    """Print seconds of rollout and update in both modes, and their ratios."""
    policies = {parity: policy_of(given, parity) for parity in ("rounding", "exact")}
    seconds = {parity: (list[float](), list[float]()) for parity in policies}
    for turn in range(given.seconds + 1):
        for parity, policy in policies.items():
            sampler, random = Sampler(policy, 64), np.random.default_rng(turn)
            prompts = [tuple(random.integers(3, policy.vocabulary, 100).tolist()) for _ in range(8)]
            requests = [Request(prompts[n // 8], seeds.key("time", turn, n)) for n in range(64)]
            begin = time.process_time()
            answers = sampler.generate(
                requests, Sampling(max_new_tokens=given.new_tokens, min_new_tokens=given.new_tokens)
            )
            middle = time.process_time()
            episodes = [
                Episode(Example(f"x/{n // 8}", ""), n // 8, n, [Turn([*prompts[n // 8]], one.ids, one.logprobs)])
                for n, one in enumerate(answers)
            ]
            batch = collate(episodes, policy.pad_id)
            for rows in policy.micro_batches(batch):
                policy.compute_logprobs(batch[rows]).logprobs.sum().backward()
            for parameter in policy.parameters():
                parameter.grad = None
            if turn:  # the first one warms up
                for own, value in zip(seconds[parity], (middle - begin, time.process_time() - middle), strict=True):
                    own.append(value)
    medians = {parity: [statistics.median(own) for own in both] for parity, both in seconds.items()}
    for parity, (rollout, update) in medians.items():
        print(
            f"{parity}: rollout {rollout:.2f} s, update {update:.2f} s, together {rollout + update:.2f} s", flush=True
        )
    ratios = [exact / usual for exact, usual in zip(medians["exact"], medians["rounding"], strict=True)]
    together = sum(medians["exact"]) / sum(medians["rounding"])
    print(f"exact takes {ratios[0]:.2f} of the rollout, {ratios[1]:.2f} of the update, {together:.2f} of both")
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
