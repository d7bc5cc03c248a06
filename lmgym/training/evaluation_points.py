"""What happens beside the steps: evaluations, the best model, early stopping, and the end of a run."""

from dataclasses import asdict
from typing import Any

from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.logs.console import Sample
from lmgym.logs.formatting import json_text
from lmgym.logs.plots import training_plot
from lmgym.logs.records import prediction_record, rollout_record, split_of_rl4lms
from lmgym.rollouts.evaluate import evaluate, reference_nll
from lmgym.stats.intervals import Interval
from lmgym.training import checkpoint
from lmgym.training.run import Run
from lmgym.training.setup import held_out_rewards
from lmgym.types import Episode


def evaluate_now(run: Run) -> None:
    """Evaluate on the held-out prompts and log it; keep the best model; decide on early stopping."""
    results, run.progress["newest"] = _measure(run, run.config.evaluation.split)
    _keep_best(run, results)
    _stop_early(run, results)


def record_evaluation(run: Run, moment: str) -> None:
    """Keep what the policy can do "before" or "after" the last stage, for the table at the end.

    On `evaluation.final_split`, where the recipe names one: numbers that no decision of the run has looked at. Else the
    newest evaluation.
    """
    split = run.config.evaluation.final_split
    if split is None:
        run.progress[moment] = run.progress["newest"]
    elif run.step == 0 or not is_evaluated(run, moment, split):  # else a finished run, resumed
        _, run.progress[moment] = _measure(run, split)


def is_evaluated(run: Run, moment: str, split: str) -> bool:
    """True if the "newest" (or "before", "after") evaluation is about this split and the policy as it is now."""
    known = run.progress.get(moment, {})
    return [known.get(key) for key in ("stage", "step", "split")] == [run.stage.name, run.step, split]


def finish(run: Run) -> None:
    """The final model, the summary, the plot, and the tables that a person reads."""
    run.console.close()
    if run.interrupted:
        run.console.say(f"stopped and saved; go on with: lmgym train {run.folder}")
        return
    checkpoint.save_model(run.folder / "final", run.policy)
    checkpoint.write_text(run.folder / "summary.json", json_text(run.progress))
    before, after = run.progress["before"], run.progress["after"]
    rows = [
        (name, Interval(**before["results"][name]), Interval(**after["results"][name]))
        for name in after["results"]
        if name in before["results"]
    ]
    run.console.samples(_samples(before["answers"], after["answers"]))
    run.console.before_after(rows)
    plot = training_plot(run.folder / "metrics.jsonl", run.folder / "plot.png")
    run.console.say(f"model: {run.folder / 'final'}")
    run.console.say(f"plot:  {plot}")


def _measure(run: Run, split: str) -> tuple[dict[str, Interval], dict[str, Any]]:
    """Answer a split's prompts, log the results, and return them, alone and as the summary keeps them."""
    section, stage = run.config.evaluation, run.stage
    examples, rewards = run.held_out[split], held_out_rewards(run.config, stage)
    sampling = section.decoding(stage.sampling)
    seed, timeout = run.config.seed, run.config.reward_timeout
    result = evaluate(examples, run.actor, sampling, rewards, run.held_out_envs, seed, section.samples, timeout)
    results = dict(result.results)
    asked = run.config.evaluation.env or stage.env
    demonstrated = asked["name"] != "single_turn" or all(example.references for example in examples)
    if section.reference_nll or (run.algorithm.requirements.answers == "references" and demonstrated):
        results["reference_nll"] = reference_nll(examples, run.actor, run.policy, seed, run.held_out_envs)
    place = {"kind": "evaluation", "stage": run.stage_index, "stage_name": stage.name, "step": run.step, "split": split}
    record: dict[str, Any] = {**place, "count": len(examples)}
    for name, interval in results.items():
        record |= {name: interval.mean, f"{name}/low": interval.low, f"{name}/high": interval.high}
    run.writer.metrics(record)
    tracked = result.episodes[: run.config.logs.samples * section.samples : section.samples]
    run.writer.rollouts([place | rollout_record(episode) for episode in tracked])  # the same prompts every time
    if run.config.logs.predictions:
        _write_predictions(run, result.episodes, split)
    shown = [name for name in results if name not in ("reward", "length/mean", "truncated")] or ["reward"]
    run.console.evaluation(run.step, {name: results[name] for name in shown}, split)
    plain = {name: asdict(interval) for name, interval in results.items()}
    answers = _answers(tracked)
    return results, {"stage": stage.name, "step": run.step, "split": split, "results": plain, "answers": answers}


def _write_predictions(run: Run, episodes: list[Episode], split: str) -> None:
    """Every answer of an evaluation in one file, which an evaluation that is repeated replaces."""
    name = f"epoch_{run.version}_{split_of_rl4lms(split)}_split_predictions.json"
    records = [prediction_record(episode, split) for episode in episodes]
    checkpoint.write_text(run.folder / name, json_text(records))


def _keep_best(run: Run, results: dict[str, Interval]) -> None:
    metric = run.config.evaluation.keep_best
    if metric is None:
        return
    if metric not in results:
        raise LmgymError(f"evaluation.keep_best is '{metric}'; {registry.suggest(metric, results)}")
    if results[metric].mean > run.progress.get("best", {}).get("value", -float("inf")):
        run.progress["best"] = {
            "metric": metric,
            "value": results[metric].mean,
            "stage": run.stage.name,
            "step": run.step,
        }
        checkpoint.save_model(run.folder / "best", run.policy)


def _stop_early(run: Run, results: dict[str, Interval]) -> None:
    stop = run.stage.early_stop
    if stop is None:
        return
    if stop.metric not in results:
        raise LmgymError(f"early_stop.metric is '{stop.metric}'; {registry.suggest(stop.metric, results)}")
    sign = 1.0 if stop.mode == "max" else -1.0
    value, best = sign * results[stop.metric].mean, run.progress.get("early_best")
    improved = best is None or value > best
    run.progress["early_best"] = value if improved else best
    run.progress["early_waited"] = 0 if improved else run.progress["early_waited"] + 1
    reached = stop.target is not None and value >= sign * stop.target
    tired = stop.patience is not None and run.progress["early_waited"] >= stop.patience
    run.progress["stop"] = asdict(stop) if reached or tired else None
    if reached or tired:
        why = (
            f"{stop.metric} reached {stop.target}"
            if reached
            else f"{stop.metric} did not improve {stop.patience} times"
        )
        run.console.say(f"stage {run.stage.name} ends at step {run.step}: {why}")


def _answers(episodes: list[Episode]) -> list[dict[str, Any]]:
    return [
        {
            "prompt": e.example.prompt if isinstance(e.example.prompt, str) else e.example.prompt[-1]["content"],
            "text": e.text,
            "reference": e.example.references[0] if e.example.references else "",
            "reward": e.score,
        }
        for e in episodes
    ]


def _samples(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[Sample]:
    return [
        Sample(prompt=b["prompt"], before=a["text"], after=b["text"], reference=b["reference"], reward=b["reward"])
        for a, b in zip(before, after, strict=False)  # a resumed run may have been told to show more, or others
        if a["prompt"] == b["prompt"]
    ]
