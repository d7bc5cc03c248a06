"""What a first GPU must tell, in ten minutes and one report: `python -m benchmarks.gpu --plan FOLDER`.

Each part is a process of its own with a limit of its own; what takes too long is cut, what fails is told, and the next
one runs. FOLDER/report.md is written anew after each part, so that a machine that is taken away leaves what was found
out; FOLDER/NAME.log has all that a part said. Nothing is downloaded: what is not installed is left out, by name.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHOWN = 60  # lines of a part's output that the report shows


@dataclass(frozen=True)
class Part:
    """One command and the most seconds that it may take.
    Example: Part("tests", "what does a GPU break?", 120, ["-m", "pytest", "-q"], needs=("pytest",))"""

    name: str
    question: str
    seconds: int
    arguments: Sequence[str]
    needs: Sequence[str] = ()
    """Packages without which it is left out."""


@dataclass(frozen=True)
class Outcome:
    """What became of a part: "passed", "failed with status 1", "cut off after 60 s" or why it was left out."""

    part: Part
    end: str
    seconds: float = 0.0
    output: str = ""


def parts(device: str, models: Sequence[str], sizes: Sequence[str]) -> list[Part]:
    """All parts, the most telling first. `sizes` are options of a smaller workload, for trying."""
    step = ["-m", "benchmarks.gpu", "--device", device, "--rounds", "2", "--models"]
    forms = ["lmgym-bf16", "lmgym-bf16-captured", "lmgym-bf16-captured-flex"]
    trl = ["trl-1.16-autocast", "trl-1.16-bf16"]
    exact = ["-m", "benchmarks.gpu_exact", "--device", device]
    tests = ["tests/parity/test_gpu_path.py", "tests/parity/test_sampler.py", "tests/parity/test_families.py"]
    return [
        Part("machine", "what is it?", 30, ["-m", "benchmarks.gpu_exact", "--device", device, "--only", "machine"]),
        Part("exact", "are runs repeatable, resumable, and sampled as scored?", 150, exact),
        Part(
            "step", "seconds of a step, graphs and flex on and off", 150, [*step, models[0], *sizes, "--only", *forms]
        ),
        Part("tests", "what do the tests find?", 90, ["-m", "pytest", "-q", "-x", *tests], ["pytest"]),
        Part("trl", "seconds of TRL's step", 120, [*step, models[0], *sizes, "--here", "--only", *trl], ["trl"]),
        *[
            Part(f"step {name}", "a larger model", 120, [*step, name, *sizes, "--only", "lmgym-bf16-captured"])
            for name in models[1:]
        ],
    ]


def run(folder: Path, minutes: float, device: str, models: Sequence[str], sizes: Sequence[str]) -> int:
    """Run the plan. Returns 0 if no part failed."""
    folder.mkdir(parents=True, exist_ok=True)
    end, outcomes = time.monotonic() + 60 * minutes, list[Outcome]()
    for part in parts(device, models, sizes):
        outcomes.append(outcome(part, folder, min(part.seconds, end - time.monotonic())))
        (folder / "report.md").write_text(report(outcomes), encoding="utf-8")
        print(f"{part.name:<20} {outcomes[-1].end}, {outcomes[-1].seconds:.0f} s", flush=True)
    print(f"report: {folder / 'report.md'}")
    return int(any(one.end.startswith("failed") for one in outcomes))


def outcome(part: Part, folder: Path, seconds: float) -> Outcome:
    """Run one part for at most so many seconds."""
    if missing := [name for name in part.needs if importlib.util.find_spec(name) is None]:
        return Outcome(part, f"left out: {', '.join(missing)} not installed")
    if seconds < 5:
        return Outcome(part, "left out: no time left")
    log, begun = folder / f"{part.name.replace(' ', '_')}.log", time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        command = [sys.executable, *part.arguments]
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | offline, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = process.wait(seconds)
            said = "passed" if status == 0 else f"failed with status {status}"
        except subprocess.TimeoutExpired:
            said = f"cut off after {seconds:.0f} s"
            os.killpg(process.pid, signal.SIGKILL)  # and all that it has started
            process.wait()
    return Outcome(part, said, time.monotonic() - begun, log.read_text(encoding="utf-8", errors="replace"))


def report(outcomes: Sequence[Outcome]) -> str:
    """Markdown: a table of what became of each part, and the end of what each said."""
    lines = [f"# A first GPU, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "", "| part | question | end | seconds |"]
    lines += ["|---|---|---|---|"]
    lines += [f"| {one.part.name} | {one.part.question} | {one.end} | {one.seconds:.0f} |" for one in outcomes]
    for one in (one for one in outcomes if one.output):
        last = one.output.splitlines()[-SHOWN:]
        command = " ".join(["python", *one.part.arguments])
        lines += ["", f"## {one.part.name}", "", f"    {command}", "", *(f"    {line}" for line in last)]
    return "\n".join(lines) + "\n"
