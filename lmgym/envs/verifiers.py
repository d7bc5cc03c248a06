"""Environments of the library verifiers 0.4 (`verifiers.v1`): tasksets with their own rewards (extra `verifiers`)."""

import importlib.metadata
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lmgym.core import registry
from lmgym.core.constraints import PositiveInt
from lmgym.core.errors import LmgymError, describe
from lmgym.core.validation import Section
from lmgym.envs.base import Step, library
from lmgym.envs.global_random import OwnRandomState
from lmgym.envs.replies import reply_of, step_of
from lmgym.envs.verifiers_episode import VerifiersEpisode
from lmgym.gateway.session import Tree, Waiting
from lmgym.gateway.wire import Answer
from lmgym.types import Example, Message

VERSION = "0.4."  # of verifiers; how it runs an episode changes from one such version to the next
NO_LIMIT = 1e9  # seconds by the clock in which a task wants to be done: the policy's sampling would count


@registry.register("env", "verifiers")
@dataclass(kw_only=True)
class Verifiers(Section):
    """An episode of a taskset of verifiers, as a plain chat: no programs, no tools, one agent. Its reward, the weighted
    sum of the taskset's rewards, comes with the last turn; `Step.info` has each reward and metric by its name. A
    request that changes the past begins a branch, as in a session of env agent.

    - `taskset`: the id, which is the name of an installed module; `config`: its keys, `task` among them.
    - `environment`: the id of an environment of verifiers, if not the taskset's own or a single agent;
      `environment_config`: its keys.
    - `rows`: [begin, end), the tasks to play, by their numbers in the taskset. An episode plays the task
      `meta["row"]`; without it, the number at the end of `example.id`, modulo the number of rows, counts from `begin`.
    - `max_turns`: most turns of the policy; the conversation so far is then scored.

    Raises LmgymError for a taskset that cannot be loaded, or one that needs more than this.

    Example: Verifiers(taskset="my_taskset", rows=[0, 1000])"""

    section = "env"

    taskset: str
    config: dict[str, Any] = field(default_factory=dict)
    environment: str = ""
    environment_config: dict[str, Any] = field(default_factory=dict)
    rows: list[int] | None = None
    max_turns: PositiveInt | None = None

    needs_data = False  # the recipe needs no task
    workers = 2  # processes for these environments, unless the recipe sets env.workers
    program = True  # the taskset asks as a program does

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows is not None and not (len(self.rows) == 2 and 0 <= self.rows[0] < self.rows[1]):
            raise LmgymError(f"key 'env.rows' must be [begin, end] with 0 <= begin < end, not {self.rows}")
        if "id" in self.config:
            raise LmgymError("key 'env.config.id' is 'env.taskset'; leave it out")
        self._episode: VerifiersEpisode | None = None

    def reset(self, example: Example, seed: int) -> Sequence[Message]:
        self.close()
        keys = [self.taskset, self.config, self.environment, self.environment_config, self.rows, self.max_turns]
        loaded = load(json.dumps(keys))
        task = loaded.tasks[_place(example, loaded.tasks[0].data.idx, len(loaded.tasks))]
        self._random = OwnRandomState(seed)
        self._episode = episode = VerifiersEpisode(loaded.env, task, loaded.role)
        asked = self._random.call(episode.start)
        if not isinstance(asked, Waiting):
            raise RuntimeError("the episode ended before its first request to the model")
        self._asked, self._tree = asked.request, Tree()
        return step_of(self._asked, self._tree).messages

    def step(self, text: str, stop: str) -> Step:
        episode = self._episode
        if episode is None:
            raise RuntimeError("step() before reset()")
        answer = Answer(self._tree.count, [reply_of(text, stop, self._asked, self._tree.count)])
        self._tree.record(self._asked, answer.replies[0].said, text)
        after = self._random.call(lambda: episode.answer(answer, full=stop == "context"))
        if isinstance(after, Waiting):
            self._asked = after.request
            return step_of(self._asked, self._tree)
        cut = stop == "context" or str(after.stop_condition).startswith("max_")
        return Step(reward=after.reward, terminated=not cut, truncated=cut, info=_scores(after))

    def close(self) -> None:
        if self._episode is not None:
            self._episode.close()
            self._episode = None


@dataclass(frozen=True)
class Loaded:
    """An environment of verifiers, the tasks to play, and the name of its agent.
    Example: load('["my_taskset", {}, "", {}, [0, 9], null]').tasks[0]"""

    env: Any
    tasks: list[Any]
    role: str


@cache
def load(keys: str) -> Loaded:
    """What the keys of `Verifiers` name (its fields as a list of JSON), once for each process. Raises LmgymError."""
    taskset, config, environment, environment_config, rows, max_turns = json.loads(keys)
    library = _library()
    if str(Path.cwd()) not in sys.path:  # a user's own taskset usually lies in the current folder
        sys.path.append(str(Path.cwd()))
    tree = {**environment_config, "id": environment, "taskset": {**config, "id": taskset}}
    try:
        # The program of the agent is replaced when the episode begins; "null" is the one that only chats.
        agent: dict[str, Any] = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
        agent |= {"timeout": {"rollout": NO_LIMIT}, **({"max_turns": max_turns} if max_turns else {})}
        own = library.resolve_env_config(tree)
        roles = [name for name, value in own if isinstance(value, library.AgentConfig)]
        ours = {"id", "taskset", "interception", "timeout", *roles} & environment_config.keys()
        if ours:
            raise LmgymError(f"key 'env.environment_config.{min(ours)}' is set by env verifiers; leave it out")
        tree |= {"interception": {"type": "server"}, "timeout": {"episode": NO_LIMIT}} | dict.fromkeys(roles, agent)
        env = library.load_environment(library.resolve_env_config(tree))
        _refuse(taskset, _needs(env, roles, library))
        tasks = _tasks(env.taskset, taskset, rows)
    except LmgymError:
        raise
    except Exception as error:  # the library and the taskset judge the keys
        raise _explained(error, library, taskset) from error
    _refuse(taskset, [need for task in tasks for need in _needs_of(task.data)])
    return Loaded(env, tasks, roles[0])


