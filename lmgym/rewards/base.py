"""Rewards: call them, check what they return (building.py makes them from a recipe).

A reward is a callable `(texts, examples, **arguments) -> list of floats`. `texts` are the model's last turns without
special tokens; `examples` are the problems that they answer. A function marked with `@episodes` gets whole episodes
instead. None in place of a float says that an answer cannot be judged; so does a Failure, which also says that
something went wrong. A metric is the same kind of function."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from lmgym.core import registry
from lmgym.core.constraints import LARGEST_REWARD
from lmgym.core.errors import LmgymError, describe, place, represent
from lmgym.core.registry import suggest
from lmgym.processes import coroutines
from lmgym.processes.coroutines import result_of
from lmgym.processes.pool import Failure
from lmgym.rewards import adapters
from lmgym.rewards.failures import RewardFailed
from lmgym.rewards.running.alarm import TimeUp, alarm
from lmgym.rewards.running.pooled import NeedsTorch, Pooled, pooled_values
from lmgym.rewards.views import Stripping, as_sequence, strip_thoughts, with_champion, with_text
from lmgym.types import Episode, Example

CorrectIsOne = bool | Literal["math_equal"]
Normalise = bool | Literal["scale"]
RewardFunction = TypeVar("RewardFunction", bound=Callable[..., Any])
Judgement = float | Failure | None  # what a reward says of an answer; Failure: it went wrong, None: it cannot judge it


@dataclass
class Reward:
    """One component of the score: a function with its arguments bound, and its weight (0: a metric only).

    With `strip_thinking` the function sees the text without the model's thoughts (see `without_thinking`).
    `post_process` then changes that text. `tasks` names the tasks of a mixture that the reward is for, `where` columns
    of the data with the values that they must have (empty: all); for other examples it is 0. With `shaping` each token
    gets its own reward (see token_credit.py), with `each_turn` each turn does. `normalise` makes
    it relative to a running estimate in training (normalisation.py). With `correct_is_one` a text that announces the
    reference's final answer gets 1, and the function is not asked about it. `pooled` says how a worker process finds
    the function, if it runs in one; `unlimited` is the reason why its limit of time cannot be enforced. `champions` are
    texts by the id of the example, which the function is shown as `meta["champion"]` (champions.py).

    Example: Reward("final_answer", 1.0, lmgym.core.registry.get("reward", "final_answer"))"""

    name: str
    weight: float
    function: Callable[..., Any]
    strip_thinking: Stripping = False
    tasks: tuple[str, ...] = ()
    where: Mapping[str, Any] = field(default_factory=dict)
    post_process: Callable[[str], str] | None = None
    shaping: bool = False
    each_turn: bool = False
    normalise: Normalise = False
    correct_is_one: CorrectIsOne = False
    pooled: Pooled | None = None
    unlimited: str = ""
    champions: Mapping[str, str] = field(default_factory=dict)

    @property
    def by_token(self) -> bool:
        """True if each token gets its own reward."""
        return self.shaping or getattr(self.function, "pays_tokens", False)

    @property
    def selective(self) -> bool:
        """True if the reward is for some examples only."""
        return bool(self.tasks or self.where)

    def arguments(self, episodes: Sequence[Episode]) -> tuple[list[Any], ...]:
        """What the function is called with."""
        if getattr(self.function, "takes_episodes", False):
            return (list(episodes),)
        return [episode.text for episode in episodes], [episode.example for episode in episodes]

    def applies(self, example: Example) -> bool:
        """True if the reward is for the example. Raises LmgymError if `tasks` names an unknown task, or `where` a
        column that the example lacks."""
        for column, wanted in self.where.items():
            if column not in example.meta:
                valid = suggest(column, example.meta)
                raise LmgymError(f"key 'rewards.{self.name}.where': '{example.id}' has no column '{column}'; {valid}")
            if example.meta[column] not in (wanted if isinstance(wanted, list) else [wanted]):
                return False
        if not self.tasks:
            return True
        if "mixture" not in example.meta:
            raise LmgymError(f"key 'rewards.{self.name}.tasks': example '{example.id}' is from no mixture of tasks")
        for task in self.tasks:
            if task not in example.meta["mixture"]:
                valid = suggest(task, example.meta["mixture"])
                raise LmgymError(f"key 'rewards.{self.name}.tasks': the mixture has no task '{task}'; {valid}")
        return example.meta["task"] in self.tasks

    def correct(self, texts: Sequence[str], examples: Sequence[Example]) -> list[bool]:
        """Which texts are 1 without asking the function: those whose announced answer is right (`final_answer`, strict,
        or `math_equal`). Raises LmgymError for an example without references."""
        if not self.correct_is_one:
            return [False] * len(texts)
        judge = registry.get("reward", "final_answer" if self.correct_is_one is True else self.correct_is_one)
        return [value == 1.0 for value in judge(list(texts), list(examples), strict=True)]


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


def linear_time(function: RewardFunction) -> RewardFunction:
    """Decorator: on any text this reward takes a time proportional to the text's length, a second for a million
    characters or so. It then runs in the training process, since there is no need to enforce its limit.

    Example:
        >>> @register("reward", "shout")
        ... @linear_time
        ... def shout(texts, examples):
        ...     return [float(text.isupper()) for text in texts]
    """
    function.linear_time = True  # type: ignore[attr-defined]
    return function


def call_reward(
    reward: Reward, episodes: Sequence[Episode], timeout: float | None = 60.0, tokenizer: Any = None
) -> list[Judgement]:
    """Call a reward: one finite number per episode, not yet weighted; 0 if the reward is not for the episode's task;
    None or a Failure where it says that it cannot judge the answer.

    Raises RewardFailed, in one sentence, if the reward raises or takes longer than `timeout` seconds by the clock
    (None: no limit), and LmgymError if it returns anything but that. A reward runs in a worker process
    (running/pooled.py), which is killed at its limit. One that must stay in this process (`Reward.unlimited` says
    why) gets an alarm signal instead. It interrupts Python code and regular expressions, but not a call that blocks
    inside a C library nor code that catches it, and it needs the main thread and a system with SIGALRM. A function
    with the attribute `limits_itself` gets no alarm: it works in time-limited processes (processes/pool.py) and
    limits each text by itself, so that a slow text costs its own reward and not the run. A function with the attribute
    `reads_sequence` gets prompt and answer as the `tokenizer` writes them (views.as_sequence).

    Example: call_reward(build_rewards({"final_answer": 1.0})[0], episodes) -> [1.0, 0.0]"""
    if getattr(reward.function, "pays_tokens", False):
        raise LmgymError(f"reward '{reward.name}' pays token by token; let lmgym.apply_rewards apply it")
    with guard_reward(reward, len(episodes), timeout):  # a post-processor may be the user's
        shown = episodes_to_judge(reward, episodes)
    shown = as_read(reward, shown, tokenizer)
    right = reward.correct([episode.text for episode in shown], [episode.example for episode in shown])
    judged = iter(_judge(reward, [episode for episode, known in zip(shown, right, strict=True) if not known], timeout))
    values = iter([1.0 if known else next(judged) for known in right])
    return [next(values) if reward.applies(episode.example) else 0.0 for episode in episodes]


def episodes_to_judge(reward: Reward, episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes of the reward's tasks, with the text that the reward sees: without thoughts (`strip_thinking`), then
    post-processed. A changed episode is a copy, so the episodes that train stay as they were sampled."""
    shown = [episode for episode in episodes if reward.applies(episode.example)]
    if reward.strip_thinking:
        shown = [strip_thoughts(episode, reward.strip_thinking) for episode in shown]
    if reward.post_process is not None:
        shown = [with_text(episode, reward.post_process(episode.text)) for episode in shown]
    if reward.champions:
        shown = [with_champion(episode, reward.champions.get(episode.example.id)) for episode in shown]
    return shown


