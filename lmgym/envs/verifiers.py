"""Environments of the library verifiers 0.4 (`verifiers.v1`): tasksets with their own rewards (extra `verifiers`).

The library asks for a model's answers; lmgym asks for an environment's steps. So an episode of verifiers runs in a
thread, and each of its requests to the model waits there for the policy's next turn. It works only while `reset`
or `step` waits for it.
"""

import asyncio
import contextlib
import copy
import itertools
import json
import queue
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from lmgym.core import registry
from lmgym.core.constraints import PositiveInt
from lmgym.core.errors import LmgymError, describe
from lmgym.core.validation import Section
from lmgym.envs.base import Step
from lmgym.envs.global_random import OwnRandomState
from lmgym.types import Example, Message

CLOSING_SECONDS = 5.0


@registry.register("env", "verifiers")
@dataclass(kw_only=True)
class Verifiers(Section):
    """An episode of a taskset of verifiers, as a plain chat: no programs, no tools, one agent. Its reward, the weighted
    sum of the taskset's rewards, comes with the last turn; `Step.info` has each reward and metric by its name.

    - `taskset`: the id, which is the name of an installed module; `config`: its keys, `task` among them.
    - `environment`: the id of an environment of verifiers, if not the taskset's own or a single agent.
    - `rows`: [begin, end), the tasks to play, by their numbers. An episode plays the task `meta["row"]`; without
      it the number at the end of `example.id`, modulo the number of rows, counts from `begin`.
    - `max_turns`: most turns of the policy; the conversation so far is then scored.

    Raises LmgymError for a taskset that cannot be loaded, or one that needs more than this.

    Example: Verifiers(taskset="my_taskset", rows=[0, 1000])
    """

    section = "env"

    taskset: str
    config: dict[str, Any] = field(default_factory=dict)
    environment: str = ""
    rows: list[int] | None = None
    max_turns: PositiveInt | None = None

    needs_data = False  # the recipe needs no task
    workers = 2  # processes for these environments, unless the recipe sets env.workers

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows is not None and not (len(self.rows) == 2 and 0 <= self.rows[0] < self.rows[1]):
            raise LmgymError(f"key 'env.rows' must be [begin, end] with 0 <= begin < end, not {self.rows}")
        self._game: _Game | None = None

    def reset(self, example: Example, seed: int) -> Sequence[Message]:
        self.close()
        env, tasks = _load(json.dumps([self.taskset, self.environment, self.config, self.max_turns, self.rows]))
        self._random = OwnRandomState(seed)
        self._game = game = _Game(env, tasks[_row(example, len(tasks))])
        asked = self._random.call(game.start)
        if not isinstance(asked, _Request):
            raise RuntimeError("the episode ended before its first request to the model")
        self._seen = asked.messages
        return [dict(message) for message in self._seen]

    def step(self, text: str, stop: str) -> Step:
        game = self._game
        if game is None:
            raise RuntimeError("step() before reset()")
        after = self._random.call(lambda: game.answer(text, stop))
        if not isinstance(after, _Request):
            cut = stop == "context" or after.stop_condition == "max_turns"
            return Step(reward=after.reward, terminated=not cut, truncated=cut, info=_signals(after))
        # Token in, token out: what the policy has read and written stays as it is, and new messages follow.
        said = [*self._seen, {"role": "assistant", "content": text}]
        if not follows(said, after.messages):
            raise RuntimeError(
                "a request to the model does not begin with the conversation so far (its history was rewritten, or "
                "a second conversation began); lmgym trains one growing conversation"
            )
        self._seen = after.messages
        return Step([dict(message) for message in after.messages[len(said) :]])

    def close(self) -> None:
        if self._game is not None:
            self._game.close()
            self._game = None


def follows(so_far: Sequence[Message], messages: Sequence[Message]) -> bool:
    """Whether `messages` are those so far and at least one more, which is not the assistant's.

    Example:
        >>> follows([{"role": "user", "content": "2+2="}], [{"role": "user", "content": "2+3="}])
        False
    """
    new = messages[len(so_far) :]
    same = list(messages[: len(so_far)]) == list(so_far)
    return same and bool(new) and all(message["role"] != "assistant" for message in new)


