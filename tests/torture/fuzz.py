"""Damaged recipes, data and run folders: each must be accepted, or refused in one sentence, within five seconds.

    python -m tests.torture.fuzz --mutants 100000 --seed 0 --command-line 1000 --out /tmp/fuzz
    python -m tests.torture.fuzz --replay /tmp/fuzz/finding-003.json

A mutant is a function of (seed, kind, number). They are tried one after the other in one process, which another one
watches: if a mutant ends it, that is a finding, and the next process goes on behind that mutant. The findings are files
in the folder of `--out`, one for each distinct one, from which `--replay` repeats the mutant.
"""

import argparse
import base64
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ |= {"MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}

from tests import runs
from tests.torture import data, folders, recipes, trials
from tests.torture.trials import Mutant, Outcome

KINDS = ("recipe", "data", "folder")
OUT = Path(tempfile.gettempdir()) / "lmgym-fuzz"
MEMORY = 12 * 2**30  # bytes of addresses that the process may have; what wants more gets a MemoryError
STUCK = 120  # seconds without a result after which the process is ended
PRELUDE = "import bitsandbytes, datasets, peft, pyarrow.parquet, reasoning_gym\n"  # what a command may import at last
CLASSES = {"recipe": recipes.RecipeMutant, "data": data.DataMutant, "folder": folders.FolderMutant}


def make_mutant(kind: str, seed: int, number: int, bases: Mapping[str, Path]) -> Mutant:
    """The mutant with this number."""
    chance = random.Random(f"{seed}/{kind}/{number}")
    if kind == "recipe":
        return recipes.recipe_mutant(chance)
    return data.data_mutant(chance) if kind == "data" else folders.folder_mutant(chance, dict(bases))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign, or repeat one finding. The exit status is 1 if there was a finding."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mutants", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, help="only this one; by default each kind in turn")
    parser.add_argument("--command-line", type=int, default=1000, metavar="N", help="N more, each as a command")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder for the findings ({OUT})")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="a finding")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.out = given.out.absolute()
    if given.replay:
        return _replay(given)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.worker is not None:
        _work(given)
        return 0
    for stale in ("results.jsonl", "current"):
        (given.out / stale).unlink(missing_ok=True)
    processes, began = _campaign(given), time.perf_counter()
    if given.command_line:
        _command_line(given)
    seconds = time.perf_counter() - began
    print(f"{given.mutants} mutants in {processes} process(es); seed {given.seed}; {seconds:.0f} s of commands")
    return _report(given)


def _campaign(given: argparse.Namespace) -> int:
    """Let processes try all mutants; returns how many it took."""
    done, processes = 0, 0
    results = given.out / "results.jsonl"
    while done < given.mutants:
        words = ["--mutants", given.mutants, "--seed", given.seed, "--out", given.out, "--worker", done]
        words += ["--kind", given.kind] if given.kind else []
        log = open(given.out / "log.txt", "ab")  # noqa: SIM115 (closed below)
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.torture.fuzz", *map(str, words)], cwd=runs.ROOT, stdout=log, stderr=log
        )
        log.close()
        processes, moved, size = processes + 1, time.monotonic(), -1
        while worker.poll() is None:
            time.sleep(0.5)
            now = results.stat().st_size if results.exists() else 0
            if now != size:
                moved, size = time.monotonic(), now
            elif time.monotonic() - moved > STUCK:
                worker.kill()
        if worker.returncode == 0:
            break
        if worker.returncode == 1:
            raise SystemExit(f"the campaign itself failed; see {given.out / 'log.txt'}")
        # The mutant that it was at has ended it.
        current = given.out / "current"
        number = int(current.read_text()) if current.exists() else done
        if number < done:
            raise SystemExit(f"the process ended before its first mutant; see {given.out / 'log.txt'}")
        outcome = Outcome("refused", 0.0, f"the process ended with status {worker.returncode}", "died", "died")
        kind = _kind(given, number)
        bases = folders.make_bases(given.out / "bases")
        mutant = make_mutant(kind, given.seed, number, bases)
        _record(given.out, kind, number, given.seed, mutant, outcome)
        done = number + 1
    return processes