def as_read(reward: Reward, shown: Sequence[Episode], tokenizer: Any) -> list[Episode]:
    """The episodes to judge as the function reads them: with `reads_sequence`, prompt and answer as two texts."""
    how, changed = getattr(reward.function, "reads_sequence", None), reward.strip_thinking or reward.post_process
    if how is None:
        return list(shown)
    return [as_sequence(episode, tokenizer, how == "tokens", bool(changed)) for episode in shown]


def _judge(reward: Reward, episodes: Sequence[Episode], timeout: float | None) -> list[Judgement]:
    """What the reward's function returns for these episodes, its numbers checked to be finite."""
    if not episodes:
        return []
    if reward.pooled is not None and timeout is not None and math.isfinite(timeout):
        pooled = pooled_values(reward.name, reward.pooled, episodes, timeout)
        if pooled is not None:
            return pooled
    values = call_guarded(reward, reward.arguments(episodes), timeout, episodes)
    return [
        value if value is None or isinstance(value, Failure) else finite_number(reward.name, value, index, episodes)
        for index, value in enumerate(values)
    ]


def call_guarded(
    reward: Reward, arguments: tuple[Any, ...], timeout: float | None, episodes: Sequence[Episode]
) -> list[Any]:
    """Call the reward's function under `guard_reward` and check that it returns one item per episode."""
    with guard_reward(reward, len(episodes), timeout):
        values = result_of(reward.function(*arguments))
    if isinstance(values, str | bytes | Mapping | Set) or not hasattr(values, "__len__"):
        kind = type(values).__name__
        raise LmgymError(f"reward '{reward.name}' returned {kind}; it must return a list of one number per episode")
    if len(values) != len(episodes):
        raise LmgymError(f"reward '{reward.name}' returned {len(values)} values for {len(episodes)} episodes")
    return list(values)


