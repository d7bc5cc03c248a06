"""Any program that talks to an endpoint of OpenAI's or Anthropic's form, as an environment: it asks, the policy answers
(docs/agents.md)."""

import asyncio
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal

from lmgym.core import registry
from lmgym.core.constraints import PositiveFloat, PositiveInt
from lmgym.core.errors import LmgymError, represent, shortened, warn
from lmgym.core.open_files import make_room
from lmgym.core.validation import Section, check_arguments
from lmgym.envs.base import Heard, Step
from lmgym.envs.replies import reply_of, step_of
from lmgym.envs.step_checks import reward_number
from lmgym.gateway.recording import Recording
from lmgym.gateway.server import addresses, gateway_of
from lmgym.gateway.session import Mailbox, Tree, Waiting
from lmgym.gateway.wire import SAMPLING, Answer, ChatRequest, Refused
from lmgym.pictures.addresses import address_of
from lmgym.pictures.store import current_store
from lmgym.processes.container import Container
from lmgym.processes.keeper import Command, Outcome, Program, Start, start_commands
from lmgym.processes.nursery import Nursery
from lmgym.types import BarePrompt, Example, Prompt, pictures_of

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
ENDPOINT = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY")
OTHERS = ("LMGYM_SEED", "PYTHONHASHSEED", "NO_PROXY", "no_proxy")  # of its variables that a container gets
LOCAL = "127.0.0.1,localhost"  # never asked through a proxy
KEEPER_KILLED = (-9, -15)  # exit statuses
PROGRAM_KILLED = (128 + 9, 128 + 15)  # of a container it may be the limit of its own memory
MOST_STARTS = 3  # of a program in an episode
FILES_EACH = 5  # open files of an episode: output, errors and status of its program, its keeper, and its request


