"""The same recipes in one process, on two ranks, and on two ranks of which each holds a part of the weights.

    python -m benchmarks.rank_forms --gsm8k data/gsm8k --out /tmp/forms

The recipes are trained as they are: quickstart, increasing_numbers, and gsm8k_grpo with a small random model on a CPU,
which is paid for the length of its answers, since it solves nothing (without --gsm8k it is left out). Prints a Markdown
table of what each run says of itself: the held-out metric before and after with its interval, and the mean training
reward of its last ten steps. A finished run in the folder is read, not trained again.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.training import ROOT, train

FORMS: dict[str, list[str]] = {
    "one process": [],
    "two ranks": ["--ranks", "2"],
    "two ranks, weights in parts": ["--ranks", "2", "distributed.sharding=fsdp"],
}
SMALL = [
    "policy.model=builtin:tiny",
    "policy.device=cpu",
    "policy.architecture={max_position_embeddings: 2048}",
    "policy.tokens_per_forward=4096",
    "sampling.max_new_tokens=48",
    "rewards={length: {unit: characters, target: 30}}",
    "optimizer.learning_rate=0.001",
    "prompts_per_step=8",
    "steps=40",
    "evaluation.examples=32",
    "evaluation.every=0",
    "evaluation.temperature=1.0",
]
METRICS = {"quickstart": "final_answer", "increasing_numbers": "increasing_numbers", "gsm8k_grpo": "length"}


def trained(recipe: str, settings: list[str], folder: Path) -> Path:
    """The run folder of a recipe, trained unless it is finished."""
    if not (folder / "summary.json").is_file():
        train(ROOT / "lmgym/recipes" / f"{recipe}.yaml", [f"out={folder}", *settings])
    return folder


def cells(folder: Path, metric: str) -> list[str]:
    """What a finished run says of itself."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    records = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    rewards = [record["reward"] for record in records if record["kind"] == "train" and "reward" in record]
    before, after = (written(summary[moment]["results"][metric]) for moment in ("before", "after"))
    return [before, after, f"{statistics.mean(rewards[-10:]):.3f}", str(len(rewards))]


def written(interval: dict[str, Any]) -> str:
    """Example: written({"mean": 0.5, "low": 0.4, "high": 0.6}) is "0.500 [0.400, 0.600]" """
    if interval["low"] is None:
        return f"{interval['mean']:.3f}"
    return f"{interval['mean']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gsm8k", type=Path, help="a folder with train.jsonl and test.jsonl of GSM8K")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    given = parser.parse_args()
    recipes: dict[str, list[str]] = {"quickstart": [], "increasing_numbers": []}
    if given.gsm8k is not None:
        recipes["gsm8k_grpo"] = [f"task.path={given.gsm8k.resolve()}", *SMALL]
    print("| recipe | form | held-out metric before | after | training reward at the end | steps with rewards |")
    print("|---|---|---|---|---|---|")
    for recipe, settings in recipes.items():
        for number, (form, how) in enumerate(FORMS.items()):
            folder = trained(recipe, [*settings, *how], given.out / f"{recipe}-{number}")
            shown = [f"{recipe} ({METRICS[recipe]})", form, *cells(folder, METRICS[recipe])]
            print(f"| {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
