"""Questions about a run that need its model: `lmgym why`, `bisect` and `what-if`, in a process of their own.

The page shows what they print for programs (--json). A question takes the run's own recipe, so it runs the code that
the recipe names, as the commands do; the page says so, and asks only when its user presses the button."""

import json
import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Mapping
from typing import Any

from lmgym.core.errors import LmgymError, describe
from lmgym.processes.keeper import Outcome, Program, started_with
from lmgym.viewer.runs import RunRecords

KINDS = ("why", "bisect", "what-if")
PLAIN = re.compile(r"[a-z_][\w.]*=[\w.+-]*")  # a change of the recipe that names no code, folder or program
LARGEST = 2**26  # bytes of an answer
BOOT = """import os, sys
os.chdir(sys.argv[1])
sys.path[:] = sys.argv[2].split(os.pathsep)
sys.argv[:] = ["lmgym", *sys.argv[3:]]
from lmgym.cli.main import main
sys.exit(main())
"""


class Question:
    """A question that is being answered: begin it, look at it, cancel it.

    Example:
        >>> question = Question(run, {"kind": "why", "stage": 0, "example": "arithmetic/test/3", "answer": "7"})
        >>> question.tree()
        {'key': ..., 'kind': 'why', 'done': False, 'seconds': 0.0, 'doing': '', 'answer': None, 'problem': ''}
    """

    def __init__(self, run: RunRecords, asked: Mapping[str, Any]) -> None:
        words = command(run, asked)
        self.key, self.kind = secrets.token_hex(8), words[0]
        self._began, self._ended = time.monotonic(), 0.0
        self._outcome: Outcome | None = None
        program = [sys.executable, "-c", BOOT, os.getcwd(), started_with(), *words]
        self._program = Program(program, os.environ, b"", output=LARGEST, ended=self._end, kept=LARGEST)

    def tree(self) -> dict[str, Any]:
        """How far it is, as JSON can hold it. `answer` is what the command prints; null with a `problem`, or where it
        has found nothing."""
        outcome = self._outcome
        seconds = (time.monotonic() if outcome is None else self._ended) - self._began
        tree = {"key": self.key, "kind": self.kind, "done": outcome is not None, "seconds": seconds}
        if outcome is None:
            return tree | {"doing": _sentence(self._program.last_error_line()), "answer": None, "problem": ""}
        answer, problem = _read(outcome)
        return tree | {"doing": "", "answer": answer, "problem": problem}

    def cancel(self) -> None:
        """Have its process killed."""
        self._program.end()

    def _end(self, outcome: Outcome) -> None:
        self._ended, self._outcome = time.monotonic(), outcome


def command(run: RunRecords, asked: Mapping[str, Any]) -> list[str]:
    """The command line of a question. Raises LmgymError for one that the page does not ask.

    Example: command(run, {"kind": "bisect", "stage": 0, "metric": "reward"})
        -> ["bisect", "/runs/a", "--json", "--stage=train", "--metric=reward"]"""
    kind = asked["kind"]
    if kind not in KINDS:
        raise LmgymError(f"a question is one of {', '.join(KINDS)}")
    given = {name: str(asked[name]) for name in ("example", "answer", "metric") if asked.get(name)}
    given |= {name: str(int(asked[name])) for name in ("step", "try", "token") if asked.get(name)}
    stage = run.curves.stages.get(int(asked.get("stage", 0)), "")
    words = [kind, str(run.folder.absolute()), "--json", *([f"--stage={stage}"] if stage else [])]
    words += [f"--{name}={value}" for name, value in given.items()]
    if any("\0" in word for word in words):
        raise LmgymError("an answer with the character NUL cannot be asked about; leave it out")
    return words + _changes(str(asked.get("changes", "")))


def _changes(text: str) -> list[str]:
    try:
        changes = shlex.split(text)
    except ValueError as error:
        raise LmgymError(f"the changes cannot be read: {describe(error)}") from error
    if wrong := [change for change in changes if not PLAIN.fullmatch(change)]:
        raise LmgymError(
            f"'{wrong[0]}' is not KEY=VALUE with a plain number or word; `lmgym what-if` in a terminal takes more"
        )
    return changes


def _read(outcome: Outcome) -> tuple[Any, str]:
    """The answer, or the sentence that says why there is none."""
    if outcome.status == 0 and not outcome.too_long:
        try:
            return json.loads(outcome.output), ""
        except (ValueError, RecursionError):
            return None, "the command has printed no JSON"
    if outcome.too_long:
        return None, f"the command has printed more than {LARGEST:,} bytes; ask it in a terminal"
    last = _sentence(outcome.errors.strip().rpartition("\n")[2])
    return None, last or "the command was ended"


def _sentence(line: str) -> str:
    return line.removeprefix("lmgym: ")[:1000]
