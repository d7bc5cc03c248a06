"""The display of a run on a terminal: one live line, warnings, and tables at the end.

Printing never ends a run: what cannot be written (a full disk, a closed pipe) is dropped, and said once on standard
error."""

import math
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO, cast

import rich.box
import rich.console
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lmgym.core import progress
from lmgym.core.errors import shortened
from lmgym.core.output import HarmlessOutput, SurvivingOutput, columns_of, rich_settings, styled
from lmgym.core.visible import visible
from lmgym.logs.formatting import decimal, number, shorten, status, table_lines
from lmgym.stats.intervals import Interval, change

SHOWN = 6  # metrics in the line of an evaluation


@dataclass(frozen=True)
class Sample:
    """One problem with the model's answers before and after training; `reward` is that of the later answer. Of several
    turns the answer is the whole conversation, a list of messages.

    Example:
        >>> Sample(prompt="2+2=", before="5", after="4", reference="4", reward=1.0)
    """

    prompt: str
    before: str | Sequence[Mapping[str, str]]
    after: str | Sequence[Mapping[str, str]]
    reference: str
    reward: float | None  # None: not judged


class Pace:
    """Estimates the remaining time: the number of remaining steps times the median duration of recent steps.

    The first step does not count (it compiles, allocates and fills caches). The median ignores a single slow step.

    Example:
        >>> pace = Pace()
        >>> for seconds in (9.0, 1.0, 1.0, 30.0, 1.0):
        ...     pace.add(seconds)
        >>> pace.left(60)
        60.0
    """

    def __init__(self, recent: int = 32):
        self._seconds: deque[float] = deque(maxlen=recent)
        self._first = True

    def add(self, seconds: float) -> None:
        """Record the duration of a step, in seconds."""
        if not self._first:
            self._seconds.append(seconds)
        self._first = False

    def left(self, steps: int) -> float | None:
        """Seconds for this number of further steps; None before the second step."""
        return statistics.median(self._seconds) * steps if self._seconds else None


