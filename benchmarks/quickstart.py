"""The quickstart by seeds, beside a control: the same seconds spent on more imitation of the same demonstrations.

    python -m benchmarks.quickstart --seeds 10 11 12 13 14 --out runs/quickstart_table

For each seed the recipe is trained as it is. The control starts from the same warm start (equal bit for bit), goes on
imitating for as many seconds as the reinforcement learning took, and keeps the model with the lowest validation loss.
All three models answer the same test problems, sampled at temperature 1 and greedily. Prints a Markdown table.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.training import train

RECIPE = Path(__file__).parents[1] / "lmgym/recipes/quickstart.yaml"
KEEP_ALL = ("checkpoint.keep=1000",)  # the end of the warm start, too
DECODINGS = {"sampled": ("evaluation.temperature=1", "evaluation.samples=4"), "greedy": ("evaluation.samples=1",)}


def records(run: Path, stage: str) -> list[dict[str, Any]]:
    """A stage's training records."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["kind"] == "train" and line["stage_name"] == stage]


def seconds_of(run: Path, stage: str) -> tuple[float, int]:
    """Seconds of training in a stage, without the evaluations, and its steps."""
    found = records(run, stage)
    return sum(record["seconds"] for record in found), len(found)


def write_control(path: Path, run: Path) -> int:
    """The recipe with more imitation in the place of the last stage. Returns its number of steps: as many as take the
    same time, at the speed that the warm start of the same run had."""
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    warm, learned = recipe["stages"]
    (warm_seconds, warm_steps), (seconds, _) = (seconds_of(run, stage["name"]) for stage in (warm, learned))
    steps = round(seconds / (warm_seconds / warm_steps))
    imitation = {key: value for key, value in warm.items() if key != "early_stop"}
    recipe["stages"] = [warm, {**imitation, "name": "imitation", "steps": steps}]
    recipe["evaluation"] |= {"keep_best": "reference_nll", "keep_best_mode": "min"}
    path.write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    return steps


def end_of_warm_start(run: Path) -> Path:
    """The checkpoint at the end of the first stage."""
    return max((run / "checkpoints").glob("stage-0-step-*"))


def accuracies(recipe: Path, model: Path) -> dict[str, Any]:
    """Accuracy on the test split with its interval, sampled and greedy."""
    from lmgym.config.build import load_config
    from lmgym.training.machine import choose_machine
    from lmgym.training.setup import actor_of, evaluate_actor, held_out_examples, held_out_rewards, load_weights

    found = {}
    for name, settings in DECODINGS.items():
        temperature = () if name == "sampled" else ("evaluation.temperature=0",)
        config = load_config(recipe, ["evaluation.split=test", *settings, *temperature])
        policy = load_weights(config.policy, config.seed, choose_machine(config, None), model)
        rewards = held_out_rewards(config, config.stages[-1])
        result = evaluate_actor(config, actor_of(config, policy), held_out_examples(config), rewards)
        found[name] = result.results["final_answer"]
    return found


def one_seed(seed: int, out: Path, settings: Sequence[str]) -> dict[str, Any]:
    """Train the recipe and its control with a seed; the accuracies of the three models."""
    run, control, recipe = out / f"seed-{seed}", out / f"control-{seed}", out / f"control-{seed}.yaml"
    minutes = train(RECIPE, [f"seed={seed}", f"out={run}", *KEEP_ALL, *settings]) / 60
    steps = write_control(recipe, run)
    train(recipe, [f"seed={seed}", f"out={control}", *KEEP_ALL])
    best = control / "best"
    assert (end_of_warm_start(run) / "model.safetensors").read_bytes() == (
        end_of_warm_start(control) / "model.safetensors"
    ).read_bytes(), "the control has another warm start"
    models = {"warm start": end_of_warm_start(run), "control": best, "GRPO": run / "final"}
    return {
        "seed": seed,
        "minutes": minutes,
        "control_steps": steps,
        **{name: accuracies(RECIPE, model) for name, model in models.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12, 13, 14])
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart_table"))
    parser.add_argument("settings", nargs="*", metavar="key=value", help="overrides of the recipe (not of the control)")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    print("| seed | answers | warm start | control | GRPO | minutes |\n|---|---|---|---|---|---|", flush=True)
    for seed in given.seeds:
        row = one_seed(seed, given.out.absolute(), given.settings)
        for kind in DECODINGS:
            cells = [str(row[name][kind]) for name in ("warm start", "control", "GRPO")]
            print(f"| {seed} | {kind} | {' | '.join(cells)} | {row['minutes']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
