"""Reading files that someone else names, in bounded time and memory: no pipes, no devices, no endless lines. And the
permissions of written ones."""

import errno
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

LONGEST_LINE = 2**26  # bytes
LONGEST_TEXT = 2**28


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
