"""Building rewards from a recipe, calling them behind a guard, and the contract of a reward.

A reward is a callable `(texts, examples, **arguments) -> list of floats`: `texts` are the model's last turns,
special tokens removed, `examples` the problems they answer. One marked with `@episodes` gets whole episodes
instead. The same function is a metric.
"""

import math
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, update_wrapper
from types import FrameType
from typing import Any, Literal, TypeVar

from lmgym import registry
from lmgym.episode import Episode, Example, Turn
from lmgym.errors import LmgymError
from lmgym.registry import check_arguments, converted, suggest
from lmgym.rewards.adapters import from_trl
from lmgym.rewards.thinking import Stripping, thoughtless

RewardFunction = TypeVar("RewardFunction", bound=Callable[..., Any])
OPTIONS = {"weight": float, "strip_thinking": Stripping, "tasks": list[str], "style": Literal["lmgym", "trl"]}

SAMPLE_TEXTS = (
    "The answer is: 18",
    "",
    "Don't stop, don't STOP!\n#### 1,234",
    " ",
    "\u00e9t\u00e9 \U0001f600 \\boxed{\\frac{1}{2}}",
    "no number here " * 40,
)


class _TimeUp(BaseException):
    """Raised inside a reward by the alarm; not an Exception, so that `except Exception` in a reward lets it pass."""


@dataclass
class Reward:
    """One part of the score: a function with its arguments bound, and its weight (0: a metric only).

    It sees the text behind the model's thoughts where `strip_thinking` says so (see `without_thinking`), and only the
    examples of the named `tasks` of a mixture, all of them where there are none; elsewhere it counts as 0.

    Example: Reward("final_answer", 1.0, lmgym.registry.get("reward", "final_answer"))
    """

    name: str
    weight: float
    function: Callable[..., Any]
    strip_thinking: Stripping = False
    tasks: tuple[str, ...] = ()

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


def build(section: Mapping[str, Any]) -> list[Reward]:
    """The rewards of a recipe's section `rewards:`, in its order.

    A key is a registered name or "module:attribute". A number is the weight; a mapping holds `weight` (1
    where it is left out), the options of any reward (`strip_thinking`, `tasks`, and `style: trl` for a function of
    TRL's kind), and the function's arguments. Raises LmgymError for unknown names, unknown, missing or wrong
    arguments, and weights that are no finite number.

    Example:
        >>> build({"final_answer": 1.0, "length": {"weight": 0.1, "target": 50}})
    """
    rewards = []
    for name, value in section.items():
        key = f"rewards.{name}"
        function = registry.get("reward", name)
        arguments = {"weight": 1.0, **value} if isinstance(value, Mapping) else {"weight": value}
        options = {
            option: converted(hint, arguments.pop(option), f"{key}.{option}")
            for option, hint in OPTIONS.items()
            if option in arguments
        }
        if not math.isfinite(options["weight"]):
            raise LmgymError(f"key '{key}.weight' must be finite, not {options['weight']}")
        if options.pop("style", "lmgym") == "trl":
            function = episodes(from_trl(function, name))
        of_episodes = getattr(function, "takes_episodes", False)
        arguments = check_arguments(function, arguments, key, given=1 if of_episodes else 2, also=OPTIONS)
        if arguments:
            function = update_wrapper(partial(function, **arguments), function)
        options["tasks"] = tuple(options.get("tasks", ()))
        rewards.append(Reward(name, function=episodes(function) if of_episodes else function, **options))
    return rewards


def evaluate(reward: Reward, episodes: Sequence[Episode], timeout: float | None = 60.0) -> list[float]:
    """One finite number per episode, before the weight; 0 for those of a task that the reward does not judge.

    Raises LmgymError, in one sentence, if the reward raises, returns anything but one finite number per
    episode, or takes longer than `timeout` seconds (None: no limit). The limit is an alarm signal: it
    interrupts Python code and regular expressions, but not a call that blocks inside a C library, and there
    is none outside the main thread or on systems without SIGALRM. A function that works in time-limited processes
    (see workers.py) bounds each of its calls itself, says so by an attribute `limits_itself`, and has no alarm: some
    slow texts must cost their own reward, not the run.

    Example:
        >>> evaluate(build({"final_answer": 1.0})[0], episodes)
        [1.0, 0.0]
    """
    judged = [episode for episode in episodes if reward.applies(episode.example)]
    if reward.strip_thinking:
        judged = [thoughtless(episode, reward.strip_thinking) for episode in judged]
    values = iter(_judge(reward, judged, None if getattr(reward.function, "limits_itself", False) else timeout))
    return [next(values) if reward.applies(episode.example) else 0.0 for episode in episodes]


