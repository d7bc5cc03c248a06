"""Building rewards from a recipe, and calling them behind a guard.

A reward is a callable `(texts, examples, **arguments) -> list of floats`: `texts` are the model's last turns,
special tokens removed, `examples` the problems they answer. One marked with `@episodes` gets whole episodes
instead. The same function is a metric.
"""

import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial, update_wrapper
from typing import Any, Literal, TypeVar

from lmgym.core import registry
from lmgym.core.availability import availability_of
from lmgym.core.errors import LmgymError
from lmgym.core.registry import check_arguments, converted, suggest
from lmgym.rewards.adapters import from_trl
from lmgym.rewards.alarm import TimeUp, alarm
from lmgym.rewards.parallel import Parallel, in_parallel
from lmgym.rewards.views import Stripping, strip_thoughts, with_text
from lmgym.types import Episode, Example

RewardFunction = TypeVar("RewardFunction", bound=Callable[..., Any])
OPTIONS = {
    "weight": float,
    "reward": str,
    "strip_thinking": Stripping,
    "post_process": str,
    "shaping": bool,
    "each_turn": bool,
    "parallel": dict[str, Any],
    "tasks": list[str],
    "style": Literal["lmgym", "trl"],
}


@dataclass
class Reward:
    """One part of the score: a function with its arguments bound, and its weight (0: a metric only).

    It sees the text behind the model's thoughts where `strip_thinking` says so (see `without_thinking`), what
    `post_process` makes of that, and only the examples of the named `tasks` of a mixture, all of them where there are
    none; elsewhere it counts as 0. With `shaping` it is paid token by token (see tokens.py), with `each_turn` turn by
    turn (see turns.py).

    Example: Reward("final_answer", 1.0, lmgym.core.registry.get("reward", "final_answer"))
    """

    name: str
    weight: float
    function: Callable[..., Any]
    strip_thinking: Stripping = False
    tasks: tuple[str, ...] = ()
    post_process: Callable[[str], str] | None = None
    shaping: bool = False
    each_turn: bool = False

    @property
    def by_token(self) -> bool:
        """Whether tokens are paid each for itself."""
        return self.shaping or getattr(self.function, "pays_tokens", False)

    def applies(self, example: Example) -> bool:
        """True if the example is of a task that this reward judges. Raises LmgymError for a name of no task."""
        if not self.tasks:
            return True
        if "mixture" not in example.meta:
            raise LmgymError(f"key 'rewards.{self.name}.tasks': example '{example.id}' is from no mixture of tasks")
        for task in self.tasks:
            if task not in example.meta["mixture"]:
                valid = suggest(task, example.meta["mixture"])
                raise LmgymError(f"key 'rewards.{self.name}.tasks': the mixture has no task '{task}'; {valid}")
        return example.meta["task"] in self.tasks


def episodes(function: RewardFunction) -> RewardFunction:
    """Decorator: this reward takes a list of episodes in place of texts and examples.

    Example:
        >>> @register("reward", "brief")
        ... @episodes
        ... def brief(episodes):
        ...     return [1.0 / max(len(episode.turns), 1) for episode in episodes]
    """
    function.takes_episodes = True  # type: ignore[attr-defined]
    return function


