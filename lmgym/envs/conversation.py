"""A conversation of several turns, with tools for the policy and optionally a simulated user."""

import inspect
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.envs.base import Step
from lmgym.envs.placement import workers_for_tools
from lmgym.envs.tools.entries import tools_of
from lmgym.envs.tools.parsing import parse_calls
from lmgym.envs.tools.schema import Answer, begin_call, cut, describe_error
from lmgym.types import Example, Message, RecipeText, pictures_of

HOW_TO_CALL = """You can call tools. To call one, write its name and its arguments as JSON between these tags, then \
end your turn:
<tool_call>
{"name": "...", "arguments": {"...": "..."}}
</tool_call>
Its result comes with the next message. Write a pair of tags for each call. Where you need no tool, answer without tags.
The tools, one JSON schema a line:
"""
AS_USER = """You play a person who talks with an assistant. Write only what that person says next, in a sentence or \
two. You began with these words:
{prompt}
When you have what you want, or give up, write {end}."""


@register("env", "conversation")
@dataclass(kw_only=True)
class Conversation:
    """The policy writes; tools answer its calls, and a user answers turns without calls.

    - `tools`: names of tools ("python", "calculator", those of `@register("tool", ...)`) or functions as
      "module:function"; `schema` in tools/schema.py says what a function needs. `python` holds the limits of that tool.
      `{mcp: [program, argument, ...]}` gives the tools of an MCP server; other keys: `McpServer` in tools/entries.py.
    - `tool_prompt`: `system` puts the schemas, and how to call a tool, into the system message; `template` leaves both
      to the chat template, whose keyword arguments are in the attribute `template`.
    - `tool_role`: with `tool`, each result is a message of that role; with `user`, all results of a turn are one user
      message, between `<tool_response>` tags, for chat templates without the role `tool`.
    - `user`: `none` ends the episode with the first turn without a call. `scripted` answers such turns with the texts
      of `example.meta["script"]` (or `script`, for an example without one) and ends the episode after the last.
      "module:function" is called with the messages so far, and returns the user's next text, or None for the end; its
      parameters `example` and `seed`, if it has them, get those. A function that fails truncates the episode.
      `current`: the policy itself plays the user; `frozen`: the policy as it was when the stage began. It reads
      `user_prompt` (or `example.meta["user"]`), with {prompt} replaced by the user's first message and {end} by
      `user_end`, then the assistant's messages to the user, without tool calls. Its own texts are not trained on; one
      that contains `user_end` ends the episode.
    - `max_turns`: most turns of the policy; an episode that goes on after the last one is truncated.
    - `max_calls`: most calls in one turn; `max_result_chars`: the length to which each result is cut.
    - `invalid_call_penalty`: subtracted from the reward of the turn for each call that cannot be read or made.

    A tool may return a picture of Pillow's, or a text with pictures in it (pictures/store.py, `shown`); so may a user.

    A tool or user that is a coroutine function is awaited, and `step` then returns a coroutine of the Step. The
    environments of a rollout wait together (vector.py); within a turn, the calls of such tools come last, one by one.

    If a turn was cut off at the token limit, its calls are not made and the episode is truncated. `Step.info` counts
    `calls`, `invalid_calls` and `tool_errors`. Raises LmgymError for invalid arguments.

    Example:
        >>> env = Conversation(tools=["calculator"])
        >>> env.reset(Example("a/0", "What is 12 * 34?"), seed=0)[-1]
        {'role': 'user', 'content': 'What is 12 * 34?'}
        >>> call = '<tool_call>{"name": "calculator", "arguments": {"expression": "12 * 34"}}</tool_call>'
        >>> env.step(call, "eos").messages[0]["content"]
        '408'
        >>> env.step("It is 408.", "eos").terminated
        True
    """

    tools: list[str | dict[str, Any]] = field(default_factory=list)
    user: str | None = None
    script: list[str] | None = None
    user_prompt: str = AS_USER
    user_end: str = "[END]"
    system_prompt: str | None = None
    tool_prompt: Literal["system", "template"] = "system"
    tool_role: Literal["tool", "user"] = "tool"
    max_turns: int = 8
    max_calls: int = 8
    max_result_chars: int = 4_000
    invalid_call_penalty: float = 0.0
    python: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, valid in (("tool_prompt", ("system", "template")), ("tool_role", ("tool", "user"))):
            if getattr(self, name) not in valid:
                raise LmgymError(f"key 'env.{name}' must be {' or '.join(valid)}, not '{getattr(self, name)}'")
        for name, least in (("max_turns", 1), ("max_calls", 1), ("max_result_chars", 100), ("invalid_call_penalty", 0)):
            if not least <= getattr(self, name) < math.inf:
                raise LmgymError(f"key 'env.{name}' must be a number from {least} on, not {getattr(self, name)}")
        if self.script is not None and self.user != "scripted":
            raise LmgymError("key 'env.script' needs 'env.user: scripted'")
        if not self.user_end:
            raise LmgymError("key 'env.user_end' is empty, and would end every conversation at once")
        self.players = 2 if self.user in ("current", "frozen") else 1
        if self.players == 1 and (self.user_prompt, self.user_end) != (AS_USER, "[END]"):
            raise LmgymError("keys 'env.user_prompt' and 'env.user_end' need 'env.user: current' or 'frozen'")
        self.learners, self.first = (0,), 0
        self._tools, self._sessions = tools_of(self.tools, self.python)
        built_in = self.players == 2 or self.user in (None, "none", "scripted")
        self._reply = None if built_in else _user(str(self.user))
        self._lines: list[str] = []  # remaining lines of a scripted user
        self._history: list[dict[str, str]] = []
        self._turns = self._seed = 0

    @staticmethod
    def workers(arguments: Mapping[str, Any]) -> int:
        """Processes for these environments, unless the recipe sets env.workers: some, if a tool or user of one's own
        makes the others wait."""
        names = [entry for entry in arguments.get("tools", ()) if isinstance(entry, str)]
        return workers_for_tools([*names, *(name for name in [arguments.get("user") or ""] if ":" in name)])

    @property
    def template(self) -> dict[str, Any]:
        """Keyword arguments of the chat template: with `tool_prompt: template` the schemas, as `tools`."""
        if self.tool_prompt == "system" or not self._tools:
            return {}
        return {"tools": [deepcopy(tool.schema) for tool in self._tools.values()]}

    def reset(self, example: Example, seed: int) -> list[Message]:
        """Begin. Returns one system message (`system_prompt`, the prompt's, the tools) and the rest."""
        prompt = [{"role": "user", "content": example.prompt}] if isinstance(example.prompt, str) else example.prompt
        messages = [dict(message) for message in prompt]
        # Many chat templates take one system message only, so all its texts are joined.
        system: list[str] = [RecipeText(self.system_prompt)] if self.system_prompt else []
        if messages and messages[0]["role"] == "system":
            system.append(messages.pop(0)["content"])
        if self._tools and self.tool_prompt == "system":
            schemas = [json.dumps(tool.schema["function"], ensure_ascii=False) for tool in self._tools.values()]
            system.append(HOW_TO_CALL + "\n".join(schemas))
        if system:
            parts = [part for text in system for part in ("\n\n", text)][1:]
            messages.insert(0, {"role": "system", "content": RecipeText.join(*parts)})
        # Begin a new episode: the environment object may have played before.
        self.close()
        if self.user == "scripted":
            self._lines = _script(example, self.script or [])
        self._example, self._seed, self._turns, self._history = example, seed, 0, messages
        self._users_turn = self._user_has_prompt = False
        self._user_prompt = example.meta.get("user", self.user_prompt)
        if self.players == 2 and not isinstance(self._user_prompt, str):
            raise LmgymError(f"example '{example.id}': meta['user'] must be a text, what the model as user is told")
        return [dict(message) for message in messages]

    def step(self, text: str, stop: str) -> Any:  # Step, or a coroutine of it
        """Answer a turn with the results of its calls, or as the user. If a model plays the user, take its turn too."""
        if self._users_turn:
            return self._pass_to_policy(text)
        # The policy has written: note it, then make its calls or answer as the user.
        self._turns += 1
        self._history.append({"role": "assistant", "content": text})
        if stop in ("length", "context"):
            return Step(truncated=True, info=_counts())
        schemas = {name: tool.schema["function"]["parameters"] for name, tool in self._tools.items()}
        calls = parse_calls(text, self.max_calls, schemas) if self._tools else []
        if not calls:
            return self._answer_as_user()
        names = [getattr(call, "name", "") for call in calls]
        answers = [begin_call(call, self._tools, self._example, self.max_result_chars) for call in calls]
        waits = any(map(inspect.isawaitable, answers))
        return self._wait_for_answers(names, answers) if waits else self._answer_calls(names, answers)

    def close(self) -> None:
        """End the MCP servers of this episode."""
        for session in self._sessions:
            session.close()

    async def _wait_for_answers(self, names: Sequence[str], answers: Sequence[Any]) -> Step:
        known = [await answer if inspect.isawaitable(answer) else answer for answer in answers]
        return self._answer_calls(names, known)

    def _answer_calls(self, names: Sequence[str], answers: Sequence[Any]) -> Step:
        penalty = self.invalid_call_penalty * sum(answer.invalid for answer in answers)
        return self._go_on(self._results(names, answers), -penalty if penalty else 0.0, _counts(answers))

    def _answer_as_user(self) -> Any:
        counts = _counts()
        # The end of the conversation, for users that say nothing more.
        if self.players == 1 and self._reply is None and not self._lines:
            return Step(terminated=True, info=counts)
        if self._turns >= self.max_turns:
            return Step(truncated=True, info=counts)
        if self.players == 2:
            return self._pass_to_user(counts)
        if self._reply is None:
            return self._go_on([{"role": "user", "content": self._lines.pop(0)}], 0.0, counts)
        # A function of the recipe plays the user; its mistakes end one episode, not the run.
        try:
            reply = self._reply([dict(message) for message in self._history], self._example, self._seed)
        except (Exception, SystemExit) as error:
            return self._fail_as_user(error)
        return self._wait_for_user(reply) if inspect.isawaitable(reply) else self._say_as_user(reply)

    async def _wait_for_user(self, reply: Awaitable[Any]) -> Step:
        try:
            said = await reply
        except (Exception, SystemExit) as error:
            return self._fail_as_user(error)
        return self._say_as_user(said)

    def _fail_as_user(self, error: BaseException) -> Step:
        problem = f"user '{self.user}' raised {describe_error(error)}"
        return Step(truncated=True, info={**_counts(), "error": cut(problem, 500)})

    def _say_as_user(self, reply: Any) -> Step:
        counts = _counts()
        if reply is None:
            return Step(terminated=True, info=counts)
        if not isinstance(reply, str) or not reply.strip():
            kind = "an empty text" if isinstance(reply, str) else type(reply).__name__
            problem = f"user '{self.user}' returned {kind}; it must be a text, or None for the end"
            return Step(truncated=True, info={**counts, "error": cut(problem, 500)})
        return self._go_on([{"role": "user", "content": cut(reply, len(reply))}], 0.0, counts)  # for half surrogates

    def _pass_to_user(self, counts: dict[str, Any]) -> Step:
        """Give the policy's text to the model that plays the user."""
        messages = [{"role": "user", "content": self._history[-1]["content"]}]
        # Its first turn begins with the instruction to play the user.
        if not self._user_has_prompt:
            first = next((message["content"] for message in self._history if message["role"] == "user"), "")
            begin, *rest = self._user_prompt.replace("{end}", self.user_end).split("{prompt}")
            shown = RecipeText(first, (), pictures_of(first))
            prompt = RecipeText.join(begin, *(piece for text in rest for piece in (shown, text)))
            messages.insert(0, {"role": "system", "content": prompt})
        self._users_turn = self._user_has_prompt = True
        return Step(messages, player=1, info=counts)

    def _pass_to_policy(self, text: str) -> Step:
        """Give the text of the user's model to the policy."""
        self._users_turn = False
        if self.user_end in text:
            return Step(terminated=True)
        if not text.strip():
            return Step(truncated=True, info={"error": "the model that plays the user said nothing"})
        message = {"role": "user", "content": text}
        self._history.append(message)
        return Step([dict(message)], player=0)

    def _results(self, names: Sequence[str], answers: Sequence[Answer]) -> list[dict[str, str]]:
        if self.tool_role == "user":
            wrapped = [("\n", "<tool_response>\n", answer.text, "\n</tool_response>") for answer in answers]
            return [{"role": "user", "content": RecipeText.join(*[piece for one in wrapped for piece in one][1:])}]
        return [
            {"role": "tool", "name": name if name in self._tools else "unknown", "content": answer.text}
            for name, answer in zip(names, answers, strict=True)
        ]

    def _go_on(self, messages: list[dict[str, str]], reward: float, info: dict[str, Any]) -> Step:
        if self._turns >= self.max_turns:  # nothing would read the messages
            return Step(truncated=True, reward=reward, info=info)
        self._history += messages
        return Step(messages=[dict(message) for message in messages], reward=reward, info=info)