def _judge(reward: Reward, episodes: Sequence[Episode], timeout: float | None) -> list[float]:
    """The reward's own numbers, checked."""
    if not episodes:
        return []
    call: tuple[list[Any], ...] = (
        [episode.text for episode in episodes],
        [episode.example for episode in episodes],
    )
    if getattr(reward.function, "takes_episodes", False):
        call = (list(episodes),)
    try:
        with _alarm(timeout):
            values = _as_list(reward.function(*call))
    except LmgymError:
        raise
    except _TimeUp as error:
        raise LmgymError(
            f"reward '{reward.name}' did not return within {timeout:g} s for {len(episodes)} episodes{_place(error)}"
        ) from error
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}".split("\n")[0].removesuffix(": ")
        raise LmgymError(f"reward '{reward.name}' raised {reason}{_place(error)}") from error
    if isinstance(values, str):
        raise LmgymError(f"reward '{reward.name}' returned {values}; it must return a list of one number per episode")
    if len(values) != len(episodes):
        raise LmgymError(f"reward '{reward.name}' returned {len(values)} values for {len(episodes)} episodes")
    return [_number(reward.name, value, index, episodes) for index, value in enumerate(values)]


def check_examples(rewards: Sequence[Reward], examples: Sequence[Example]) -> None:
    """Raise LmgymError where a reward could not judge an example whatever is answered, as one whose reference cannot be
    read; to be called before anything is trained. A function says how by an attribute `check`, which takes the examples
    and the function's arguments.

    Example:
        >>> check_examples(build({"math_equal": 1.0}), load("math", "train", path="data/math"))
    """
    for reward in rewards:
        check = getattr(reward.function, "check", None)
        if check is not None:
            arguments = getattr(reward.function, "keywords", {})
            check([example for example in examples if reward.applies(example)], **arguments)


def check_reward(
    name: str, texts: Sequence[str] | None = None, examples: Sequence[Example] | None = None, **arguments: Any
) -> None:
    """Raise LmgymError, with one sentence, unless the reward keeps its contract. For the tests of whoever writes one.

    Held: one finite number per text, the empty text included, and the same number whether a text is scored
    alone, in a batch, or in the batch reversed (to one part in a million). Without `texts` and `examples` a
    small sample is used.

    Example:
        >>> check_reward("length", target=50)
    """
    reward = build({name: arguments})[0]
    texts = SAMPLE_TEXTS if texts is None else texts
    if examples is None:
        examples = [
            Example(f"sample/{index}", "How many?", ("9 * 2 = 18\n#### 18", "18")) for index in range(len(texts))
        ]
    if not texts or len(texts) != len(examples):
        raise LmgymError(
            f"check_reward needs as many texts as examples, and at least one: {len(texts)}, {len(examples)}"
        )
    texts, examples = [*texts, ""], [*examples, examples[0]]
    sampled = [
        Episode(example, group=index, index=index, turns=[Turn(prompt_ids=[], action_ids=[], text=text)])
        for index, (text, example) in enumerate(zip(texts, examples, strict=True))
    ]
    batch = evaluate(reward, sampled)
    reversed_batch = evaluate(reward, sampled[::-1])[::-1]
    for episode, together, backwards in zip(sampled, batch, reversed_batch, strict=True):
        for value, how in ((evaluate(reward, [episode])[0], "alone"), (backwards, "in the batch reversed")):
            if not math.isclose(value, together, rel_tol=1e-6, abs_tol=1e-6):
                raise LmgymError(f"reward '{name}' gives {episode.text!r} {together} in a batch but {value} {how}")


@contextmanager
def _alarm(timeout: float | None) -> Iterator[None]:
    """Raise _TimeUp in the body after `timeout` seconds; leaves handler and timer as they were."""
    usable = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if timeout is None or math.isinf(timeout) or not usable:
        yield
        return
    running = True

    def ring(number: int, frame: FrameType | None) -> None:
        if running:
            raise _TimeUp

    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    # It rings again every second, for a body that swallows the first one (a bare `except:`, a destructor).
    left, interval = signal.setitimer(signal.ITIMER_REAL, timeout, 1.0)
    try:
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # somebody else's timer was running; it goes on with what is left of it
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3), interval)


def _place(error: BaseException) -> str:
    """Where it happened: the innermost line of the file that the reward itself is in."""
    ours = (__file__, from_trl.__code__.co_filename)
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


def _number(name: str, value: Any, index: int, episodes: Sequence[Episode]) -> float:
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
