"""The doctor's rules while a run trains: what they find is warned of, once each."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lmgym.core.errors import describe
from lmgym.logs.doctor.examine import LIVE
from lmgym.logs.doctor.facts import answer_of_episode
from lmgym.training.stage import StageRun
from lmgym.types import Episode


def warn_of_symptoms(stage: StageRun, record: Mapping[str, Any], tracked: Sequence[Episode]) -> None:
    """Hold the rules against a step's record and the answers to its first prompt, and warn of what they find for the
    first time. Reads no file and changes no number; on ranks other than the first it does nothing."""
    run, watch = stage.run, stage.watch
    if not run.ranks.first or watch is None:
        return
    try:
        newest = run.progress.evaluations.get("newest")
        if newest and newest["stage"] == stage.config.name:
            watch.add_evaluation(evaluation_record(newest))
        found = watch.add_step(record, [answer_of_episode(episode) for episode in tracked])
    except Exception as error:  # advice must not end a training
        stage.watch = None
        run.console.warn(f"the doctor's rules failed ({describe(error)}), and are not asked any more")
        return
    for finding in found:
        if finding.rule in LIVE:
            sign = finding.sign
            run.console.warn(f"step {finding.step + 1}: {sign.what}; {sign.remedy} (`lmgym doctor {run.shown}`)")


def evaluation_record(kept: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluation as `Progress.evaluations` keeps it, in the form of metrics.jsonl.

    Example:
        >>> interval = {"mean": 0.4, "low": 0.3, "high": math.nan}
        >>> evaluation_record({"step": 20, "split": "test", "results": {"reward": interval}})
        {'step': 20, 'split': 'test', 'reward': 0.4, 'reward/low': 0.3, 'reward/high': None}
    """
    numbers = flat_results(kept["results"])
    plain = {key: None if value is None or math.isnan(value) else value for key, value in numbers.items()}
    return {"step": kept["step"], "split": kept["split"], **plain}


def flat_results(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Results with intervals as numbers by name. Example: flat_results({"a": {"mean": 0.4, "low": 0.3, "high": 0.5}})
    -> {"a": 0.4, "a/low": 0.3, "a/high": 0.5}"""
    ends = {"": "mean", "/low": "low", "/high": "high"}
    return {f"{name}{end}": interval[key] for name, interval in results.items() for end, key in ends.items()}
