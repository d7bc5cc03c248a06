"""Several runs of one recipe: `runs: {seeds: [0, 1, 2], sweep: {optimizer.learning_rate: [1.0e-5, 1.0e-4]}}`.

OUT/
    recipe.yaml       the recipe with its `runs:`; `lmgym train OUT` resumes it
    seed-0/ ...       one run folder each (docs/run_folder.md), with log.txt if runs are parallel
    results.json, table.md, plot.png    see results.py"""

import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

from lmgym.config.build import build_config, resolved
from lmgym.config.schema import STAGE_KEYS, Config
from lmgym.config.yaml import apply_override, check_heard, load_yaml, own_key, read_yaml, write_yaml
from lmgym.core.constraints import PositiveInt
from lmgym.core.errors import LmgymError, describe
from lmgym.core.files import read_json
from lmgym.core.registry import suggest
from lmgym.core.validation import Section, check_arguments
from lmgym.experiments.grid import SEED, expand, expands, flat, holds, says_expand
from lmgym.experiments.parallel_runs import train_in_parallel
from lmgym.experiments.results import Member, report
from lmgym.logs.console import Console
from lmgym.logs.writer import disk_errors
from lmgym.rewards.building import available_metrics
from lmgym.rollouts.evaluate import SELECTED
from lmgym.training.checkpoints import checkpoint
from lmgym.training.loop import train
from lmgym.training.setup import count_epochs, training_examples

ALWAYS = ("reward", "length/mean", "truncated", "reference_nll")  # metrics that no section names


@dataclass(kw_only=True)
class Runs(Section):
    """The `runs:` section of a recipe, which makes it several runs.

    Example: Runs(seeds=[0, 1, 2], sweep={"algorithm.group_size": [4, 8]}, jobs=2)"""

    section = "runs"

    seeds: list[int] = field(default_factory=list)
    """One run for each; by default the recipe's seed."""
    sweep: dict[str, Any] = field(default_factory=dict)
    """Dotted key: list of values; stages by name, as in overrides. All combinations are run."""
    jobs: PositiveInt = 1
    """Number of parallel runs, each in a separate process."""
    metric: str | None = None
    """The metric, on evaluation.split, that sorts the table of a sweep; by default the last stage's first reward."""
    mode: Literal["max", "min"] = "max"
    """max: a higher `metric` is better; min: a lower one."""


@dataclass(frozen=True)
class Plan:
    """A checked recipe with `runs:`: the section, the recipe's tree (without `out`), and all runs."""

    section: Runs
    tree: dict[str, Any]
    out: str | None
    members: list[Member]
    metric: str


def plan(path: Path, overrides: Sequence[str] = ()) -> Plan | None:
    """The runs of a recipe, or None for a recipe of a single run. Every combination is checked now, so that a wrong key
    is found before the first run trains.

    Raises LmgymError naming the file, the run and the key at fault.

    Example: [member.label for member in plan(Path("lmgym/recipes/quickstart.yaml"), ["runs.seeds=[0,1]"]).members]"""
    tree = read_yaml(path)
    for override in overrides:
        apply_override(tree, override, STAGE_KEYS)
    if tree.get("runs") is None and not expands(tree):
        return None
    try:
        planned = plan_tree(tree)
    except LmgymError as error:
        raise LmgymError(f"{path}: {error}") from error
    base = {key: value for key, value in tree.items() if key != "runs"}
    check_heard(base, list(overrides), STAGE_KEYS)
    _check_swept(tree, overrides, planned)
    return planned