@contextmanager
def guard_reward(reward: Reward, count: int, timeout: float | None) -> Iterator[None]:
    """Turn any exception in the body, or a body that takes longer than `timeout` seconds, into one RewardFailed that
    names the reward; an LmgymError, which is about the recipe, is left as it is. `count` is the number of episodes, for
    the message."""
    limit = None if getattr(reward.function, "limits_itself", False) else timeout
    try:
        with alarm(limit):
            yield
    except (LmgymError, KeyboardInterrupt, NeedsTorch):
        raise
    except TimeUp as error:
        raise RewardFailed(
            f"reward '{reward.name}' did not return within {limit:g} s for {count} episodes{_place(error)}"
        ) from error
    except BaseException as error:  # SystemExit and CancelledError, too
        raise RewardFailed(f"reward '{reward.name}' raised {describe(error)}{_place(error)}") from error


def check_examples(rewards: Sequence[Reward], examples: Sequence[Example]) -> None:
    """Raise LmgymError if a reward cannot work with an example, whatever the answer; say, if a reference cannot be
    read. Called before training starts. A reward function may have an attribute `check`, a function that takes the
    examples and the reward's arguments and raises.

    Example:
        >>> check_examples(build_rewards({"math_equal": 1.0}), load_task("math", "train", path="data/math"))
    """
    for reward in rewards:
        shown = [example for example in examples if reward.applies(example)]
        if reward.correct_is_one == "math_equal":
            registry.get("reward", "math_equal").check(shown)
        reward.correct([""] * len(shown), shown)  # raises for an example without references
        check = getattr(reward.function, "check", None)
        if check is not None:
            arguments = getattr(reward.function, "keywords", {})
            check(shown, **arguments)


def _place(error: BaseException) -> str:
    """Where the error happened: " at FILE:LINE", the innermost line in the reward's own file."""
    return place(error, __file__, *adapters.FILES, coroutines.__file__, TimeUp.file)


def check_size(reward: Reward, episode: Episode) -> None:
    """Raise LmgymError if what a reward gave an episode is finite, and too large to train on."""
    value = episode.reward_components[reward.name] or 0.0
    if max(abs(value), abs(reward.weight * value)) > LARGEST_REWARD:
        raise LmgymError(
            f"reward '{reward.name}' gave {value:g} (weight {reward.weight:g}) for example '{episode.example.id}'; "
            f"training computes in fp32, so keep rewards and their weighted values within {LARGEST_REWARD:g}"
        )


def finite_number(name: str, value: Any, index: int, episodes: Sequence[Episode]) -> float:
    """The value as a float. Raises LmgymError, with the reward and the example, if it is not a finite number."""
    where = f"for example '{episodes[index].example.id}' (index {index} of {len(episodes)})"
    try:
        if not hasattr(type(value), "__float__"):  # float() would accept a text such as "1.5"
            raise TypeError
        number = float(value)
    except OverflowError:
        number = math.inf
    except Exception as error:
        raise LmgymError(f"reward '{name}' returned {represent(value)} {where}; it must be a number") from error
    if not math.isfinite(number):
        raise LmgymError(f"reward '{name}' returned {number} {where}; it must be finite (None: not judged)")
    return number
