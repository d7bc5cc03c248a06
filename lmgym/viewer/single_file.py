"""`lmgym view --html FILE`: the page, its script, its style and a part of the data as one file, to be sent.

The file opens from disk and asks for nothing. Its data is a block that no browser executes, and its policy allows only
the two blocks of script and style whose hashes it names."""

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lmgym.core.errors import LmgymError
from lmgym.logs.formatting import json_bytes
from lmgym.logs.writer import replace_file
from lmgym.viewer.addresses import tree_at
from lmgym.viewer.runs import RunRecords
from lmgym.viewer.server import page_files

MEGABYTE = 1_000_000
IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w-]+\.js)";\n', re.MULTILINE)
WARNING = (
    "This file holds prompts, answers and data of the run, your notes, and paths of this machine where sentences or "
    "differences of recipes name them: send it only to people who may see them."
)
PAIRS, GROUPS = 0.2, 0.6  # shares of the room up to which pairs of runs are taken, and steps with one group each
MOST_MISSES = 20  # that do not fit, one after the other: then there is no room


def write_file(runs: Sequence[RunRecords], path: Path, megabytes: float) -> list[str]:
    """Write the page with as much of the runs as fits into so many megabytes; returns sentences for the user: where it
    is, what was left out, and a warning.

    Curves, held-out answers and notes come first, then pairs of runs, then steps: the last, the first, and those
    between in ever finer distances, each with one group, and with the others as long as there is room. Raises
    LmgymError if not even the curves fit, and if the file cannot be written.

    Example: write_file(open_runs([Path("runs/a")]), Path("a.html"), megabytes=20)"""
    files = page_files()
    script, style = bundle(files), files["style.css"].decode()
    room = int(megabytes * MEGABYTE) - len(script) - len(style) - len(files["index.html"]) - 4096  # policy, sentences
    chosen = Chosen(runs, room)
    _choose(chosen)
    said = _sentence(chosen, megabytes)
    left_out = _escaped(json_bytes(f"{said} {WARNING}"))
    tree = b'{"left_out":%s,"data":{%s}}' % (left_out, b",".join(chosen.entries.values()))
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    charset, security = '<meta charset="utf-8">', f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    data = f'<script type="application/json" id="data">{tree.decode()}</script>'
    blocks = {
        charset: charset + security,
        '<link rel="stylesheet" href="/page/style.css">': f"<style>{style}</style>",
        '<script type="module" src="/page/main.js"></script>': f'{data}\n<script type="module">{script}</script>',
    }
    text = files["index.html"].decode()
    for link, block in blocks.items():
        text = text.replace(link, block, 1)
    page = text.encode()
    replace_file(path, lambda file: file.write(page), durable=False)
    return [f"{path}: {len(page) / MEGABYTE:.1f} MB", said, WARNING]


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


@dataclass
class Chosen:
    """What goes into the file: entries `"address":tree` by their address, as long as they fit into `room` bytes."""

    runs: Sequence[RunRecords]
    room: int
    entries: dict[str, bytes] = field(default_factory=dict)
    size: int = 0
    pairs: int = 0
    steps: int = 0  # with their numbers and a group
    whole: int = 0  # of them, with all that was kept
    unread: list[str] = field(default_factory=list)  # why steps are not there

    def add(self, addresses: Sequence[str], share: float = 1.0) -> bool:
        """Take all of these addresses, or none if the data would then fill more than this share of the room. Raises
        LmgymError for one that cannot be read."""
        own = {address: self._entry(address) for address in addresses if address not in self.entries}
        size = self.size + sum(len(entry) + 1 for entry in own.values())
        if fits := size <= share * self.room:
            self.entries |= own
            self.size = size
        return fits

    def _entry(self, address: str) -> bytes:
        tree = tree_at(self.runs, address)
        if address == "runs":  # who gets the file need not know where they lie
            tree = [{**run, "folder": ""} for run in tree]
        elif address.endswith("/overview"):  # a recipe may hold what its writer would send to nobody
            tree = {**tree, "recipe": ""}
        return _escaped(b"%s:%s" % (json_bytes(address), json_bytes(tree)))


def _escaped(data: bytes) -> bytes:
    """JSON in which no text can close the script block that it stands in."""
    return data.replace(b"<", b"\\u003c")