def plan_tree(tree: dict[str, Any]) -> Plan:
    """The runs of a recipe's tree with `runs:` or with `expand` values."""
    given = tree.get("runs") or {}
    if not isinstance(given, dict):
        raise LmgymError(f"'runs' must be a section with seeds and sweep, not {given!r}")
    section = Runs(**check_arguments(Runs, given, "runs", given=0))
    base = {key: value for key, value in tree.items() if key not in ("runs", "out")}
    inline = says_expand(base.get(SEED)) or SEED in section.sweep
    seeds = section.seeds or ([] if inline else [base.get(SEED, 0)])
    variants = expand(base, section.sweep, seeds, STAGE_KEYS)
    chooses = any(key != SEED for key in variants[0].settings)
    # A sweep that selects a setting must not select it on the test split.
    members = []
    for variant in variants:
        if chooses:
            _keep_test_apart(variant.tree)
        try:
            config = build_config(variant.tree)
        except LmgymError as error:
            raise LmgymError(f"run {variant.label}: {error}") from error
        settings = {key: value for key, value in variant.settings.items() if key != SEED}
        members.append(Member(variant.label, settings, config))
    if chooses and any(member.config.evaluation.split == "test" for member in members):
        raise LmgymError(
            "runs.sweep chooses by evaluation.split, and that is 'test', whose numbers would then mean nothing; write "
            "evaluation: {split: validation, final_split: test}"
        )
    metric = section.metric or _metrics(members[0].config)[0]
    if metric == "reference_nll" and "mode" not in given:
        section.mode = "min"
    for member in members:
        _check_metric(metric, member.config)
    return Plan(section, {**base, "runs": given}, tree.get("out"), members, metric)


def _check_swept(tree: dict[str, Any], overrides: Sequence[str], planned: Plan) -> None:
    """Raise LmgymError for an override of a key that is swept, or of one inside: it would have no effect."""
    swept = {key for key, _ in flat(planned.section.sweep)} | {SEED for _ in planned.section.seeds}
    swept |= {key for member in planned.members for key in member.settings}
    for override in overrides:
        key, _, text = override.partition("=")
        if expands(value := load_yaml(text)):  # these are the values
            continue
        for given, other in product([key, *(below for below, _ in flat({key: value}))], sorted(swept)):
            if holds(own_key(tree, other), own_key(tree, given)):
                whose = "it" if key == other else other
                raise LmgymError(
                    f"override {key}: the recipe's 'runs' gives {whose} values of its own; override those, or drop it"
                )


def _keep_test_apart(tree: dict[str, Any]) -> None:
    """Unless the recipe sets the splits, let a sweep select on validation and report test as well."""
    section = tree.setdefault("evaluation", {})
    if isinstance(section, dict) and "split" not in section:
        section["split"] = "validation"
        section.setdefault("final_split", "test")


def _metrics(config: Config) -> list[str]:
    """What an evaluation says, the first reward first. A reward model answers nothing, so no reward is asked."""
    last = config.stages[-1]
    if not last.algorithm.requirements.makes_policy:
        return [last.source.metric]
    return [*last.rewards, *available_metrics(config.evaluation.metrics), last.source.metric, *ALWAYS]


def _check_metric(metric: str, config: Config) -> None:
    known = {*_metrics(config)}
    if SELECTED.sub("", metric.removesuffix("/corpus")) not in known:
        raise LmgymError(f"runs.metric is '{metric}'; {suggest(metric, known)}")


def sweep_folder(planned: Plan, recipe: Path) -> Path:
    """The folder of all runs: `out`, or runs/<the recipe's name>. A folder with runs of this recipe is used again, even
    with other seeds or values; if it has runs of another recipe, a number is appended to the name.

    Raises LmgymError if `out` has runs of another recipe."""
    if planned.out is not None:
        folder = Path(os.path.expanduser(planned.out))
        if (folder / "recipe.yaml").is_file() and not _same_base(folder, planned):
            raise LmgymError(f"{folder} holds runs of another recipe than {recipe}; choose another out=")
        return folder
    folder, number = Path("runs") / recipe.stem, 1
    while folder.exists() and not _same_base(folder, planned):
        number += 1
        folder = Path("runs") / f"{recipe.stem}-{number}"
    return folder


