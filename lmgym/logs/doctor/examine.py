"""The doctor: what is wrong with a run, worst first.

`Watch` holds the rules (rules.py) against the steps of a stage as they come. Training does that
while it trains; `examine` does it with the records of a run folder, so both find the same at the same step.
docs/doctor.md has the table of the rules: thresholds with their reasons, remedies, and the runs that prove them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean as mean
from typing import Any

from lmgym.core.files import read_json
from lmgym.logs.doctor.facts import Answer, Facts, Record, answer_of_record, bounded, facts_of
from lmgym.logs.doctor.history import History, Level, Sign
from lmgym.logs.doctor.rules import LEVELS, RULES
from lmgym.logs.records import METRICS, ROLLOUTS, read_records
from lmgym.logs.run_state import run_state


@dataclass(frozen=True)
class Finding:
    """What a rule has found in a stage: the `step` of the stage (counted from 0) where it showed first, its `sign` at
    its worst, at `sign_step`, and the last step where it still showed. `held`: that was at the end of the stage; else
    `end_value` is what the sign's metric was in the end.

    Example: [(finding.rule, finding.step, finding.sign.what) for finding in examine(Path("runs/a"), recipe).findings]
    """

    rule: str
    stage: int
    stage_name: str
    step: int
    sign: Sign
    sign_step: int
    last_step: int
    held: bool = True
    end_value: float | None = None

    @property
    def title(self) -> str:
        return self.rule.replace("_", " ")

    @property
    def level(self) -> Level:
        """The sign's; minor for what was over before the end."""
        return self.sign.level if self.held else "minor"

    def as_json(self) -> dict[str, Any]:
        """Plain values, in one dictionary."""
        named = {"rule": self.rule, "level": self.level, "stage": self.stage, "stage_name": self.stage_name}
        steps = {"step": self.step, "last_step": self.last_step, "held_to_the_end": self.held}
        shown = {key: value for key, value in vars(self.sign).items() if key != "level"}
        return named | steps | shown | {"value_step": self.sign_step, "end_value": self.end_value}


class Watch:
    """Asks all rules after each step of a stage. `findings` has what each has found first, or at its worst level.

    Example:
        >>> watch = Watch(facts_of(recipe, stage=0))
        >>> for record in records:
        ...     for finding in watch.add_step(record):
        ...         print(finding.step, finding.sign.what)
    """

    def __init__(self, facts: Facts):
        self.history = History(facts)
        self.findings: dict[str, Finding] = {}

    def add_step(self, record: Record, answers: Sequence[Answer] = ()) -> list[Finding]:
        """Take a train record and the answers to the step's first prompt; returns what is found for the first time."""
        self.history.add_step(record, answers)
        return self._ask()

    def add_evaluation(self, record: Record) -> None:
        """Take an evaluation's record; what it shows is found at the next step, or by `close`."""
        self.history.add_evaluation(record)

    def close(self) -> None:
        """Ask the rules once more, of the last step and of the evaluation after it; what no longer holds is noted with
        the number of the end."""
        if len(self.history):
            self._ask()
        for name, known in self.findings.items():
            if not known.held:
                self.findings[name] = replace(known, end_value=self._newest(known.sign))

    def unjudged(self) -> dict[str, list[str]]:
        """The rules that had too little to judge the stage, by what they lack."""
        found: dict[str, list[str]] = {}
        for rule in RULES:
            if rule.name not in self.findings and (lacks := rule.lacks(self.history)):
                found.setdefault(lacks, []).append(rule.name)
        return found

    def _newest(self, sign: Sign) -> float | None:
        """The newest number of a sign's metric."""
        if sign.held_out:
            return bounded(self.history.evaluations[-1].get(sign.metric))
        recent = self.history.recent(sign.metric)
        return mean(recent) if recent else None

    def _ask(self) -> list[Finding]:
        facts, step, new = self.history.facts, self.history.steps[-1], []
        for rule in RULES:
            sign, known = rule.check(self.history), self.findings.get(rule.name)
            if known is None and sign is not None:
                new.append(Finding(rule.name, facts.stage, facts.name, step, sign, step, step))
                self.findings[rule.name] = new[-1]
            elif known is not None and sign is None:
                self.findings[rule.name] = replace(known, held=False)
            elif known is not None and sign is not None:
                if LEVELS.index(sign.level) < LEVELS.index(known.sign.level):
                    known = replace(known, sign=sign, sign_step=step)
                self.findings[rule.name] = replace(known, last_step=step, held=True)
        return new