def _choose(chosen: Chosen) -> None:
    """Take as much of the runs as fits. Raises LmgymError if the curves and the held-out answers do not."""
    runs = chosen.runs
    for address in _always(runs):
        try:
            fits = chosen.add([address])
        except LmgymError:  # a run without evaluations, or damaged records
            continue
        if not fits:
            raise LmgymError(
                f"the curves and held-out answers do not fit into the {max(chosen.room, 0) / MEGABYTE:.1f} MB that the "
                "limit leaves for data; raise --limit, or name fewer runs"
            )
    for other in range(len(runs)):
        for one in range(other):
            with suppress(LmgymError):  # they have no prompts in common
                chosen.pairs += chosen.add([f"pairs/{one}/{other}"], PAIRS)
    steps = _steps(runs)
    begun = _take_steps(chosen, steps, GROUPS)
    _take_groups(chosen, begun)
    _take_groups(chosen, _take_steps(chosen, [place for place in steps if place not in begun], 1.0))


Place = tuple[int, int, int]  # run, stage and step


def _take_steps(chosen: Chosen, places: Sequence[Place], share: float) -> dict[Place, list[list[str]]]:
    """Take the numbers of these steps, each with the first group that was kept; returns the other groups of each step
    that was taken."""
    taken: dict[Place, list[list[str]]] = {}
    misses = 0
    for place in places:
        try:
            first, *others = _parts(chosen.runs, *place)
            fits = chosen.add(first, share)
        except LmgymError as error:
            chosen.unread.append(str(error))
            continue
        if fits:
            taken[place] = others
        misses = 0 if fits else misses + 1
        if misses == MOST_MISSES:
            break
    chosen.steps += len(taken)
    return taken


def _take_groups(chosen: Chosen, steps: Mapping[Place, list[list[str]]]) -> None:
    """Take the other groups of steps, as long as there is room."""
    misses = 0
    for groups in steps.values():
        missed = 0
        for group in groups if misses < MOST_MISSES else []:
            with suppress(LmgymError):
                missed += not chosen.add(group)
        misses += missed
        chosen.whole += not missed and misses < MOST_MISSES


def _always(runs: Sequence[RunRecords]) -> Iterator[str]:
    yield from ("runs", "list")
    for number, run in enumerate(runs):
        yield from (
            f"runs/{number}/{what}" for what in ("overview", "newest", "findings", "curves", "notes", "evaluations")
        )
        newest = run.rollouts.moments("evaluation")[-4:]
        records = [record for moment in newest for record in run.rollouts.records(moment)]
        answers = {(str(record.get("split")), str(record.get("example"))) for record in records}
        for split in sorted({split for split, _ in answers}):
            yield f"runs/{number}/evaluations/{split}"
        yield from (f"runs/{number}/prompts/{split}/{example}" for split, example in sorted(answers))


def _steps(runs: Sequence[RunRecords]) -> list[Place]:
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


def _parts(runs: Sequence[RunRecords], number: int, stage: int, step: int) -> list[list[str]]:
    """The addresses of a step, group by group: those with answers first, and before the first one the step's own."""
    columns = tree_at(runs, f"runs/{number}/steps/{stage}/{step}")["columns"]
    groups: dict[int, list[str]] = {}
    for group, index, kept in zip(columns["group"], columns["index"], columns["kept"], strict=True):
        own = groups.setdefault(group, [f"runs/{number}/groups/{stage}/{step}/{group}"])
        own += [f"runs/{number}/answers/train/{stage}/{step}/{index}"] if kept else []
    first, *others = sorted(groups.values(), key=lambda own: len(own) == 1) or [[]]
    return [[f"runs/{number}/steps/{stage}/{step}", *first], *others]


def _sentence(chosen: Chosen, megabytes: float) -> str:
    """What was left out."""
    total = sum(len(run.curves.steps) for run in chosen.runs)
    readable = total - len(set(chosen.unread))
    tokens = "the tokens of held-out answers are left out"
    said = f"All {total:,} steps are in it, as far as their answers were kept; {tokens}."
    if chosen.whole < total:
        some = f"Of {total:,} steps {chosen.steps:,} are in it, {chosen.whole:,} of them with all groups that were kept"
        limit = f", so that it stays below {megabytes:g} MB (--limit)" if chosen.whole < readable else ""
        said = f"{some}{limit}; {tokens}."
    if chosen.unread:
        said += f" Some steps have no answers that can be read; the first: {chosen.unread[0]}."
    if chosen.pairs < (pairs := len(chosen.runs) * (len(chosen.runs) - 1) // 2):
        said += f" Of {pairs:,} pairs of runs {chosen.pairs:,} are in it."
    return said


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
