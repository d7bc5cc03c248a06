"""What a step's answers are warned of: environments that failed, answers that were cut off, and what the doctor's rules
find, once each."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lmgym.core.errors import describe
from lmgym.logs.doctor.facts import answer_of_episode
from lmgym.logs.doctor.rules import LIVE
from lmgym.logs.records import environment_numbers
from lmgym.training.stage import StageRun
from lmgym.training.unjudged import warn_of_unjudged
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


def warn_of_failures(stage: StageRun, episodes: list[Episode], step: int) -> None:
    """Warn of environments that failed, and of answers that were cut off."""
    console, sampling = stage.run.console, stage.config.sampling
    failed = [episode.error for episode in episodes if episode.error]
    if failed:
        count = len(failed)
        console.warn(f"step {step + 1}: {count} environments failed and were left out; the first one: {failed[0]}")
    warn_of_unjudged(stage, stage.rewards, episodes, f"step {step + 1}")
    full = sum(episode.overflowed for episode in episodes)
    if full > 0.1 * len(episodes):
        console.warn(
            f"step {step + 1}: {full} of {len(episodes)} episodes filled the model's context "
            f"({stage.run.engine.context} tokens) and were cut off there; lower env.max_turns or "
            "sampling.max_new_tokens, shorten what the environment writes, or take a model with a longer context"
        )
    invalid = environment_numbers(episodes).get("invalid", [])
    if invalid and min(invalid) > 0:
        console.warn(
            f"step {step + 1}: not one of {len(invalid)} answers was a valid action of the environment; the model does "
            "not know the form of an action, or the agent does not read it (`lmgym check` shows an answer)"
        )
    # An environment may well take what was cut off: a move of one token is a move.
    cut = [episode for episode in episodes if any(turn.stop == "length" for turn in episode.turns)]
    unended = sum(not episode.terminated for episode in cut)
    if unended > 0.5 * len(episodes) and not sampling.fixed_length:
        console.warn(
            f"more than half of a step's answers were cut off at sampling.max_new_tokens "
            f"({sampling.max_new_tokens}); they never came to an end, so their rewards may mean little"
        )


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
