"""Evaluation: answers to held-out prompts, every reward as a metric, with 95 % confidence intervals."""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lmgym.core.constraints import NonNegativeFloat, NonNegativeInt, PositiveInt
from lmgym.core.errors import LmgymError
from lmgym.core.registry import suggest
from lmgym.core.validation import Section
from lmgym.envs.base import Env
from lmgym.envs.single_turn import SingleTurn
from lmgym.envs.vector import Envs
from lmgym.inference.base import Decoding, MinP, Sampling, TopK, TopP
from lmgym.inference.generation_options import checked
from lmgym.logs.records import environment_numbers
from lmgym.rewards.base import Reward, episodes_to_judge
from lmgym.rewards.corpus import Corpus, corpora
from lmgym.rollouts.actor import Actor
from lmgym.rollouts.play import play, who_moved
from lmgym.rollouts.rollout import groups_of
from lmgym.stats.intervals import Interval, mean_interval, pass_at_k_each
from lmgym.stats.selection import best_of, majority
from lmgym.types import Episode, Example

SELECTED = re.compile(r"/(pass|maj|best)@\d+$")  # what is said of several answers to a prompt
RARE = {"unjudged": "reward", "environment_errors": "length/mean", "truncated/context": "truncated"}  # `counted_with`


@dataclass(kw_only=True)
class EvaluationSection(Section):
    """The `evaluation:` section of a recipe."""

    section = "evaluation"

    every: NonNegativeInt = 20
    """Steps between evaluations; there is always one at the start and one at the end of each stage. 0: only those."""
    split: str = "test"
    """Held-out split of the evaluations on the way, which early stopping and keep_best look at."""
    final_split: str | None = None
    """Another split for the before-and-after table, so that its numbers have not been selected on."""
    examples: NonNegativeInt = 256
    """Held-out prompts (all of them, where there are fewer). 0: no evaluation, as with evaluation: null."""
    samples: PositiveInt = 1
    """Answers per prompt; with more than one, pass@k is reported too, and maj@k of rewards that read a final answer."""
    best_of: str | None = None
    """A reward or metric that picks the best of `samples` answers: every other one is also reported of its choice."""
    temperature: NonNegativeFloat = 0.0
    """0 is greedy, or beam search where `generation` names num_beams. The sampling section's truncation is not taken
    over; its stops and its numbers of tokens are."""
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    """As in `sampling:`, where temperature is above 0."""
    max_new_tokens: PositiveInt | None = None
    min_new_tokens: NonNegativeInt | None = None
    """As in `sampling:`; left out, the stage's own."""
    generation: dict[str, Any] = field(default_factory=dict)
    """Keys of Hugging Face's GenerationConfig, such as {num_beams: 4}; where there are any, its `generate` decodes."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """As `rewards:`; these are reported besides the stage's own rewards."""
    task: dict[str, Any] | None = None
    """Evaluate on this task instead of the last stage's."""
    env: dict[str, Any] | None = None
    """Evaluate in this environment instead of the stage's, such as against chance after training against itself."""
    reference_nll: bool = False
    """Report the negative log-likelihood of held-out references (nats per token, end of sequence included) in every
    stage; without it only in those that imitate references."""
    keep_best: str | None = None
    """A metric; the model that was best by it is kept in the run folder's best/."""
    keep_best_mode: Literal["max", "min"] = "max"
    """Whether higher or lower is better: "min" for reference_nll."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.examples and (self.keep_best or self.final_split):
            raise LmgymError("evaluation.keep_best and final_split need evaluations, and examples is 0; remove them")
        self.generation = checked(self.generation, self.temperature)
        if self.best_of is not None and self.samples < 2:
            raise LmgymError(
                f"evaluation.best_of picks one of several answers, and samples is {self.samples}; raise it"
            )

    def decoding(self, sampling: Sampling) -> Decoding:
        """How answers are decoded in the evaluations of a stage that samples like this."""
        settings = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p", "generation")}
        for name in ("max_new_tokens", "min_new_tokens"):
            settings[name] = getattr(sampling if getattr(self, name) is None else self, name)
        return Decoding(stop=sampling.stop, stop_ids=sampling.stop_ids, **settings)


@dataclass(frozen=True)
class Evaluation:
    """Results by metric, the answers behind them, and the figures of all answers at once ("bleu/corpus": in both).
    Example: evaluation.results["final_answer"] -> Interval(mean=0.61, low=0.57, high=0.65, count=512)"""

    results: dict[str, Interval]
    episodes: list[Episode]
    corpora: dict[str, Corpus] = field(default_factory=dict)


def evaluate(
    examples: Sequence[Example],
    actor: Actor,
    sampling: Sampling,
    rewards: Sequence[Reward],
    envs: Envs | Callable[[], Env] = SingleTurn,
    seed: int = 0,
    samples: int = 1,
    timeout: float = 60.0,
    judge: str | None = None,
    rewards_failed: float = 0.0,
) -> Evaluation:
    """Answer each example `samples` times and score the answers. `judge` is the reward that picks the best of them. An
    answer that a reward did not judge is not in its mean, and a metric without any answer is left out; "unjudged" is
    the share of those that none judged, and "unjudged/NAME" of those that the reward NAME did not judge. An episode
    whose environment failed is in "environment_errors" and in no other metric, but for what it has noted. That of a
    player who has never moved is in none.

    Random numbers are a function of (seed, place), not of the training step, so that two evaluations of the same
    examples are paired. Intervals are over prompts (stats/intervals.py); there is none (NaN) for a single prompt, for
    equal values that are not 0 or 1, and for a "NAME/corpus" that is not of sums, as the number of distinct words."""
    prompts = [(group, example) for group, example in enumerate(examples) for _ in range(samples)]
    totals = [replace(reward, shaping=False) for reward in rewards]
    episodes = play(prompts, actor, sampling, (seed, "evaluation"), envs, totals, timeout, rewards_failed)
    groups = groups_of(episodes)
    values = measured(groups, rewards) | by_task(groups) | noted(groups)
    values |= chosen_by(judge, groups, rewards) if judge is not None else {}
    if sampling.fixed_length:
        del values["truncated"]
    found = corpora(rewards, [_answered(group) for group in groups], timeout)
    results = {}
    for name, numbers in values.items():
        if known := [own for own in numbers if own]:
            results[name] = mean_interval(known, shares=is_share(name, values))
        if (whole := f"{name}/corpus") in found:
            results[whole] = found[whole].interval
    return Evaluation(results, episodes, found)


def measured(groups: Sequence[Sequence[Episode]], rewards: Sequence[Reward]) -> dict[str, list[list[float]]]:
    """The numbers behind an evaluation: by metric, one list per prompt of one number per answer (pass@k: one per
    prompt). "length/mean" are tokens; "length" is a reward. Answers that were not judged have no number, nor have
    episodes whose environment failed, nor those to prompts that a reward with `tasks` or `where` is not for, so a list
    may be empty."""
    failed = [[float(bool(episode.error)) for episode in who_moved(group)] for group in groups]
    ks, groups = _sizes(groups), [_answered(group) for group in groups]
    values = {"reward": [[episode.score for episode in group if episode.judged] for group in groups]}
    for reward in rewards:
        asked = _asked(reward, groups)
        own = values[reward.name] = _values_of(reward.name, asked)
        if all(value in (0.0, 1.0) for group in own for value in group):
            values |= {f"{reward.name}/pass@{k}": _each(k, _pass_at_k, own) for k in ks}
            values |= _elected(reward, asked, own, ks)
        if any(episode.reward_components[reward.name] is None for group in asked for episode in group):
            lacking = [[float(e.reward_components[reward.name] is None) for e in group] for group in asked]
            values[f"unjudged/{reward.name}"] = lacking
    if any(not episode.judged for group in groups for episode in group):
        values["unjudged"] = [[float(not episode.judged) for episode in group] for group in groups]
    values["length/mean"] = [[float(sum(len(t.action_ids) for t in e.turns)) for e in group] for group in groups]
    values["truncated"] = [[float(episode.truncated) for episode in group] for group in groups]
    if any(episode.overflowed for group in groups for episode in group):
        values["truncated/context"] = [[float(episode.overflowed) for episode in group] for group in groups]
    if any(map(any, failed)):
        values["environment_errors"] = failed
    return values


def _answered(group: Sequence[Episode]) -> list[Episode]:
    """The episodes whose environment did not fail: an answer that a failure has cut short is no wrong answer. Nor is it
    one of a player's who has never moved."""
    return [episode for episode in who_moved(group) if not episode.error]


