"""`lmgym compare A B`: two models answer the same examples with the same decoding; is the difference significant?"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from typing import Any

from lmgym.config.schema import Config
from lmgym.core.errors import LmgymError
from lmgym.core.registry import suggest
from lmgym.experiments.compared_models import (
    check_same_question,
    choose_split,
    common_rewards,
    find_models,
    same_examples,
)
from lmgym.experiments.compared_tables import print_differences, print_means
from lmgym.experiments.evaluations import equal_answers
from lmgym.experiments.named_models import NamedModel
from lmgym.experiments.paired_metrics import Numbers, completed, numbers_of, pair_metrics, zeros
from lmgym.experiments.win_rates import WinRates, print_win_rates, read_judge, win_rates
from lmgym.logs.console import Console
from lmgym.logs.formatting import decimal, json_text
from lmgym.rewards.base import Reward, check_examples
from lmgym.rollouts.evaluate import Evaluation, better_directions
from lmgym.rollouts.rollout import groups_of
from lmgym.stats.paired import Paired
from lmgym.training.planning.lengths import check_lengths
from lmgym.training.planning.preflight import cut_prompts
from lmgym.training.setup import actor_of, evaluate_actor
from lmgym.types import Episode, Example

ALWAYS = ("reward", "length/mean", "truncated")  # metrics of every task; the task's own metrics tell more


@dataclass(frozen=True)
class Comparison:
    """The result: each metric of both models with its difference, and every example with both answers.

    Example: comparison.metrics["final_answer"].difference -> Interval(mean=0.25, low=0.08, high=0.41, count=64)"""

    first: str
    second: str
    split: str
    samples: int
    decoding: dict[str, Any]
    metric: str  # selects the examples to show
    metrics: dict[str, Paired]
    examples: list[dict[str, Any]]  # id, prompt, references; "first" and "second" have texts, and values by metric
    better: dict[str, int]  # 1 where higher is better, -1 where lower is; left out where the recipe does not say
    notes: list[str]  # sentences about metrics that were not compared, and about equal answers
    judged: WinRates | None = None  # if a judge was asked

    def most_different(self, limit: int = 4) -> list[dict[str, Any]]:
        """The examples with the largest differences in `metric`: alternately one where the first model is higher and
        one where the second is."""
        means = [[_mean(row[side]["values"][self.metric]) for side in ("first", "second")] for row in self.examples]
        gaps = [0.0 if math.isnan(second - first) else second - first for first, second in means]
        order = sorted(range(len(gaps)), key=lambda index: -abs(gaps[index]))
        sides = [[index for index in order if gaps[index] * sign > 0] for sign in (-1, 1)]
        alternating = [index for index in chain.from_iterable(zip_longest(*sides)) if index is not None]
        return [self.examples[index] for index in alternating[:limit]]

    def text(self) -> str:
        """The comparison as JSON; NaN and infinity are null."""
        return json_text(asdict(self))


def compare_models(
    first: str,
    second: str,
    overrides: Sequence[str] = (),
    split: str | None = None,
    metric: str | None = None,
    console: Console | None = None,
    judge: str | None = None,
) -> Comparison:
    """Answer the same examples with both models, one model after the other, and compare them prompt by prompt.

    `overrides` are `key=value` for both recipes. `split` defaults to the recipe's evaluation.final_split, or else its
    evaluation.split. `metric` selects the examples to show; by default it is the task's first metric in which any
    differ. `judge`, for win rates, is a reward that compares pairs: "judge_pairs: {model: FOLDER}". Sampled answers use
    the same random numbers on both sides. Raises LmgymError, before any model is loaded, if prompts or decoding of the
    two differ, and names the difference.

    Example: compare_models("runs/a/recipe.yaml", "runs/a", ["evaluation.examples=1319"]).metrics["final_answer"]"""
    console = console or Console(quiet=True)
    # Refuse an unfair comparison before any model is loaded.
    sides = find_models(first, second, overrides)
    choose_split(sides, overrides, split)
    check_same_question(*sides)
    examples = same_examples(*sides)
    rewards, notes = common_rewards(*sides)
    judges = None if judge is None else read_judge(judge)
    check_examples(judges or (), examples)
    known = [*(reward.name for reward in rewards), *ALWAYS]
    if metric is not None and (metric not in known or (metric == "reward" and notes)):
        raise LmgymError(f"--metric is '{metric}'; {suggest(metric, known)}")
    # Both sides compute in the precision of the first run that has one.
    config, results = sides[0].config, []
    compute = sides[0].compute or sides[1].compute
    for letter, side in zip("AB", sides, strict=True):
        weights = f", weights of {side.weights}" if side.weights and str(side.weights) != side.name else ""
        console.say(f"{letter}: {side.name}{weights}")
        result, compute = _answers(side, compute, config, examples, rewards, console)
        results.append(result)
    # Each metric per prompt, then paired.
    groups, section = [groups_of(result.episodes) for result in results], config.evaluation
    best_of = section.best_of or sides[1].config.evaluation.best_of
    values = completed([numbers_of(answered, rewards, best_of) for answered in groups], zeros)
    for own in values if notes else ():
        del own["reward"]
    metrics, unpaired = pair_metrics(values[0], values[1], [result.corpora for result in results])
    names = [name for name in metrics if name in values[0]]
    if metric is not None and metric not in metrics:
        raise LmgymError(f"--metric is '{metric}', by which no prompt was judged for both")
    rows = _rows(examples, groups, [{name: own[name] for name in names} for own in values])
    differing = (name for name in names if name not in ALWAYS and metrics[name].equal != metrics[name].difference.count)
    metric = metric or next(differing, names[0])
    decoding = asdict(section.decoding(config.stages[-1].sampling))
    better = better_directions(metrics, rewards)
    judged = None if judges is None else win_rates(judges, *groups)
    asked = (section.split, section.samples, decoding)
    notes += [*unpaired, *equal_answers(section, *groups)]
    return Comparison(first, second, *asked, metric, metrics, rows, better, notes, judged)


def print_comparison(comparison: Comparison, console: Console, limit: int = 4) -> None:
    """Print tables of means and of differences, and the answers that differ most."""
    count = len(comparison.examples)
    several = f", {comparison.samples} answers each" if comparison.samples > 1 else ""
    print_means(f"{count} prompts of {comparison.split}{several}: mean [95% interval]", comparison.metrics, console)
    title = "B - A, of the same prompts [95% interval]"
    print_differences(title, comparison.metrics, comparison.better, console)
    for note in comparison.notes:
        console.say(note)
    if comparison.judged is not None:
        print_win_rates(comparison.judged, console)
    metric, different = comparison.metric, comparison.most_different(limit)
    if not different:
        console.say(f"no prompt differs on {metric}")
        return
    blocks = []
    for row in different:
        prompt = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
        block = {"prompt": prompt}
        for letter, side in (("A", "first"), ("B", "second")):
            block[f"{letter}: {decimal(_mean(row[side]['values'][metric]))}"] = row[side]["texts"][0]
        blocks.append({**block, "reference": row["references"][0]} if row["references"] else block)
    console.blocks(f"largest differences on {metric}, A higher and B higher by turns", blocks)


def _answers(
    side: NamedModel,
    compute: str | None,
    config: Config,
    examples: Sequence[Example],
    rewards: list[Reward],
    console: Console,
) -> tuple[Evaluation, str]:
    """The scored answers of one model, and the precision in which it computed."""
    policy = side.load(compute)
    if cut := cut_prompts(examples, side.config.policy, policy):
        console.say(cut)
    check_lengths(examples, side.config, config.stages[-1], policy)
    result = evaluate_actor(config, actor_of(side.config, policy), examples, rewards)
    return result, str(policy.compute).removeprefix("torch.")


def _rows(
    examples: Sequence[Example], groups: Sequence[Sequence[Sequence[Episode]]], values: Sequence[Numbers]
) -> list[dict[str, Any]]:
    """Every example with the answers of both sides, and their values by metric."""
    rows = []
    for index, example in enumerate(examples):
        prompt = example.prompt if isinstance(example.prompt, str) else list(example.prompt)
        row: dict[str, Any] = {"id": example.id, "prompt": prompt, "references": list(example.references)}
        for side, answered, own in zip(("first", "second"), groups, values, strict=True):
            texts = [episode.text for episode in answered[index]]
            row[side] = {"texts": texts, "values": {name: numbers[index] for name, numbers in own.items()}}
        rows.append(row)
    return rows


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan  # not judged
