"""Notes and tags on answers: notes.jsonl in the run folder, a line an answer, ready to be a task's data."""

import fcntl
import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.core.files import read_text
from lmgym.logs.writer import replace_file
from lmgym.viewer.tail import inside

NOTES = "notes.jsonl"
LONGEST_NOTE, MOST_TAGS, LONGEST_TAG = 20_000, 50, 100
PLACE = ("kind", "stage", "step", "split", "index")

Note = dict[str, Any]


def read_notes(folder: Path) -> list[Note]:
    """The notes on a run's answers. Raises LmgymError, with its number, for a line that is none."""
    path = inside(folder, NOTES)
    try:
        lines = read_text(path).split("\n")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise LmgymError(f"{path} cannot be read: {error}") from error
    notes = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            note = json.loads(line)
            [note[name] for name in PLACE]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise LmgymError(f"{path} line {number} is no note with {', '.join(PLACE)}; delete the line") from error
        notes.append(note)
    return notes


def write_note(folder: Path, answer: Mapping[str, Any], text: str, tags: list[str]) -> list[Note]:
    """Write a note on an answer (a tree of views.py) in place of the one it has; without text and tags, remove that
    one. Returns all notes. The file is replaced as a whole, under a lock: two pages may write at once.

    Raises LmgymError for a note or tags that are too long, and if the file cannot be written."""
    if len(text) > LONGEST_NOTE or len(tags) > MOST_TAGS or any(len(tag) > LONGEST_TAG for tag in tags):
        raise LmgymError(
            f"a note has at most {LONGEST_NOTE:,} characters, and {MOST_TAGS} tags of {LONGEST_TAG} characters each"
        )
    place = {name: answer[name] for name in PLACE}
    with open(folder / "metrics.jsonl", "rb") as lock:  # any file of the run: a lock file would be one more
        with suppress(OSError):  # some network file systems cannot lock
            fcntl.flock(lock, fcntl.LOCK_EX)
        notes = [note for note in read_notes(folder) if any(note[name] != place[name] for name in PLACE)]
        if text or tags:
            example = answer["example"]
            kept = {"example": example.get("id"), "prompt": example.get("prompt"), "answer": answer["texts"][-1:]}
            kept["answer"] = kept["answer"][0] if kept["answer"] else ""
            said = {"score": answer["score"], "note": text, "tags": tags}
            notes.append(place | kept | said | {"time": datetime.now(UTC).isoformat(timespec="seconds")})
        lines = "".join(json.dumps(note) + "\n" for note in notes)
        for last in (False, True):  # a run that resumes just then may take the new file for one that a kill has left
            try:
                replace_file(inside(folder, NOTES), lambda file: file.write(lines.encode()))
                break
            except LmgymError as error:
                if last or not isinstance(error.__cause__, FileNotFoundError):
                    raise
    return notes
