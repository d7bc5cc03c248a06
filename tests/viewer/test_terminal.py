"""`lmgym view --text` in a terminal of its own (a pty), driven by real keys."""

import os
import pty
import re
import select
import struct
import sys
import termios
import time
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path

import pytest

from lmgym.core.errors import LmgymError
from lmgym.viewer.runs import open_runs
from lmgym.viewer.screens import parse_filters
from lmgym.viewer.terminal import show
from tests.viewer.sample_runs import ANSWERS, HOSTILE, sample_run

SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PATIENCE = 60.0  # seconds for a busy machine


class Shown:
    """A viewer in a pty; `press` sends keys and waits until a text is on the screen, no line of which is too long."""

    def __init__(self, folder: Path, columns: int) -> None:
        self.columns = columns
        self.process, self.terminal = pty.fork()
        if self.process == 0:
            os.environ["TERM"] = "xterm-256color"
            os.execv(sys.executable, [sys.executable, "-m", "lmgym", "view", str(folder), "--text"])
        ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.raw = self.screen = ""

    def press(self, keys: str, wanted: str) -> str:
        os.write(self.terminal, keys.encode())
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if select.select([self.terminal], [], [], 0.2)[0]:
                self.raw += os.read(self.terminal, 65536).decode(errors="replace")
                self.screen = SEQUENCE.sub("", self.raw.rpartition("\x1b[H")[2])
            elif wanted in self.screen:
                assert max(map(len, self.screen.splitlines())) <= self.columns
                return self.screen
        raise AssertionError(f"'{wanted}' did not come; the screen is:\n{self.screen}")

    def end(self) -> int:
        os.write(self.terminal, b"q")
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


@pytest.fixture(params=[110, 60])
def shown(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shown]:
    made = Shown(sample_run(tmp_path / "run", texts=[*ANSWERS, HOSTILE]), request.param)
    yield made
    os.close(made.terminal)


@pytest.mark.slow
def test_keys_lead_from_a_curve_to_the_tokens_and_back(shown: Shown) -> None:
    assert "held out validation: final_answer" in shown.press("", "curves of run") and "[" in shown.screen
    assert "reward" in shown.press("/reward\r", "reward  ")
    assert "stage 1 step 12" in shown.press("G\r", "reward of run")
    assert shown.press("l", "step 12 of stage 1: 18 answers").count("●") == 18
    assert shown.press("/score>0.5\r", "j k: move") and shown.press("G", "●").count("●") == 6
    assert shown.press("/score>>5\r", "is no filter")
    assert "prompt: What is 20 + 22" in shown.press("gl", "group 0 of step 12")
    hostile = shown.press("Gl", "colour: probability")
    assert "<script>" in hostile and "U+202E" in hostile and "␛[2J␇" in hostile
    assert "\u202e" not in shown.raw and "\x07" not in shown.raw
    assert shown.press("c", "colour: advantages")
    assert shown.press("jj", "probability")  # down to the numbers of the tokens
    assert shown.press("?", "back up") and shown.press("x", "colour: advantages")
    assert shown.press("h", "group 0 of step 12") and shown.press("hhhhh", "curves of run")
    assert shown.end() == 0


def test_no_terminal_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(LmgymError, match="needs a terminal"):
        show(open_runs([sample_run(tmp_path / "run", steps=1)]))


def test_filters_are_those_of_the_page() -> None:
    assert parse_filters("seconds/environment>2 -equal") == [("seconds/environment", ">", 2.0), ("equal", "=", 0.0)]
    numbers = {"-1.5": -1.5, "2.": 2.0, ".5": 0.5, "1e-3": 0.001, "1E2": 100.0}
    assert [parse_filters(f"score>{text}")[0][2] for text in numbers] == list(numbers.values())
    for wrong in ("-score<1", "score<0..5", "score<.", "score<-", "score<1.2.3", "score<1e", "score<--1"):
        with pytest.raises(LmgymError, match="is no filter"):
            parse_filters(wrong)
