"""Rewards: build them from a recipe, call them, check what they return.

A reward is a callable `(texts, examples, **arguments) -> list of floats`. `texts` are the model's last turns without
special tokens; `examples` are the problems that they answer. A function marked with `@episodes` gets whole episodes
instead. A metric is the same kind of function."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial, update_wrapper
from typing import Any, Literal, TypeVar

from lmgym.core import registry
from lmgym.core.availability import availability_of
from lmgym.core.constraints import LARGEST_REWARD
from lmgym.core.errors import LmgymError, describe, place, represent, warn
from lmgym.core.importable import importable_name
from lmgym.core.registry import suggest
from lmgym.core.validation import check_arguments, converted, parameters_of
from lmgym.processes import coroutines
from lmgym.processes.coroutines import result_of
from lmgym.rewards import adapters
from lmgym.rewards.adapters import Style, adapted, is_factory, made_by, style_of
from lmgym.rewards.running.alarm import TimeUp, alarm
from lmgym.rewards.running.parallel import Parallel, in_parallel
from lmgym.rewards.running.pooled import NeedsTorch, Pooled, pooled_values, unlimited_reason
from lmgym.rewards.views import Stripping, as_sequence, strip_thoughts, with_text
from lmgym.types import Episode, Example

CorrectIsOne = bool | Literal["math_equal"]
Normalise = bool | Literal["scale"]
RewardFunction = TypeVar("RewardFunction", bound=Callable[..., Any])
OPTIONS = {
    "weight": float,
    "reward": str,
    "strip_thinking": Stripping,
    "post_process": str,
    "shaping": bool,
    "each_turn": bool,
    "normalise": Normalise,
    "parallel": dict[str, Any],
    "pool": bool,
    "tasks": list[str],
    "where": dict[str, Any],
    "style": Style,
    "correct_is_one": CorrectIsOne,
}


@dataclass
class Reward:
    """One component of the score: a function with its arguments bound, and its weight (0: a metric only).

    With `strip_thinking` the function sees the text without the model's thoughts (see `without_thinking`).
    `post_process` then changes that text. `tasks` names the tasks of a mixture that the reward is for, `where` columns
    of the data with the values that they must have (empty: all); for other examples it is 0. With `shaping` each token
    gets its own reward (see token_credit.py), with `each_turn` each turn does (see turn_credit.py). `normalise` makes
    it relative to a running estimate in training (normalisation.py). With `correct_is_one` a text that announces the
    reference's final answer gets 1, and the function is not asked about it. `pooled` says how a worker process finds
    the function, if it runs in one; `unlimited` is the reason why its limit of time cannot be enforced.

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

    @property
    def by_token(self) -> bool:
        """True if each token gets its own reward."""
        return self.shaping or getattr(self.function, "pays_tokens", False)

    @property
    def selective(self) -> bool:
        """True if the reward is for some examples only."""
        return bool(self.tasks or self.where)

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


