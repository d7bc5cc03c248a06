"""How often the doctor is wrong: 30 runs that learn, and 30 that have one thing wrong (doctor_runs.py).

    python -m benchmarks.doctor --out runs/doctor
    python -m benchmarks.doctor --out runs/doctor --only quickstart sums    # runs whose names begin so

Trains them one after another, about 10 minutes on one core and 10 more for the real model, which is read from the Hub,
or from `--model`. A run whose folder is finished is judged as it is, so a changed rule costs seconds. A healthy run
counts as right if nothing moderate or worse is found in it, a planted fault as found if a rule that names it finds
something moderate or worse. Prints a line for each run and the two rates.
"""

import argparse
import multiprocessing
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib.backends.backend_agg
import matplotlib.style  # noqa: F401 (both: so that each run need not)
import yaml

from benchmarks.doctor_runs import HEALTHY, PLANTED, START, Tree
from benchmarks.quickstart import RECIPE, end_of_warm_start
from lmgym.config.build import load_config
from lmgym.config.packaged import find_recipe
from lmgym.config.schema import Config
from lmgym.config.yaml import read_yaml
from lmgym.logs.console import Console
from lmgym.logs.doctor.examine import Finding, examine
from lmgym.training.loop import train

WORTH_A_WORD = ("severe", "moderate")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/doctor"))
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="runs whose names begin so")
    parser.add_argument("--model", help="a folder of SmolLM2-135M-Instruct, instead of the Hub's")
    given = parser.parse_args()
    given.out = given.out.absolute()
    given.out.mkdir(parents=True, exist_ok=True)
    right = {"healthy": 0, "planted": 0}
    count = dict.fromkeys(right, 0)
    for kind, name, recipe, settings, rules in all_runs(given.out):
        if not name.startswith(tuple(given.only)):
            continue
        if given.model and name == "smollm2":
            settings = [*settings, f"policy.model={Path(given.model).absolute()}"]
        found = worth_a_word(trained(given.out / kind / name, recipe, settings))
        wanted = any(finding.rule in rules for finding in found) if kind == "planted" else not found
        count[kind] += 1
        right[kind] += wanted
        said = ", ".join(f"{finding.level} {finding.rule} at step {finding.step + 1}" for finding in found)
        print(f"{'right' if wanted else 'WRONG':<6} {kind} {name}: {said or 'nothing'}", flush=True)
    for kind, what in (("healthy", "without a finding"), ("planted", "found")):
        print(f"{kind}: {right[kind]} of {count[kind]} {what}")


def all_runs(out: Path) -> Iterator[tuple[str, str, Path, list[str], frozenset[str]]]:
    """Kind, name, recipe file, overrides, and the rules that name the fault, of each run."""
    start = out / "warm_start"
    if not (start / "summary.json").is_file():
        trained(start, RECIPE, ["threads=1", "stages.rl.steps=1", "checkpoint.keep=1000"])
    for name, healthy in HEALTHY.items():
        for seed in range(healthy.seeds):
            recipe = healthy.recipe
            file = find_recipe(recipe) if isinstance(recipe, str) else written(out, name, recipe)
            own = f"{name}_{seed}" if healthy.seeds > 1 else name
            yield "healthy", own, file, [*healthy.changes, f"seed={seed}"], frozenset()
    for name, planted in PLANTED.items():
        yield "planted", name, written(out, name, planted.recipe), [], planted.rules


def written(out: Path, name: str, tree: Tree) -> Path:
    """A recipe as a file, which begins at the warm start where it says so."""
    tree = {key: value for key, value in tree.items() if value is not None}
    if tree["policy"]["model"] == START:
        tree["policy"] = {**tree["policy"], "model": str(end_of_warm_start(out / "warm_start"))}
    path = out / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def trained(folder: Path, recipe: Path, settings: list[str]) -> list[Finding]:
    """What the doctor finds in the run of a recipe; trains it, unless that is done."""
    if not (folder / "summary.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)  # one that was interrupted
        # Each in a process of its own, forked from this one, which has imported everything already.
        config = load_config(recipe, [*settings, f"out={folder}"])
        process = multiprocessing.get_context("fork").Process(target=train_silently, args=(config,))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"{recipe}: the run failed")
    return examine(folder, read_yaml(folder / "recipe.yaml")).findings


def train_silently(config: Config) -> None:
    train(config, Console(quiet=True))


def worth_a_word(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level in WORTH_A_WORD]


if __name__ == "__main__":
    main()
