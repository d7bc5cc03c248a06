"""Conversations in the sampler: what is held from turn to turn changes nothing but the number of tokens read."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmgym.batch import collate
from lmgym.core import seeds
from lmgym.core.errors import LmgymError
from lmgym.inference.base import Completion, Request, Sampling
from lmgym.inference.conversation_cache import _grown
from lmgym.inference.sampler import Sampler
from lmgym.models.policy import Policy
from lmgym.types import Episode, Example, Restriction, Turn
from tests import models, rounding
from tests.parity.test_families import FAMILIES
from tests.parity.test_families import policy_of as policy_of_family


def talk(
    engine: Sampler, sampling: Sampling, turns: int, talks: int, held: bool
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
        for talk, request, answer in zip(alive, asked, engine.generate(asked, sampling), strict=True):
            said[talk].append((request, answer))
            prompts[talk] = (*prompts[talk], *answer.ids, *random.integers(30, 90, talk % 4 + (talk == 0)).tolist())
    return said


def policy_of(seed: int = 0) -> Policy:
    model = models.sharpen(models.llama(max_position_embeddings=256), 0.12, seed)
    return models.exact(Policy(model, models.tokenizer()))


POLICY = policy_of()


def assert_same(
    policy: Policy, one: list[list[tuple[Request, Completion]]], other: list[list[tuple[Request, Completion]]]
) -> None:
    """Equal ids, and log-probabilities that differ by rounding."""
    ours, theirs = [answer for said in one for _, answer in said], [answer for said in other for _, answer in said]
    assert [answer.ids for answer in ours] == [answer.ids for answer in theirs]
    assert rounding.near(policy.model, logprobs_of(ours), logprobs_of(theirs), tokens=128)


def logprobs_of(answers: list[Completion]) -> list[float]:
    return [logprob for answer in answers for logprob in answer.logprobs]


@pytest.mark.parametrize("rows", [3, 64], ids=["fewer slots than conversations", "one slot each"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_held_conversation_says_what_one_read_anew_says(rows: int, temperature: float) -> None:
    sampling = Sampling(max_new_tokens=6, temperature=temperature)
    one = talk(Sampler(policy_of(), rows), sampling, turns=4, talks=7, held=True)
    other = talk(Sampler(policy_of(), rows), sampling, turns=4, talks=7, held=False)
    assert_same(policy_of(), one, other)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_so_it_is_in_every_family(family: str) -> None:
    policy, sampling = models.exact(policy_of_family(family)), Sampling(max_new_tokens=5)
    one = talk(Sampler(policy, 8), sampling, turns=3, talks=5, held=True)
    assert_same(policy, one, talk(Sampler(policy, 8), sampling, turns=3, talks=5, held=False))


def test_so_it_is_where_another_policy_restricts_it() -> None:
    one, other = (
        talk(
            Sampler(policy_of(), 8).restricted(Restriction("top_p", 0.5, 2), policy_of(seed=1)),
            Sampling(max_new_tokens=5),
            3,
            5,
            held,
        )
        for held in (True, False)
    )
    assert_same(policy_of(), one, other)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 5), captured=st.booleans())
def test_who_comes_and_goes_changes_nothing(seed: int, rows: int, captured: bool) -> None:
    """Calls of any of nine conversations and of prompts that are none, in any order, with few slots, of answers that
    end at different times; some are forgotten in between, some prompts rewritten, some gone back in."""
    random = np.random.default_rng(seed)
    held, anew = Sampler(POLICY, rows, captured), Sampler(POLICY, rows)
    said = {number: tuple(random.integers(30, 90, random.integers(2, 9)).tolist()) for number in range(9)}
    for call in range(6):
        called = random.permutation(9)[: random.integers(1, 10)].tolist()
        keys = [seeds.key(seed, call, number) for number in called]
        names = [number if random.random() < 0.8 else None for number in called]
        sampling = Sampling(max_new_tokens=int(random.integers(1, 9)), stop_ids=tuple(range(0, 256, 6)))
        asked = [Request(said[n], key, conversation=name) for n, key, name in zip(called, keys, names, strict=True)]
        one = held.generate(asked, sampling)
        other = anew.generate([Request(said[n], key) for n, key in zip(called, keys, strict=True)], sampling)
        assert [answer.ids for answer in one] == [answer.ids for answer in other]
        assert rounding.near(POLICY.model, logprobs_of(one), logprobs_of(other), tokens=128)
        for number, answer in zip(called, one, strict=True):
            said[number] = (*said[number], *answer.ids, *random.integers(30, 90, random.integers(0, 4)).tolist())
            if random.random() < 0.1:
                said[number] = tuple(random.integers(30, 90, 5).tolist())
            elif random.random() < 0.3:  # it goes back to an earlier place, or asks the same again
                place = int(random.integers(1, len(said[number]) + 1))
                said[number] = (*said[number][:place], *random.integers(30, 90, random.integers(0, 3)).tolist())
            if random.random() < 0.1:
                held.forget([number])


def test_a_call_that_breaks_off_leaves_nothing_wrong_behind() -> None:
    """A conversation whose prompt was being read anew when the call broke off is read anew again, whatever it had
    held."""
    engine, sampling = Sampler(policy_of(), 4), Sampling(max_new_tokens=6)
    (said,) = engine.generate([Request((40, 41, 42), 1, conversation=0)], sampling)
    rewritten = [Request((50, 77, 52, 53), 2, conversation=0), Request((60, 61), 3, conversation=1)]

    def broken(place: int, ids: list[int]) -> None:
        raise RuntimeError("the caller's own")

    with pytest.raises(RuntimeError):
        engine.generate(rewritten, sampling, ended=broken)
    goes_on = Request((40, 41, 42, *said.ids, 50), 4, conversation=0)
    (fresh,) = Sampler(policy_of(), 4).generate([Request(goes_on.prompt_ids, 4)], sampling)
    (again,) = engine.generate([goes_on], sampling)
    assert again.ids == fresh.ids and rounding.near(policy_of().model, again.logprobs, fresh.logprobs)


def test_a_conversation_cannot_be_asked_twice_at_once() -> None:
    both = [Request((40, 41), key, conversation=3) for key in (1, 2)]
    with pytest.raises(LmgymError, match="conversation 3 is asked twice"):
        Sampler(policy_of(), 4).generate(both, Sampling(max_new_tokens=2))


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


def test_a_fork_reads_what_is_new_behind_it_and_no_answer_of_the_other_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Back to the first answer, the same again, and back to the first prompt, which is read anew; a call that breaks
    off in a branch leaves nothing of it."""
    read = []
    forward = Policy.forward_hidden

    def counting(self: Policy, ids: torch.Tensor, *rest: Any, **named: Any) -> Any:
        read.append(ids.numel())
        return forward(self, ids, *rest, **named)

    engine, sampling = Sampler(policy_of(), 2), Sampling(max_new_tokens=4)

    def asked(prompt: tuple[int, ...], key: int, **more: Any) -> tuple[int, ...]:
        """An answer, which is the same without a cache."""
        (alone,) = Sampler(policy_of(), 2).generate([Request(prompt, key)], sampling)
        with monkeypatch.context() as patch:
            patch.setattr(Policy, "forward_hidden", counting)
            read.clear()
            (answer,) = engine.generate([Request(prompt, key, conversation=0)], sampling, **more)
        assert answer.ids == alone.ids and rounding.near(policy_of().model, answer.logprobs, alone.logprobs)
        return (*prompt, *answer.ids)

    def broken(place: int, ids: list[int]) -> None:
        raise RuntimeError("the caller's own")

    first = tuple(range(40, 50))
    one = asked(first, 1)
    assert read[0] == 10
    asked((*one, 50, 51, 52), 2)
    assert read[0] == 4
    asked((*one, 60, 61), 3)
    assert read[0] == 2
    again = asked((*one, 60, 61), 4)
    assert read[0] == 1
    with pytest.raises(RuntimeError):
        asked((*one, 70, 71), 5, ended=broken)
    asked((*again, 62), 6)
    assert read[0] == len(again) + 1 - len(one)
    asked(first, 7)
    assert read[0] == 10


