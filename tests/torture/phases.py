"""Kills and stops in every phase of a run: loading, evaluation, rollout, update, saving, summary, final model.

    python -m tests.torture.phases --kills 1000 --seed 0

Each recipe is trained once without a kill, while it is noted when each phase begins and how long it takes. Then it is
ended again and again, each time in a phase that was drawn (all are drawn equally often, however short they are), at any
moment of it: by SIGKILL, or by Ctrl-C (once, twice), SIGTERM or SIGHUP, which save. After one to five of these it is
started without any, and must end equal to the uninterrupted run, bit for bit. Of several ranks one is hit.
"""

import argparse
import importlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

from rich.console import Console
from rich.table import Table

from lmgym.cli.main import main as command
from lmgym.training import evaluation_points
from lmgym.training.run import AS_ONE
from tests import runs
from tests.contract.test_every_algorithm import policy_section
from tests.parity.test_resume import ALGORITHMS
from tests.parity.test_resume_environments import GAMES, NUMBERS
from tests.ranks import Group

PHASES = {  # a phase, and the function that is it
    "joining": "lmgym.distributed.process_group:ProcessGroup.__init__",
    "data": "lmgym.training.setup:load_data",
    "progress": "lmgym.training.setup:find_progress",
    "model": "lmgym.training.setup:load_policy",
    "proof": "lmgym.training.setup:prove_policy",
    "opening": "lmgym.training.setup:open_run",
    "stage": "lmgym.training.loop:begin_stage",
    "evaluation": "lmgym.training.evaluation_points:_measure",
    "best": "lmgym.training.evaluation_points:_keep_best",
    "rollout": "lmgym.training.loop:gather",
    "preparing": "lmgym.training.loop:prepare",
    "update": "lmgym.training.loop:update",
    "advance": "lmgym.training.loop:advance",
    "logging": "lmgym.training.loop:log_step",
    "saving": "lmgym.training.loop:save_checkpoint",
    "stage's end": "lmgym.training.loop:end_stage",
    "final": "lmgym.training.evaluation_points:save_result",
    "small files": "lmgym.training.checkpoints.checkpoint:write_text",
    "plot": "lmgym.training.evaluation_points:training_plot",
    "results": "lmgym.training.evaluation_points:_write_results",
}
STOPS = {"SIGKILL": [9], "SIGINT": [2], "SIGINT twice": [2, 2], "SIGTERM": [15], "SIGHUP": [1]}
COMMON: dict[str, Any] = {
    "callbacks": {"tests.parity.test_resume:Evaluations": {}},
    "checkpoint": {"every": 1, "keep": 2},
    "distributed": {"seconds": 30},
    "evaluation": {"every": 1, "examples": 4, "keep_best": "length/mean", "final_split": "validation"},
    "optimizer": {"learning_rate": 0.03, "warmup": 0},
    "prompts_per_step": 2,
    "steps": 3,
}
WARM = {"name": "warm", "algorithm": "supervised", "steps": 2}
RL = {"name": "rl", "steps": 2}
RECIPES: dict[str, dict[str, Any]] = {
    "supervised, then grpo with a reference": {"algorithm": ALGORITHMS["grpo, reference"], "stages": [WARM, RL]},
    "early stop": {
        "stages": [WARM, {**RL, "early_stop": {"metric": "length/mean", "mode": "min", "patience": 1}}],
        "evaluation": {**COMMON["evaluation"], "final_split": None},
    },
    "ppo, critic apart": {"algorithm": ALGORITHMS["ppo"], "policy": {**runs.TINY["policy"], "critic": "separate"}},
    "nlpo, mask refreshed": {"algorithm": {**ALGORITHMS["nlpo"], "refresh_every": 2}},
    "trpo": {"algorithm": ALGORITHMS["trpo"]},
    "replay, few checkpoints": {"algorithm": ALGORITHMS["replay"], "checkpoint": {"every": 2}},
    "moving mean": {"algorithm": ALGORITHMS["reinforce ema"], "checkpoint": {"every": 0}},
    "dpo, then grpo": {
        "stages": [{"name": "pairs", "algorithm": "dpo", "task": runs.JUDGED, "steps": 2}, RL],
        "evaluation": {"every": 2, "examples": 4, "task": "arithmetic"},
    },
    "reward model": {
        "algorithm": ALGORITHMS["reward_model"],
        "task": runs.JUDGED,
        "evaluation": {"every": 1, "examples": 4},
    },
    "lora with a reference": {
        "algorithm": ALGORITHMS["grpo, reference"],
        "policy": policy_section("builtin:tiny", lora_rank=4),
        "stages": [WARM, RL],
    },
    "t5 with a2c": {"policy": policy_section("builtin:tiny_t5"), "algorithm": {"name": "a2c"}},
    "a game against a frozen copy": {
        "task": None,
        "rewards": {},
        "policy": NUMBERS,
        "sampling": {"max_new_tokens": 1},
        "algorithm": {"name": "rloo", "group_size": 2},
        "env": GAMES["against a frozen copy"],
        "evaluation": {"every": 1, "examples": 2, "keep_best": "reward"},
        "stages": [WARM, RL],
    },
}
SHARDED = {"distributed": {"seconds": 30, "sharding": "fsdp"}}
TOGETHER: dict[str, dict[str, Any]] = {  # for several ranks
    "supervised, then grpo with a reference": RECIPES["supervised, then grpo with a reference"],
    "early stop": RECIPES["early stop"],
    "ppo, critic apart, sharded": {**RECIPES["ppo, critic apart"], **SHARDED},
    "lora with a reference": RECIPES["lora with a reference"],
}
DIFFERENT = {"metrics.jsonl", "timings.jsonl", "plot.png", "recipe.yaml"}
LONGEST = 120.0  # seconds that a run may take


