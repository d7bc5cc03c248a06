"""How often a judge prefers one model's answers to another's: `lmgym compare A B --judge JUDGE`.

A judge likes what stands first, or last. So each pair is shown in both orders, and how much the place has counted is a
number of its own."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from yaml import YAMLError

from lmgym.config.yaml import load_yaml
from lmgym.core import registry
from lmgym.core.errors import LmgymError, represent
from lmgym.core.validation import parameters_of
from lmgym.logs.console import Console
from lmgym.processes.pool import Failure
from lmgym.rewards.base import Reward, call_reward, episodes_to_judge
from lmgym.rewards.building import build_rewards
from lmgym.stats.intervals import Interval, mean_interval
from lmgym.types import Episode

JUDGES = "judge_pairs (a local model) or endpoint_pairs (a chat endpoint)"


@dataclass(frozen=True)
class WinRates:
    """What a judge says of pairs of answers to the same prompts. Shares between 0 and 1; the unit is the prompt.

    Example: print_win_rates(win_rates(judge, first_groups, second_groups), console)"""

    judge: str
    second_wins: Interval  # how often B's answer wins, a tie counting one half
    shown_first_wins: Interval  # how often the answer that is shown first wins, A's or B's: one half without a bias
    orders_agree: Interval  # how often the same answer wins in both orders; equal answers are left out
    pairs: int
    equal: int  # pairs of equal answers: ties that nobody is asked about
    unjudged: int  # pairs without a verdict for both orders, left out


def read_judge(text: str) -> tuple[Reward, Reward]:
    """The judge of `--judge`, a reward of pairs with its arguments: once as it judges B's answer shown first, once
    shown second. Raises LmgymError for what is no such reward.

    Example: read_judge("judge_pairs: {model: Qwen/Qwen2.5-7B-Instruct}")"""
    try:
        section = load_yaml(text)
    except (YAMLError, ValueError, RecursionError):
        section = None
    name, given = next(iter(section.items())) if isinstance(section, Mapping) and len(section) == 1 else ("", None)
    if not isinstance(given, Mapping):
        raise LmgymError(f"--judge is {represent(text)}; write 'NAME: {{model: ...}}', where NAME is {JUDGES}")
    name = str(name)
    function = registry.get("reward", str(given.get("reward", name)))
    if not {"against", "order"} <= {*parameters_of(function, given=1)[0]}:
        raise LmgymError(f"--judge names '{name}', which does not compare with the reference; it may be {JUDGES}")
    for key in ("against", "opponents", "order", "weight", "tasks", "where"):
        if key in given:
            raise LmgymError(f"--judge: '{key}' has no effect on a win rate; leave it out")
    orders = ("first", "second")
    built = [build_rewards({name: {**given, "against": "reference", "order": order}})[0] for order in orders]
    return built[0], built[1]


def win_rates(
    judge: tuple[Reward, Reward], first: Sequence[Sequence[Episode]], second: Sequence[Sequence[Episode]]
) -> WinRates:
    """Of the groups of answers of two models, prompt by prompt; the n-th answer meets the n-th one of the other."""
    # 1. B's answer is judged beside A's, which takes the reference's place; each pair is a group of its own.
    pairs, prompts = list[Episode](), list[int]()
    for prompt, (group, others) in enumerate(zip(first, second, strict=True)):
        for answers in zip(group, others, strict=False):  # an episode whose environment failed is missing
            one, other = episodes_to_judge(judge[0], answers)
            example = replace(other.example, references=(one.text,))
            pairs.append(replace(other, example=example, group=len(pairs)))
            prompts.append(prompt)
    plain = [replace(one, strip_thinking=False, post_process=None) for one in judge]  # it was done above
    values = [call_reward(one, pairs, timeout=None) for one in plain]
    # 2. What both orders of each pair say, by prompt.
    wins, places, agree = ([list[float]() for _ in first] for _ in range(3))
    equal = judged = 0
    for prompt, pair, ahead, behind in zip(prompts, pairs, *values, strict=True):
        tie = pair.text == pair.example.references[0]
        equal += tie
        if isinstance(ahead, float) and isinstance(behind, float):
            judged += 1
            wins[prompt].append((ahead + behind) / 2)
            if not tie:
                places[prompt].append((ahead + 1 - behind) / 2)
                agree[prompt].append(float((ahead - 0.5) * (behind - 0.5) > 0))
    if not judged:
        failure = next((one for one in values[0] if isinstance(one, Failure)), None)
        raise LmgymError(f"the judge has judged no pair: {failure.message if failure else 'it gave no verdict'}")
    shares = (_shares(wins), _shares(places), _shares(agree))
    return WinRates(judge[0].name, *shares, len(pairs), equal, len(pairs) - judged)


def print_win_rates(rates: WinRates, console: Console) -> None:
    """Print the three shares, and what they mean."""
    left_out = f", {rates.unjudged} not judged" if rates.unjudged else ""
    title = f"{rates.judge} of {rates.pairs} pairs in both orders ({rates.equal} equal{left_out}) [95% interval]"
    rows = [("B's answer wins", rates.second_wins)]
    if rates.equal < rates.pairs - rates.unjudged:
        rows += [("the one shown first wins", rates.shown_first_wins), ("both orders agree", rates.orders_agree)]
    console.table(title, ("share", "mean"), [(name, str(share)) for name, share in rows])


def _shares(values: Sequence[Sequence[float]]) -> Interval:
    """The mean over the prompts that have a value."""
    known = [own for own in values if own]
    return mean_interval(known, shares=True) if known else Interval(math.nan, math.nan, math.nan, 0, share=True)