def build_rewards(section: Mapping[str, Any]) -> list[Reward]:
    """Build the rewards of a recipe's section `rewards:`, in the order of its keys.

    A key is a registered name or "module:attribute". With the option `reward`, which then holds one of these, the key
    may be any name; so one function can be used twice. The value is the weight, or a mapping of `weight` (default 1),
    the options of any reward (OPTIONS) and the function's own arguments. A function that was written for another
    library is recognised by its parameters, and adapted (adapters.py); `style` names its form if they do not tell.

    Raises LmgymError for unknown names, for unknown, missing or wrong arguments, for a function of no known form, and
    for weights that are not finite.

    Example:
        >>> build_rewards({"final_answer": 1.0, "length": {"weight": 0.1, "target": 50}})
    """
    rewards = []
    for name, value in section.items():
        key = f"rewards.{name}"
        if name in ("reward", "truncated", "broken", "reference_nll"):
            raise LmgymError(f"key '{key}': evaluations report something else as '{name}'; choose another name")
        # Separate the options of any reward from the function's own arguments.
        arguments = {"weight": 1.0, **value} if isinstance(value, Mapping) else {"weight": value}
        options = {
            option: converted(hint, arguments.pop(option), f"{key}.{option}")
            for option, hint in OPTIONS.items()
            if option in arguments
        }
        if not math.isfinite(options["weight"]):
            raise LmgymError(f"key '{key}.weight' must be finite, not {options['weight']}")
        # Find the function, adapt it if it is of another library's form, and check the arguments against its signature.
        target = options.pop("reward", name)
        original = function = registry.get("reward", target)
        style, sent = options.pop("style", None), arguments
        if factory := style is None and target not in registry.BUILTIN["reward"] and is_factory(original, name):
            function, arguments = made_by(original, arguments, name), {}
        style = style or style_of(function, name)
        if target in registry.BUILTIN["reward"] and style != "lmgym":
            raise LmgymError(f"key '{key}.style' is {style}, and '{target}' is a reward of lmgym's own; remove it")
        function = function if style == "lmgym" else episodes(adapted(function, style, name))
        of_episodes = getattr(function, "takes_episodes", False)
        if "correct_is_one" in options and "correct_is_one" in parameters_of(function, given=1)[0]:
            arguments["correct_is_one"] = options.pop("correct_is_one")  # judges of lines know better where it holds
        arguments = check_arguments(function, arguments, key, given=1 if of_episodes else 2, also=OPTIONS)
        # Decide where it runs, and bind the arguments; with `parallel`, calls go to several processes.
        wanted = options.pop("pool", True)
        limits_itself = "parallel" in options or hasattr(original, "limits_itself") or hasattr(original, "linear_time")
        if not limits_itself:
            sent = sent if factory else arguments
            reason = unlimited_reason(original, sent, target) if wanted else "the recipe says pool: false"
            options["unlimited"] = reason
            if not reason:
                options["pooled"] = Pooled(str(importable_name(original, target)), sent, style, of_episodes, factory)
        if "parallel" in options:
            how = Parallel(**check_arguments(Parallel, options.pop("parallel"), f"{key}.parallel", given=0))
            if of_episodes or getattr(function, "pays_tokens", False):
                raise LmgymError(f"key '{key}.parallel' is for rewards of texts, and this one takes whole episodes")
            function = in_parallel(function, arguments, how)
        elif arguments:
            function = update_wrapper(partial(function, **arguments), function)
        options["tasks"] = tuple(options.get("tasks", ()))
        if "post_process" in options:
            given = options["post_process"]
            options["post_process"] = registry.get("post_processor", given)
            if given not in registry.BUILTIN["post_processor"]:
                options["unlimited"] = options.get("unlimited") or f"'{given}' changes its text in this process"
        _check_tokens(function, options, key)
        rewards.append(Reward(name, function=episodes(function) if of_episodes else function, **options))
    return rewards


def available_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluation's metrics; a metric that cannot run on this machine is replaced by its substitute
    (`Entry.substitute`).

    The substitute is reported under its own name, with one warning. If the recipe names the substitute too, the
    recipe's arguments are kept. Rewards are never replaced: a run trains on the rewards that it names, or not at all.

    Example:
        >>> available_metrics({"meteor": {}, "bleu": {}})     # without WordNet
        {'meteor_stem': {}, 'bleu': {}}
    """
    available = {_available(name): section for name, section in metrics.items()}
    return available | {name: section for name, section in metrics.items() if name in available}


@cache  # warn once per metric
def _available(name: str) -> str:
    entry = registry.BUILTIN["reward"].get(name)
    if entry is None or not entry.substitute or (found := availability_of(entry.needs)).runs != "no":
        return name
    summary = registry.BUILTIN["reward"][entry.substitute].summary
    warn(
        f"metric '{name}' cannot run here (it needs: {found.how}); it is reported as '{entry.substitute}', {summary}",
        stacklevel=4,
    )
    return entry.substitute


def call_reward(
    reward: Reward, episodes: Sequence[Episode], timeout: float | None = 60.0, tokenizer: Any = None
) -> list[float]:
    """Call a reward: one finite number per episode, not yet weighted; 0 if the reward is not for the episode's task.

    Raises LmgymError, in one sentence, if the reward raises, returns anything but one finite number per episode,
    or takes longer than `timeout` seconds by the clock (None: no limit). A reward runs in a worker process
    (running/pooled.py), which is killed at its limit. One that must stay in this process (`Reward.unlimited` says
    why) gets an alarm signal instead. It interrupts Python code and regular expressions, but not a call that blocks
    inside a C library nor code that catches it, and it needs the main thread and a system with SIGALRM. A function
    with the attribute `limits_itself` gets no alarm: it works in time-limited processes (processes/pool.py) and
    limits each text by itself, so that a slow text costs its own reward and not the run. A function with the attribute
    `reads_sequence` gets prompt and answer as the `tokenizer` writes them (views.as_sequence).

    Example:
        >>> call_reward(build_rewards({"final_answer": 1.0})[0], episodes)
        [1.0, 0.0]
    """
    if getattr(reward.function, "pays_tokens", False):
        raise LmgymError(f"reward '{reward.name}' pays token by token; let lmgym.apply_rewards apply it")
    shown = as_read(reward, _shown(reward, episodes, timeout), tokenizer)
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
    return shown


def as_read(reward: Reward, shown: Sequence[Episode], tokenizer: Any) -> list[Episode]:
    """The episodes to judge as the function reads them: with `reads_sequence`, prompt and answer as two texts."""
    how, changed = getattr(reward.function, "reads_sequence", None), reward.strip_thinking or reward.post_process
    return [as_sequence(one, tokenizer, how == "tokens", bool(changed)) for one in shown] if how else list(shown)


def _judge(reward: Reward, episodes: Sequence[Episode], timeout: float | None) -> list[float]:
    """The numbers that the reward's function returns for these episodes, checked to be finite."""
    if not episodes:
        return []
    if reward.pooled is not None and timeout is not None and math.isfinite(timeout):
        pooled = pooled_values(reward.name, reward.pooled, episodes, timeout)
        if pooled is not None:
            return pooled
    call: tuple[Any, ...] = (
        [episode.text for episode in episodes],
        [episode.example for episode in episodes],
    )
    if getattr(reward.function, "takes_episodes", False):
        call = (list(episodes),)
    values = call_guarded(reward, call, timeout, episodes)
    return [finite_number(reward.name, value, index, episodes) for index, value in enumerate(values)]


