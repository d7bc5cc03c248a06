"""`lmgym compare A B` of two groups of seeds: is the one setting better, or was it lucky? Reads finished runs alone."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmgym.config.build import load_config
from lmgym.core.errors import LmgymError
from lmgym.core.registry import suggest
from lmgym.experiments.compared_models import check_same_question, choose_split, common_rewards, same_examples
from lmgym.experiments.compared_tables import print_differences, print_means
from lmgym.experiments.named_models import NamedModel
from lmgym.experiments.paired_metrics import completed, zero_result
from lmgym.experiments.results import read_summary
from lmgym.experiments.seed_groups import common_seeds
from lmgym.logs.console import Console
from lmgym.logs.formatting import decimal, json_text
from lmgym.rollouts.evaluate import better_directions
from lmgym.stats import paired
from lmgym.stats.paired import Paired


@dataclass(frozen=True)
class SeedComparison:
    """Each metric of two groups of runs with its difference, and its value in each run.

    Example: comparison.metrics["reward"].difference -> Interval(mean=0.06, low=0.01, high=0.11, count=3)"""

    first: str
    second: str
    seeds: list[int]
    split: str
    prompts: int
    metric: str  # the one to show seed by seed
    metrics: dict[str, Paired]
    values: dict[str, dict[str, list[float]]]  # of each metric: "first" and "second", a value per seed
    better: dict[str, int]  # 1 where higher is better, -1 where lower is; left out where the recipe does not say
    notes: list[str]  # sentences about seeds and metrics that were not compared

    def text(self) -> str:
        """The comparison as JSON; NaN and infinity are null."""
        return json_text(asdict(self))


def compare_groups(
    first: str,
    second: str,
    groups: tuple[dict[int, Path], dict[int, Path]],
    split: str | None = None,
    metric: str | None = None,
) -> SeedComparison:
    """Compare the evaluations of finished runs, seed by seed; `groups` are those of `seed_group`, and `first` and
    `second` their names. `split`: of the evaluation at the end of the runs (the default), or of their newest one.

    Raises LmgymError for less than two seeds in common, runs that were not asked alike, and an unknown split or metric.

    Example: compare_groups("runs/a", "runs/b", (seed_group("runs/a"), seed_group("runs/b")))"""
    # 1. Both groups must have answered the same examples in the same way.
    seeds, notes = common_seeds(*groups)
    sides = [
        NamedModel(name, load_config(group[seeds[0]] / "recipe.yaml"), run=group[seeds[0]])
        for name, group in zip((first, second), groups, strict=True)
    ]
    choose_split(sides, (), split)
    check_same_question(*sides)
    tasks = [side.config.evaluation.task or side.config.stages[-1].task for side in sides]
    if tasks[0] != tasks[1]:
        same_examples(*sides)
    rewards, unlike = common_rewards(*sides)
    # 2. The results of each run on that split.
    split = sides[0].config.evaluation.split
    every = completed([_results(group[seed], split) for group in groups for seed in seeds], zero_result)
    results = every[: len(seeds)], every[len(seeds) :]
    known = dict.fromkeys(name for run in every for name in run if not (name == "reward" and unlike))
    names = [name for name in known if all(name in run for run in every)]
    lacking = [f"{name} is not compared: not all runs have it" for name in known if name not in names]
    if metric is not None and metric not in names:
        raise LmgymError(f"--metric is '{metric}'; {suggest(metric, names)}")
    if not names:
        raise LmgymError(f"the runs of {first} and {second} have no metric in common on split '{split}'")
    # Some metrics have fewer: those of answers that a reward could not judge, or of prompts that it is not for.
    counts = {max(one["count"] for one in run.values()) for run in every}
    if len(counts) > 1:
        raise LmgymError(f"the runs were evaluated on different numbers of prompts: {sorted(counts)}")
    # 3. Their differences, seed by seed.
    values = {
        name: {
            side: [run[name]["mean"] for run in runs] for side, runs in zip(("first", "second"), results, strict=True)
        }
        for name in names
    }
    metrics = {
        name: paired.compare_seeds(
            values[name]["first"], values[name]["second"], shares=all(run[name].get("share") for run in every)
        )
        for name in names
    }
    metric = metric or next((name for name in names if metrics[name].equal != len(seeds)), names[0])
    better = better_directions(metrics, rewards)
    notes += [*unlike, *lacking]
    return SeedComparison(first, second, seeds, split, counts.pop(), metric, metrics, values, better, notes)


def print_seed_comparison(comparison: SeedComparison, console: Console) -> None:
    """Print tables of means, of differences, and of one metric seed by seed."""
    console.say(f"A: {comparison.first}")
    console.say(f"B: {comparison.second}")
    several = f"{len(comparison.seeds)} seeds, {comparison.prompts} prompts of {comparison.split}"
    print_means(f"{several}: mean over seeds [95% interval, Student's t]", comparison.metrics, console)
    title = "B - A, of the same seeds [95% interval, Student's t], p of the paired t test"
    print_differences(title, comparison.metrics, comparison.better, console)
    for note in comparison.notes:
        console.say(note)
    values = comparison.values[comparison.metric]
    rows = [
        (str(seed), decimal(a), decimal(b), decimal(b - a))
        for seed, a, b in zip(comparison.seeds, values["first"], values["second"], strict=True)
    ]
    console.table(f"{comparison.metric} of each seed", ("seed", "A", "B", "B - A"), rows)


def _results(run: Path, split: str) -> Mapping[str, Any]:
    """The results of a run on a split: at its end, or of its newest evaluation."""
    summary = read_summary(run / "summary.json")
    moments = [summary[moment] for moment in ("after", "newest")]
    found: Mapping[str, Any] | None = next((one["results"] for one in moments if one["split"] == split), None)
    if found is None:
        splits = dict.fromkeys(str(one["split"]) for one in moments)
        raise LmgymError(f"{run} was not evaluated on split '{split}'; {suggest(split, splits)}")
    return found
