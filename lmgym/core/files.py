"""Files in folders that may be someone else's: read in bounded time and memory (no pipes, no devices, no endless
lines), and written through no link. And the permissions of written ones."""

import difflib
import errno
import io
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any, BinaryIO

LONGEST_LINE = 2**26  # bytes
LONGEST_TEXT = 2**28
LONGEST_JSON = 2**24
MOST_BESIDE = 1000  # entries of a folder that are compared with a name
HIDDEN = ".writing-"  # the beginning of the name of a file that is not whole yet


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read its bytes. Raises OSError, at once, for what is no regular file: a folder, a pipe (which may
    never say anything) or a device (/dev/zero never ends)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer would block
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return open(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))


def nearby(path: Path) -> str:
    """The end of a sentence about a file or folder that is not there: one beside it that is nearly called so.

    Example: nearby(Path("runs/qiuckstart")) -> "; did you mean runs/quickstart?" """
    with suppress(OSError, ValueError), os.scandir(path.parent) as entries:
        names = [entry.name for entry in islice(entries, MOST_BESIDE)]
        if near := difflib.get_close_matches(path.name, names, n=1, cutoff=0.7):
            return f"; did you mean {path.parent / near[0]}?"
    return ""


def read_bytes(path: Path, most: int) -> bytes:
    """The contents of a file. Raises OSError as `open_regular` does, and for more than `most` bytes."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it is longer than {most:,} bytes", str(path))
    return data


def read_text(path: Path, most: int = LONGEST_TEXT) -> str:
    """A UTF-8 file's text, its line ends as "\\n". Raises OSError as `read_bytes` does, and UnicodeDecodeError."""
    return io.StringIO(read_bytes(path, most).decode("utf-8"), newline=None).read()


def read_json(path: Path, most: int = LONGEST_JSON) -> Any:
    """The value of a small JSON file. Raises OSError as `read_bytes` does, and ValueError for all that is no JSON, or
    nested too deeply.

    Example: read_json(Path("runs/a/machine.json"))["compute"] -> "float32" """
    try:
        return json.loads(read_text(path, most))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def lines_of(file: IO[bytes], path: Path) -> Iterator[bytes]:
    """The lines of an open file, with their ends. Raises OSError for one of more than LONGEST_LINE bytes."""
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise OSError(errno.EFBIG, f"line {number} is longer than {LONGEST_LINE:,} bytes", str(path))
        yield line


def usual_modes(folder: Path) -> None:
    """Give the tensor files in and below a folder the permissions that every other file gets here (0644 with the usual
    umask): safetensors makes its own readable by their owner alone."""
    mask = os.umask(0o077)  # the only way to read it; for that moment a stricter one
    os.umask(mask)
    for file in folder.rglob("*.safetensors"):
        if not file.is_symlink():
            file.chmod(0o666 & ~mask)


@contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[BinaryIO]:
    """A new file, which takes the place of `path` at the end of the body; if `durable`, it is on the disk then. If the
    body raises, `path` is as it was. Raises OSError.

    Its hidden name is random and must be new: in a folder of someone else's, a name that can be guessed may be a link
    to any file of the user's."""
    hidden = path.with_name(HIDDEN + secrets.token_hex(8))
    descriptor = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(descriptor)
        os.replace(hidden, path)
    except BaseException:
        with suppress(OSError):  # on a full disk an incomplete file would take up space
            hidden.unlink()
        raise
    if durable:
        flush(path.parent)


def flush(path: Path) -> None:
    """Put a file, or the names in a folder, on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