def _counts(answers: Sequence[Answer] = ()) -> dict[str, Any]:
    return {
        "calls": len(answers),
        "invalid_calls": sum(answer.invalid for answer in answers),
        "tool_errors": sum(answer.failed for answer in answers),
    }


def _user(name: str) -> Callable[[list[dict[str, str]], Example, int], Any]:
    """The recipe's function as one of (history, example, seed); it need not have the last two parameters."""
    if ":" not in name:
        raise LmgymError(f"key 'env.user' must be none, scripted, current, frozen or 'module:function', not '{name}'")
    function = registry.load_attribute(name, f"key 'env.user': '{name}'")
    if not callable(function):
        raise LmgymError(f"key 'env.user': '{name}' is no function")
    try:
        takes = set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        takes = set()

    def call(history: list[dict[str, str]], example: Example, seed: int) -> Any:
        wanted = {key: value for key, value in (("example", example), ("seed", seed)) if key in takes}
        return function(history, **wanted)

    return call


def _script(example: Example, otherwise: Sequence[str]) -> list[str]:
    lines = example.meta.get("script", otherwise)
    whose = f"example '{example.id}': meta['script']" if "script" in example.meta else "key 'env.script'"
    if isinstance(lines, str) or not isinstance(lines, Sequence) or not all(isinstance(line, str) for line in lines):
        raise LmgymError(f"{whose} must be a list of texts, one for each time that the user speaks")
    if not lines:
        raise LmgymError(f"example '{example.id}' has no meta['script'], and there is no 'env.script' in its place")
    return list(lines)