def test_new_weights_and_rewritten_prompts_are_read_anew() -> None:
    engine = Sampler(policy_of(), 4)
    first = Request((40, 41, 42), 1, conversation=0)
    (answer,) = engine.generate([first], Sampling(max_new_tokens=4))
    rewritten = Request((40, 77, 42, *answer.ids, 50), 2, conversation=0)
    alone = Sampler(policy_of(), 4).generate([Request(rewritten.prompt_ids, 2)], Sampling(max_new_tokens=4))
    assert engine.generate([rewritten], Sampling(max_new_tokens=4))[0].ids == alone[0].ids
    other = policy_of(seed=3)
    engine.load(other, 1)
    goes_on = Request((*rewritten.prompt_ids, *alone[0].ids, 60), 3, conversation=0)
    fresh = Sampler(other, 4).generate([Request(goes_on.prompt_ids, 3)], Sampling(max_new_tokens=4))[0]
    again = engine.generate([goes_on], Sampling(max_new_tokens=4))[0]
    assert again.ids == fresh.ids and rounding.near(other.model, again.logprobs, fresh.logprobs)


def test_ten_turns_scored_at_once_equal_turn_by_turn() -> None:
    """What the sampler reports in each turn equals `Policy.compute_logprobs` of the whole conversation in one row."""
    policy = policy_of()
    for number, said in enumerate(talk(Sampler(policy, 8), Sampling(max_new_tokens=6), 10, 4, held=True)):
        turns, before = [], 0
        for request, answer in said:
            turns.append(Turn([*request.prompt_ids[before:]], answer.ids, answer.logprobs))
            before = len(request.prompt_ids) + len(answer.ids)
        batch = collate([Episode(Example("x", "?"), 0, number, turns)], stop_ids=policy.stop_ids)
        assert batch.tokens.shape[0] == 1 and batch.logprobs_sampler is not None
        scored = policy.compute_logprobs_no_grad(batch).logprobs
        assert rounding.near(policy.model, scored[batch.actions], batch.logprobs_sampler[batch.actions], tokens=128)


def test_room_for_conversations_grows_by_half() -> None:
    """So that turn after turn copies as much as it computes, and not the square of it."""
    assert [_grown(8, needed) for needed in (5, 8, 9, 12, 13)] == [8, 8, 12, 12, 13]