def _asked(reward: Reward, groups: Sequence[Sequence[Episode]]) -> list[Sequence[Episode]]:
    """The groups of the prompts that the reward is for; of others, for which it is 0, a group without episodes."""
    return [group if group and reward.applies(group[0].example) else [] for group in groups]


def _sizes(groups: Sequence[Sequence[Episode]]) -> list[int]:
    """The k of pass@k and the like: 1, 2, 4 ... and all; none for single answers."""
    samples = min(map(len, groups), default=0)
    return sorted({2**power for power in range(samples.bit_length())} | {samples}) if samples > 1 else []


def _values_of(reward: str, groups: Sequence[Sequence[Episode]]) -> list[list[float]]:
    values = ([episode.reward_components[reward] for episode in group] for group in groups)
    return [[value for value in group if value is not None] for group in values]


def _each(k: int, number: Callable[..., float], *columns: Sequence[Sequence[Any]]) -> list[list[float]]:
    """For each prompt the number of its columns and k; none for a prompt of which fewer than k answers were judged."""
    rows = zip(*columns, strict=True)
    return [[number(*own, k)] if len(own[0]) >= k else [] for own in rows]


def _pass_at_k(values: Sequence[float], k: int) -> float:
    return pass_at_k_each([values], k)[0][0]


def _elected(
    reward: Reward, groups: Sequence[Sequence[Episode]], values: Sequence[Sequence[float]], ks: Sequence[int]
) -> dict[str, list[list[float]]]:
    """maj@k of a reward that says what an answer votes for (`vote`, a function of its text)."""
    vote = getattr(reward.function, "vote", None)
    if vote is None or reward.selective:
        return {}
    judged = [[one for one in group if one.reward_components[reward.name] is not None] for group in groups]
    votes = [[vote(episode.text) for episode in episodes_to_judge(reward, group)] for group in judged]
    return {f"{reward.name}/maj@{k}": _each(k, majority, values, votes) for k in ks if k > 1}


