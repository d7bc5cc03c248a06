"""The results of several runs of one recipe: a table over seeds or settings, results.json, table.md and plot.png."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmgym.config.schema import Config
from lmgym.core.files import read_json
from lmgym.core.visible import visible
from lmgym.experiments.grid import label, short_names
from lmgym.experiments.paired_metrics import completed, zero_result
from lmgym.logs.console import Console
from lmgym.logs.formatting import decimal, json_text
from lmgym.logs.plots.curves import curves_plot
from lmgym.logs.records import rename_evaluations
from lmgym.stats.intervals import Interval, student_t
from lmgym.training.checkpoints import checkpoint

SEEDS_SHOWN = 5  # most seeds with one column each; more share one column


@dataclass(frozen=True)
class Member:
    """One of the runs: its label, its values of the swept keys (without the seed), and its config.

    Example: Member("group_size-4,seed-0", {"algorithm.group_size": 4}, config)"""

    label: str
    settings: dict[str, Any]
    config: Config

    @property
    def folder(self) -> Path:
        return Path(self.config.out or "")

    @property
    def group(self) -> str:
        """The label without the seed: runs of one setting with different seeds share it."""
        return label(self.settings, short_names(list(self.settings)))


@dataclass(frozen=True)
class Table:
    """Headings and rows of text, for the terminal and for a markdown file."""

    title: str
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]
    bold: tuple[int, ...] = ()

    def markdown(self) -> str:
        """The title and the table in markdown."""
        lines = [self.headings, tuple("---" for _ in self.headings), *self.rows]
        cells = (" | ".join(visible(cell).replace("|", "\\|") for cell in line) for line in lines)
        return f"{self.title}\n\n" + "".join(f"| {line} |\n" for line in cells)


def report(
    members: Sequence[Member], metric: str, mode: str, folder: Path, failed: Mapping[str, str], console: Console
) -> None:
    """Write results.json, table.md and plot.png about the finished runs, and print the table.

    A table over seeds has every metric. A table over settings is sorted by `metric` on the recipe's evaluation split,
    and shows the same metric on the final split too."""
    summaries = {
        member.label: read_summary(member.folder / "summary.json") for member in members if member.label not in failed
    }
    if not summaries:
        return
    # Runs of one setting form a group; the seeds are its samples.
    groups: dict[str, list[Member]] = {}
    for member in members:
        if member.label in summaries:
            groups.setdefault(member.group, []).append(member)
    best = _order(groups, summaries, metric, mode)
    chooses = bool(members[0].settings)
    if chooses:
        table = settings_table({name: groups[name] for name in best}, summaries, metric, mode)
    else:
        table = seeds_table(groups[""], summaries)
    tree = {
        "metric": metric,
        "mode": mode,
        "runs": [_entry(member, summaries.get(member.label), failed.get(member.label)) for member in members],
        "settings": [
            {"settings": groups[name][0].settings, "runs": [member.label for member in groups[name]]}
            | {moment: _over_seeds(groups[name], summaries, moment) for moment in ("newest", "before", "after")}
            for name in best
        ],
    }
    checkpoint.write_text(folder / "results.json", json_text(tree))
    checkpoint.write_text(folder / "table.md", table.markdown())
    console.table(table.title, table.headings, table.rows, table.bold)
    curves = {name: [member.folder / "metrics.jsonl" for member in groups[name]] for name in best}
    share = all(summary["newest"]["results"].get(metric, {}).get("share") for summary in summaries.values())
    plot = curves_plot(curves, folder / "plot.png", metric, share)
    console.say(f"table: {folder / 'table.md'}, all numbers: {folder / 'results.json'}")
    console.say(f"plot:  {plot}")


def read_summary(path: Path) -> dict[str, Any]:
    """The summary of a run; null, JSON's form of NaN, becomes NaN again."""
    summary = rename_evaluations(read_json(path))
    summary.setdefault("before", {"step": None, "split": None, "results": {}})  # a stage that became the last one late
    for moment in ("newest", "before", "after"):
        for interval in summary[moment]["results"].values():
            interval |= {key: math.nan for key, value in interval.items() if value is None}
    return summary