def _row(example: Example, count: int) -> int:
    row = example.meta.get("row")
    if row is None:
        digits = example.id.rpartition("/")[2]
        if not digits.isdecimal():
            raise LmgymError(f"example '{example.id}' has no meta['row'], and its id does not end with a number")
        return int(digits) % count
    if not isinstance(row, int) or not 0 <= row < count:
        raise LmgymError(f"example '{example.id}': meta['row'] is {row!r}; env verifiers has the rows 0 to {count - 1}")
    return row


def _signals(trace: Any) -> dict[str, Any]:
    """The rewards before their weights, and the metrics."""
    rewards = {name: one.score for name, one in trace.rewards.items() if one is not None}
    return {**rewards, **{name: value for name, value in trace.metrics.items() if value is not None}}


def _library() -> Any:
    try:
        import verifiers.v1
    except ImportError as error:
        raise LmgymError(
            f"env verifiers needs the package verifiers, which is not completely installed ({error}); run pip install "
            "'lmgym[verifiers]'"
        ) from error
    return verifiers.v1


@cache
def _load(key: str) -> tuple[Any, list[Any]]:
    """The environment of verifiers and its tasks, once for each process."""
    taskset, environment, config, max_turns, rows = json.loads(key)
    library = _library()
    if str(Path.cwd()) not in sys.path:  # a user's own taskset usually lies in the current folder
        sys.path.append(str(Path.cwd()))
    try:
        tree = {"id": environment, "taskset": {**config, "id": taskset}}
        agents = _agents(library.resolve_env_config(tree))
        # The agent's program is replaced in _Game; "null" is the one that chats and runs no code.
        agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": max_turns}
        env = library.load_environment(library.resolve_env_config({**tree, **dict.fromkeys(agents, agent)}))
        _refuse_what_needs_more(taskset, agents, env)
        begin, end = rows or (0, None)
        if end is None and not env.taskset.bounded:
            raise LmgymError(f"key 'env.rows' is missing: the taskset '{taskset}' has no end, such as rows: [0, 1000]")
        tasks = list(itertools.islice(env.taskset, begin, end))
    except LmgymError:
        raise
    except Exception as error:  # the library and the taskset judge the keys
        listed = getattr(error, "errors", list)()  # of pydantic, which begins its own text with a count
        keys = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in listed[:3])
        raise LmgymError(f"key 'env.taskset': '{taskset}' cannot be loaded: {keys or describe(error)}") from error
    if not tasks or (end is not None and len(tasks) < end - begin):
        raise LmgymError(f"key 'env.rows': the taskset '{taskset}' has only {begin + len(tasks)} tasks, not {rows}")
    return env, tasks


def _agents(config: Any) -> list[str]:
    """The names of the agents that an environment's configuration declares."""
    return [name for name, value in config if isinstance(value, _library().AgentConfig)]


def _refuse_what_needs_more(taskset: str, agents: Sequence[str], env: Any) -> None:
    kind, config = type(env.taskset).task_type(), env.config.taskset
    reasons = {
        f"it has {len(agents)} agents ({', '.join(agents)}), and one policy is trained": len(agents) != 1,
        "its tasks need a container": kind.NEEDS_CONTAINER,
        "it needs tool servers": kind.toolsets(config.task) or type(env.taskset).toolsets(config),
    }
    for reason, found in reasons.items():
        if found:
            raise LmgymError(f"key 'env.taskset': '{taskset}' cannot be played by env verifiers: {reason}")


@dataclass
class _Request:
    """What verifiers asks the model; `answer` gets the completion, in the loop of the game's thread."""

    messages: list[dict[str, str]]
    answer: asyncio.Future[tuple[str, str]]


