"""The bytes of a file of rows: plain, compressed (.gz, .xz, .zst), or a member of an archive (.zip, .tar)."""

import gzip
import io
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from lmgym.core.errors import LmgymError, describe
from lmgym.core.files import lines_of as file_lines
from lmgym.core.files import open_regular

PACKED = (".gz", ".xz", ".zst")
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.xz")
LARGEST_MEMBER = 2**30  # bytes of a member of an archive, which is read into memory
MOST_UNPACKED = 2**30  # bytes that a file may unpack to, or
RATIO = 200  # times its size, if that is more: text shrinks to a tenth or so
DAMAGED = (
    OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError, NotImplementedError,
    RuntimeError,  # of zipfile, where a member has a password
)  # fmt: skip
DAMAGED_LIST = (ValueError, LookupError, OverflowError, struct.error)  # of zipfile and tarfile: names, numbers


def kind_of(path: Path) -> str:
    """The ending that tells the format of a file's rows, without that of a compression.
    Example: kind_of(Path("train.JSONL.gz")) -> '.jsonl'"""
    name = Path(path.name.lower())
    return Path(name.stem).suffix if name.suffix in PACKED else name.suffix


def exists(path: Path) -> bool:
    """True if there is such a file, here or in an archive ("rows.zip/train.jsonl")."""
    inside = None if path.is_file() else archive_of(path)
    return path.is_file() or (inside is not None and inside[1] in members(inside[0]))


def archive_of(path: Path) -> tuple[Path, str] | None:
    """The archive that a path leads into, and the member's name; None if it leads into none."""
    for parent in path.parents:
        if parent.name.lower().endswith(ARCHIVES) and parent.is_file():
            return parent, path.relative_to(parent).as_posix()
    return None


def members(archive: Path) -> list[str]:
    """The names of the regular files in an archive. Raises LmgymError if it cannot be read."""
    with _unarchived(archive) as found:
        return list(found)


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A file's bytes, unpacked. Raises LmgymError for what cannot be read, and for what unpacks to far more than data
    does."""
    with readable(path):
        found = archive_of(path)
        raw: Any = open_regular(path) if found is None else io.BytesIO(_member(*found))
        with raw:
            size = raw.seek(0, io.SEEK_END)
            raw.seek(0)
            if (suffix := path.suffix.lower()) in PACKED:
                raw = io.BufferedReader(_Unpacked(_unpacking(raw, suffix), size), 2**20)
            yield raw


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """What goes wrong with the bytes of a file, as one sentence."""
    try:
        yield
    except DAMAGED as error:
        reason = getattr(error, "strerror", None) or str(error).strip().split("\n")[0] or type(error).__name__
        raise LmgymError(f"cannot read {path}: {reason}") from error


def lines_of(path: Path) -> Iterator[tuple[str, str]]:
    """Each line of a text file, without its line end: ("PATH:LINE", line).

    Example:
        >>> next(lines_of(Path("multi30k/train.en.gz")))
        ('multi30k/train.en.gz:1', 'Two young, White males are outside near many bushes.')
    """
    for number, line in enumerate(text_lines(path), start=1):
        yield f"{path}:{number}", line.removesuffix("\n").removesuffix("\r")


def text_lines(path: Path) -> Iterator[str]:
    """Lines with their line ends. Only \\n ends a line; str.splitlines would also split at a \\u2028 in a sentence."""
    with opened(path) as file:
        for number, raw in enumerate(file_lines(file, path), start=1):
            try:
                yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise LmgymError(f"{path}:{number}: not UTF-8 (byte {error.start + 1} of the line)") from error


def _unpacking(file: Any, suffix: str) -> Any:
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=file)
    if suffix == ".xz":
        return lzma.LZMAFile(file)
    try:
        from pyarrow import CompressedInputStream, PythonFile
    except ImportError as error:
        raise LmgymError("a .zst file needs pyarrow: pip install 'lmgym[data]'") from error
    return CompressedInputStream(PythonFile(file, "r"), "zstd")


class _Unpacked(io.RawIOBase):
    """Unpacked bytes, at most so many as data of this size may have."""

    def __init__(self, file: Any, size: int) -> None:
        self.file, self.left = file, max(MOST_UNPACKED, RATIO * size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.file.read(len(buffer))
        self.left -= len(data)
        if self.left < 0:
            raise OSError(f"it unpacks to more than {MOST_UNPACKED:,} bytes and {RATIO} times its size")
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def _unarchived(archive: Path) -> Iterator[dict[str, Callable[[], Any]]]:
    """What opens each regular file of an archive, by its name. Links in it are not followed."""
    with readable(archive), open_regular(archive) as file:
        try:
            if archive.suffix.lower() == ".zip":
                with zipfile.ZipFile(file) as zipped:
                    yield {one.filename: partial(zipped.open, one) for one in zipped.infolist() if not one.is_dir()}
            else:
                with tarfile.open(fileobj=file) as tar:
                    yield {one.name.removeprefix("./"): partial(tar.extractfile, one) for one in tar if one.isreg()}
        except DAMAGED_LIST as error:
            raise OSError(f"its list of members is damaged ({describe(error)})") from error


def _member(archive: Path, name: str) -> bytes:
    """The bytes of a member of an archive."""
    with _unarchived(archive) as found:
        if name not in found:
            raise OSError(f"the archive has no member '{name}'")
        data: bytes = found[name]().read(LARGEST_MEMBER + 1)
    if len(data) > LARGEST_MEMBER:
        raise OSError(f"the member is longer than {LARGEST_MEMBER:,} bytes; unpack the archive")
    return data