def _work(given: argparse.Namespace) -> None:
    """Try the mutants from `given.worker` on."""
    bases = folders.make_bases(given.out / "bases")
    place = given.out / "place" / "here"
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for number in range(given.worker, given.mutants):
        kind = _kind(given, number)
        (given.out / "current").write_text(str(number))
        mutant = make_mutant(kind, given.seed, number, bases)
        with emptied(place):
            outcome = trials.judge(mutant, place, bases, deep=number // len(KINDS) % 3 == 0)
        if outcome.finding == "slow":  # another program may have had the processor: what is slow is so twice
            with emptied(place):
                outcome = trials.judge(mutant, place, bases, deep=number // len(KINDS) % 3 == 0)
        _record(given.out, kind, number, given.seed, mutant, outcome)


def _kind(given: argparse.Namespace, number: int) -> str:
    return given.kind or KINDS[number % len(KINDS)]


class emptied:
    """A folder that is empty at the beginning, and the working directory inside of the block."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.before = folder, Path.cwd()

    def __enter__(self) -> Path:
        shutil.rmtree(self.folder.parent, ignore_errors=True)
        self.folder.mkdir(parents=True)
        os.chdir(self.folder)
        return self.folder

    def __exit__(self, *_: object) -> None:
        os.chdir(self.before)


def _record(out: Path, kind: str, number: int, seed: int, mutant: Mutant, outcome: Outcome) -> None:
    """Append the result; a finding with its mutant."""
    entry = {"kind": kind, "number": number, "seed": seed, "what": mutant.what[:200], **asdict(outcome)}
    entry["length"], entry["message"] = len(outcome.message), outcome.message[:1500]
    if outcome.finding:
        entry["mutant"] = as_plain(mutant)
    with (out / "results.jsonl").open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(json.dumps(entry) + "\n")


def as_plain(value: Any) -> Any:
    """A mutant as JSON; bytes as base64."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: as_plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    return [as_plain(item) for item in value] if isinstance(value, list | tuple) else value


def from_plain(kind: str, plain: Mapping[str, Any]) -> Mutant:
    """The mutant again."""

    def back(value: Any) -> Any:
        if isinstance(value, dict):
            decoded = set(value) == {"base64"}
            return base64.b64decode(value["base64"]) if decoded else {key: back(item) for key, item in value.items()}
        return [back(item) for item in value] if isinstance(value, list) else value

    mutant: Mutant = CLASSES[kind](**{name: back(value) for name, value in plain.items()})
    return mutant


def _replay(given: argparse.Namespace) -> int:
    entry = json.loads(given.replay.read_text(encoding="utf-8"))
    mutant = from_plain(entry["kind"].partition(" ")[0], entry["mutant"])
    bases = folders.make_bases(given.out / "bases") if entry["kind"].startswith("folder") else {}
    place = given.out / "place" / "here"
    with emptied(place):
        outcome = trials.judge(mutant, place, bases)
    print(json.dumps({"what": mutant.what, **asdict(outcome)}, indent=1))
    print(f"its files are in {place}")
    return int(bool(outcome.finding))


def _command_line(given: argparse.Namespace) -> None:
    """Mutants behind those of the campaign, each a command in a process of its own (forked from one that has imported
    everything)."""
    bases = folders.make_bases(given.out / "bases")
    place = given.out / "place" / "here"
    shell_folder = given.out / "shell"
    shell_folder.mkdir(exist_ok=True)
    shell = runs.Shell(shell_folder, PRELUDE)
    try:
        for number in range(given.mutants, given.mutants + given.command_line):
            kind = _kind(given, number)
            mutant = make_mutant(kind, given.seed, number, bases)
            with emptied(place):
                outcome = trials.command_outcome(shell, mutant, place, bases)
            if outcome.finding == "slow":  # as above
                with emptied(place):
                    outcome = trials.command_outcome(shell, mutant, place, bases)
            _record(given.out, f"{kind} (command)", number, given.seed, mutant, outcome)
    finally:
        shell.close()


def _results(out: Path) -> Iterator[dict[str, Any]]:
    with (out / "results.jsonl").open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def _report(given: argparse.Namespace) -> int:
    """Print the table, and write one file for each distinct finding."""
    table: dict[str, Counter[str]] = {}
    slowest, longest = Counter[str](), Counter[str]()
    distinct: dict[tuple[str, ...], dict[str, Any]] = {}
    counts = Counter[tuple[str, ...]]()
    for entry in _results(given.out):
        kind = entry["kind"]
        row = table.setdefault(kind, Counter())
        row["count"] += 1
        row[entry["finding"] or entry["verdict"]] += 1
        slowest[kind] = max(slowest[kind], entry["seconds"])  # type: ignore[assignment]
        longest[kind] = max(longest[kind], entry["length"] if entry["finding"] != "traceback" else 0)
        if entry["finding"]:
            key = (kind, entry["finding"], entry["where"])
            counts[key] += 1
            distinct.setdefault(key, entry)
    found = sorted({name for row in table.values() for name in row} - {"count", "accepted", "refused"})
    heads = ["kind", "count", "accepted", "refused", *found, "slowest", "longest message"]
    print(" | ".join(heads))
    for kind, row in table.items():
        numbers = [str(row[name]) for name in heads[1:-2]]
        print(" | ".join([kind, *numbers, f"{slowest[kind]:.1f} s", str(longest[kind])]))
    for stale in given.out.glob("finding-*.json"):
        stale.unlink()
    for index, (key, count) in enumerate(counts.most_common()):
        path = given.out / f"finding-{index:03d}.json"
        path.write_text(json.dumps(distinct[key], indent=1), encoding="utf-8")
        print(f"{count:6d}  {key[0]}: {key[1]}: {key[2]}   {path.name}")
    return int(bool(counts))


if __name__ == "__main__":
    sys.exit(main())