def build_rewards(section: Mapping[str, Any]) -> list[Reward]:
    """The rewards of a recipe's section `rewards:`, in its order.

    A key is a registered name or "module:attribute", or any name where the option `reward` says which of these it
    stands for, so that one function can judge twice. A number is the weight; a mapping holds `weight` (1 where it is
    left out), the options of any reward (`reward`, `strip_thinking`, `post_process`, `shaping`, `each_turn`, `tasks`,
    `parallel`, and `style: trl` for a function of TRL's kind), and the function's arguments. Raises LmgymError for
    unknown names, unknown, missing or wrong arguments, and weights that are no finite number.

    Example:
        >>> build_rewards({"final_answer": 1.0, "length": {"weight": 0.1, "target": 50}})
    """
    rewards = []
    for name, value in section.items():
        key = f"rewards.{name}"
        if name in ("reward", "truncated", "broken", "reference_nll"):
            raise LmgymError(f"key '{key}': evaluations report something else as '{name}'; choose another name")
        arguments = {"weight": 1.0, **value} if isinstance(value, Mapping) else {"weight": value}
        options = {
            option: converted(hint, arguments.pop(option), f"{key}.{option}")
            for option, hint in OPTIONS.items()
            if option in arguments
        }
        if not math.isfinite(options["weight"]):
            raise LmgymError(f"key '{key}.weight' must be finite, not {options['weight']}")
        function = registry.get("reward", options.pop("reward", name))
        if options.pop("style", "lmgym") == "trl":
            function = episodes(from_trl(function, name))
        of_episodes = getattr(function, "takes_episodes", False)
        arguments = check_arguments(function, arguments, key, given=1 if of_episodes else 2, also=OPTIONS)
        if "parallel" in options:
            how = Parallel(**check_arguments(Parallel, options.pop("parallel"), f"{key}.parallel", given=0))
            if of_episodes or getattr(function, "pays_tokens", False):
                raise LmgymError(f"key '{key}.parallel' is for rewards of texts, and this one takes whole episodes")
            function = in_parallel(function, arguments, how)
        elif arguments:
            function = update_wrapper(partial(function, **arguments), function)
        options["tasks"] = tuple(options.get("tasks", ()))
        if "post_process" in options:
            options["post_process"] = registry.get("post_processor", options["post_process"])
        _check_tokens(function, options, key)
        rewards.append(Reward(name, function=episodes(function) if of_episodes else function, **options))
    return rewards


def available_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluation's metrics; one that cannot run on this machine is replaced by its substitute (`Entry.substitute`).

    The substitute is reported under its own name, and a warning says so once. A metric that the recipe names itself
    keeps its arguments. Rewards are never replaced: a run trains on what it names, or not at all.

    Example:
        >>> available_metrics({"meteor": {}, "bleu": {}})     # without WordNet
        {'meteor_stem': {}, 'bleu': {}}
    """
    available = {_available(name): section for name, section in metrics.items()}
    return available | {name: section for name, section in metrics.items() if name in available}


@cache  # so that the warning comes once
def _available(name: str) -> str:
    entry = registry.BUILTIN["reward"].get(name)
    if entry is None or not entry.substitute or (found := availability_of(entry.needs)).runs != "no":
        return name
    summary = registry.BUILTIN["reward"][entry.substitute].summary
    warnings.warn(
        f"metric '{name}' cannot run here (it needs: {found.how}); it is reported as '{entry.substitute}', {summary}",
        stacklevel=4,
    )
    return entry.substitute


def call_reward(reward: Reward, episodes: Sequence[Episode], timeout: float | None = 60.0) -> list[float]:
    """One finite number per episode, before the weight; 0 for those of a task that the reward does not judge.

    Raises LmgymError, in one sentence, if the reward raises, returns anything but one finite number per
    episode, or takes longer than `timeout` seconds (None: no limit). The limit is an alarm signal: it
    interrupts Python code and regular expressions, but not a call that blocks inside a C library, and there
    is none outside the main thread or on systems without SIGALRM. A function that works in time-limited processes
    (processes/pool.py) bounds each of its calls itself, says so by an attribute `limits_itself`, and has no alarm: some
    slow texts must cost their own reward, not the run.

    Example:
        >>> call_reward(build_rewards({"final_answer": 1.0})[0], episodes)
        [1.0, 0.0]
    """
    if getattr(reward.function, "pays_tokens", False):
        raise LmgymError(f"reward '{reward.name}' pays token by token; let lmgym.apply_rewards apply it")
    values = iter(_judge(reward, episodes_to_judge(reward, episodes), timeout))
    return [next(values) if reward.applies(episode.example) else 0.0 for episode in episodes]


def episodes_to_judge(reward: Reward, episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes that a reward judges, as it sees them: of its tasks, without thoughts where it is not shown any, and
    post-processed. Where it sees another text they are copies: what trains stays as it was sampled."""
    own = [episode for episode in episodes if reward.applies(episode.example)]
    if reward.strip_thinking:
        own = [strip_thoughts(episode, reward.strip_thinking) for episode in own]
    if reward.post_process is not None:
        own = [with_text(episode, reward.post_process(episode.text)) for episode in own]
    return own


