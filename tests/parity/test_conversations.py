"""Conversations in the sampler: what is held from turn to turn changes nothing but the number of tokens read."""

from typing import Any

import numpy as np
import pytest
import torch

from lmgym import seeds
from lmgym.batch import collate
from lmgym.engines.base import Completion, Request, Sampling
from lmgym.engines.sampler import Sampler
from lmgym.episode import Episode, Example, Restriction, Turn
from lmgym.policies.policy import Policy
from tests import models
from tests.parity.test_families import FAMILIES
from tests.parity.test_families import policy_of as policy_of_family


def talk(
    engine: Sampler, sampling: Sampling, turns: int, talks: int, held: bool, restriction: Any = None
) -> list[list[tuple[Request, Completion]]]:
    """Conversations of random prompts between the turns, all of them in one call a turn; every third one is answered
    in its first prompt by many, and one ends early."""
    random = np.random.default_rng(0)
    prompts = [tuple(random.integers(30, 90, 5 + talk % 3).tolist()) for talk in range(talks)]
    prompts[::3] = [prompts[0]] * len(prompts[::3])
    said: list[list[tuple[Request, Completion]]] = [[] for _ in range(talks)]
    for turn in range(turns):
        alive = [talk for talk in range(talks) if not (talk == 1 and turn > 1)]
        asked = [
            Request(prompts[talk], seeds.key(7, talk, turn), conversation=talk if held else None) for talk in alive
        ]
        for talk, request, answer in zip(alive, asked, engine.generate(asked, sampling, restriction), strict=True):
            said[talk].append((request, answer))
            prompts[talk] = (*prompts[talk], *answer.ids, *random.integers(30, 90, talk % 4 + (talk == 0)).tolist())
    return said


def policy_of(**settings: Any) -> Policy:
    return Policy(models.sharpen(models.llama(max_position_embeddings=256), 0.12), models.tokenizer(), **settings)


def same(one: list[list[tuple[Request, Completion]]], other: list[list[tuple[Request, Completion]]]) -> float:
    """Asserts equal ids; the largest difference of log-probabilities."""
    gaps = []
    for first, second in zip(one, other, strict=True):
        assert [answer.ids for _, answer in first] == [answer.ids for _, answer in second]
        for (_, a), (_, b) in zip(first, second, strict=True):
            gaps.append(np.abs(np.array(a.logprobs) - np.array(b.logprobs)).max())
    return max(gaps)


@pytest.mark.parametrize("rows", [3, 64], ids=["fewer slots than conversations", "one slot each"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_held_conversation_says_what_one_read_anew_says(rows: int, temperature: float) -> None:
    sampling = Sampling(max_new_tokens=6, temperature=temperature)
    one = talk(Sampler(policy_of(), rows), sampling, turns=4, talks=7, held=True)
    other = talk(Sampler(policy_of(), rows), sampling, turns=4, talks=7, held=False)
    assert same(one, other) < 1e-4


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_so_it_is_in_every_family(family: str) -> None:
    policy, sampling = policy_of_family(family), Sampling(max_new_tokens=5)
    one = talk(Sampler(policy, 8), sampling, turns=3, talks=5, held=True)
    assert same(one, talk(Sampler(policy, 8), sampling, turns=3, talks=5, held=False)) < 1e-4


def test_so_it_is_where_another_policy_restricts_it() -> None:
    restriction = Restriction("top_p", 0.5, 2, Policy(models.sharpen(models.llama(seed=1), 0.12), models.tokenizer()))
    one, other = (
        talk(Sampler(policy_of(), 8), Sampling(max_new_tokens=5), 3, 5, held, restriction) for held in (True, False)
    )
    assert same(one, other) < 1e-4


def test_each_token_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a conversation is linear in its tokens: all but the last sampled one are read, and none twice."""
    read = []
    forward = Policy.forward_hidden

    def counting(self: Policy, ids: torch.Tensor, *rest: Any, **named: Any) -> Any:
        read.append(ids.numel())
        return forward(self, ids, *rest, **named)

    monkeypatch.setattr(Policy, "forward_hidden", counting)
    engine, random = Sampler(policy_of(), 1), np.random.default_rng(0)
    prompt, sampling = tuple(range(40, 50)), Sampling(max_new_tokens=4)
    for turn in range(10):
        (answer,) = engine.generate([Request(prompt, seeds.key(1, turn), conversation=0)], sampling)
        total = len(prompt) + len(answer.ids)
        assert sum(read) == total - 1
        prompt = (*prompt, *answer.ids, *random.integers(30, 90, 3).tolist())
    engine.forget([0])
    engine.generate([Request(prompt, 0, conversation=0)], Sampling(max_new_tokens=1))
    assert read[-1] == len(prompt)


def test_new_weights_and_rewritten_prompts_are_read_anew() -> None:
    engine = Sampler(policy_of(), 4)
    first = Request((40, 41, 42), 1, conversation=0)
    (answer,) = engine.generate([first], Sampling(max_new_tokens=4))
    rewritten = Request((40, 77, 42, *answer.ids, 50), 2, conversation=0)
    alone = Sampler(policy_of(), 4).generate([Request(rewritten.prompt_ids, 2)], Sampling(max_new_tokens=4))
    assert engine.generate([rewritten], Sampling(max_new_tokens=4))[0].ids == alone[0].ids
    other = Policy(models.sharpen(models.llama(seed=3), 0.12), models.tokenizer())
    engine.load(other, 1)
    goes_on = Request((*rewritten.prompt_ids, *alone[0].ids, 60), 3, conversation=0)
    fresh = Sampler(other, 4).generate([Request(goes_on.prompt_ids, 3)], Sampling(max_new_tokens=4))[0]
    again = engine.generate([goes_on], Sampling(max_new_tokens=4))[0]
    assert again.ids == fresh.ids and again.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)


def test_ten_turns_scored_at_once_equal_turn_by_turn() -> None:
    """What the sampler reports in each turn is what `Policy.score` says of the whole conversation in one row."""
    policy = policy_of()
    for number, said in enumerate(talk(Sampler(policy, 8), Sampling(max_new_tokens=6), 10, 4, held=True)):
        turns, before = [], 0
        for request, answer in said:
            turns.append(Turn([*request.prompt_ids[before:]], answer.ids, answer.logprobs))
            before = len(request.prompt_ids) + len(answer.ids)
        batch = collate([Episode(Example("x", "?"), 0, number, turns)], stop_ids=policy.stop_ids)
        assert batch.tokens.shape[0] == 1 and batch.logprobs_sampler is not None
        gap = (policy.logprobs(batch) - batch.logprobs_sampler)[batch.actions].abs().max()
        assert float(gap) < 1e-4