def _shown(reward: Reward, episodes: Sequence[Episode], timeout: float | None) -> list[Episode]:
    if reward.post_process is None:
        return episodes_to_judge(reward, episodes)
    with guard_reward(reward, len(episodes), timeout):
        return episodes_to_judge(reward, episodes)


def call_guarded(
    reward: Reward, arguments: tuple[Any, ...], timeout: float | None, episodes: Sequence[Episode]
) -> list[Any]:
    """Call the reward's function under `guard_reward` and check that it returns one item per episode."""
    with guard_reward(reward, len(episodes), timeout):
        values = _as_list(result_of(reward.function(*arguments)))
    if isinstance(values, str):
        raise LmgymError(f"reward '{reward.name}' returned {values}; it must return a list of one number per episode")
    if len(values) != len(episodes):
        raise LmgymError(f"reward '{reward.name}' returned {len(values)} values for {len(episodes)} episodes")
    return values


@contextmanager
def guard_reward(reward: Reward, count: int, timeout: float | None) -> Iterator[None]:
    """Turn any exception in the body, or a body that takes longer than `timeout` seconds, into one LmgymError that
    names the reward. `count` is the number of episodes, for the message."""
    limit = None if getattr(reward.function, "limits_itself", False) else timeout
    try:
        with alarm(limit):
            yield
    except (LmgymError, KeyboardInterrupt, NeedsTorch):
        raise
    except TimeUp as error:
        raise LmgymError(
            f"reward '{reward.name}' did not return within {limit:g} s for {count} episodes{_place(error)}"
        ) from error
    except BaseException as error:  # SystemExit and CancelledError, too
        raise LmgymError(f"reward '{reward.name}' raised {describe(error)}{_place(error)}") from error


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


def _check_tokens(function: Callable[..., Any], options: Mapping[str, Any], key: str) -> None:
    """Raise LmgymError for options that exclude each other: a reward per token allows none of these six."""
    if getattr(function, "pays_tokens", False):
        for option in ("shaping", "each_turn", "normalise", "strip_thinking", "post_process", "correct_is_one"):
            if options.get(option):
                raise LmgymError(f"key '{key}.{option}': this reward pays token by token of itself; leave it out")
    if options.get("normalise") and (options.get("shaping") or options.get("each_turn")):
        raise LmgymError(f"key '{key}.normalise' is for a reward of whole answers; leave out shaping and each_turn")
    if options.get("shaping") and options.get("each_turn"):
        raise LmgymError(f"key '{key}': 'shaping' pays tokens and 'each_turn' turns; leave one of them out")


def _place(error: BaseException) -> str:
    """Where the error happened: " at FILE:LINE", the innermost line in the reward's own file."""
    return place(error, __file__, *adapters.FILES, coroutines.__file__, TimeUp.file)


def _as_list(values: Any) -> list[Any] | str:
    """The values as a list; if the function returned no list, the name of the type that it returned."""
    if isinstance(values, str | bytes | Mapping | Set) or not hasattr(values, "__len__"):
        return type(values).__name__
    return list(values)


def check_size(reward: Reward, episode: Episode) -> None:
    """Raise LmgymError if what a reward gave an episode is finite, and too large to train on."""
    value = episode.reward_components[reward.name]
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
        raise LmgymError(f"reward '{name}' returned {number} {where}; it must be finite")
    return number
