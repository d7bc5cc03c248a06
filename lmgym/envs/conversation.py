"""A conversation of several turns, with tools that the policy may call and a user who may answer."""

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.core.registry import register
from lmgym.core.validation import check_arguments
from lmgym.envs.base import Step
from lmgym.envs.tools.parsing import parse_calls
from lmgym.envs.tools.sandbox.runner import Limits, python_within
from lmgym.envs.tools.schema import Answer, Tool, answer, cut, in_words, prepare, tool
from lmgym.types import Example, Message

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
    """The policy speaks; tools answer its calls, and a user answers turns that call nothing.

    - `tools`: names of tools ("python", "calculator", those of `@register("tool", ...)`) or functions as
      "module:function"; see tools.py for what a function must be like. `python` are the limits of that tool.
    - `tool_prompt`: `system` puts the schemas and how to call into the system message; `template` leaves both to the
      chat template, whose keyword arguments are in the attribute `template`.
    - `tool_role`: results are messages of the role `tool`, one for each call; `user` puts all of a turn into one user
      message, between `<tool_response>` tags, for templates that know no such role.
    - `user`: `none` ends the episode with the first turn that calls nothing. `scripted` answers such turns with the
      texts of `example.meta["script"]`, or of `script` where an example has none, and ends it when they are used up.
      "module:function" is called with the messages so far, and returns the user's next text, or None for the end; a
      parameter called `example` or `seed` is given those. One that fails ends its episode as truncated.
      `current` is the policy itself in the user's seat, `frozen` the policy as it was when the stage began: it reads
      `user_prompt` (or `example.meta["user"]`), where {prompt} stands for what the user said first and {end} for
      `user_end`, and what the assistant says to the user, tools apart. What it says trains nothing, and `user_end` in
      it ends the episode.
    - `max_turns`: turns of the policy; an episode that is not over with the last one is truncated.
    - `max_calls` in one turn are made; `max_result_chars` of each result go back.
    - `invalid_call_penalty` is taken off the turn's reward for each call that cannot be read or made.

    A turn that was cut off at the token limit is unfinished: its calls are not made and the episode ends as truncated.
    `Step.info` counts `calls`, `invalid_calls` and `tool_errors`. Arguments that cannot be are one LmgymError.

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

    tools: list[str] = field(default_factory=list)
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
        _check_choice("tool_prompt", self.tool_prompt, ("system", "template"))
        _check_choice("tool_role", self.tool_role, ("tool", "user"))
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
        self._tools = _tools(self.tools, self.python)
        built_in = self.players == 2 or self.user in (None, "none", "scripted")
        self._reply = None if built_in else _user(str(self.user))
        self._lines: list[str] = []  # that a scripted user has still to say
        self._history: list[dict[str, str]] = []
        self._turns = self._seed = 0

    @property
    def template(self) -> dict[str, Any]:
        """Keyword arguments for the chat template: the schemas as `tools`, where the template is to show them."""
        if self.tool_prompt == "system" or not self._tools:
            return {}
        return {"tools": [deepcopy(one.schema) for one in self._tools.values()]}

    def reset(self, example: Example, seed: int) -> list[Message]:
        """Begin: one system message (the prompt's own, `system_prompt` before it and the tools behind it), the rest."""
        prompt = [{"role": "user", "content": example.prompt}] if isinstance(example.prompt, str) else example.prompt
        messages = [dict(message) for message in prompt]
        own = [messages.pop(0)["content"]] if messages and messages[0]["role"] == "system" else []
        system = [self.system_prompt] if self.system_prompt else []
        system += own
        if self._tools and self.tool_prompt == "system":
            schemas = [json.dumps(one.schema["function"], ensure_ascii=False) for one in self._tools.values()]
            system.append(HOW_TO_CALL + "\n".join(schemas))
        if system:
            messages.insert(0, {"role": "system", "content": "\n\n".join(system)})
        if self.user == "scripted":
            self._lines = _script(example, self.script or [])
        self._example, self._seed, self._turns, self._history = example, seed, 0, messages
        self._user_speaks = self._user_has_spoken = False
        self._told = example.meta.get("user", self.user_prompt)
        if self.players == 2 and not isinstance(self._told, str):
            raise LmgymError(f"example '{example.id}': meta['user'] must be a text, what the model as user is told")
        return [dict(message) for message in messages]

    def step(self, text: str, stop: str) -> Step:
        """Answer a turn: with the results of its calls, else as the user, who may be a player of his own."""
        if self._user_speaks:
            return self._pass_on(text)
        self._turns += 1
        self._history.append({"role": "assistant", "content": text})
        if stop in ("length", "context"):
            return Step(truncated=True, info=_counts([]))
        calls = parse_calls(text, self.max_calls) if self._tools else []
        if not calls:
            return self._answer_as_user()
        answers = [answer(call, self._tools, self._example, self.max_result_chars) for call in calls]
        penalty = self.invalid_call_penalty * sum(one.invalid for one in answers)
        names = [getattr(call, "name", "") for call in calls]
        return self._go_on(self._results(names, answers), -penalty if penalty else 0.0, _counts(answers))

    def _answer_as_user(self) -> Step:
        counts = _counts([])
        if self.players == 1 and self._reply is None and not self._lines:
            return Step(terminated=True, info=counts)
        if self._turns >= self.max_turns:
            return Step(truncated=True, info=counts)
        if self.players == 2:
            return self._ask_user(counts)
        if self._reply is None:
            return self._go_on([{"role": "user", "content": self._lines.pop(0)}], 0.0, counts)
        try:
            said = self._reply([dict(message) for message in self._history], self._example, self._seed)
        except (Exception, SystemExit) as error:
            problem = f"user '{self.user}' raised {in_words(error)}"
            return Step(truncated=True, info={**counts, "error": cut(problem, 500)})
        if said is None:
            return Step(terminated=True, info=counts)
        if not isinstance(said, str) or not said.strip():
            what = "an empty text" if isinstance(said, str) else type(said).__name__
            problem = f"user '{self.user}' returned {what}; it must be a text, or None for the end"
            return Step(truncated=True, info={**counts, "error": cut(problem, 500)})
        return self._go_on([{"role": "user", "content": cut(said, len(said))}], 0.0, counts)  # half surrogates only

    def _ask_user(self, counts: dict[str, Any]) -> Step:
        """Hand what the policy said to the model that plays the user."""
        messages = [{"role": "user", "content": self._history[-1]["content"]}]
        if not self._user_has_spoken:
            first = next((one["content"] for one in self._history if one["role"] == "user"), "")
            told = self._told.replace("{prompt}", first).replace("{end}", self.user_end)
            messages.insert(0, {"role": "system", "content": told})
        self._user_speaks = self._user_has_spoken = True
        return Step(messages, player=1, info=counts)

    def _pass_on(self, text: str) -> Step:
        """Hand what the user's model said to the policy."""
        self._user_speaks = False
        if self.user_end in text:
            return Step(terminated=True)
        if not text.strip():
            return Step(truncated=True, info={"error": "the model that plays the user said nothing"})
        said = {"role": "user", "content": text}
        self._history.append(said)
        return Step([dict(said)], player=0)

    def _results(self, names: Sequence[str], answers: Sequence[Answer]) -> list[dict[str, str]]:
        if self.tool_role == "user":
            wrapped = [f"<tool_response>\n{one.text}\n</tool_response>" for one in answers]
            return [{"role": "user", "content": "\n".join(wrapped)}]
        return [
            {"role": "tool", "name": name if name in self._tools else "unknown", "content": one.text}
            for name, one in zip(names, answers, strict=True)
        ]

    def _go_on(self, messages: list[dict[str, str]], reward: float, info: dict[str, Any]) -> Step:
        if self._turns >= self.max_turns:  # nobody would read them
            return Step(truncated=True, reward=reward, info=info)
        self._history += messages
        return Step(messages=[dict(message) for message in messages], reward=reward, info=info)


def _check_choice(key: str, value: str, valid: Sequence[str]) -> None:
    if value not in valid:
        raise LmgymError(f"key 'env.{key}' must be {' or '.join(valid)}, not '{value}'")


def _counts(answers: Sequence[Answer]) -> dict[str, Any]:
    return {
        "calls": len(answers),
        "invalid_calls": sum(one.invalid for one in answers),
        "tool_errors": sum(one.failed for one in answers),
    }


def _tools(names: Sequence[str], python: Mapping[str, Any] | None) -> dict[str, Tool]:
    """The tools by the name that the model calls them by."""
    if isinstance(names, str):
        raise LmgymError(f"key 'env.tools' must be a list of names, such as [{names}]")
    if python is not None and "python" not in names:
        raise LmgymError("key 'env.python' limits the tool 'python', which is not among 'env.tools'")
    found: dict[str, Tool] = {}
    for name in names:
        if name == "python":
            limits = Limits(**check_arguments(Limits, python or {}, "env.python", given=0))
            one = prepare(python_within(limits))
        else:
            one = tool(name)
        if one.name in found:
            raise LmgymError(f"key 'env.tools': two tools are called '{one.name}'; the model could not tell them apart")
        found[one.name] = one
    return found


def _user(name: str) -> Callable[[list[dict[str, str]], Example, int], Any]:
    """A function of (history, example, seed) around the user's, which may leave out the last two."""
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
    if isinstance(lines, str) or not isinstance(lines, Sequence) or not all(isinstance(one, str) for one in lines):
        raise LmgymError(f"{whose} must be a list of texts, one for each time that the user speaks")
    if not lines:
        raise LmgymError(f"example '{example.id}' has no meta['script'], and there is no 'env.script' in its place")
    return list(lines)
