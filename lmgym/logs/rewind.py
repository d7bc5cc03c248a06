"""Taking the records of a run folder back to a checkpoint, and saying which of them are missing."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from lmgym.core.files import HIDDEN, replacing
from lmgym.logs.records import FILES, METRICS, Record, lines
from lmgym.logs.writer import disk_errors


def rewind(
    folder: Path, stage: int, step: int, counted: Mapping[str, int] | None = None, begun: bool = False
) -> list[str]:
    """Take all files back to the checkpoint that was saved after `step` updates of `stage`; returns a sentence for
    whatever is missing in them.

    It keeps train and resume records before (stage, step), and evaluation records up to and including (stage, step):
    the evaluation of step s is written before checkpoint s (but at step 0 of a stage after it, unless the stage has
    `begun`: it stopped early there). `counted` is the number of records of each file when the checkpoint was written;
    None: not known, as in folders of older versions. What comes after so many is not read: a power failure may have
    left anything there. The new file replaces the old one atomically, so a kill in between does no harm. Raises
    LmgymError, with file and line, for a line that is not a record among those that are kept.

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
    """Rewrite one file; returns the number of records that were kept, and the (stage, step) of the train records."""
    count, trained = 0, set[tuple[int, int]]()
    if not path.is_file():
        return count, trained
    with disk_errors(path), replacing(path) as file:
        for line, record in _before(path, stage, step, expected, begun):
            file.write(line)
            count += 1
            if record["kind"] == "train":
                trained.add((record["stage"], record["step"]))
    return count, trained


def _before(path: Path, stage: int, step: int, expected: int | None, begun: bool) -> Iterable[tuple[bytes, Record]]:
    """The lines written before a checkpoint: those of earlier steps, and at most `expected` of them."""
    count = 0
    if expected == 0:
        return
    for line, record in lines(path):
        if _belongs(record, stage, step, begun):
            yield line, record
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
