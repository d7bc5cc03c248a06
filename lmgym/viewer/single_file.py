"""`lmgym view --html FILE`: the page, its script, its style and a part of the data as one file, to be sent.

The file opens from disk and asks for nothing. Its data is a block that no browser executes, and its policy allows only
the two blocks of script and style whose hashes it names.
"""

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from lmgym.core.errors import LmgymError
from lmgym.logs.writer import replace_file
from lmgym.viewer.addresses import json_bytes, tree_at
from lmgym.viewer.runs import RunRecords
from lmgym.viewer.server import page_files

MEGABYTE = 1_000_000
IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w-]+\.js)";\n', re.MULTILINE)
WARNING = "This file holds prompts, answers and data of the run: send it only to people who may see them."
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>lmgym</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<header id="top"></header>
<main id="view" tabindex="-1"></main>
<script type="application/json" id="data">{data}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def write_file(runs: Sequence[RunRecords], path: Path, megabytes: float) -> list[str]:
    """Write the page with as much of the runs as fits into so many megabytes; returns sentences for the user: where it
    is, what was left out, and a warning.

    Curves, held-out answers and notes come first, then steps: the first, the last, and those between in ever finer
    distances. Raises LmgymError if not even the curves fit, and if the file cannot be written.

    Example: write_file(open_runs([Path("runs/a")]), Path("a.html"), megabytes=20)
    """
    files = page_files()
    script, style = bundle(files), files["style.css"].decode()
    room = int(megabytes * MEGABYTE) - len(script) - len(style) - len(PAGE) - 4096  # the policy and the sentences
    data, steps = _chosen(runs, room)
    left_out = f"{_sentence(runs, steps, megabytes)} {WARNING}"
    tree = b'{"left_out":%s,"data":{%s}}' % (json_bytes(left_out), b",".join(data))
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    page = PAGE.format(policy=policy, style=style, data=tree.decode(), script=script).encode()
    replace_file(path, lambda file: file.write(page), durable=False)
    return [f"{path}: {len(page) / MEGABYTE:.1f} MB", _sentence(runs, steps, megabytes), WARNING]


def bundle(files: dict[str, bytes]) -> str:
    """The modules of the page as one script, each behind those that it imports. Their top-level names are all
    different, which a test checks."""
    done: dict[str, str] = {}

    def add(name: str) -> None:
        if name in done:
            return
        text = files[name].decode()
        done[name] = ""  # begun; modules that import each other would end here
        for other in IMPORT.findall(text):
            add(other)
        del done[name]
        done[name] = re.sub(r"^export ", "", IMPORT.sub("", text), flags=re.MULTILINE)

    add("main.js")
    return "\n".join(done.values())


def _chosen(runs: Sequence[RunRecords], room: int) -> tuple[list[bytes], int]:
    """Entries "address":tree of the data block, as many as fit; and the number of steps that are whole in it."""
    entries, size = [], 0
    for address in _always(runs):
        try:
            entries.append(_entry(runs, address))
        except LmgymError:  # a run without evaluations, or two runs without common prompts
            continue
        size += len(entries[-1])
    if size > room:
        raise LmgymError(
            f"the curves and held-out answers take {size / MEGABYTE:.1f} MB, and the limit leaves "
            f"{room / MEGABYTE:.1f}; raise --limit, or name fewer runs"
        )
    steps = 0
    for number, stage, step in _steps(runs):
        try:
            own = [_entry(runs, address) for address in _of_step(runs, number, stage, step)]
        except LmgymError:  # a step without answers, or a damaged one
            continue
        if size + (length := sum(map(len, own))) > room:
            break
        entries, size, steps = [*entries, *own], size + length, steps + 1
    return entries, steps


def _entry(runs: Sequence[RunRecords], address: str) -> bytes:
    # "<" is written as an escape, so that no text can close the script block.
    return (b"%s:%s" % (json_bytes(address), json_bytes(tree_at(runs, address)))).replace(b"<", b"\\u003c")


def _always(runs: Sequence[RunRecords]) -> Iterator[str]:
    yield "runs"
    for number, run in enumerate(runs):
        yield from (f"runs/{number}/{what}" for what in ("curves", "notes", "evaluations"))
        newest = run.rollouts.moments("evaluation")[-4:]
        records = [record for moment in newest for record in run.rollouts.records(moment)]
        answers = {(str(record.get("split")), str(record.get("example"))) for record in records}
        for split in sorted({split for split, _ in answers}):
            yield f"runs/{number}/evaluations/{split}"
        yield from (f"runs/{number}/prompts/{split}/{example}" for split, example in sorted(answers))
    yield from (f"pairs/{one}/{other}" for one in range(len(runs)) for other in range(len(runs)) if one != other)


def _steps(runs: Sequence[RunRecords]) -> list[tuple[int, int, int]]:
    """Run, stage and step of all steps: the last and the first of each run, then by halves."""
    ordered = []
    for number, run in enumerate(runs):
        places = list(run.curves.steps)
        ordered += [(rank, number, *places[row]) for rank, row in enumerate(by_halves(len(places)))]
    return [(number, stage, step) for _, number, stage, step in sorted(ordered)]


def by_halves(count: int) -> list[int]:
    """The numbers below `count`: the last, the first, then those between them in ever finer distances.

    Example:
        >>> by_halves(9)
        [8, 0, 4, 2, 6, 1, 3, 5, 7]
    """
    if count <= 2:
        return list(range(count))[::-1]
    seen = [count - 1, 0]
    distance = 1 << ((count - 1).bit_length() - 1)
    while distance >= 1:
        seen += [number for number in range(distance, count - 1, distance) if number % (2 * distance)]
        distance //= 2
    return list(dict.fromkeys(seen))


def _of_step(runs: Sequence[RunRecords], number: int, stage: int, step: int) -> Iterator[str]:
    columns = tree_at(runs, f"runs/{number}/steps/{stage}/{step}")["columns"]
    yield f"runs/{number}/steps/{stage}/{step}"
    yield from (f"runs/{number}/groups/{stage}/{step}/{group}" for group in dict.fromkeys(columns["group"]))
    for index, kept in zip(columns["index"], columns["kept"], strict=True):
        if kept:
            yield f"runs/{number}/answers/train/{stage}/{step}/{index}"


def _sentence(runs: Sequence[RunRecords], steps: int, megabytes: float) -> str:
    """What was left out."""
    total = sum(len(run.curves.steps) for run in runs)
    tokens = "the tokens of held-out answers are left out"
    if steps == total:
        return f"All {total:,} steps are in it, as far as their answers were kept; {tokens}."
    return f"Of {total:,} steps {steps:,} are in it, so that it stays below {megabytes:g} MB (--limit); {tokens}."


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
