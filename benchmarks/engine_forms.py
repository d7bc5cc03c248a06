"""The same recipes with the sampler of the training process, a pool of generators, a vLLM server, and one step ahead.

    python -m benchmarks.engine_forms --out /tmp/engines
    python -m benchmarks.engine_forms --out /tmp/engines --vllm venv/bin/python     # a Python that has vLLM

quickstart and increasing_numbers are trained as they are, a thread for each process. One step ahead needs a weight for
answers of older weights (a correction), so it is left out for PPO, and GRPO runs with this weight and without. vLLM's
kernels for processors need heads of 32 at least. quickstart's model has such. That of increasing_numbers has four of
16, so there sampler and vLLM are compared with two of 32. A server lives as long as its run. Prints a Markdown table of
what each run says of itself, with the median seconds of a step of the last stage. A finished run in the folder is read,
not trained again.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rank_forms import METRICS, cells, trained
from benchmarks.training import ROOT
from benchmarks.vllm_server import served
from lmgym.config.build import load_config
from lmgym.models.load import load_policy

POOL = ["engine.name=pool"]
VLLM = ["engine.name=vllm"]
WIDE = ["policy.architecture={n_head: 2}"]
CAPPED = ["stages.rl.algorithm.correction=truncated"]
STEPS = {"quickstart": "stages.rl.steps", "increasing_numbers": "steps"}
FORMS: dict[str, dict[str, list[str]]] = {
    "quickstart": {
        "sampler": [],
        "pool of 2": [*POOL, "engine.workers=2"],
        "sampler, corrected": CAPPED,
        "pool of 1, one step ahead, corrected": [*POOL, "engine.workers=1", "engine.ahead=1", *CAPPED],
        "vLLM": VLLM,
        "vLLM, corrected": [*VLLM, *CAPPED],
    },
    "increasing_numbers": {
        "sampler": [],
        "pool of 2": [*POOL, "engine.workers=2"],
        "sampler, heads of 32": WIDE,
        "vLLM, heads of 32": [*VLLM, *WIDE],
    },
}


def step_seconds(folder: Path) -> float:
    """Median seconds of a step of a run's last stage."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    last = max(record["stage"] for record in records)
    return statistics.median(one["seconds"] for one in records if one["kind"] == "train" and one["stage"] == last)


def trained_with_server(python: Path, recipe: str, settings: Sequence[str], folder: Path) -> Path:
    """As `trained`, with a vLLM server of the recipe's model."""
    if (folder / "summary.json").is_file():
        return folder
    model = folder.with_name(folder.name + "-model")
    config = load_config(ROOT / "lmgym/recipes" / f"{recipe}.yaml", [*settings, "engine.address=http://127.0.0.1"])
    load_policy(config.policy, config.seed).save_pretrained(model)
    more = ("--max-num-seqs", 512, "--skip-tokenizer-init")  # ids travel, and no text
    with served(python, model, folder.with_name(folder.name + "-server.txt"), *more) as (address, _):
        return trained(recipe, [*settings, f"engine.address={address}"], folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--vllm", type=Path, help="a Python that has vLLM; without it these forms are left out")
    parser.add_argument("--only", default="", help="a word of the forms that are run")
    parser.add_argument("--steps", type=int, help="fewer steps of the last stage, to see that all of it works")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    print("| recipe | engine | before | after | training reward at the end | steps with rewards | seconds a step |")
    print("|---|---|---|---|---|---|---|")
    for recipe, forms in FORMS.items():
        for number, (form, settings) in enumerate(forms.items()):
            served_by_vllm, folder = VLLM[0] in settings, given.out / f"{recipe}-{number}"
            if given.only not in form or (served_by_vllm and given.vllm is None):
                continue
            settings = ["threads=1", *settings, *([f"{STEPS[recipe]}={given.steps}"] if given.steps else [])]
            if served_by_vllm:
                trained_with_server(given.vllm, recipe, settings, folder)
            else:
                trained(recipe, settings, folder)
            shown = [f"{recipe} ({METRICS[recipe]})", form, *cells(folder, METRICS[recipe])]
            print(f"| {' | '.join(shown)} | {step_seconds(folder):.2f} |", flush=True)


if __name__ == "__main__":
    main()