def seeds_table(members: Sequence[Member], summaries: Mapping[str, Any]) -> Table:
    """One row for each metric: its mean over the seeds before and after (with an interval), and each seed's number. A
    "-" stands for a number that is missing, and for a mean if the metric of one of its seeds is missing."""
    every = _completed(members, summaries, "before", "after")
    befores, afters = every[: len(members)], every[len(members) :]
    seeds = [str(member.config.seed) for member in members]
    rows = []
    for name in dict.fromkeys(name for after in afters for name in after):
        each = [decimal(after[name]["mean"]) if name in after else "-" for after in afters]
        cells = each if len(seeds) <= SEEDS_SHOWN else [" ".join(each)]
        start = [before[name]["mean"] for before in befores if name in before]
        before = decimal(sum(start) / len(start)) if len(start) == len(seeds) else "-"
        whole = all(name in after for after in afters)
        rows.append((name, before, str(_over(after[name] for after in afters)) if whole else "-", *cells))
    heads = [f"seed {seed}" for seed in seeds] if len(seeds) <= SEEDS_SHOWN else [f"seeds {', '.join(seeds)}"]
    # Metrics of answers that a reward could not judge, or of prompts that it is not for, are of fewer prompts.
    count = max((one["count"] for one in afters[0].values()), default=0)
    counts = f"{count} prompts of {summaries[members[0].label]['after']['split']}" if count else "no evaluation"
    title = f"{len(seeds)} seeds, {counts}: mean over seeds [95% interval, Student's t, shares within 0 and 1]"
    return Table(title, ("metric", "before", "after", *heads), rows)


def settings_table(
    groups: Mapping[str, Sequence[Member]], summaries: Mapping[str, Any], metric: str, mode: str
) -> Table:
    """One row per setting, in the order of `groups`; the first is the best."""
    first = next(iter(groups.values()))[0]
    newest, after = (summaries[first.label][moment] for moment in ("newest", "after"))
    informs = newest["split"] != after["split"]
    names = short_names(list(first.settings))
    rows = []
    for members in groups.values():
        found = [_result(members, summaries, moment, metric) for moment in ("newest", "after")]
        shown = [str(interval) for interval in (found if informs else found[:1])]
        values = [_cell(value) for value in members[0].settings.values()]
        rows.append((*values, str(len(members)), *shown))
    several = max(len(members) for members in groups.values()) > 1
    over = "over seeds, Student's t, shares within 0 and 1" if several else "over prompts, one seed each"
    title = (
        f"{metric} on {newest['split']}, {'highest' if mode == 'max' else 'lowest'} first: mean [95% interval {over}]"
    )
    heads = [newest["split"]] + [after["split"]] * informs
    title += f"; {after['split']} is for information only" * informs
    return Table(title, (*names.values(), "seeds", *heads), rows, bold=(0,))


def _order(groups: Mapping[str, Sequence[Member]], summaries: Mapping[str, Any], metric: str, mode: str) -> list[str]:
    """Names of groups, best first on the recipe's evaluation split; equal groups in the recipe's order."""
    sign = -1 if mode == "max" else 1
    means = {name: _result(members, summaries, "newest", metric).mean for name, members in groups.items()}
    return sorted(groups, key=lambda name: (math.isnan(means[name]), sign * means[name]))


def _result(members: Sequence[Member], summaries: Mapping[str, Any], moment: str, metric: str) -> Interval:
    """The interval over seeds; for a single run its own interval, over prompts."""
    intervals = [summaries[member.label][moment]["results"].get(metric) for member in members]
    if None in intervals:
        return Interval(math.nan, math.nan, math.nan, 0)
    return _over(intervals) if len(intervals) > 1 else Interval(**intervals[0])


def _over(results: Iterable[Mapping[str, Any]]) -> Interval:
    """The interval over seeds of the means of a metric; of a share if it is one in each run."""
    known = list(results)
    return student_t([one["mean"] for one in known], share=all(one.get("share") for one in known))


def _over_seeds(members: Sequence[Member], summaries: Mapping[str, Any], moment: str) -> dict[str, Any]:
    every = _completed(members, summaries, moment)
    names = [name for name in every[0] if all(name in one for one in every)]
    results = {name: asdict(_over(one[name] for one in every)) for name in names}
    return {"split": summaries[members[0].label][moment]["split"], "results": results}


def _completed(members: Sequence[Member], summaries: Mapping[str, Any], *moments: str) -> list[dict[str, Any]]:
    """The results of every run at each moment, one moment after the other, with the metrics that are 0 in some."""
    found = [summaries[member.label][moment]["results"] for moment in moments for member in members]
    return completed(found, zero_result)


def _entry(member: Member, summary: Any, sentence: str | None) -> dict[str, Any]:
    entry = {"label": member.label, "folder": str(member.folder), "seed": member.config.seed}
    entry["settings"] = member.settings
    if summary is None:
        return {**entry, "failed": sentence or "not finished"}
    for moment in ("newest", "before", "after"):
        entry[moment] = {key: summary[moment][key] for key in ("step", "split", "results")}
    return entry


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
