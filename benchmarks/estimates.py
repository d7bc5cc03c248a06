"""What `lmgym check` says of a recipe, beside what a run of it takes: memory and the seconds of a step.

    python -m benchmarks.estimates --smollm2 FOLDER --gemma FOLDER

Each recipe is checked in one process and trained for a few steps in another; a step's seconds are the median of those
after the first, and the memory is the process's peak. Prints a table.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.training import ROOT, train

SUMS = {"name": "arithmetic", "style": "short", "system_prompt": "Answer with the number alone."}
GRPO = {"name": "grpo", "group_size": 8}
# Answers differ in their words, so every group has something to learn from: no luck with eight groups in the seconds.
REWARDS = {"final_answer": 1.0, "type_token_ratio": 0.1}
SAMPLED = {"rewards": REWARDS, "prompts_per_step": 8, "algorithm": GRPO}
RECIPES: dict[str, dict[str, Any]] = {  # "model" is the option of the same name
    "grpo, short answers": {"model": "smollm2", "sampling": {"max_new_tokens": 24}},
    "grpo, longer answers": {
        "model": "smollm2", "task": {"name": "arithmetic"}, "sampling": {"max_new_tokens": 96}, "prompts_per_step": 4,
    },
    "grpo, adapters of rank 32": {
        "model": "smollm2", "policy": {"lora_rank": 32}, "sampling": {"max_new_tokens": 24},
    },
    "ppo, reference and value head": {
        "model": "smollm2", "sampling": {"max_new_tokens": 24},
        "algorithm": {"name": "ppo", "epochs": 2, "minibatches": 1},
    },
    "rloo on a base model": {
        "model": "gemma", "task": {"name": "arithmetic"}, "sampling": {"max_new_tokens": 32},
        "algorithm": {"name": "rloo", "group_size": 8},
    },
    "supervised": {
        "model": "gemma", "task": {"name": "arithmetic"}, "algorithm": "supervised", "prompts_per_step": 32,
        "rewards": None,
    },
}  # fmt: skip
STEP = re.compile(r"a step takes about ([\d.]+) s")
PEAK = re.compile(r"^\s*total\s+(.+)$", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", required=True, help="a folder with SmolLM2-135M-Instruct")
    parser.add_argument("--gemma", required=True, help="a folder with Gemma 3 270M")
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()
    print("| recipe | GiB: check, run | ratio | seconds a step: check, run | ratio |\n" + "|---" * 5 + "|")
    for name in given.only:
        with tempfile.TemporaryDirectory() as folder:
            print(row(name, recipe(RECIPES[name], given), Path(folder), given.steps), flush=True)


def recipe(own: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    """The whole recipe. Nothing but steps: no evaluation, no checkpoint."""
    tree = {"task": SUMS, **SAMPLED, **{key: value for key, value in own.items() if key != "model"}}
    tree["policy"] = {"model": getattr(given, own["model"]), **own.get("policy", {})}
    tree |= {"optimizer": {"learning_rate": 1e-5}, "steps": given.steps, "seed": 0}
    tree |= {"evaluation": None, "checkpoint": {"every": 0}}
    return {key: value for key, value in tree.items() if value is not None or key == "evaluation"}


def row(name: str, tree: dict[str, Any], folder: Path, steps: int) -> str:
    """A line of the table."""
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(tree), encoding="utf-8")  # JSON is YAML
    command = [sys.executable, "-m", "lmgym.cli.main", "check", str(path)]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    step, totals = STEP.search(said.stdout), PEAK.search(said.stdout)
    if step is None or totals is None:
        sys.exit(f"lmgym check of '{name}' says nothing of its steps or memory: {said.stdout}{said.stderr}")
    expected = max(float(number) for number in re.findall(r"([\d.]+) GiB", totals[1]))
    train(path, [f"out={folder / 'run'}"])
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    seconds = statistics.median(record["seconds"] for record in rows[1:])
    peak = max(record["memory/peak_gib"] for record in rows)
    return (
        f"| {name}, {Path(tree['policy']['model']).name} | {expected:.2f}, {peak:.2f} | {expected / peak:.2f} | "
        f"{float(step[1]):.1f}, {seconds:.1f} | {float(step[1]) / seconds:.2f} |"
    )


if __name__ == "__main__":
    main()
