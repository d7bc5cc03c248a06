"""What `lmgym check` prints, line by line."""

import sys
from dataclasses import dataclass, field

from lmgym.core.visible import visible


@dataclass
class Report:
    """Lines to print; `problems` counts those that would spoil the run.

    Example:
        >>> report = Report(); report.note("prompts: 20 tokens"); report.warn("no answer ended"); report.problems
        1
    """

    lines: list[str] = field(default_factory=list)
    problems: int = 0

    def note(self, *texts: str) -> None:
        self.lines += [f"  {text}" for text in texts]

    def warn(self, *texts: str) -> None:
        self.lines += [f"! {text}" for text in texts]
        self.problems += len(texts)

    def doing(self, what: str) -> None:
        """Print the lines so far, and on standard error what takes its time now."""
        self.show()
        print(f"lmgym: {visible(what)} ...", file=sys.stderr, flush=True)

    def show(self) -> None:
        """Print the lines, with all their words as one line each, and begin anew."""
        if self.lines:
            print("\n".join(map(visible, self.lines)), flush=True)
        self.lines.clear()
