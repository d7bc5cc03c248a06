"""Taking the records of a run folder back to a checkpoint, and saying which of them are missing."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from lmgym.core.files import HIDDEN, replacing
from lmgym.logs.records import FILES, METRICS, Record, at_once, lines
from lmgym.logs.writer import disk_errors

COPIED = 2**20  # bytes at once


def rewind(
    folder: Path, stage: int, step: int, counted: Mapping[str, int] | None = None, begun: bool = False
) -> list[str]:
    """Take all files back to the checkpoint that was saved after `step` updates of `stage`; returns a sentence for
    whatever is missing in them.

    It keeps train and resume records before (stage, step), and evaluation records up to and including (stage, step):
    the evaluation of step s is written before checkpoint s (but at step 0 of a stage after it, unless the stage has
    `begun`: it stopped early there). `counted` is the number of records of each file when the checkpoint was written;
    None: not known, as in folders of older versions. What comes after so many is not read: a power failure may have
    left anything there. A new file replaces the old one atomically, so a kill in between does no harm; a file that has
    nothing to be cut stays. Raises LmgymError, with file and line, for a line that is not a record among those that are
    kept.

    Example: rewind(Path("runs/a"), stage=1, step=40)   # the run goes on with step 40 of its second stage"""
    sentences = []
    with disk_errors(folder):
        for left in Path(folder).glob(f"{HIDDEN}*"):  # by a kill
            left.unlink()
    for name in FILES:
        expected = None if counted is None else counted.get(name, 0)
        count, trained = _rewind(Path(folder) / name, stage, step, expected, begun or step > 0)
        gaps = _gaps(trained, stage, step) if name == METRICS else []
        sentences += _missing(name, 0 if expected is None else expected - count, expected, gaps)
    return sentences


def _rewind(path: Path, stage: int, step: int, expected: int | None, begun: bool) -> tuple[int, set[tuple[int, int]]]:
    """Cut one file; returns the number of records that were kept, and the (stage, step) of the train records."""
    count, trained, spans = 0, set[tuple[int, int]](), list[tuple[int, int]]()
    if not path.is_file():
        return count, trained
    with disk_errors(path):
        for begin, end, record in _before(path, stage, step, expected, begun):
            first = spans.pop()[0] if spans and spans[-1][1] == begin else begin
            spans.append((first, end))
            count += 1
            if record["kind"] == "train":
                trained.add((record["stage"], record["step"]))
        # It stays as it is if nothing is cut. But what the run appends must not go through a link, or into the copy
        # that `cp -al` makes.
        whole = spans == [(0, path.stat().st_size)] or not path.stat().st_size
        if not whole or path.is_symlink() or path.stat().st_nlink > 1:
            _keep(path, spans)
    return count, trained


def _keep(path: Path, spans: Iterable[tuple[int, int]]) -> None:
    """Rewrite a file with these parts of it alone, each from one offset to another. Raises OSError."""
    with open(path, "rb", opener=at_once) as old, replacing(path) as new:
        for begin, end in spans:
            old.seek(begin)
            while piece := old.read(min(end - old.tell(), COPIED)):
                new.write(piece)


def _before(path: Path, stage: int, step: int, expected: int | None, begun: bool) -> Iterable[tuple[int, int, Record]]:
    """The lines written before a checkpoint, as (first byte, end, record): those of earlier steps, and at most
    `expected` of them."""
    count = end = 0
    if expected == 0:
        return
    for line, record in lines(path):
        begin, end = end, end + len(line)
        if _belongs(record, stage, step, begun):
            yield begin, end, record
            count += 1
            if count == expected:
                return


def _belongs(record: Record, stage: int, step: int, begun: bool) -> bool:
    position = (record["stage"], record["step"])
    # A stage's first checkpoint comes before its first evaluation, every other one after it.
    return position < (stage, step) or (record["kind"] == "evaluation" and position == (stage, step) and begun)


def _missing(name: str, lacking: int, expected: int | None, gaps: list[str]) -> list[str]:
    """What a file lacks, as a sentence: train records of metrics.jsonl by their steps, all others by their number."""
    which = f"train records of {', '.join(gaps)}" if gaps else ""
    if lacking > 0:
        count = f"{lacking:,} of the {expected:,} records that the checkpoint counts"
        return [f"{name} lacks {count}{f' ({which})' if gaps else ''}; the run goes on without them"]
    return [f"{name} lacks {which}; the run goes on without them"] if gaps else []


def _gaps(seen: set[tuple[int, int]], stage: int, step: int) -> list[str]:
    """The steps without a train record, stage by stage, counted from 1, as words: "stage 1 steps 3 to 5"."""
    # An earlier stage may have stopped early: it has ended where its records end.
    ends = {own: max((at for where, at in seen if where == own), default=-1) + 1 for own in range(stage)}
    ends[stage] = step
    words = []
    for own, end in ends.items():
        steps = [at for at in range(end) if (own, at) not in seen]
        runs: list[list[int]] = []
        for at in steps:
            if runs and at == runs[-1][1] + 1:
                runs[-1][1] = at
            else:
                runs.append([at, at])
        words += [f"stage {own + 1} step{'s' * (a < b)} {a + 1}{f' to {b + 1}' * (a < b)}" for a, b in runs]
    return words if len(words) <= 5 else [*words[:5], f"{len(words) - 5} more gaps"]
