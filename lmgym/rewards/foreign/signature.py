"""What a reward function of another library takes, what the recipe may give it, and what it notes beside its value."""

import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmgym.core.errors import LmgymError, shortened
from lmgym.core.registry import suggest
from lmgym.core.validation import hints_of
from lmgym.types import Episode, Example, Message

EpisodeReward = Callable[..., list[float]]
ELSEWHERE = {  # what only the other library's trainer has
    "trainer_state": "TRL's trainer",
    "states": "a reward of whole groups",
    "infos": "a reward of whole groups",
    "trace": "verifiers' own rollout",
    "runtime": "verifiers' own rollout",
}
LONGEST_NOTE = 500  # characters


def parameters(function: Any, called: str) -> list[inspect.Parameter]:
    """The parameters of a function; LmgymError for what has none."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise LmgymError(f"reward '{called}' is {type(function).__name__}, and not a function with parameters") from (
            error
        )


def named(parameters: Sequence[inspect.Parameter]) -> list[str]:
    """The names of those that may be given by name."""
    return [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]


@dataclass(frozen=True)
class Foreign:
    """A function of another library: the name of the reward, and which of the parameters the library gives (`own`).

    Example: Foreign(accuracy, "accuracy", "TRL", ("prompts", "completions", "completion_ids"))"""

    function: Any
    called: str
    library: str
    own: tuple[str, ...]

    @property
    def named(self) -> list[str]:
        return named(parameters(self.function, self.called))

    @property
    def everything(self) -> bool:
        """True if the function takes **keywords."""
        return any(p.kind is p.VAR_KEYWORD for p in parameters(self.function, self.called))

    def needed(self) -> list[str]:
        """The parameters that only a column of the examples, or the recipe, can fill. Raises LmgymError for what lmgym
        cannot give."""
        takes = parameters(self.function, self.called)
        found = [p.name for p in takes if p.name in named(takes) and p.default is p.empty and p.name not in self.own]
        for key in found:
            if key in ELSEWHERE:
                raise LmgymError(
                    f"reward '{self.called}' needs '{key}', which only {ELSEWHERE[key]} has; give the parameter a "
                    "default, or remove it"
                )
        return found

    def chosen(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What the function takes of all that could be given."""
        return dict(given) if self.everything else {key: given[key] for key in self.named if key in given}

    def finished(self, reward: EpisodeReward, needed: Iterable[str], taken: Callable[..., str] | None = None) -> Any:
        """The reward with its name, the arguments that a recipe may give it, and a check that the examples have what it
        needs (see base.check_examples); `taken` may end the sentence."""

        def check(examples: Sequence[Example], **arguments: Any) -> None:
            columns = {key for example in examples for key in example.meta}
            for key in needed:
                if examples and key not in columns and key not in arguments:
                    raise LmgymError(
                        f"reward '{self.called}', written for {self.library}, needs '{key}' of each example, and no "
                        f"example has it in its meta; {suggest(key, columns)}{taken(examples) if taken else ''}"
                    )

        takes = [p for p in parameters(self.function, self.called) if p.name in self.named and p.name not in self.own]
        free = [p.replace(kind=p.KEYWORD_ONLY, default=None if p.default is p.empty else p.default) for p in takes]
        first = inspect.Parameter("episodes", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        hints = hints_of(self.function)
        kept: Any = reward
        kept.__name__, kept.check = self.called, check
        kept.__signature__ = inspect.Signature([first, *free])
        kept.__annotations__ = {p.name: hints[p.name] for p in takes if p.default is not p.empty and p.name in hints}
        return kept


def note(episode: Episode, name: str, value: Any) -> None:
    """Record what a reward function notes of an answer beside its value: a number as a component of weight 0, which is
    averaged like a reward, anything else as a short text of the last turn."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:  # a number of numpy or torch
        value = value.item()
    if isinstance(value, numbers.Real) and math.isfinite(value):
        episode.reward_components[name] = float(value)
    elif episode.turns:
        episode.turns[-1].info[name] = shortened(str(value), LONGEST_NOTE)


def notes_of(episode: Episode, called: str) -> dict[str, Any]:
    """All that a reward has noted of an episode, by name."""
    known = {**episode.reward_components, **(episode.turns[-1].info if episode.turns else {})}
    return {name: value for name, value in known.items() if name.startswith(f"{called}/")}


def prompt_of(example: Example) -> str | list[Message]:
    """The prompt as plain values."""
    return str(example.prompt) if isinstance(example.prompt, str) else [dict(message) for message in example.prompt]


def written_of(episode: Episode) -> list[Message]:
    """The messages of an episode behind its prompt: the policy's own, and between them the environment's.

    Example: after a call of a tool: [message["role"] for message in written_of(episode)]
    -> ['assistant', 'tool', 'assistant']"""
    last: list[Message] = [{"role": "assistant", "content": episode.text}]
    # 1. How many messages the policy has written since the environment began anew; the last one may differ from
    # Episode.messages, where a reward sees it without thoughts.
    begun = max((n for n, turn in enumerate(episode.turns) if turn.restart and not turn.source_ids), default=0)
    count = 1 + sum(turn.continuation is None for turn in episode.turns[begun:-1])
    # 2. So many of the conversation's last messages of an assistant are its own.
    places = [n for n, message in enumerate(episode.messages) if message["role"] == "assistant"]
    if count == 1 or len(places) < count:
        return last
    return [*({**message} for message in episode.messages[places[-count] : -1]), *last]
