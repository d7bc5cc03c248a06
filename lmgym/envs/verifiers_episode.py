"""One episode of verifiers, as a session of the gateway that waits for its answers (envs/verifiers.py).

verifiers asks a model for answers; lmgym asks an environment for steps. So the episode runs in an event loop in a
thread, and each of its requests to the model waits in the session's mailbox for the policy's next turn. It comes there
without the gateway's server, since verifiers has one of its own on loopback. All episodes of a process share that
loop; one of them works at a time, while `start`, `answer` or `close` waits for it."""

import asyncio
import concurrent.futures
import contextlib
import copy
import os
import threading
from collections.abc import Mapping
from functools import cache, partial
from typing import Any, NoReturn

from lmgym.core.open_files import make_room
from lmgym.gateway.chat import CHAT
from lmgym.gateway.session import Mailbox, Waiting
from lmgym.gateway.wire import SAMPLING, Answer

CLOSING_SECONDS = 5.0
FILES_EACH = 3  # open files of an episode: its server, and both ends of its request
NO_PROGRAMS = "the task runs programs or uses files, and env verifiers gives it no machine for that"
USES_MACHINE = ("run", "open_process", "run_background", "write", "read", "expose")  # methods of a runtime


class VerifiersEpisode:
    """An episode of `task` in `env`, objects of verifiers; `role` is the name of its only agent.

    Raises what fails in the episode; a failure that verifiers has recorded, as RuntimeError with its message. Raises
    LmgymError if there are more episodes than the process may open files for.

    Example:
        episode = VerifiersEpisode(env, task, "agent")
        waiting = episode.start()               # a Waiting, with its request
        trace = episode.answer(Answer(0, [Reply(Said("assistant", "4"), "stop")]))  # of the finished episode"""

    def __init__(self, env: Any, task: Any, role: str) -> None:
        self._env, self._task, self._role = env, task, role
        self._mailbox = Mailbox[Any]()  # requests, then a trace or an exception
        self._waiting: Waiting | None = None
        self._full = False  # the model's context is: it cannot be asked again
        self._running: concurrent.futures.Future[None] | None = None

    def start(self) -> Any:
        """The first request, or the trace of an episode that has made none."""
        make_room("verifiers", len(_alive) + 1, FILES_EACH, "lower engine.rows, raise env.workers")
        _alive.add(self)
        self._running = asyncio.run_coroutine_threadsafe(self._run(), _loop(os.getpid()))
        return self._next()

    def answer(self, answer: Answer, full: bool = False) -> Any:
        """The next request after this answer, or the trace of the episode that is over. `full`: the model's context is,
        so nothing more can be asked."""
        assert self._waiting is not None
        self._full = full
        if self._waiting.answered.set_running_or_notify_cancel():  # the episode may have given it up
            self._waiting.answered.set_result(answer)
        return self._next()

    def close(self) -> None:
        """End the episode, if it is not over."""
        if self in _alive and self._running is not None:
            self._running.cancel()
            with contextlib.suppress(TimeoutError):  # wait until it has ended, but not forever
                self._mailbox.take().result(CLOSING_SECONDS)
        _alive.discard(self)

    def _next(self) -> Any:
        event = self._mailbox.take().result()  # the time limit is that of a worker process
        self._waiting = event if isinstance(event, Waiting) else None
        if self._waiting is None:
            _alive.discard(self)
        if isinstance(event, BaseException):
            raise event
        return event

    async def _run(self) -> None:
        try:
            event = await self._play()
        except BaseException as error:
            event = error
        self._mailbox.end(event)

    async def _play(self) -> Any:
        """Play the episode and return its trace."""
        from verifiers.v1 import EvalClientConfig, ModelContext

        env = copy.copy(self._env)
        env.setup = partial(self._prepare, env.setup)
        context = ModelContext(model="policy", client=EvalClientConfig(base_url="http://127.0.0.1"))
        async with env.serving():  # a server on loopback, where verifiers keeps its books of requests
            episode = await env.run_episode(self._task, context)
        errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
        if errors:
            raise RuntimeError(errors[0].message)
        if len(episode.traces) != 1:
            raise RuntimeError(f"the episode has {len(episode.traces)} conversations; lmgym trains one")
        return episode.traces[0]

    async def _prepare(self, setup: Any, agents: Any) -> None:
        """Give the agent this episode as its model, a chat in this process as its program, and no machine."""
        from verifiers.v1.runtimes import SubprocessConfig
        from verifiers.v1.runtimes.subprocess import SubprocessRuntime

        await setup(agents)
        agent = getattr(agents, self._role)
        # The server looks up its client of a model by these words; it calls this object's `get_response`.
        agent.interception.clients[agent.ctx.client.model_dump_json()] = self
        agent.harness.setup, agent.harness.launch = _nothing, partial(self._chat, agent.harness)
        runtime = SubprocessRuntime(SubprocessConfig())
        for name in USES_MACHINE:
            setattr(runtime, name, _refuse)
        agent.run = partial(agent.run, runtime=runtime)
        agent.interaction = partial(agent.interaction, runtime=runtime)
        agent.provision = _refuse_now

    async def _chat(self, harness: Any, *given: Any, **more: Any) -> Any:
        """The agent's program (`Harness.launch`): one request, by the server, with the conversation so far."""
        import aiohttp
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
        asked = {"json": {"model": "policy", "messages": messages}, "headers": {"Authorization": f"Bearer {secret}"}}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client,
            client.post(f"{endpoint}/chat/completions", **asked) as reply,
        ):
            said = await reply.text()
        # A refusal after a stop (most turns, a condition of the task) is the usual end of the program.
        failed = reply.status != 200 and trace.stop_condition is None
        return ProgramResult(exit_code=int(failed), stdout="", stderr=said if failed else "")

    async def get_response(self, dialect: Any, body: Mapping[str, Any], *given: Any, **more: Any) -> Any:
        """The model's answer to a request (`Client.get_response`): the policy's next turn. Raises Refused for what the
        gateway does not support."""
        waiting = Waiting(CHAT.read(body, SAMPLING))
        self._mailbox.put(waiting)
        raw = CHAT.body(await asyncio.wrap_future(waiting.answered), "policy")
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


_alive: set[VerifiersEpisode] = set()


@cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """The event loop of this process, in a thread of its own; a fork of the process needs another one."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


async def _nothing(*given: Any, **more: Any) -> None:
    """Replaces the preparation of a program that does not run."""


async def _refuse(*given: Any, **more: Any) -> NoReturn:
    raise RuntimeError(NO_PROGRAMS)


def _refuse_now(*given: Any, **more: Any) -> NoReturn:
    raise RuntimeError(NO_PROGRAMS)