def train_all(planned: Plan, folder: Path, changed: bool = False, console: Console | None = None) -> int:
    """Train all unfinished runs, one after the other or `jobs` in parallel, and report the results. Returns the exit
    status: 0 if all are finished, 1 if some failed, 130 if stopped by Ctrl-C.

    If a run fails, the others still train. `changed`: overrides change the recipe in `folder`, so its runs may differ
    from their folders. Raises LmgymError, before any run trains, if the folder of a run has a run of another recipe.

    Example: train_all(plan(Path("recipe.yaml")), Path("runs/recipe"))"""
    console = console or Console()
    for member in planned.members:
        member.config.out = str(folder / member.label)
        if not changed and _holds_another(member):
            raise LmgymError(
                f"{member.folder} holds a run of another recipe (was it trained further by itself?); move it away, or "
                "choose another out="
            )
    # Write the recipe first: with it the folder can be resumed.
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    checkpoint.write_text(folder / "recipe.yaml", write_yaml(planned.tree))
    todo = [member for member in planned.members if not is_finished(member.config)]
    kept = len(planned.members) - len(todo)
    console.say(f"{folder}: {len(planned.members)} runs" + (f", {kept} of them finished before" if kept else ""))
    if planned.section.jobs == 1:
        failed, stopped = _one_by_one(todo, console)
    else:
        configs = {member.label: member.config for member in todo}
        failed, stopped = train_in_parallel(configs, planned.section.jobs, is_finished, console)
    for label, sentence in failed.items():
        console.say(f"{label} failed: {sentence}", style="bold")
    if stopped:
        done = sum(is_finished(member.config) for member in planned.members)
        console.say(f"stopped with {done} of {len(planned.members)} runs finished; go on with: lmgym train {folder}")
        return 130
    report(planned.members, planned.metric, planned.section.mode, folder, failed, console)
    return 1 if failed else 0


def is_finished(config: Config) -> bool:
    """True if the run folder has exactly this run, trained to its end."""
    folder = Path(config.out or "")
    if not has_ended(folder):
        return False
    try:
        _count_epochs(config)
        return _apart_from_out(read_yaml(folder / "recipe.yaml")) == _apart_from_out(resolved(config))
    except (OSError, ValueError, KeyError, TypeError, LmgymError):
        return False


def has_ended(folder: Path) -> bool:
    """True if the run folder's run was trained to its last step or stopped early, and has its final model. Its own
    recipe tells, so no data are read."""
    try:
        summary = read_json(folder / "summary.json")
        state = checkpoint.read_state(checkpoint.all_checkpoints(folder / "checkpoints")[-1])
        stages = read_yaml(folder / "recipe.yaml")["stages"]
        ended = state["step"] >= stages[-1]["steps"] or state["progress"].get("stop") is not None
        there = (folder / "final").is_dir() and summary["after"]["step"] == state["step"]
        return bool(ended and there and state["stage"] == len(stages) - 1)
    except (OSError, ValueError, KeyError, IndexError, TypeError, LmgymError):
        return False


def _one_by_one(todo: Sequence[Member], console: Console) -> tuple[dict[str, str], bool]:
    """Train in this process. Returns the errors of failed runs by label, and True if the user stopped it."""
    failed: dict[str, str] = {}
    for index, member in enumerate(todo, 1):
        console.say(f"run {index}/{len(todo)}: {member.label}", style="bold")
        try:
            train(member.config, console)
        except LmgymError as error:
            failed[member.label] = str(error)
        except Exception as error:  # a bug in a library, or too little memory: it may not affect the other runs
            traceback.print_exc()
            failed[member.label] = describe(error)
        else:
            if not has_ended(member.folder):
                return failed, True
    return failed, False


def _holds_another(member: Member) -> bool:
    path = member.folder / "recipe.yaml"
    if not path.is_file():
        return False
    there, here = read_yaml(path), _apart_from_out(resolved(member.config))
    if _apart_from_out(there) == here:  # with its epochs: a run that failed before it began
        return False
    _count_epochs(member.config)
    return _apart_from_out(there) != _apart_from_out(resolved(member.config))


def _count_epochs(config: Config) -> None:
    """Set the steps of stages with epochs, as a run does that begins: its folder has them in place of the epochs."""
    for stage in config.stages:
        if stage.epochs is not None:
            count_epochs(stage, training_examples(config, stage))


def _same_base(folder: Path, planned: Plan) -> bool:
    path = folder / "recipe.yaml"
    if not path.is_file():
        return False
    there = read_yaml(path)
    return "runs" in there and {**there, "runs": None} == {**planned.tree, "runs": None}


def _apart_from_out(tree: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if key != "out"}