@registry.register("env", "agent")
@dataclass(kw_only=True)
class AgentProgram(Section):
    """A program for each episode. It finds the policy at OPENAI_BASE_URL with OPENAI_API_KEY (or the same of
    ANTHROPIC), the example as JSON on its standard input (its pictures as data: addresses, in `pictures`), and a seed
    for what it draws itself in LMGYM_SEED; it works in a folder of its own. Each of its requests is a turn of the
    policy, and may hold pictures, too.

    - `command`: the program and its arguments; those that are files here are given by their full path.
    - `function`: in place of a command, a Python function `module:function` of the example, `async` or not, which
      returns the reward. Its module is imported once, not for each episode (processes/nursery.py); a call is a process
      all the same.
    - `grader`: a command that judges the work of `command`: it runs in the same folder when the program has ended,
      without the policy, with the example on its standard input.
    - `reward`: `printed` (the last line of the output is JSON such as {"reward": 1.0}: the grader's, or the program's
      own), or `none`: the recipe's `rewards:` alone judge the conversation.
    - `seconds`: how long program and grader may work in an episode, without the time of waiting for the policy; anew
      for one that is started again.
    - `max_turns`: most turns of the policy in an episode, which is then truncated, and the program killed.
    - `parallel`: how many programs work at the same time; the others wait to start, or for their replies.
    - `output_mib`: most that it may write to its output and errors.
    - `sandbox`: a container for each episode, such as {docker: python:3.12}: the keys of `Container`
      (processes/container.py).
    - `tool_prompt`: `template` gives the schemas of a request's tools to the chat template; `system` puts them, and how
      to call a tool, into the system message.
    - `ignored`: fields of requests without effect, such as temperature, on which the recipe decides. Any other field
      that the gateway does not support is refused.

    A program that fails, or works for too long, costs its own episode. One that something else has killed is started
    again, twice at most: what it has asked before gets the same replies, so that it goes on where it was.

    Example: AgentProgram(command=["python", "my_agent.py"], ignored=["temperature"])"""

    section = "env"

    command: list[str] = field(default_factory=list)
    function: str | None = None
    grader: list[str] = field(default_factory=list)
    reward: Literal["printed", "none"] = "printed"
    seconds: PositiveFloat = 120.0
    max_turns: PositiveInt = 100
    parallel: PositiveInt = 16
    output_mib: PositiveInt = 16
    sandbox: dict[str, Any] | None = None
    tool_prompt: Literal["template", "system"] = "template"
    ignored: list[str] = field(default_factory=list)

    workers = 0  # each episode is a process already
    limits_itself = True  # `seconds` are the program's alone
    program = True  # a request that the chat template refuses is its own mistake

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.function is not None:
            if self.command:
                raise LmgymError("env has a command and a function; leave one of them out")
            if not FUNCTION.fullmatch(self.function):
                raise LmgymError(f"key 'env.function' is '{self.function}'; write my_module:my_function")
            if self.grader:
                raise LmgymError("env.grader judges the work of a command; a function returns its reward itself")
        else:
            for key, command in (("command", self.command), *([("grader", self.grader)] if self.grader else [])):
                if not command or (self.sandbox is None and not shutil.which(command[0])):
                    name = command[0] if command else ""
                    said = f"there is no program '{name}'; write [python, my_agent.py] or so"
                    raise LmgymError(f"key 'env.{key}': {said}")
        self._container: Container | None = None
        if self.sandbox is not None:
            if self.function is not None:
                raise LmgymError("env.sandbox runs a command; a function runs without it (env.function)")
            self._container = Container(**check_arguments(Container, self.sandbox, "env.sandbox", given=0))
            self._container.check()
        if unknown := [name for name in self.ignored if name not in SAMPLING]:
            raise LmgymError(f"key 'env.ignored' may name {', '.join(SAMPLING)}, not '{unknown[0]}'")
        self._program: Program | None = None
        self._waiting: Waiting | None = None  # the request that is being answered
        self._heard = Heard(0, 0, list)

    async def reset(self, example: Example, seed: int) -> Prompt:
        self.close()
        self._tree, self._recording, self._starts = Tree(), Recording(), 0
        self._given, self._seed = json.dumps(_told(example)).encode() + b"\n", seed
        async with _room(os.getpid(), self.parallel):
            self._begin()
            step = await self._go_on()
        if step.branch is None:
            raise RuntimeError("the program ended without a request to the policy")
        self.template, self.stop, self.sampling_seed = step.branch.template, step.branch.stop, step.branch.sampling_seed
        return BarePrompt(step.messages[0]["content"]) if step.branch.bare else list(step.messages)

    def _begin(self) -> None:
        """Start the program, with an address of its own."""
        gateway = gateway_of(os.getpid())
        make_room("agent", gateway.sessions + 1, FILES_EACH, "lower engine.rows")
        self._mailbox, self._left = Mailbox[Outcome](), self.seconds
        self._address, key = gateway.open(self._mailbox, tuple(self.ignored))
        variables = _variables(self._address, key, self._seed)
        if self._container is not None:
            variables = self._container.variables(variables, ENDPOINT + OTHERS)
        start = self._start() if self.function is None else _nursery(os.getpid(), self.function).start
        self._starts += 1
        try:
            self._program = Program(start, variables, self._given, self.output_mib * 2**20, self._mailbox.end)
        except BaseException:
            gateway.close(self._address)
            raise

    def _start(self) -> Start:
        commands = [self._command(self.command, ())]
        if self.grader:
            commands.append(self._command(self.grader, ENDPOINT))
        return partial(start_commands, commands)

    def _command(self, words: list[str], without: tuple[str, ...]) -> Command:
        if self._container is None:
            full = (os.path.abspath(str(shutil.which(words[0]))), *map(_full, words[1:]))
            return Command(full, without=without)
        names = tuple(name for name in ENDPOINT + OTHERS if name not in without)
        start, remove = self._container.command(words, names)
        return Command(tuple(start), tuple(remove), self._container.names(without))

    def hear(self, turn: Heard) -> None:
        """The tokens of the turn that `step` gets next."""
        self._heard = turn

    async def step(self, text: str, stop: str) -> Step:
        waiting = self._waiting
        if waiting is None:
            raise RuntimeError("step() before reset()")
        reply, heard = reply_of(text, stop, waiting.request, self._tree.count), self._heard
        self._tree.record(waiting.request, reply.said, text)
        tokens = tuple(heard.tokens()) if waiting.request.logprobs else None
        self._answer.replies.append(replace(reply, tokens=tokens, sampled=heard.sampled))
        self._answer.prompt = heard.prompt
        if len(self._answer.replies) < waiting.request.choices:
            return self._ask(waiting.request)
        self._waiting = None
        self._recording.add(waiting.request, self._answer)
        async with _room(os.getpid(), self.parallel):
            waiting.answered.set_result(self._answer)
            return await self._go_on()

    def close(self) -> None:
        """Kill the program and all that it has started."""
        if self._program is not None:
            self._end()
            self._mailbox.end(Outcome(0, "", ""))
            if self._waiting is not None:
                self._waiting.answered.cancel()

    def _end(self) -> None:
        assert self._program is not None
        gateway_of(os.getpid()).close(self._address)
        self._program.end()
        self._program.wait()
        self._program = None

    async def _go_on(self) -> Step:
        """The step of the next request that can be answered, or the last step, after the program's end."""
        while True:
            began = time.monotonic()
            taken = asyncio.wrap_future(self._mailbox.take())
            try:
                event = await asyncio.wait_for(taken, max(self._left, 0.0))
            except TimeoutError:
                raise RuntimeError(f"the program worked for more than {self.seconds:g} s") from None
            self._left -= time.monotonic() - began
            if isinstance(event, Outcome):
                killed = KEEPER_KILLED if self.sandbox else (*KEEPER_KILLED, *PROGRAM_KILLED)
                if event.status not in killed or event.too_long or self._starts == MOST_STARTS:
                    return Step(reward=self._earned(event), terminated=True)
                warn(
                    "a program was killed by something else than lmgym; it is started again, and gets the same replies"
                )
                self._end()
                self._recording.rewind()
                self._begin()
                continue
            self._waiting, self._answer = event, Answer(self._tree.count)
            try:
                if (reply := self._recording.again(event.request)) is None:
                    return self._ask(event.request)
            except Refused as refused:
                reply = refused
                self._recording.add(event.request, refused)
            self._waiting = None
            if isinstance(reply, Refused):
                event.answered.set_exception(reply)
            else:
                event.answered.set_result(reply)

    def _ask(self, request: ChatRequest) -> Step:
        """The request as a step of the environment."""
        if self._tree.count >= self.max_turns:
            return Step(truncated=True)
        return step_of(request, self._tree, self.tool_prompt, choice=len(self._answer.replies))

    def _earned(self, outcome: Outcome) -> float:
        """The reward that the program has printed. Raises RuntimeError for a program that failed."""
        last = next((line for line in reversed(outcome.errors.split("\n")) if line.strip()), "").strip()
        if outcome.too_long:
            raise RuntimeError(f"the program wrote more than {self.output_mib} MiB")
        if outcome.status:
            which = "the program or its grader" if self.grader else "the program"
            if not last and self.sandbox and outcome.status in PROGRAM_KILLED:
                last = "it was killed, perhaps for its memory (env.sandbox.memory_mib)"
            raise RuntimeError(f"{which} ended with exit status {outcome.status}: {shortened(last, 300)}")
        if self.reward == "none":
            return 0.0
        line = next((line for line in reversed(outcome.output.split("\n")) if line.strip()), "")
        try:
            tree = json.loads(line)
        except (ValueError, RecursionError):
            tree = None
        if not isinstance(tree, Mapping) or "reward" not in tree:
            raise RuntimeError(
                f"the last line of the program's output is {represent(line[:200])}; it must be JSON such as "
                '{"reward": 1.0}'
            )
        return reward_number(tree["reward"])


