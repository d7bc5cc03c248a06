"""What the drivers have in common: their options, tables, and the line that says on what machine and with what.

Ratios are taken within a round. A table is Markdown, as docs/benchmarks.md takes it.
"""

import argparse
import json
import os
import platform
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.environments import VENVS
from benchmarks.interleave import Result
from benchmarks.workloads import Workload

GIB = 2**30


def options(doc: str | None, contenders: Sequence[str], rounds: int = 5) -> argparse.ArgumentParser:
    """A parser of the options that every driver has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help="measured rounds (%(default)s)")
    parser.add_argument("--warmup", type=int, default=1, help="rounds before them that do not count (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=contenders, metavar="NAME", help=", ".join(contenders))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--venvs", type=Path, default=VENVS, help="where the environments of other libraries are")
    parser.add_argument("--out", type=_file, help="append every round's numbers to this .jsonl")
    sizes = parser.add_argument_group("for trying: a smaller workload, whose numbers mean nothing")
    sizes.add_argument("--prompts", type=int)
    sizes.add_argument("--completions", type=int)
    sizes.add_argument("--new-tokens", type=int)
    return parser


def _file(text: str) -> Path:
    """Said before hours of measuring, not after."""
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path} cannot be written; name a file in a folder that exists")
    return path


def sized(workload: Workload, arguments: argparse.Namespace) -> Workload:
    """The workload, made smaller where the options say so."""
    return workload.smaller(arguments.prompts, arguments.completions, arguments.new_tokens)


def ratio(slow: Sequence[float], fast: Sequence[float]) -> str:
    """Median, smallest and largest of the rounds' ratios.

    Example:
        >>> ratio([4.0, 6.0, 5.0], [2.0, 2.0, 2.0])
        '2.5 (2.0 to 3.0)'
    """
    each = [a / b for a, b in zip(slow, fast, strict=True)]
    digits = 1 if statistics.median(each) >= 2 else 2
    return f"{statistics.median(each):.{digits}f} ({min(each):.{digits}f} to {max(each):.{digits}f})"


def table(results: Sequence[Result], tokens: int | None = None) -> str:
    """Seconds per step with their parts, new tokens per second where `tokens` is their number, seconds of CPU (all
    threads), and peak memory."""
    parts = list(results[0].parts[0])
    head = ["contender", "s/step (min to max)", *(parts if len(parts) > 1 else [])]
    head += [*(["tokens/s"] if tokens else []), "CPU s", "peak GiB"]
    lines = [row(head), rule(len(head))]
    for result in results:
        cells = [result.name, f"{result.median:.2f} ({min(result.seconds):.2f} to {max(result.seconds):.2f})"]
        cells += [f"{result.part(part):.2f}" for part in parts] if len(parts) > 1 else []
        cells += [f"{tokens / result.median:,.0f}"] if tokens else []
        cells += [f"{statistics.median(result.cpu_seconds):.2f}", f"{result.peak_bytes / GIB:.2f}"]
        lines.append(row(cells))
    return "\n".join(lines)


def against(ours: Sequence[Result], theirs: Sequence[Result]) -> str:
    """Each of ours against each of theirs, their fastest first."""
    lines = [row(["", "times as fast (min to max)", "by CPU seconds", "share of the peak memory"]), rule(4)]
    for own in ours:
        for other in sorted(theirs, key=lambda result: result.median):
            wall, cpu = ratio(other.seconds, own.seconds), ratio(other.cpu_seconds, own.cpu_seconds)
            share = f"{own.peak_bytes / other.peak_bytes:.2f}"
            lines.append(row([f"{own.name} against {other.name}", wall, cpu, share]))
    return "\n".join(lines) if ours and theirs else ""


def report(title: str, results: Sequence[Result], arguments: argparse.Namespace, tokens: int | None = None) -> None:
    """Print the table of one measurement, the ratios, and the footer; append the rounds to `--out`."""
    print(f"\n{title}, {arguments.rounds} rounds\n\n{table(results, tokens)}\n")
    ours = [result for result in results if result.name.startswith("lmgym")]
    print(against(ours, [result for result in results if result not in ours]))
    print(f"\n{footer(results, arguments.threads)}", flush=True)
    save(title, results, arguments.out)


def footer(results: Sequence[Result], threads: int) -> str:
    """A line of the machine, the date and the versions."""
    versions = dict.fromkeys(
        f"{package} {release}"
        for result in results
        for package, release in result.about.items()
        if isinstance(release, str)
    )
    return f"{machine(threads)} | {today()} | {' '.join(versions)}"


def save(title: str, results: Sequence[Result], path: Path | None, **more: Any) -> None:
    """Append one JSON line for each contender, with every round's numbers."""
    if path is None:
        return
    with path.open("a", encoding="utf-8") as file:
        for result in results:
            file.write(json.dumps({"title": title, "date": today(), **more, **vars(result)}) + "\n")


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def rule(columns: int) -> str:
    return f"|{'---|' * columns}"


def machine(threads: int) -> str:
    """The processor, its cores, the threads used and what else the machine was doing."""
    name = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.is_file():
        lines = information.read_text(encoding="utf-8").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {os.cpu_count()} cores, {threads} threads, load {os.getloadavg()[0]:.1f}"


def today() -> str:
    return datetime.now(UTC).date().isoformat()
