"""Two ranks of one thread each beside one rank of one thread: seconds a step, by turns, on five workloads.

    python -m benchmarks.ranks --rounds 3
    python -m benchmarks.ranks --rounds 3 --only W1 W2        # by a word of their names

W1 and W2 are the workloads of benchmarks/README.md, a model of 15M parameters with a vocabulary of 32,000. Each round
trains every workload for some steps with one rank, then with two. Prints a Markdown table: the median seconds of a step
(sampling, rewards, update), over all rounds without each run's first two steps, and the ratio by round.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks import workloads as shared
from benchmarks.quickstart import RECIPE
from benchmarks.training import train

WARM_UP = 2  # steps of a run that are not counted


def workloads(folder: Path) -> dict[str, dict[str, Any]]:
    """The recipes, by what they are about; what they read is written to `folder`."""
    words = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    stage = words.pop("stages")[-1]
    del stage["name"]
    short = words | stage | {"evaluation": {"examples": 8, "every": 0, "split": "validation"}, "steps": 14}
    long = {
        "task": {"name": "arithmetic", "size": 512, "largest": 50},
        "rewards": {"length": {"unit": "characters", "target": 80}},
        "policy": {"model": "builtin:tiny", "device": "cpu"},
        "sampling": {"max_new_tokens": 96, "min_new_tokens": 96},
        "algorithm": {"name": "ppo", "epochs": 2},
        "optimizer": {"learning_rate": 1.0e-4},
        "prompts_per_step": 64,
        "evaluation": {"examples": 8, "every": 0},
        "steps": 8,
    }
    wide = {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    large = long | {
        "policy": {"model": "builtin:tiny", "device": "cpu", "architecture": wide},
        "sampling": {"max_new_tokens": 32, "min_new_tokens": 32},
        "algorithm": {"name": "grpo", "group_size": 8},
        "prompts_per_step": 8,
        "steps": 6,
    }
    return {
        "quickstart's GRPO, 256 answers of 9 tokens, 0.8M": short,
        "PPO, 64 answers of 96 tokens, 0.8M": long,
        "GRPO, 64 answers of 32 tokens, 21M": large,
        "W1, GRPO, 64 answers of 128 tokens, 15M": recipe_of(shared.w1(), folder / "w1"),
        "W2, GRPO, 64 answers of 64 tokens, 15M": recipe_of(shared.w2(), folder / "w2"),
    }


def recipe_of(workload: shared.Workload, folder: Path) -> dict[str, Any]:
    """A recipe of the prompts and the model of a workload, which are written to `folder`."""
    shared.write(workload, folder)
    rows = [json.dumps({"prompt": shared.text(prompt)}) for prompt in workload.prompts]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return {
        "task": {"name": "jsonl", "path": str(folder / "prompts.jsonl"), "test_path": str(folder / "prompts.jsonl")},
        # the words of an answer have 2 to 6 letters, so no two answers earn the same
        "rewards": {"length": {"unit": "characters", "target": 16 * workload.new_tokens}},
        "policy": {"model": str(folder / "model"), "device": "cpu"},
        "sampling": {"max_new_tokens": workload.new_tokens, "min_new_tokens": workload.new_tokens},
        "algorithm": {"name": "grpo", "group_size": workload.completions},
        "optimizer": {"learning_rate": 1.0e-5},
        "prompts_per_step": len(workload.prompts),
        "evaluation": {"every": 0, "examples": 8},
        "steps": 5,
    }


def seconds_a_step(recipe: dict[str, Any], ranks: int, folder: Path) -> list[float]:
    """Train a recipe with so many ranks; the seconds of each step after the first ones."""
    run = folder / f"{ranks}-ranks-{len(list(folder.iterdir()))}"
    path = folder / f"{run.name}.yaml"
    path.write_text(yaml.safe_dump(recipe | {"threads": 1, "checkpoint": {"every": 0}}), encoding="utf-8")
    train(path, [f"out={run}", *(["--ranks", str(ranks)] if ranks > 1 else [])])
    records = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [record["seconds"] for record in records if record["kind"] == "train"][WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[""], help="words; workloads whose name has one of them")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print("| workload | one rank, s | two ranks, s | times as fast | by round |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        chosen = {name: recipe for name, recipe in workloads(Path(place)).items() if any(w in name for w in given.only)}
        for number, (name, recipe) in enumerate(chosen.items()):
            folder = Path(place) / str(number)
            folder.mkdir()
            print(row(name, recipe, folder, given.rounds), flush=True)


def row(name: str, recipe: dict[str, Any], folder: Path, rounds: int) -> str:
    """Train one workload for so many rounds; its line of the table."""
    seconds: dict[int, list[list[float]]] = {1: [], 2: []}
    for _ in range(rounds):
        for ranks in seconds:
            seconds[ranks].append(seconds_a_step(recipe, ranks, folder))
    medians = {ranks: [statistics.median(steps) for steps in each] for ranks, each in seconds.items()}
    one, two = (statistics.median(medians[ranks]) for ranks in (1, 2))
    by_round = ", ".join(f"{a / b:.2f}" for a, b in zip(medians[1], medians[2], strict=True))
    return f"| {name} | {one:.2f} | {two:.2f} | {one / two:.2f} | {by_round} |"


if __name__ == "__main__":
    main()