@dataclass
class Plan:
    """Which entry into a phase to hit, how long after it, and with which signals."""

    phase: str
    entry: int
    after: float
    signals: list[int]


@dataclass
class Tally:
    kills: Counter[str] = field(default_factory=Counter)  # by phase, of those that ended a process
    signals: Counter[str] = field(default_factory=Counter)  # the same, by signal
    missed: int = 0  # the run had ended before
    ends: int = 0
    failures: list[str] = field(default_factory=list)


def train(recipe: str, folder: str, victim: int, plan: dict[str, Any] | None, noted: str | None) -> int:
    """In a process of its own: `lmgym train`, hit by what is planned for this rank; `noted` gets the phases."""
    entries: list[tuple[str, float]] = []
    counts: Counter[str] = Counter()
    mine = plan is not None and victim == int(os.environ["RANK"])

    def hit(after: float, numbers: list[int]) -> None:
        time.sleep(after)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(2 * AS_ONE)  # else two would count as one

    def watched(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            counts[phase] += 1
            if mine and plan and (plan["phase"], plan["entry"]) == (phase, counts[phase]):
                Thread(target=hit, args=(plan["after"], plan["signals"]), daemon=True).start()
            began = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                entries.append((phase, time.perf_counter() - began))

        return call

    for phase, place in PHASES.items():
        module, _, path = place.partition(":")
        *above, name = path.split(".")
        owner = importlib.import_module(module)
        for part in above:
            owner = getattr(owner, part)
        setattr(owner, name, watched(phase, getattr(owner, name)))
    if plan and plan["phase"] not in ("plot", "results"):  # a plot takes as long as all else, and is not compared
        evaluation_points.training_plot = lambda metrics, plot: plot
    status = command(["train", recipe, f"out={folder}"])
    if noted and os.environ["RANK"] == "0":
        Path(noted).write_text(json.dumps(entries))
    return status


def warm() -> None:
    """Train once in the process that all others are forked from, so that none of them has to import anything."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        for name in ("supervised, then grpo with a reference", "lora with a reference", "t5 with a2c"):
            recipe = runs.write(Path(folder) / "recipe.yaml", **COMMON | RECIPES[name])
            command(["train", str(recipe), f"out={folder}/{len(name)}"])


def assert_same_files(one: Path, other: Path) -> None:
    """Every file of two run folders is the same, but for times, and for the folder's own name in its recipe. A stop has
    left a checkpoint that the other run did not need."""
    newest = runs.newest(one).name
    assert runs.newest(other).name == newest
    stopped = {path.name for run in (one, other) for path in run.glob("checkpoints/*")} - {newest}
    found = [
        {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and stopped.isdisjoint(path.parts)}
        for run in (one, other)
    ]
    assert found[0] - DIFFERENT == found[1] - DIFFERENT, found[0] ^ found[1]
    for name in sorted(found[0] - DIFFERENT):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert runs.records(one / "metrics.jsonl") == runs.records(other / "metrics.jsonl")


def waited(group: Group) -> list[int]:
    """The statuses of all ranks; those that take too long are killed."""
    guard = Thread(target=_end_late, args=(list(group.processes), time.monotonic() + LONGEST), daemon=True)
    guard.start()
    return group.wait()


def _end_late(processes: list[int], end: float) -> None:
    while time.monotonic() < end:
        time.sleep(0.5)
        if not any(Path(f"/proc/{process}/exe").exists() for process in processes):
            return
    for process in processes:
        if Path(f"/proc/{process}/exe").exists():
            os.kill(process, signal.SIGKILL)


def campaign(
    recipe: dict[str, Any],
    group: Group,
    ranks: int,
    kills: int,
    chance: random.Random,
    place: Path,
    phases: Sequence[str] = (),
    signals: Sequence[str] = (),
) -> Tally:
    """All kills of one recipe, in these phases and by these signals (none: all)."""
    tally, whole, noted = Tally(), place / "whole", place / "phases.json"
    path = str(runs.write(place / "recipe.yaml", **COMMON | recipe))
    target = "tests.torture.phases:train"
    if group.run(ranks, path, str(whole), 0, None, str(noted), target=target) != [0] * ranks:
        tally.failures.append(f"without any kill: {group.said()[-500:]}")
        return tally
    seconds: dict[str, list[float]] = {}
    for phase, took in json.loads(noted.read_text()):
        seconds.setdefault(phase, []).append(took)
    number = 0
    while sum(tally.kills.values()) < kills:
        number += 1
        run, story = place / f"run-{number}", list[str]()
        for again in range(chance.randint(1, 5)):
            phase = chance.choice(sorted(seconds.keys() & {*phases} if phases else seconds))
            entry = 1 if again and chance.random() < 0.7 else chance.randint(1, len(seconds[phase]))
            name = chance.choice(signals or ["SIGKILL"] * 4 + sorted(STOPS))
            plan = Plan(phase, entry, chance.uniform(0.0, 1.1) * seconds[phase][entry - 1], STOPS[name])
            victim = chance.randrange(ranks)
            group.start(ranks, path, str(run), victim, vars(plan), None, target=target)
            statuses = waited(group)
            story.append(f"{name} in {phase} {entry} after {plan.after:.4f} s: {statuses}")
            if statuses == [0] * ranks:
                tally.missed += 1
                break
            if statuses[victim] not in (130, *(-number for number in plan.signals)):
                tally.failures.append(f"{'; '.join(story)}: {group.said(victim)[-700:]}")
            others = [status for rank, status in enumerate(statuses) if rank != victim]
            if wrong := [status for status in others if status not in (0, 75, 130)]:
                said = [group.said(rank)[-400:] for rank in range(ranks)]
                tally.failures.append(f"{'; '.join(story)}: other ranks ended with {wrong}: {said}")
            tally.kills[phase] += 1
            tally.signals[name] += 1
        group.start(ranks, path, str(run), -1, {"phase": ""}, None, target=target)
        if (statuses := waited(group)) != [0] * ranks:
            tally.failures.append(f"{run}: {'; '.join(story)}: then {statuses}: {group.said()[-700:]}")
            continue
        tally.ends += 1
        try:
            assert_same_files(whole, run)
        except (AssertionError, OSError, ValueError) as error:
            tally.failures.append(f"{run} differs after {'; '.join(story)}: {str(error)[:300]}")
        else:
            shutil.rmtree(run)
    return tally


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torture.phases", description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--only", default="", help="only recipes whose name contains this")
    parser.add_argument("--phases", nargs="*", default=[], choices=PHASES, help="only these, such as data model proof")
    parser.add_argument("--signals", nargs="*", default=[], choices=STOPS, help="only these")
    given = parser.parse_args(arguments)
    chosen = {name: one for name, one in (RECIPES if given.ranks == 1 else TOGETHER).items() if given.only in name}
    folder = Path(tempfile.mkdtemp(prefix="lmgym-phases-"))
    group, tallies = Group(folder, "import tests.torture.phases\ntests.torture.phases.warm()"), dict[str, Tally]()
    for number, (name, recipe) in enumerate(chosen.items()):
        (own := folder / str(number)).mkdir()
        began, share = time.monotonic(), -(-given.kills // len(chosen))
        tally = tallies[name] = campaign(
            recipe, group, given.ranks, share, random.Random(f"{given.seed} {given.ranks} {name}"), own,
            given.phases, given.signals,
        )  # fmt: skip
        kills, seconds = sum(tally.kills.values()), time.monotonic() - began
        print(f"{name}: {kills} kills, {tally.ends} ends, {seconds:.0f} s", flush=True)
        for failure in tally.failures:  # now, too: whoever stops the campaign has them
            print(f"{name}: {failure}", flush=True)
        if not tally.failures:
            shutil.rmtree(own)
    group.close()
    phases = [phase for phase in PHASES if any(tally.kills[phase] for tally in tallies.values())]
    table = Table("phase", *(str(number) for number in range(len(tallies))), "all", title=f"kills, seed {given.seed}")
    for phase in phases:
        numbers = [tally.kills[phase] for tally in tallies.values()]
        table.add_row(phase, *map(str, numbers), str(sum(numbers)))
    Console(width=140).print(table)
    signals: Counter[str] = sum((tally.signals for tally in tallies.values()), Counter())
    kills, ends = sum(signals.values()), sum(tally.ends for tally in tallies.values())
    failures = sum(len(tally.failures) for tally in tallies.values())
    print(f"{kills} kills ({dict(signals)}) of {given.ranks} ranks, {ends} ends compared, {failures} failures")
    print(f"the runs are kept in {folder}" if failures else "no failure")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
