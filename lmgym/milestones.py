"""What happens beside the steps: evaluations, the best model, early stopping, and the end of a run."""

import json
from dataclasses import asdict, replace
from typing import Any

from lmgym import checkpoint, registry
from lmgym.errors import LmgymError
from lmgym.evaluate import Evaluation, evaluate, reference_nll
from lmgym.logs.console import Sample
from lmgym.logs.plots import training_plot
from lmgym.rewards.base import build
from lmgym.run import Run
from lmgym.statistics import Interval


def evaluate_now(run: Run) -> None:
    """Evaluate on the held-out prompts and log it; keep the first and the newest result, and the best model; decide on
    early stopping."""
    section, stage = run.config.evaluation, run.stage
    sampling = replace(stage.sampling, temperature=section.temperature)
    rewards = build({**run.config.stages[-1].rewards, **stage.rewards, **section.metrics})
    timeout = run.config.reward_timeout
    result = evaluate(
        run.held_out, run.speaker, sampling, rewards, run.make_env, run.config.seed, section.samples, timeout
    )
    results = dict(result.results)
    if "demonstrations" in run.algorithm.needs and all(example.references for example in run.held_out):
        results["reference_nll"] = reference_nll(run.held_out, run.speaker, run.policy, run.config.seed)
    _log(run, results)
    summary = {"stage": stage.name, "step": run.step, "results": {name: asdict(v) for name, v in results.items()}}
    summary["answers"] = _answers(result, run.config.logs.samples, section.samples)
    if "before" not in run.progress or (run.last_stage and run.step == 0):
        run.progress["before"] = summary  # the start of the last stage: "after" shows what its training changed
    run.progress["after"] = summary
    run.progress["evaluated"] = [run.stage_index, run.step]
    _keep_best(run, results)
    _stop_early(run, results)


def finish(run: Run) -> None:
    """The final model, the summary, the plot, and the tables that a person reads."""
    run.console.close()
    if run.interrupted:
        run.console.say(f"stopped and saved; go on with: lmgym train {run.folder}")
        return
    checkpoint.save_model(run.folder / "final", run.policy)
    checkpoint.write_text(run.folder / "summary.json", json.dumps(run.progress, indent=1, ensure_ascii=False))
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


def _log(run: Run, results: dict[str, Interval]) -> None:
    record: dict[str, Any] = {
        "kind": "evaluation",
        "stage": run.stage_index,
        "stage_name": run.stage.name,
        "step": run.step,
        "split": run.config.evaluation.split,
        "count": len(run.held_out),
    }
    for name, interval in results.items():
        record |= {name: interval.mean, f"{name}/low": interval.low, f"{name}/high": interval.high}
    run.writer.metrics(record)
    shown = [name for name in results if name not in ("reward", "length", "truncated")] or ["reward"]
    run.console.evaluation(run.step, {name: results[name] for name in shown}, run.config.evaluation.split)


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
    run.progress["stop"] = reached or tired
    if reached or tired:
        why = (
            f"{stop.metric} reached {stop.target}"
            if reached
            else f"{stop.metric} did not improve {stop.patience} times"
        )
        run.console.say(f"stage {run.stage.name} ends at step {run.step}: {why}")


def _answers(result: Evaluation, count: int, samples: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": e.example.prompt if isinstance(e.example.prompt, str) else e.example.prompt[-1]["content"],
            "text": e.text,
            "reference": e.example.references[0] if e.example.references else "",
            "reward": e.score,
        }
        for e in result.episodes[: count * samples : samples]
    ]


def _samples(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[Sample]:
    return [
        Sample(prompt=b["prompt"], before=a["text"], after=b["text"], reference=b["reference"], reward=b["reward"])
        for a, b in zip(before, after, strict=True)
    ]