class _Game:
    """One episode of verifiers in a thread: its requests to the model, then its trace, come out of `_out`."""

    def __init__(self, env: Any, task: Any) -> None:
        self._env, self._task = env, task
        self._out: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waiting: _Request | None = None
        self._full = False  # the model's context is: it cannot be asked again
        self._loop = asyncio.new_event_loop()
        self._running: asyncio.Task[Any] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> Any:
        """The first request."""
        self._thread.start()
        return self._next()

    def answer(self, text: str, stop: str) -> Any:
        """The next request after this answer, or the trace of the episode that is over."""
        assert self._waiting is not None
        self._full = stop == "context"
        self._loop.call_soon_threadsafe(self._waiting.answer.set_result, (text, stop))
        return self._next()

    def close(self) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                self._loop.call_soon_threadsafe(lambda: self._running and self._running.cancel())
            self._thread.join(CLOSING_SECONDS)

    def _next(self) -> Any:
        event = self._out.get()  # a worker process has the time limit
        if isinstance(event, BaseException):
            raise event
        self._waiting = event if isinstance(event, _Request) else None
        return event

    def _run(self) -> None:
        try:
            self._running = self._loop.create_task(self._play())
            self._out.put(self._loop.run_until_complete(self._running))
        except BaseException as error:
            self._out.put(error)
        finally:
            self._loop.close()

    async def _play(self) -> Any:
        """Play the episode. Returns its trace; raises RuntimeError for what has failed in it."""
        from verifiers.v1 import EvalClientConfig, ModelContext
        from verifiers.v1.interception import InterceptionServer

        env = copy.copy(self._env)
        async with InterceptionServer() as server:  # on loopback; verifiers keeps its books there
            env.setup = partial(self._prepare, env.setup, server)
            context = ModelContext(model="policy", client=EvalClientConfig(base_url="http://127.0.0.1"))
            episode = await env.run_episode(self._task, context)
        errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
        if errors:
            raise RuntimeError(errors[0].message)
        if len(episode.traces) != 1:
            raise RuntimeError(f"the episode has {len(episode.traces)} conversations; one can be trained")
        return episode.traces[0]

    async def _prepare(self, setup: Any, server: Any, agents: Any) -> None:
        """Give the agent lmgym's model, a chat in this process as its program, and no machine to run others on."""
        from verifiers.v1.runtimes import SubprocessConfig
        from verifiers.v1.runtimes.subprocess import SubprocessRuntime

        await setup(agents)
        runtime = SubprocessRuntime(SubprocessConfig())
        for name in ("run", "open_process", "run_background", "write", "read"):
            setattr(runtime, name, _refuse_program)
        for name in _agents(self._env.config):
            agent = getattr(agents, name)
            agent.interception = _Served(server, self)
            agent.harness.setup, agent.harness.launch = _nothing, partial(self._chat, agent.harness)
            agent.run = partial(agent.run, runtime=runtime)
            agent.interaction = partial(agent.interaction, runtime=runtime)

    async def _chat(self, harness: Any, *given: Any, **more: Any) -> Any:
        """The agent's program (`Harness.launch`): one request with the conversation so far, by the server."""
        import httpx
        from verifiers.v1 import ProgramResult
        from verifiers.v1.dialects.chat import message_to_wire

        _, trace, _, endpoint, secret, _, data = given[:7]
        if self._full:
            return ProgramResult(exit_code=0, stdout="", stderr="")
        system, prompt = harness.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        body, headers = {"model": "policy", "messages": messages}, {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
            reply = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
        # A refusal after a stop (most turns, a condition of the task) is the usual end of the program.
        failed = reply.status_code != 200 and trace.stop_condition is None
        return ProgramResult(exit_code=int(failed), stdout="", stderr=reply.text if failed else "")

    async def get_response(self, dialect: Any, body: Mapping[str, Any], *given: Any, **more: Any) -> Any:
        """The model's answer to a request (`Client.get_response`): the policy's next turn."""
        messages = [{"role": one["role"], "content": _text(one.get("content"))} for one in body["messages"]]
        request = _Request(messages, self._loop.create_future())
        self._out.put(request)
        text, stop = await request.answer
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "length" if stop in ("length", "context") else "stop",
        }
        raw = {"id": "0", "created": 0, "model": "policy", "object": "chat.completion", "choices": [choice]}
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


@dataclass
class _Served:
    """The server as the `Interception` of an agent, with the game in the place of a client for a model."""

    server: Any
    game: _Game

    @contextlib.asynccontextmanager
    async def acquire(self, session: Any) -> AsyncIterator[Any]:
        self.server.clients[session.ctx.client.model_dump_json()] = self.game
        async with self.server.acquire(session) as slot:
            yield slot


def _text(content: Any) -> str:
    """A message's content, which may come in parts."""
    parts = [{"type": "text", "text": content or ""}] if isinstance(content, str | None) else content
    if any(part["type"] != "text" for part in parts):
        raise ValueError("a message holds a picture, which lmgym's environments cannot show")
    return "\n".join(part["text"] for part in parts)


async def _nothing(*given: Any, **more: Any) -> None:
    """Replaces the preparation of a program that does not run."""


async def _refuse_program(*given: Any, **more: Any) -> None:
    raise RuntimeError("the task runs programs or uses files, and env verifiers gives it no machine for that")
