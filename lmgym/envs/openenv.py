"""Environments of OpenEnv (github.com/meta-pytorch/OpenEnv): a class in this process, or a server."""

import inspect
import json
import re
import time
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from lmgym.core import registry
from lmgym.core.constraints import FINITE, PositiveInt
from lmgym.core.errors import LmgymError, describe
from lmgym.core.validation import Section
from lmgym.envs.agent import Agent, InvalidActionError, read_answer
from lmgym.envs.base import Step, library
from lmgym.envs.dialogue import Dialogue, validity
from lmgym.envs.filling import from_row
from lmgym.envs.global_random import OwnRandomState
from lmgym.types import Example, Message

FENCED = re.compile(r"\A```(?:json)?\s*\n(.*)\n```\Z", re.DOTALL)
WAITS = (0.5, 1, 2, 4)  # seconds between attempts to reach a server
OWN = ("done", "reward", "metadata")  # fields of every observation of OpenEnv; the model does not see them


@registry.register("agent", "fields")
class Fields(Agent):
    """The agent of OpenEnv's environments: an observation's fields as text; an answer is a JSON object of the action's
    fields, or, if the action has one required field, its value.

    `action_space` is the JSON schema of the action."""

    def get_system_prompt(self) -> str:
        """None for an action with one required field; else the schema."""
        if self.system_prompt or self._only_field():
            return self.system_prompt
        schema = {key: value for key, value in self.action_space.items() if key != "description"}
        return f"Answer with a JSON object and nothing else. Its JSON schema: {json.dumps(schema, ensure_ascii=False)}"

    def format_observation(self, observation: Any) -> str:
        """A line "field: value" for each field; the value alone if there is one field."""
        shown = {name: value for name, value in observation.items() if name not in OWN}
        texts = {n: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for n, v in shown.items()}
        if len(texts) == 1:
            return next(iter(texts.values()))
        return "\n".join(f"{name}: {text}" for name, text in texts.items())

    def extract_action(self, text: str) -> dict[str, Any]:
        """The fields of the action that an answer means."""
        text = text.strip()
        fenced = FENCED.match(text)
        only = self._only_field()
        try:
            value = json.loads(fenced[1] if fenced else text)
        except (ValueError, RecursionError):
            if not only:
                raise InvalidActionError("it is not a JSON object") from None
            return {only: text}
        if isinstance(value, dict) and (not only or only in value):
            return value
        if not only:
            raise InvalidActionError("it is not a JSON object")
        # "3" is the number 3 for a field that takes numbers, and the text "3" for one that takes texts.
        kind = self.action_space.get("properties", {}).get(only, {}).get("type")
        return {only: text if kind == "string" else value}

    def format_action(self, action: Any) -> str:
        return json.dumps(action, ensure_ascii=False)

    def _only_field(self) -> str:
        required = self.action_space.get("required", [])
        return required[0] if len(required) == 1 else ""


@registry.register("env", "openenv")
@dataclass(kw_only=True)
class OpenEnv(Section):
    """An episode of an OpenEnv environment. The reward of a turn is that of its observation, which the environment's
    own rubric has given, if it has one; an observation that is `done` ends the episode.

    - `environment`: "module:Class" of the environment, which then runs in this process; or `url` of a server, such as
      http://127.0.0.1:8000, which holds one session for each episode.
    - `action`: "module:Class" of the action, if the annotation of the environment's `step` does not tell.
    - `arguments`: keyword arguments of the class; `reset_arguments`: of its reset, besides `seed`. An example's
      meta["reset"] adds to these.
    - `agent`: puts observations into words and reads actions: a registered agent, or "module:Class".
    - `on_invalid`, `invalid_penalty`, `max_invalid`, `memory`, `max_turns`: as in `Gymnasium`.

    Raises LmgymError for a class that cannot be loaded or built, or a server that cannot be reached within 8 seconds.

    Example: OpenEnv(environment="my_env.server:MyEnvironment")"""

    section = "env"

    environment: str | None = None
    url: str | None = None
    action: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    reset_arguments: dict[str, Any] = field(default_factory=dict)
    agent: str = "fields"
    memory: Literal["conversation", "observation"] = "conversation"
    max_turns: PositiveInt | None = None
    on_invalid: Literal["retry", "penalty", "end"] = "penalty"
    invalid_penalty: Annotated[float, FINITE] = 1.0
    max_invalid: PositiveInt = 3

    needs_data = False  # the recipe needs no task

    @staticmethod
    def workers(arguments: Mapping[str, Any]) -> int:
        """Processes for these environments, unless the recipe sets env.workers: more where a server is waited for."""
        return 16 if arguments.get("url") else 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.environment is None) == (self.url is None):
            raise LmgymError("env openenv needs either 'env.environment' (module:Class) or 'env.url' (of a server)")
        if self.url is not None and (self.action or self.arguments):
            raise LmgymError("keys 'env.action' and 'env.arguments' need 'env.environment'; a server has its own")
        self._make_agent = registry.get("agent", self.agent)

    def reset(self, example: Example, seed: int) -> Sequence[Message]:
        arguments = {
            **from_row(self.reset_arguments, example, "env.reset_arguments"),
            **example.meta.get("reset", {}),
            "seed": seed % 2**31,
        }
        self._game: InThisProcess | OnServer
        if self.environment is not None:
            self._game = InThisProcess(self.environment, self.action, self.arguments, seed)
        else:
            self._game = OnServer(str(self.url))
        self._agent: Agent = self._make_agent()
        self._agent.action_space = self._game.schema
        observation, _, over = self._game.reset(arguments)
        if over:
            raise RuntimeError("its reset returned an observation that is done; there is nothing to answer")
        self._dialogue = Dialogue(self._agent, self.memory, self.max_turns)
        return self._dialogue.begin(observation)

    def step(self, text: str, stop: str) -> Step:
        self._dialogue.turns += 1
        action, reason = read_answer(self._agent, text)
        if not reason:
            try:
                observation, reward, over = self._game.step(action)
            except InvalidActionError as error:
                reason = str(error)
        if reason:
            return self._dialogue.refuse(reason, self.on_invalid, self.invalid_penalty, self.max_invalid)
        self._dialogue.invalid = 0
        if over:
            return Step(reward=reward, terminated=True, info=validity(""))
        return self._dialogue.answer(self._dialogue.show(observation), reward, validity(""))

    def close(self) -> None:
        self._game.close()


