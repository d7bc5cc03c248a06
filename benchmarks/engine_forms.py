"""The same recipes with the sampler of the training process, with a pool of generators, and one step ahead.

    python -m benchmarks.engine_forms --out /tmp/engines

quickstart and increasing_numbers are trained as they are, a thread for each process. One step ahead needs a weight for
answers of older weights (importance_cap), so it is left out for PPO, and GRPO runs with this weight and without. Prints
a Markdown table of what each run says of itself, with the median seconds of a step of the last stage. A finished run in
the folder is read, not trained again.
"""

import argparse
import json
import statistics
from pathlib import Path

from benchmarks.rank_forms import METRICS, cells, trained

POOL = ["engine.name=pool"]
CAPPED = ["stages.rl.algorithm.importance_cap=2.0"]
FORMS: dict[str, dict[str, list[str]]] = {
    "quickstart": {
        "sampler": [],
        "pool of 2": [*POOL, "engine.workers=2"],
        "sampler, importance_cap": CAPPED,
        "pool of 1, one step ahead, importance_cap": [*POOL, "engine.workers=1", "engine.ahead=1", *CAPPED],
    },
    "increasing_numbers": {"sampler": [], "pool of 2": [*POOL, "engine.workers=2"]},
}


def step_seconds(folder: Path) -> float:
    """Median seconds of a step of a run's last stage."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    last = max(record["stage"] for record in records)
    return statistics.median(one["seconds"] for one in records if one["kind"] == "train" and one["stage"] == last)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    given = parser.parse_args()
    print("| recipe | engine | before | after | training reward at the end | steps with rewards | seconds a step |")
    print("|---|---|---|---|---|---|---|")
    for recipe, forms in FORMS.items():
        for number, (form, settings) in enumerate(forms.items()):
            folder = trained(recipe, ["threads=1", *settings], given.out / f"{recipe}-{number}")
            shown = [f"{recipe} ({METRICS[recipe]})", form, *cells(folder, METRICS[recipe])]
            print(f"| {' | '.join(shown)} | {step_seconds(folder):.2f} |", flush=True)


if __name__ == "__main__":
    main()
