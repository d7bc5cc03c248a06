"""Reading a file that another process appends to: each line once, and from the beginning if the file was replaced."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from lmgym.core.errors import LmgymError
from lmgym.core.files import lines_of, open_regular


class Tail:
    """The whole lines of a growing file. An incomplete last line waits until it is complete.

    A resumed run replaces its files by shorter ones (logs/rewind.py); then `anew` is called, and reading begins at the
    beginning.

    Example:
        >>> tail = Tail(Path("runs/a/metrics.jsonl"), anew=rows.clear)
        >>> rows += [line for offset, line in tail.lines()]
    """

    def __init__(self, path: Path, anew: Callable[[], object]) -> None:
        self.path, self.anew = path, anew
        self.offset = 0  # of the first byte that was not read
        self.number = 0  # lines read
        self._file = (0, 0)  # device and number of the file, which a replacement changes

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Offset and bytes of each line since the last call; nothing if there is no file."""
        try:
            with open_regular(self.path) as file:
                state = os.fstat(file.fileno())
                same = (state.st_dev, state.st_ino) == self._file
                if self.offset and not (same and state.st_size >= self.offset):
                    self.offset = self.number = 0
                    self.anew()
                self._file = (state.st_dev, state.st_ino)
                file.seek(self.offset)
                for line in lines_of(file, self.path):
                    if not line.endswith(b"\n"):
                        return
                    begin, self.offset = self.offset, self.offset + len(line)
                    self.number += 1
                    yield begin, line
        except FileNotFoundError:
            return
        except OSError as error:
            raise LmgymError(f"cannot read {self.path}: {error.strerror or error}") from error


def inside(folder: Path, *names: str) -> Path:
    """The path of a file of a run. Raises LmgymError if a link in the folder leads out of it, as in a run of someone
    else's: what it leads to is not the run's to show."""
    path = folder.joinpath(*names)
    try:
        within = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links that lead to each other (Python < 3.13)
        raise LmgymError(f"{path} cannot be read: it is a link that leads nowhere") from error
    if not within:
        raise LmgymError(f"{path} is a link that leads out of the run folder; it is not read")
    return path
