"""Tools, users, environments and rewards that are coroutine functions: awaited, side by side, in order."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from lmgym.core.errors import LmgymError
from lmgym.envs.base import Step
from lmgym.envs.conversation import Conversation
from lmgym.envs.env_processes import EnvProcesses
from lmgym.envs.vector import EnvFailure, InProcess
from lmgym.processes.coroutines import results_of
from lmgym.rewards.base import call_reward
from lmgym.rewards.building import build_rewards
from lmgym.types import Episode, Example, Turn

HERE = __name__
QUESTION = Example("a/0", "go")
log: list[str] = []


async def look_up(word: str, example: Example) -> str:
    """Looks a word up.

    Args:
        word: the word
    """
    log.append(f"begin {word}")
    await asyncio.sleep(0.02)
    log.append(f"end {word}")
    if word == "raise":
        raise KeyError(word)
    if word == "exit":
        raise SystemExit(3)
    return f"{word} of {example.id}"


async def lengths(texts: list[str], examples: list[Example]) -> list[float]:
    await asyncio.sleep(0)
    if max(map(len, texts)) > 5:
        raise ValueError("too long")
    return [float(len(text)) for text in texts]


def write(word: str) -> object:
    """A function that is no coroutine function, and returns one."""
    return look_up(word, QUESTION)


async def talkative(history: list[dict[str, str]]) -> str | None:
    await asyncio.sleep(0)
    if "raise" in history[-1]["content"]:
        raise ValueError("no more")
    return None if len(history) > 3 else "and then?"


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Waits:
    """An environment of coroutine functions. The later it began, the sooner it answers."""

    async def reset(self, example: Example, seed: int) -> str:
        self.number = int(example.id)
        if example.id == "3":
            raise ValueError("no board")
        return f"go {self.number}"

    async def step(self, text: str, stop: str) -> Step | None:
        log.append(f"begin {self.number}")
        await asyncio.sleep(0.03 * (3 - self.number))
        log.append(f"end {self.number}")
        if text == "exit":
            raise SystemExit(1)
        return None if text == "nothing" else Step(reward=float(self.number), terminated=True)

    async def demonstrate(self) -> str:
        return f"demo {self.number}"

    async def close(self) -> None:
        log.append(f"close {self.number}")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    log.clear()


@pytest.mark.parametrize("word, text", [("tea", "tea of a/0"), ("raise", '{"error": "KeyError: \'raise\'"}'),
                                        ("exit", '{"error": "SystemExit: 3"}')])  # fmt: skip
@pytest.mark.parametrize("name", ["look_up", "write"])
def test_the_model_reads_what_a_coroutine_returns(name: str, word: str, text: str) -> None:
    envs = InProcess(partial(Conversation, tools=[f"{HERE}:{name}", "calculator"]))
    envs.begin([(0, QUESTION, 0)])
    sum_of = call("calculator", expression="1+1")
    [step] = envs.step([(0, call(name, word=word) + sum_of, "eos")])
    assert [message["content"] for message in step.messages] == [text, "2"]
    assert step.info == {"calls": 2, "invalid_calls": 0, "tool_errors": int(word != "tea")}


def test_conversations_wait_side_by_side_and_answer_in_order() -> None:
    envs = InProcess(partial(Conversation, tools=[f"{HERE}:look_up"]))
    envs.begin([(n, Example(f"a/{n}", "go"), 0) for n in range(8)])
    steps = envs.step([(n, call("look_up", word=str(n)), "eos") for n in range(8)])
    assert [step.messages[0]["content"] for step in steps] == [f"{n} of a/{n}" for n in range(8)]
    assert log[:8] == [f"begin {n}" for n in range(8)] and sorted(log[8:]) == [f"end {n}" for n in range(8)]
    assert all(envs.spent[n] >= 0.02 for n in range(8))


def test_a_user_may_be_a_coroutine_function() -> None:
    envs = InProcess(partial(Conversation, user=f"{HERE}:talkative"))
    envs.begin([(0, QUESTION, 0), (1, QUESTION, 0)])
    first, failed = envs.step([(0, "once", "eos"), (1, "raise", "eos")])
    assert first.messages == [{"role": "user", "content": "and then?"}]
    assert failed.truncated and "raised ValueError: no more" in failed.info["error"]
    assert envs.step([(0, "upon", "eos")])[0].terminated


def test_environments_of_coroutines_wait_side_by_side() -> None:
    envs = InProcess(Waits)
    openings = envs.begin([(n, Example(str(n), "go"), 0) for n in range(4)])
    assert [getattr(one, "prompt", "") for one in openings] == ["go 0", "go 1", "go 2", ""]
    assert isinstance(openings[3], EnvFailure) and "no board" in openings[3].message and __file__ in openings[3].message
    steps = envs.step([(0, "a", "eos"), (1, "exit", "eos"), (2, "nothing", "eos")])
    assert log == ["begin 0", "begin 1", "begin 2", "end 2", "end 1", "end 0"]
    assert steps[0].reward == 0.0
    assert [one.message.split(" (at")[0] for one in steps[1:]] == [
        "SystemExit: 1", "TypeError: step() returned NoneType; it must return a Step",
    ]  # fmt: skip
    assert envs.demonstrate([2, 0]) == ["demo 2", "demo 0"]
    envs.close()
    assert log[-4:-1] == ["close 0", "close 1", "close 2"]


@pytest.mark.slow  # starts a process
def test_in_worker_processes_they_are_awaited_too() -> None:
    envs = EnvProcesses("conversation", {"tools": [f"{HERE}:look_up"]}, count=1)
    envs.begin([(0, QUESTION, 0)])
    [step] = envs.step([(0, call("look_up", word="tea"), "eos")])
    assert step.messages[0]["content"] == "tea of a/0"
    envs.close()


def test_the_first_in_order_decides_the_exception() -> None:
    async def fail(seconds: float, error: BaseException) -> None:
        await asyncio.sleep(seconds)
        raise error

    with pytest.raises(SystemExit):
        results_of([fail(0.01, SystemExit(1)), "b", fail(0.0, ValueError("sooner"))])
    assert results_of([asyncio.sleep(0, "the loop goes on")]) == ["the loop goes on"]


def test_where_nothing_is_to_be_awaited_the_loop_is_not_asked() -> None:
    """Not even by a coroutine, which may not wait for its own loop."""

    async def ask(*values: object) -> list[object]:
        return results_of(values)

    assert results_of([ask(), ask("a", 1)]) == [[], ["a", 1]]
    coroutine = ask()
    with pytest.raises(RuntimeError, match="await it instead"):
        results_of([ask(coroutine)])
    coroutine.close()


@pytest.mark.parametrize("unlimited", [pytest.param(False, marks=pytest.mark.slow), True])  # in a worker, and here
def test_a_reward_may_be_a_coroutine_function(unlimited: bool) -> None:
    [reward] = build_rewards({f"{HERE}:lengths": 1.0})
    if unlimited:
        reward = replace(reward, pooled=None)
    episodes = [Episode(QUESTION, n, n, [Turn([1], [2], text="a" * n)]) for n in (3, 0)]
    assert call_reward(reward, episodes) == [3.0, 0.0]
    with pytest.raises(LmgymError, match=r"reward '.*lengths' raised ValueError: too long at .*test_coroutines.py:"):
        call_reward(reward, [Episode(QUESTION, 0, 0, [Turn([1], [2], text="a" * 9)])])