def chosen_by(
    judge: str, groups: Sequence[Sequence[Episode]], rewards: Sequence[Reward]
) -> dict[str, list[list[float]]]:
    """ "NAME/best@K": each reward of the answer that the judge, one of the rewards, likes best among K."""
    names = [reward.name for reward in rewards]
    if judge not in names:
        raise LmgymError(f"evaluation.best_of: there is no reward or metric '{judge}'; {suggest(judge, names)}")
    found = dict[str, list[list[float]]]()
    for reward, name in zip(rewards, names, strict=True):
        asked = _asked(reward, [_answered(group) for group in groups])
        parts = [[episode.reward_components for episode in group] for group in asked]
        both = [[own for own in group if own[name] is not None and own[judge] is not None] for group in parts]
        values, liked = ([[own[key] for own in group] for group in both] for key in (name, judge))
        found |= {f"{name}/best@{k}": _each(k, best_of, values, liked) for k in _sizes(groups) if k > 1}
    return found


def counted_with(name: str) -> str | None:
    """The metric beside which an evaluation has this one only where it is above 0: where that one is and this one is
    not, this one is 0. None for a metric that is never left out so.

    Example: counted_with("unjudged/final_answer") -> "final_answer" """
    return name.removeprefix("unjudged/") if name.startswith("unjudged/") else RARE.get(name)


def is_share(name: str, among: Collection[str] = ()) -> bool:
    """Whether a metric lies between 0 and 1 by its definition, though its values are not only 0 and 1: pass@k and
    maj@k, and best@k of a reward that is right or wrong, which has a pass@1 `among` the metrics.

    Example: is_share("final_answer/best@4", ["final_answer", "final_answer/pass@1"]) -> True"""
    whole, best, _ = name.partition("/best@")
    return "/pass@" in name or "/maj@" in name or (bool(best) and f"{whole}/pass@1" in among)


def better_directions(names: Iterable[str], rewards: Sequence[Reward]) -> dict[str, int]:
    """Of each metric 1 if higher is better, -1 if lower is better; left out where the recipe does not say. The reward
    and its parts of positive weight should rise, parts of negative weight, errors and cut answers fall."""
    known = dict.fromkeys(("truncated", "truncated/context", "environment_errors", "unjudged", "reference_nll"), -1)
    known |= {"reward": 1, "preference/accuracy": 1, "preference/margin": 1, "calibration/error": -1}
    known |= dict.fromkeys(("step/accuracy", "step/first_wrong", "step/all_right"), 1)
    known |= {reward.name: 1 if reward.weight > 0 else -1 for reward in rewards if reward.weight}
    found = {}
    for name in names:
        whole = SELECTED.sub("", name.removesuffix("/corpus"))
        whole = "reward" if whole.startswith("reward/") else whole  # of one task of a mixture
        if whole in known:
            found[name] = known[whole]
    return found


def by_task(groups: Sequence[Sequence[Episode]]) -> dict[str, list[list[float]]]:
    """In a mixture of tasks, the score of each task, as "reward/TASK"."""
    values: dict[str, list[list[float]]] = {}
    for group in groups:
        if "mixture" in group[0].example.meta:
            task = f"reward/{group[0].example.meta['task']}"
            values.setdefault(task, []).append([episode.score for episode in _answered(group) if episode.judged])
    return values


def noted(groups: Sequence[Sequence[Episode]]) -> dict[str, list[list[float]]]:
    """The numbers that environments have noted on turns, as "environment/NAME"; prompts without any are left out."""
    values: dict[str, list[list[float]]] = {}
    for group in groups:
        for name, numbers in environment_numbers(group).items():
            values.setdefault(f"environment/{name}", []).append(numbers)
    return values