def _told(example: Example) -> dict[str, Any]:
    """The example as a program reads it: a picture is a character of a text, and its data: address is beside it."""
    texts = [example.prompt] if isinstance(example.prompt, str) else [one["content"] for one in example.prompt]
    shown = [digest for text in texts for _, digest in pictures_of(text)]
    pictures = {"pictures": [address_of(current_store().open(digest)) for digest in shown]} if shown else {}
    return {**example.to_json(), **pictures}


@cache
def _nursery(process: int, function: str) -> Nursery:
    """Of this process: the one that imports this function."""
    return Nursery(function)


@cache
def _room(process: int, parallel: int) -> asyncio.Semaphore:
    """Of this process: room for so many programs that work."""
    return asyncio.Semaphore(parallel)


def _variables(address: str, key: str, seed: int) -> dict[str, str]:
    """The variables of a program's process: those of this one, and where the policy is."""
    given = {"PYTHONHASHSEED": "0", **os.environ}
    if "PYTHONPATH" in given:  # its folder is another one
        given["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, given["PYTHONPATH"].split(os.pathsep)))
    for name in ("NO_PROXY", "no_proxy"):
        given[name] = ",".join(filter(None, [given.get(name, ""), LOCAL]))
    given.pop("ANTHROPIC_AUTH_TOKEN", None)  # a client would send it too
    return {**given, **addresses(address, key), "LMGYM_SEED": str(seed % 2**32)}


def _full(word: str) -> str:
    return os.path.abspath(word) if os.path.isfile(word) else word