def _library() -> Any:
    v1 = library("verifiers.v1", "verifiers", f"verifiers {VERSION[:-1]}", "'lmgym[verifiers]'")
    installed = importlib.metadata.version("verifiers")
    if not installed.startswith(VERSION):
        raise LmgymError(
            f"env verifiers works with verifiers {VERSION[:-1]}, and {installed} is installed; run pip install "
            "'lmgym[verifiers]'"
        )
    return v1


def _tasks(tasks: Any, taskset: str, rows: list[int] | None) -> list[Any]:
    begin, end = rows or (0, None)
    if end is None and not tasks.bounded:
        raise LmgymError(
            f"key 'env.rows' is missing: the taskset '{taskset}' has no end; write how much of it to play, such as "
            "rows: [0, 1000]"
        )
    found = list(itertools.islice(tasks, begin, end))
    if not found or (end is not None and len(found) < end - begin):
        has = begin + len(found) if found else len(list(tasks))
        raise LmgymError(f"key 'env.rows': the taskset '{taskset}' has only {has} tasks, not {rows}")
    return found


def _needs(env: Any, roles: Sequence[str], library: Any) -> list[str]:
    """What an environment needs and lmgym does not give."""
    tasks, config = type(env.taskset), env.config.taskset
    needs = {
        f"it has {len(roles)} agents ({', '.join(roles)}), and one policy is trained": len(roles) != 1,
        "its tasks need a container": tasks.task_type().NEEDS_CONTAINER,
        "its tasks need tools": tasks.task_type().toolsets(config.task) or tasks.toolsets(config),
        "it brings a program for the agent (a harness)": library.default_harness_id(config.id) == config.id,
    }
    return [need for need, found in needs.items() if found]


def _needs_of(data: Any) -> list[str]:
    """What a task needs, from its data, and lmgym does not give."""
    needs = {
        "its tasks need a container": data.image is not None or data.agent_user is not None,
        "its tasks install skills": data.skills,
        "its tasks restrict the network": "*" not in data.network_allow or data.network_block,
    }
    return [need for need, found in needs.items() if found]


def _refuse(taskset: str, needs: Sequence[str]) -> None:
    if needs:
        raise LmgymError(
            f"key 'env.taskset': '{taskset}' cannot be played by env verifiers, which is a chat without programs: "
            f"{needs[0]}"
        )


def _explained(error: Exception, library: Any, taskset: str) -> LmgymError:
    """What the library says of a taskset that cannot be loaded, in one sentence."""
    problems: list[Any] = getattr(error, "errors", list)()  # of pydantic, which begins its own text with a count
    if problems:
        place, problem = [str(part) for part in problems[0]["loc"]], problems[0]["msg"]
        name = ".".join(["config", *place[1:]] if place[:1] == ["taskset"] else ["environment_config", *place])
        valid = library.taskset_config_type(taskset).model_fields
        if problems[0]["type"] == "extra_forbidden" and len(place) == 2 and place[0] == "taskset":
            names = [field for field in valid if field != "id"]
            return LmgymError(f"unknown key 'env.{name}' of '{taskset}'; {registry.suggest(place[1], names)}")
        return LmgymError(f"key 'env.{name}' of '{taskset}': {problem}")
    absent = error.__cause__ if isinstance(error.__cause__, ModuleNotFoundError) else error
    if isinstance(absent, ModuleNotFoundError):
        return LmgymError(
            f"key 'env.taskset': '{taskset}' cannot be loaded: Python finds no module '{absent.name}'; install the "
            "package that has it"
        )
    return LmgymError(f"key 'env.taskset': '{taskset}' cannot be loaded: {describe(error)}")


def _place(example: Example, begin: int, count: int) -> int:
    """Which of the tasks, whose first number is `begin`, an example plays."""
    row = example.meta.get("row")
    if row is None:
        digits = example.id.rpartition("/")[2]
        if not digits.isdecimal():
            raise LmgymError(f"example '{example.id}' has no meta['row'], and its id does not end with a number")
        return int(digits) % count
    if not isinstance(row, int) or not begin <= row < begin + count:
        last = begin + count - 1
        raise LmgymError(f"example '{example.id}': meta['row'] is {row!r}; env verifiers plays rows {begin} to {last}")
    return row - begin


def _scores(trace: Any) -> dict[str, float]:
    """The rewards before their weights, and the metrics."""
    rewards = {name: one.score for name, one in trace.rewards.items() if one is not None}
    return {**rewards, **{name: value for name, value in trace.metrics.items() if value is not None}}
