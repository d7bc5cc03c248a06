"""Evaluations of a run and what they decide: the best model, early stopping; and the end of a run."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lmgym.batch import collate
from lmgym.config.schema import Stage, is_played
from lmgym.core import registry
from lmgym.core.errors import LmgymError
from lmgym.core.progress import doing
from lmgym.envs.vector import Envs
from lmgym.logs.console import Sample
from lmgym.logs.formatting import json_text
from lmgym.logs.plots.calibration import calibration_plot
from lmgym.logs.plots.training import training_plot
from lmgym.logs.records import rollout_record
from lmgym.models import copies
from lmgym.models.policy import Policy
from lmgym.models.reward_model import facts_of_base, save_reward_model
from lmgym.rollouts.actor import Actor
from lmgym.rollouts.evaluate import Evaluation, better_directions, evaluate
from lmgym.rollouts.play import who_moved
from lmgym.rollouts.rollout import demonstrate
from lmgym.stats.calibration import Bin
from lmgym.stats.intervals import Interval, mean_interval
from lmgym.training.callbacks import EvaluationEnd
from lmgym.training.checkpoints import checkpoint
from lmgym.training.judgements import judgements
from lmgym.training.run import Run
from lmgym.training.setup import held_out_rewards
from lmgym.training.stage import StageRun
from lmgym.training.symptoms import flat_results
from lmgym.training.unjudged import warn_of_unjudged
from lmgym.types import Episode, Example


def evaluate_now(stage: StageRun) -> None:
    """Evaluate on the held-out prompts and log it; keep the best model; decide on early stopping."""
    if not stage.run.data.held_out:  # the recipe wants no evaluation; only the place of this one is kept
        place = {"stage": stage.config.name, "step": stage.step, "split": stage.run.config.evaluation.split}
        stage.run.progress.evaluations["newest"] = {**place, "results": {}, "answers": []}
        return
    results, stage.run.progress.evaluations["newest"] = _measure(stage, stage.run.config.evaluation.split)
    _keep_best(stage, results)
    _stop_early(stage, results)


def record_evaluation(stage: StageRun, moment: str) -> None:
    """Keep what the policy can do "before" or "after" the last stage, for the table at the end. It is measured on
    `evaluation.final_split`, if the recipe names one: no decision of the run has looked at these numbers. Else it is
    the newest evaluation."""
    evaluations, split = stage.run.progress.evaluations, stage.run.config.evaluation.final_split
    if split is None:
        evaluations[moment] = evaluations["newest"]
    elif not is_evaluated(stage, moment, split):  # else a finished run, resumed
        _, evaluations[moment] = _measure(stage, split)


def is_evaluated(stage: StageRun, moment: str, split: str) -> bool:
    """True if the "newest" (or "before", "after") evaluation is about this split and the policy as it is now."""
    known = stage.run.progress.evaluations.get(moment, {})
    return [known.get(key) for key in ("stage", "step", "split")] == [stage.config.name, stage.step, split]


def finish(run: Run) -> None:
    """Write the final model, the summary and the plot, and show the tables; if interrupted, say how to go on. All ranks
    return when the first one has written."""
    run.console.close()
    if run.interrupted:
        saved = run.progress.version > 0
        where = "stopped and saved" if saved else "stopped before the first step"
        run.console.say(f"{where}; go on with: lmgym train {run.shown}")
        return
    final = copies.gathered(run.policy)
    if final is not None:
        _write_results(run, final)
    run.ranks.wait()


@doing("saving the model")
def save_result(run: Run, stage: Stage, name: str, policy: Policy) -> None:
    """Write what a stage makes, a language model or a reward model, as the run's `name`, whole or not at all.
    Raises LmgymError if the run folder is not where it was."""
    run.check_in_place()
    required = stage.algorithm.requirements
    if required.makes_policy:
        checkpoint.save_model(run.folder / name, policy)
        return
    kind = required.makes
    facts = facts_of_base(run.config.policy, required.separator)
    checkpoint.write_folder(run.folder / name, lambda folder: save_reward_model(folder, policy, facts, kind))


@doing("writing the results")
def _write_results(run: Run, final: Policy) -> None:
    save_result(run, run.config.stages[-1], "final", final)
    evaluations = run.progress.evaluations
    checkpoint.write_text(run.folder / "summary.json", json_text(evaluations))
    # An own loop may evaluate at neither end; and of a stage that has become the last one the beginning is over.
    nothing: dict[str, Any] = {"results": {}, "answers": []}
    measured = [evaluations.get(moment, nothing) for moment in ("before", "after")]
    run.console.samples(_samples(*(one["answers"] for one in measured)))
    before, after = (one["results"] for one in measured)
    rows = [(name, Interval(**before[name]), Interval(**after[name])) for name in after if name in before]
    better = better_directions(after, held_out_rewards(run.config, run.config.stages[-1]))
    if rows:
        run.console.before_after(rows, better)
    plot = training_plot(run.folder / "metrics.jsonl", run.folder / "plot.png")
    scalars = {f"{moment}/{key}": value for moment, one in (("before", before), ("after", after))
               for key, value in flat_results(one).items() if value is not None and math.isfinite(value)}  # fmt: skip
    run.writer.finish(scalars, plot)
    run.console.say(f"model: {run.shown / 'final'}")
    run.console.say(f"plot:  {run.shown / plot.name}")
    if bins := measured[1].get("calibration"):
        drawn = calibration_plot([Bin(**one) for one in bins], run.folder / "calibration.png")
        run.console.say(f"calibration: {run.shown / drawn.name}")


def _measure(stage: StageRun, split: str) -> tuple[dict[str, Interval], dict[str, Any]]:
    """Answer a split's prompts, log the results, and return them, alone and as the summary keeps them."""
    run, config = stage.run, stage.run.config
    run.settings.hold(run.console)
    section, examples = config.evaluation, run.data.held_out[split]
    sampling, rewards = section.decoding(stage.config.sampling), held_out_rewards(config, stage.config)
    seed, place = config.seed, {"kind": "evaluation", **stage.place, "split": split}
    result = Evaluation({}, [])
    if stage.algorithm.requirements.makes_policy:  # a reward model answers nothing
        stage.source.settle()
        run.renew_engine()
        run.console.doing(f"answering {len(examples)} prompts of the {split} split")
        how = (seed, section.samples, config.reward_timeout, section.best_of, config.rewards_failed)
        result = evaluate(examples, stage.actor, sampling, rewards, stage.held_out_envs, *how)
        run.settings.hold(run.console)  # rewards and environments may have changed them
    results = dict(result.results)
    if _measures_references(stage, examples):
        results["reference_nll"] = reference_nll(examples, stage.actor, run.policy, seed, stage.held_out_envs)
    judged = judgements(stage, examples)
    results |= judged.results
    record: dict[str, Any] = {**place, "count": len(examples)}
    if unlimited := [reward.name for reward in rewards if reward.unlimited]:
        record["rewards_without_limit"] = unlimited
    plain = {name: asdict(interval) for name, interval in results.items()}
    record |= flat_results(plain)
    run.writer.metrics(record)
    run.callbacks.on_evaluation(EvaluationEnd(stage.config.name, stage.step, split, result.episodes, record))
    where = f"the evaluation on {split} after step {stage.step}"
    warn_of_unjudged(stage, rewards, result.episodes, where)
    tracked = result.episodes[: config.logs.samples * section.samples : section.samples]  # the same prompts every time
    predictions = config.logs.predictions
    recorded = result.episodes if predictions is True else tracked
    run.writer.rollouts(place | rollout_record(episode) for episode in who_moved(recorded))
    run.writer.answers(place | rollout_record(episode) for episode in who_moved(tracked))
    if isinstance(predictions, str) and run.ranks.first:
        write = registry.load_attribute(predictions, "logs.predictions")
        write(run.folder, run.progress.version, split, result.episodes)
    shown = [name for name in results if name not in ("reward", "length/mean", "truncated")]
    if all(name.startswith("environment") for name in shown):  # there is no reward of the recipe
        shown = ["reward", *shown]
    printed = {name: results[name] for name in shown if name in results}
    run.console.evaluation(stage.step, printed, len(examples), split)
    kept: dict[str, Any] = {"stage": stage.config.name, "step": stage.step, "split": split}
    if judged.bins:
        kept["calibration"] = [asdict(one) for one in judged.bins]
    return results, {**kept, "results": plain, "answers": _answers(tracked)}