@dataclass(frozen=True)
class Diagnosis:
    """What `examine` has found in a run folder; `histories` has the numbers of each stage, `unjudged` for each stage
    the rules that had too little to judge it, by what they lack.

    `state` is "finished", "running" (another process trains in it now) or "unfinished". `seconds` has for each stage
    the mean of a step and of its parts."""

    folder: Path
    state: str
    findings: list[Finding]
    histories: list[History]
    seconds: dict[str, dict[str, float]]
    unjudged: dict[str, dict[str, list[str]]]

    @property
    def steps(self) -> int:
        return sum(map(len, self.histories))

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        found = [finding.as_json() for finding in self.findings]
        return {
            "run": str(self.folder),
            "state": self.state,
            "steps": self.steps,
            "seconds": self.seconds,
            "unjudged": self.unjudged,
            "findings": found,
        }


def examine(folder: Path, recipe: Mapping[str, Any]) -> Diagnosis:
    """Read a run folder and hold all rules against it; `recipe` is the tree of its recipe.yaml. Worst first: by level,
    then what held to the end, then by step. Raises LmgymError for a folder without records, and for damaged ones.

    Example: examine(Path("runs/a"), read_yaml(Path("runs/a/recipe.yaml"))).findings[0].sign.remedy"""
    records, answers = list(read_records(folder / METRICS)), _tracked_answers(folder)
    watches: dict[int, Watch] = {}
    for record in records:
        stage = record["stage"]
        if stage not in watches:
            watches[stage] = Watch(facts_of(recipe, stage, _precision(folder)))
        if record["kind"] == "train":
            watches[stage].add_step(record, answers.get((stage, record["step"]), ()))
        elif record["kind"] == "evaluation":
            watches[stage].add_evaluation(record)
    for watch in watches.values():
        watch.close()
    histories = [watch.history for _, watch in sorted(watches.items())]
    findings = [finding for watch in watches.values() for finding in watch.findings.values()]
    trained = [history for history in histories if len(history)]
    stage, steps = (trained[-1].facts.name, trained[-1].steps[-1] + 1) if trained else (None, 0)
    state = run_state(folder, stage, steps)
    if state == "unfinished" and (early := _ended_early(folder, recipe, histories)):
        findings.append(early)
    findings.sort(key=lambda found: (LEVELS.index(found.level), not found.held, found.stage, found.step))
    seconds = {_name(one): _seconds(one) for one in histories if len(one)}
    unjudged = {_name(watch.history): watch.unjudged() for _, watch in sorted(watches.items())}
    return Diagnosis(folder, state, findings, histories, seconds, unjudged)


def _tracked_answers(folder: Path) -> dict[tuple[int, int], list[Answer]]:
    """The answers to the first prompt of each step. A folder without rollouts.jsonl has none."""
    tracked: dict[tuple[int, int], list[Answer]] = {}
    if (folder / ROLLOUTS).is_file():
        for record in read_records(folder / ROLLOUTS):
            if record["kind"] == "train" and record.get("group", 0) == 0:
                tracked.setdefault((record["stage"], record["step"]), []).append(answer_of_record(record))
    return tracked


def _precision(folder: Path) -> str:
    """What machine.json says of it; empty if that cannot be read."""
    try:
        return str(read_json(folder / "machine.json")["compute"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _ended_early(folder: Path, recipe: Mapping[str, Any], histories: Sequence[History]) -> Finding | None:
    """That a run ended before its last step, or before its results were written."""
    last = next((history for history in reversed(histories) if len(history)), None)
    if last is None:
        return None
    step, facts = last.steps[-1], last.facts
    planned, several = recipe["stages"][facts.stage].get("steps", "?"), len(recipe["stages"]) > 1
    losses = [name for name in last.columns if name.startswith("loss/")]
    metric = next((name for name in ("reward", *losses, *last.columns) if name in last.columns), "")
    where = f" of stage {facts.name}" if several else ""
    ended = f"the run ended after {step + 1} of {planned} steps{where}, without its results"
    what = f"{ended}: it was stopped, killed, or it failed"
    remedy = f"go on with `lmgym train {folder}`; if it ends again, its last sentence says why"
    sign = Sign("moderate", what, remedy, metric, last.columns[metric][-1] if metric else 0.0, steps=1)
    return Finding("ended_early", facts.stage, facts.name, step, sign, step, step)


def _seconds(history: History) -> dict[str, float]:
    """The mean seconds of a step and of its parts; the first step, which compiles and fills caches, does not count."""
    found = {}
    for name in ("seconds", "seconds/rollout", "seconds/update"):
        values = [value for value in history.columns.get(name, []) if value == value]
        if values:
            found[name] = mean(values[1:] or values)
    return found


def _name(history: History) -> str:
    return history.facts.name or f"stage {history.facts.stage + 1}"