def _judge(reward: Reward, episodes: Sequence[Episode], timeout: float | None) -> list[float]:
    """The reward's own numbers, checked."""
    if not episodes:
        return []
    call: tuple[Any, ...] = (
        [episode.text for episode in episodes],
        [episode.example for episode in episodes],
    )
    if getattr(reward.function, "takes_episodes", False):
        call = (list(episodes),)
    values = call_guarded(reward, call, timeout, episodes)
    return [finite_number(reward.name, value, index, episodes) for index, value in enumerate(values)]


def call_guarded(
    reward: Reward, arguments: tuple[Any, ...], timeout: float | None, episodes: Sequence[Episode]
) -> list[Any]:
    """What the reward's function returns of these arguments, one item per episode, behind the guard."""
    with guard_reward(reward, len(episodes), timeout):
        values = _as_list(reward.function(*arguments))
    if isinstance(values, str):
        raise LmgymError(f"reward '{reward.name}' returned {values}; it must return a list of one number per episode")
    if len(values) != len(episodes):
        raise LmgymError(f"reward '{reward.name}' returned {len(values)} values for {len(episodes)} episodes")
    return values


@contextmanager
def guard_reward(reward: Reward, count: int, timeout: float | None) -> Iterator[None]:
    """Whatever a reward's function raises in the body, or a body that takes longer than `timeout` seconds, becomes a
    LmgymError of one sentence; `count` is the number of episodes that it judges."""
    limit = None if getattr(reward.function, "limits_itself", False) else timeout
    try:
        with alarm(limit):
            yield
    except LmgymError:
        raise
    except TimeUp as error:
        raise LmgymError(
            f"reward '{reward.name}' did not return within {limit:g} s for {count} episodes{_place(error)}"
        ) from error
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}".split("\n")[0].removesuffix(": ")
        raise LmgymError(f"reward '{reward.name}' raised {reason}{_place(error)}") from error


def check_examples(rewards: Sequence[Reward], examples: Sequence[Example]) -> None:
    """Raise LmgymError where a reward could not judge an example whatever is answered, as one whose reference cannot be
    read; to be called before anything is trained. A function says how by an attribute `check`, which takes the examples
    and the function's arguments.

    Example:
        >>> check_examples(build_rewards({"math_equal": 1.0}), load_task("math", "train", path="data/math"))
    """
    for reward in rewards:
        check = getattr(reward.function, "check", None)
        if check is not None:
            arguments = getattr(reward.function, "keywords", {})
            check([example for example in examples if reward.applies(example)], **arguments)


def _check_tokens(function: Callable[..., Any], options: Mapping[str, Any], key: str) -> None:
    """Raise LmgymError for options that a reward that pays token by token does not go with."""
    if getattr(function, "pays_tokens", False):
        for option in ("shaping", "each_turn", "strip_thinking", "post_process"):
            if options.get(option):
                raise LmgymError(f"key '{key}.{option}': this reward pays token by token of itself; leave it out")
    if options.get("shaping") and options.get("each_turn"):
        raise LmgymError(f"key '{key}': 'shaping' pays tokens and 'each_turn' turns; leave one of them out")


def _place(error: BaseException) -> str:
    """Where it happened: the innermost line of the file that the reward itself is in."""
    ours = (__file__, from_trl.__code__.co_filename, TimeUp.file)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in ours]
    if not frames:
        return ""
    own = [frame for frame in frames if frame.filename == frames[0].filename][-1]
    return f" at {own.filename}:{own.lineno}"


def _as_list(values: Any) -> list[Any] | str:
    """The values, or what the function returned in place of a list."""
    if isinstance(values, str | bytes | Mapping | Set) or not hasattr(values, "__len__"):
        return type(values).__name__
    return list(values)


def finite_number(name: str, value: Any, index: int, episodes: Sequence[Episode]) -> float:
    """The value as a finite number; LmgymError naming the reward and the episode's example if it is none."""
    where = f"for example '{episodes[index].example.id}' (index {index} of {len(episodes)})"
    try:
        if not hasattr(type(value), "__float__"):  # float() itself would read a text
            raise TypeError
        number = float(value)
    except OverflowError:
        number = math.inf
    except Exception as error:
        raise LmgymError(f"reward '{name}' returned {value!r} {where}; it must be a number") from error
    if not math.isfinite(number):
        raise LmgymError(f"reward '{name}' returned {number} {where}; it must be finite")
    return number