def _measures_references(stage: StageRun, examples: Sequence[Example]) -> bool:
    """Whether an evaluation reports `reference_nll`: if the recipe asks for it, and in stages that learn from given
    answers if the held-out examples (or the environment's demonstrator) have references."""
    section = stage.run.config.evaluation
    demonstrated = is_played(section.env or stage.config.env) or all(example.references for example in examples)
    if not stage.algorithm.requirements.makes_policy:
        return False
    return section.reference_nll or (not stage.source.samples and demonstrated)


def reference_nll(examples: Sequence[Example], actor: Actor, policy: Policy, seed: int, envs: Envs) -> Interval:
    """Mean negative log-likelihood (nats per token) of the held-out references, or of what the environments' own
    demonstrators say; the interval is over examples, of their per-token means."""
    episodes = demonstrate(list(enumerate(examples)), actor, (seed, "evaluation"), envs)
    batch = collate(episodes, policy.pad_id)
    logprobs = policy.compute_logprobs_no_grad(batch).logprobs
    means = -(logprobs * batch.actions).sum(1) / batch.actions.sum(1)
    return mean_interval([[value] for value in means.double().tolist()])


def _keep_best(stage: StageRun, results: dict[str, Interval]) -> None:
    run, section = stage.run, stage.run.config.evaluation
    metric = section.keep_best
    if metric is None:
        return
    if (value := _value(stage, results, metric, "evaluation.keep_best")) is None:
        return
    evaluations = run.progress.evaluations
    sign = 1.0 if section.keep_best_mode == "max" else -1.0
    best = evaluations.get("best")
    if best is None or not best.get("comparable", True) or sign * value > sign * best["value"]:
        evaluations["best"] = {"metric": metric, "value": value, "stage": stage.config.name, "step": stage.step}
        copied = copies.gathered(run.policy)
        if copied is not None:
            save_result(run, stage.config, "best", copied)