class Console:
    """Shows a run on a terminal as one live line, and in a file or a pipe as plain lines.

    Plain lines are printed at the first and last step of a stage, and in between at most every `every_seconds`. Missing
    numbers, NaN and infinity are shown as "-". Use it as a context manager, or call `close`, so that the live line ends
    even if the run fails. `quiet` prints nothing (for ranks other than 0).

    Example:
        >>> with Console() as console:
        ...     console.stage("rl", index=1, total=2)
        ...     console.step({"reward": 0.53, "seconds": 0.9}, step=12, steps=200)
    """

    def __init__(
        self,
        file: TextIO | None = None,
        every_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        quiet: bool = False,
    ):
        self._output = styled(file or sys.stdout)
        file = cast(TextIO, self._output)
        self._rich = rich.console.Console(file=file, quiet=quiet, **rich_settings())
        self._encoding = getattr(file, "encoding", None) or "utf-8"
        self._told_of_loss = False
        self._terminal = not quiet and file.isatty() and self._rich.is_terminal and not self._rich.is_dumb_terminal
        self._every_seconds = every_seconds
        self._clock = clock
        self._shown_at = -math.inf
        self._pace = Pace()
        self._held_out: tuple[str, float] | None = None
        self._warnings: set[str] = set()
        self._live: Live | None = None
        self._words: list[str] = []  # of the live line
        self._busy = False  # between these it shows what is being done
        self._lock = threading.RLock()  # the thread that tells of progress changes the live line, too
        self._passing = False  # what the live line says is about what is being done now, and goes when that is over

    def stage(self, name: str, index: int, total: int) -> None:
        """Announce a stage; `index` counts from 0."""
        self._finish_line()
        self._pace, self._shown_at = Pace(), -math.inf
        self.say(f"stage {index + 1}/{total}: {name}", style="bold")

    def step(self, record: Mapping[str, Any], step: int, steps: int, seconds_left: float | None = None) -> None:
        """Show a train record; `step` counts from 0 and shows as step + 1 of steps.

        Without `seconds_left` the remaining time of the stage is estimated from "seconds" of the records."""
        seconds = number(record, "seconds")
        if seconds is not None:
            self._pace.add(seconds)
        if seconds_left is None:
            seconds_left = self._pace.left(steps - step - 1)
        # A terminal is redrawn at most ten times a second; a file gets few lines.
        last, now = step + 1 >= steps, self._clock()
        if not last and now - self._shown_at < (0.1 if self._terminal else self._every_seconds):
            return
        self._shown_at = now
        words = status(record, step, steps, seconds_left, self._held_out)
        if self._warnings:
            words.append(f"{len(self._warnings)} warning" + "s" * (len(self._warnings) > 1))
        self._passing = False
        self._show_line(words)
        if last:
            self._finish_line()

    def evaluation(self, step: int, results: Mapping[str, Interval], count: int, split: str = "") -> None:
        """Print the first few results of `count` prompts (each is of those that it judged) after `step` steps, and how
        many others metrics.jsonl and the table at the end have. The first becomes the live line's held-out number."""
        if not results:
            return
        name, first = next(iter(results.items()))
        self._held_out = (name, first.mean)
        where = f", {split}" if split else ""
        means = "  ".join(f"{name} {interval}" for name, interval in list(results.items())[:SHOWN])
        if len(results) > SHOWN:
            means += f"  and {len(results) - SHOWN} more"
        self.say(f"evaluation after {step} steps ({count} prompts{where}): {means}", style="cyan")

    def warn(self, sentence: str) -> None:
        """Print a warning; the same warning is printed only once."""
        if sentence not in self._warnings:
            self._warnings.add(sentence)
            self.say(f"warning: {sentence}", style="yellow")

    def before_after(
        self, rows: Sequence[tuple[str, Interval, Interval]], better: Mapping[str, int] | None = None
    ) -> None:
        """Print a table of (metric, before, after): means with 95% intervals, and what has changed, if the intervals do
        not overlap (see `change`). `better` says of a metric whether higher (1) or lower (-1) is better."""
        self._finish_line()
        counts = {interval.count for _, *pair in rows for interval in pair}
        prompts = f" on {counts.pop()} prompts" if len(counts) == 1 else ""
        cells, bold = [], []
        for place, (metric, before, after) in enumerate(rows):
            word = change(before, after, (better or {}).get(metric, 0))
            cells.append((metric, str(before), str(after), word))
            if word not in ("unclear", "-"):
                bold.append(place)
        self.table(
            f"before and after{prompts}: mean [95% interval]", ("metric", "before", "after", "change"), cells, bold
        )

    def samples(self, rows: Sequence[Sample]) -> None:
        """Print a few answers before and after training, if there are any."""
        if not rows:
            return
        blocks = []
        for sample in rows:
            block = {"prompt": sample.prompt, "before": sample.before, "after": sample.after}
            blocks.append({**block, "reference": sample.reference, "reward": decimal(sample.reward)})
        self.blocks("sample answers", blocks)

    def blocks(
        self, title: str, blocks: Sequence[Mapping[str, str | Sequence[Mapping[str, str]]]], limit: int = 240
    ) -> None:
        """Print blocks of named texts or conversations (lists of messages, shown with their roles), each text shortened
        to `limit` characters."""
        self.say(title, style="italic")  # a table breaks its own title by its own width
        table = Table(box=rich.box.SIMPLE, show_header=False)
        table.add_column(style="dim")
        table.add_column(overflow="fold")
        for block in blocks:
            for index, (name, text) in enumerate(block.items(), 1):
                texts = [text] if isinstance(text, str) else [f"{one['role']}: {one['content']}" for one in text]
                cells = self._text(name), Text("\n").join(self._text(shorten(one, limit)) for one in texts)
                table.add_row(*cells, end_section=index == len(block))
        self._print(table)

    def table(
        self, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], bold: Sequence[int] = ()
    ) -> None:
        """Print a table, or lists, where the terminal is too narrow (`table_lines`). `bold` lists rows, counted from
        0."""
        self.say(title, style="italic")
        head, lines = table_lines(headings, rows, columns_of(self._output))
        for line in ["", *head]:
            self._line(line)
        for place, own in enumerate(lines):
            for line in own:
                self._line(line, "bold" if place in bold else "")
        self._line("")

    def say(self, sentence: str, style: str = "") -> None:
        """Print a line above the live line, neither wrapped nor shortened (so that a path can be copied)."""
        if self._passing:
            self._finish_line()
        self._print(self._text(shortened(sentence), style), soft_wrap=True)

    def doing(self, what: str, line: bool = False) -> None:
        """Say what takes its time now: on a terminal in the live line, elsewhere only as a `line` of its own."""
        if self._terminal:
            self._show_line([f"{what} ..."])
            self._passing = True
        elif line:
            self.say(f"{what} ...")

    def _line(self, text: str, style: str = "") -> None:
        """Print a line as it is, of any length."""
        self._print(self._text(text, style), soft_wrap=True)

    def close(self) -> None:
        """End the live line; its last state stays on the screen."""
        self._finish_line()

    def __enter__(self) -> "Console":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _print(self, what: Table | Text, soft_wrap: bool = False) -> None:
        self._rich.print(what, soft_wrap=soft_wrap)
        if self._output.lost and not self._told_of_loss:
            self._told_of_loss = True
            why = self._output.lost.strerror
            SurvivingOutput(sys.stderr).write(
                f"lmgym: standard output cannot be written ({why}); the run goes on, and its folder has all records\n"
            )

    def _show_line(self, words: list[str]) -> None:
        if not self._terminal:
            self.say("  ".join(words))
            return
        with self._lock:
            self._words, self._busy = words, False
            self._update_line(words)

    def _progress(self, sentence: str) -> None:
        """Show what is done now behind the first words of the live line."""
        with self._lock:
            if self._live is not None:
                self._busy = True
                self._update_line([*self._words[:1], sentence, *self._words[1:]])

    def _update_line(self, words: list[str]) -> None:
        while len(words) > 1 and len("  ".join(words)) >= self._rich.width:
            words = words[:-1]  # it must fit into one line; the least important words are the last
        text = self._text("  ".join(words))
        text.no_wrap, text.overflow = True, "crop"
        if self._live is None:
            # Standard error is printed above the line only if it goes to the terminal.
            self._live = Live(text, console=self._rich, auto_refresh=False, redirect_stderr=sys.stderr.isatty())
            self._live.start()
            for name in ("stdout", "stderr"):  # what others print above the line, where rich would obey its colours
                if isinstance(getattr(sys, name), FileProxy):
                    setattr(sys, name, HarmlessOutput(getattr(sys, name)))
            self._rich.show_cursor(True)  # otherwise a killed run would leave the cursor hidden
            progress.show_with(self._progress)
        self._live.update(text, refresh=True)

    def _finish_line(self) -> None:
        with self._lock:
            if self._live is not None:
                progress.show_with(None)
                if self._busy:
                    self._update_line(self._words)
                self._live.transient = self._passing
                self._live.stop()
                self._live, self._passing = None, False

    def _text(self, content: str, style: str = "") -> Text:
        known = visible(content).encode(self._encoding, "replace").decode(self._encoding)
        return Text(known, style=style)