Seen = tuple[dict[str, Any], float, bool]  # observation, reward, whether the episode is over


class InThisProcess:
    """An environment's class, built for one episode, with a state of Python's global random generator of its own: many
    environments draw from that one and take no seed."""

    def __init__(self, name: str, action: str | None, arguments: Mapping[str, Any], seed: int) -> None:
        self._random = OwnRandomState(seed)
        make = registry.load_attribute(name, f"key 'env.environment': '{name}'")
        if action is not None:
            self._action = registry.load_attribute(action, f"key 'env.action': '{action}'")
        else:
            self._action = _action_of(make, name)
        if not hasattr(self._action, "model_validate"):
            raise LmgymError(f"key 'env.action': '{action}' is no action of OpenEnv (a class of pydantic)")
        try:
            self._env = self._random.call(lambda: make(**arguments))
        except Exception as error:  # the class judges its arguments
            raise LmgymError(f"key 'env.environment': '{name}' cannot be built: {describe(error)}") from error
        self.schema = self._action.model_json_schema()

    def reset(self, arguments: Mapping[str, Any]) -> Seen:
        # A reset without the parameter `seed` gets none; a server of OpenEnv leaves it out as well.
        takes = inspect.signature(self._env.reset).parameters
        any_name = any(one.kind is one.VAR_KEYWORD for one in takes.values())
        given = {name: value for name, value in arguments.items() if name != "seed" or any_name or name in takes}
        return self._seen(self._random.call(lambda: self._env.reset(**given)))

    def step(self, action: Any) -> Seen:
        from pydantic import ValidationError

        try:
            valid = action if isinstance(action, self._action) else self._action.model_validate(action)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InvalidActionError(f"{where}: {first['msg']}" if where else str(first["msg"])) from None
        return self._seen(self._random.call(lambda: self._env.step(valid)))

    def close(self) -> None:
        getattr(self._env, "close", lambda: None)()

    def _seen(self, observation: Any) -> Seen:
        if not hasattr(observation, "model_dump"):
            raise TypeError(f"the environment returned {type(observation).__name__}; it must return an Observation")
        return observation.model_dump(mode="json"), float(observation.reward or 0.0), bool(observation.done)


class OnServer:
    """A session on a server of OpenEnv, by the library's own client."""

    def __init__(self, url: str) -> None:
        for wait in (*WAITS, None):  # a server that was killed may be starting again
            try:
                return self._connect(url)
            except (OSError, ValueError, KeyError) as error:
                if wait is None:
                    raise LmgymError(
                        f"key 'env.url': there is no server of OpenEnv at {url}: {describe(error)}"
                    ) from error
                time.sleep(wait)

    def _connect(self, url: str) -> None:
        import urllib.request

        with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=10) as answer:
            self.schema = json.load(answer)["action"]
        self._client = _library().GenericEnvClient(base_url=url).sync()
        self._client.connect()

    def reset(self, arguments: Mapping[str, Any]) -> Seen:
        return self._seen(self._client.reset(**arguments))

    def step(self, action: Any) -> Seen:
        try:
            return self._seen(self._client.step(action))
        except RuntimeError as error:  # the client tells what the server has refused by this text only
            if "VALIDATION_ERROR" not in str(error):
                raise
            raise InvalidActionError("it does not fit the action's fields") from None

    def close(self) -> None:
        self._client.close()

    def _seen(self, result: Any) -> Seen:
        return dict(result.observation), float(result.reward or 0.0), bool(result.done)


def _action_of(environment: Any, name: str) -> Any:
    """The class of the action, from the annotation of step."""
    try:
        hints = typing.get_type_hints(environment.step)
    except (AttributeError, NameError, TypeError):
        hints = {}
    hint = hints.get("action")
    if not isinstance(hint, type) or hint.__name__ == "Action":
        raise LmgymError(f"key 'env.action' is missing: the annotation of {name}.step does not tell the action's class")
    return hint


def _library() -> Any:
    return library("openenv.core", "openenv with a url", "openenv-core", "'lmgym[openenv]'")