def _stop_early(stage: StageRun, results: dict[str, Interval]) -> None:
    stop, state = stage.config.early_stop, stage.run.progress.evaluations
    if stop is None:
        return
    if (mean := _value(stage, results, stop.metric, "early_stop.metric")) is None:
        return
    sign = 1.0 if stop.mode == "max" else -1.0
    value, best = sign * mean, state.get("early_best")
    improved = best is None or value > best
    state["early_best"] = value if improved else best
    state["early_waited"] = 0 if improved else state["early_waited"] + 1
    reached = stop.target is not None and value >= sign * stop.target
    tired = stop.patience is not None and state["early_waited"] >= stop.patience
    state["stop"] = asdict(stop) if reached or tired else None
    if reached or tired:
        why = f"reached {stop.target}" if reached else f"did not improve {stop.patience} times"
        stage.run.console.say(f"stage {stage.config.name} ends after step {stage.step}: {stop.metric} {why}")


def _value(stage: StageRun, results: dict[str, Interval], metric: str, key: str) -> float | None:
    """The metric by which a `key` of the recipe decides; None, with a warning, if no answer of this evaluation was
    judged by it, or if it is NaN. Raises LmgymError if no evaluation has it."""
    if metric in results and not math.isnan(results[metric].mean):
        return results[metric].mean
    reward = metric.partition("/")[0]
    # Where environments have failed, their answers have no number.
    known = metric in results or f"unjudged/{reward}" in results or "environment_errors" in results
    if not known and not (reward == "reward" and "unjudged" in results):
        if any(own.name == reward and own.selective for own in held_out_rewards(stage.run.config, stage.config)):
            raise LmgymError(f"{key} is '{metric}', and this reward (tasks, where) is for none of the held-out prompts")
        raise LmgymError(f"{key} is '{metric}'; {registry.suggest(metric, results)}")
    why = "is not a number" if metric in results else "has no answer"
    stage.run.console.warn(f"evaluation after {stage.step} steps: {key} decides nothing, since '{metric}' {why}")
    return None


def _answers(episodes: list[Episode]) -> list[dict[str, Any]]:
    return [
        {
            "prompt": e.example.prompt if isinstance(e.example.prompt, str) else e.example.prompt[-1]["content"],
            "text": e.text,
            "reference": e.example.references[0] if e.example.references else "",
            "reward": e.score if e.judged and e.turns else None,
            **({"conversation": [dict(message) for message in e.messages]} if len(e.turns) > 1 else {}),
        }
        for e in episodes
    ]


def _samples(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[Sample]:
    return [
        Sample(
            prompt=b["prompt"],
            before=a.get("conversation", a["text"]),
            after=b.get("conversation", b["text"]),
            reference=b["reference"],
            reward=b["reward"],
        )
        for a, b in zip(before, after, strict=False)  # a resumed run may have been told to show more, or others
        if a["prompt"] == b["prompt"]
    ]
