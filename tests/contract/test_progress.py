"""What a command says while it is busy: in a file a line now and then, on a terminal a line that goes again."""

import io
import sys
import threading

import pytest

from lmgym.core import progress
from lmgym.core.output import HarmlessOutput
from lmgym.core.progress import OFTEN, SILENCE, Teller, count, counted, doing, told
from lmgym.logs.console import Console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def quiet_for(teller: Teller, seconds: float) -> None:
    """As if nothing had been printed for so long, and the newest work were as old."""
    for stream in teller.streams:
        stream.written -= seconds
    teller._said -= seconds
    progress._works[-1].began -= seconds


def test_a_file_gets_a_line_after_some_seconds_and_then_rarely() -> None:
    file = io.StringIO()
    teller = Teller([HarmlessOutput(io.StringIO()), HarmlessOutput(file)])
    with doing("sampling answers"):
        count(12, 1064, "answers")
        teller.tell()
        assert not file.getvalue()
        for _ in range(int(OFTEN) + 3):
            quiet_for(teller, SILENCE + 1)
            teller.tell()
        lines = file.getvalue().splitlines()
        assert lines[0] == "lmgym: sampling answers, 12 of 1,064 answers, 4 s"
        assert len(lines) == OFTEN
    quiet = file.getvalue()
    teller.tell()  # nothing is being done: a command that waits for its user says nothing
    assert file.getvalue() == quiet


def test_on_a_terminal_the_line_goes_before_anything_else_is_printed() -> None:
    screen = Terminal()
    output, errors = HarmlessOutput(screen), HarmlessOutput(screen)
    teller = Teller([output, errors])
    with doing("saving \x1b]0;title\x07"):
        quiet_for(teller, 2)
        teller.tell()
    assert screen.getvalue() == "\r\x1b[2Klmgym: saving ␛]0;title␇, 2 s"
    output.write("saved\n")
    assert screen.getvalue().endswith(", 2 s\r\x1b[2Ksaved\n")
    teller.close()


def test_the_live_line_of_a_run_shows_what_is_done_behind_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", HarmlessOutput(screen))
    monkeypatch.setattr(sys, "stderr", HarmlessOutput(Terminal()))
    with told(), Console() as console:
        console.step({"reward": 0.5, "seconds": 1.0}, step=1, steps=9)
        assert progress._teller is not None and progress._teller.show is not None
        progress._teller.show("updating, 2 of 3 passes, 4 s")
        assert "step 2/9  updating, 2 of 3 passes, 4 s  reward 0.5" in screen.getvalue()
        console.close()
        assert progress._teller.show is None
    assert screen.getvalue().rstrip("\x1b[?25h\r\n").endswith("--:-- left")


def test_work_is_counted_and_nested_and_of_the_main_thread_only() -> None:
    seen = []
    for thing in counted(["a", "b"], "updating", "passes"):
        with doing("saving"):
            seen.append((thing, *(work.sentence() for work in progress._works)))
    assert seen[1] == ("b", "updating, 1 of 2 passes, 0 s", "saving, 0 s")

    def other() -> None:
        with doing("sampling ahead"):
            count(1, 9, "answers")
            seen.append(("other", *(work.what for work in progress._works)))

    with doing("updating"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen[2] == ("other", "updating")
    assert not progress._works
