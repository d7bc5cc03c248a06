"""GRPO some steps ahead (`engine.ahead`) by each form of importance correction, beside GRPO on new answers.

    python -m benchmarks.older_answers --seeds 0 1 2 --out runs/older_answers
    python -m benchmarks.older_answers --ahead 1 2 4 8 --forms "clip alone" "truncated, by token" icepop
    python -m benchmarks.older_answers --model models/smollm2-135m-instruct --answers 64 --ahead 1 4 \
      --set optimizer.learning_rate=1e-6 sampling.max_new_tokens=48 evaluation.examples=128

Task, warm start, steps and evaluations are those of `benchmarks.algorithms`; a model of your own begins as it is. One
process samples ahead in turn, which gives the bits of a pool. With `--chunk` it samples in chunks (docs/ahead.md).
Prints a Markdown table: the accuracy on unseen numbers, and what the weights were.
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import yaml

from benchmarks.algorithms import after, recipe_of
from benchmarks.quickstart import RECIPE, end_of_warm_start
from benchmarks.training import train

FORMS: dict[str, dict[str, Any]] = {  # algorithm.correction
    "new answers": {"name": "none"},
    "clip alone": {"name": "sampler"},  # the ratio to what the sampler said, as PPO has it
    "all weights as they are": {"name": "truncated", "cap": 1e6},
    "truncated, by token": {"name": "truncated", "cap": 2.0},
    "truncated, by sequence": {"name": "truncated", "cap": 2.0, "level": "sequence"},
    "masked, by token": {"name": "masked", "cap": 2.0},
    "masked, by sequence": {"name": "masked", "cap": 3.0, "level": "sequence"},
    "icepop": {"name": "masked", "floor": 0.5, "cap": 5.0},
    "truncated, rejection by sequence": {"name": "truncated", "cap": 2.0, "mismatch_bound": 1.02},
    "truncated, off-policy mask": {"name": "truncated", "cap": 2.0, "off_policy_threshold": 0.05},
}
METRICS = ("sampler_logprob_gap", "ratio/clipped", "importance/mean", "importance/capped", "importance/left_out")


def one_run(form: str, ahead: int, seed: int, start: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Train GRPO with one form of correction: its evaluations, and the means of the metrics of its weights."""
    name = f"{form.replace(', ', '-').replace(' ', '_')}-{ahead}-{seed}"
    recipe = recipe_of("grpo", start, given.steps, given.every, given.answers)
    recipe["algorithm"] |= {"correction": FORMS[form]}
    recipe["engine"] = {"unit": given.answers, "ahead": ahead} | ({"chunk": given.chunk} if ahead > 1 else {})
    path, run = given.out / f"{name}.yaml", given.out / name
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    if not (run / "summary.json").exists():
        train(path, [f"seed={seed}", f"out={run}", *given.set])
    answers, curve, means = 0, [], dict[str, list[float]]()
    for record in map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
        if record["kind"] == "train":
            answers += int(record["answers"])
            for metric in METRICS:
                means.setdefault(metric, []).append(record.get(metric, float("nan")))
        elif record["split"] == "validation":
            curve.append({"answers": answers, "accuracy": record["final_answer"]})
    print(f"{form}, {ahead} ahead, seed {seed}: {curve[0]['accuracy']:.3f} to {curve[-1]['accuracy']:.3f}", flush=True)
    return {"form": form, "ahead": ahead, "seed": seed, "curve": curve} | {
        key: statistics.mean(own) for key, own in means.items()
    }


def warm_start(run: Path, seed: int) -> Path:
    """The quickstart's model after its warm start."""
    if not (run / "summary.json").exists():
        train(RECIPE, [f"seed={seed}", f"out={run}", "stages.rl.steps=1", "checkpoint.keep=1000", "threads=1"])
    return end_of_warm_start(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps between two evaluations (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/older_answers"))
    parser.add_argument("--ahead", type=int, nargs="+", default=[1])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=[*FORMS])
    parser.add_argument("--model", type=Path, help="a model folder; without it the quickstart's, after its warm start")
    parser.add_argument("--answers", type=int, default=256, help="of a step (%(default)s)")
    parser.add_argument("--chunk", type=int, help="engine.chunk, where --ahead is 2 or more")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of the recipe of every run")
    given = parser.parse_args()
    forms = list(dict.fromkeys(["new answers", *given.forms]))
    plans = [(form, ahead) for form in forms for ahead in ([0] if form == "new answers" else given.ahead)]
    given.out = given.out.absolute()
    given.out.mkdir(parents=True, exist_ok=True)
    results = []
    for seed in given.seeds:
        start = given.model.absolute() if given.model else warm_start(given.out / f"start-{seed}", seed)
        results += [one_run(form, ahead, seed, start, given) for form, ahead in plans]
    (given.out / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(
        f"| form | ahead | before | after {given.answers * given.steps:,} answers [95%] | by seed | gap, nats | "
        "clipped | mean weight | outside | left out |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for form, ahead in plans:
        own = [one for one in results if (one["form"], one["ahead"]) == (form, ahead)]
        by_seed = ", ".join(f"{one['curve'][-1]['accuracy']:.3f}" for one in own)
        before, end = (after(own, "answers", most) for most in (0, given.answers * given.steps))
        means = [statistics.mean(one[metric] for one in own) for metric in METRICS]
        shares = " | ".join("" if math.isnan(mean) else f"{mean:.4f}" for mean in means)
        print(f"| {form} | {ahead} | {before.mean:.3f} | {end} | {by_seed} | {shares} |")


if __name__ == "__main__":
    main()
