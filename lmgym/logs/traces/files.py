"""The files of traces/ in a run folder: one zip a step, and the zips of each hundred steps joined in one.

    traces/stage-0-step-000012.zip              one step: step.json, and episodes/000007.json for each whole answer
    traces/stage-0-steps-000000-000099.zip      the zips of a hundred steps, stored as they are

Every file is written under a hidden name and renamed, so a kill leaves the old one or the new one. What the members
say is described in trace.py; folder.py joins, shortens and deletes them."""

import io
import json
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from lmgym.core.errors import LmgymError, describe
from lmgym.core.files import LONGEST_LINE, open_regular
from lmgym.logs.writer import replace_file

TRACES = "traces"
TOGETHER = 100  # steps in one file
STEP, TEXTS, EPISODES = "step.json", "texts.json", "episodes/"  # members of a step's zip
NAME = re.compile(r"stage-([0-9]{1,9})-step(s?)-([0-9]{6,12})(?:-[0-9]{6,12})?\.zip")
DAMAGE = (BadZipFile, zlib.error, struct.error, OSError, EOFError, ValueError, LookupError, TypeError, AttributeError,
          ArithmeticError, RuntimeError)  # fmt: skip

Place = tuple[int, int]  # stage and step
Contents = Iterable[tuple[Place, bytes]]  # the zips of several steps


class DamagedTrace(LmgymError):
    """A file of traces/ that cannot be read."""


def shard_name(stage: int, step: int) -> str:
    """The name of a step's file. Example: shard_name(0, 12) -> "stage-0-step-000012.zip" """
    return f"stage-{stage}-step-{step:06d}.zip"


def pack_name(stage: int, step: int) -> str:
    """The name of the file of a step's hundred. Example: pack_name(0, 12) -> "stage-0-steps-000000-000099.zip" """
    first = step - step % TOGETHER
    return f"stage-{stage}-steps-{first:06d}-{first + TOGETHER - 1:06d}.zip"


def files_of(traces: Path) -> list[tuple[Place, bool, Path]]:
    """The files of a traces/ folder, the oldest step first: stage and (first) step, whether it holds several steps, and
    the path. Other files are left out. Raises LmgymError if the folder cannot be read."""
    try:
        paths = list(traces.iterdir()) if traces.exists() else []
    except OSError as error:
        raise LmgymError(f"{traces} cannot be read ({error.strerror})") from error
    found = []
    for path in paths:
        if parts := NAME.fullmatch(path.name):
            stage, step, several = int(parts[1]), int(parts[3]), bool(parts[2])
            if path.name == (pack_name if several else shard_name)(stage, step):
                found.append(((stage, step), several, path))
    return sorted(found, key=lambda one: (one[0], not one[1]))


def places_in(traces: Path) -> list[Place]:
    """The steps of a traces/ folder, sorted. A single step is known by its file's name; of a file of several, the list
    of its members is read. One that is damaged counts as empty."""
    places = set[Place]()
    for place, several, path in files_of(traces):
        if not several:
            places.add(place)
            continue
        with suppress(DamagedTrace), opened(path) as pack:
            places.update(own for own, _ in members(pack))
    return sorted(places)


@contextmanager
def opened(path: Path) -> Iterator[ZipFile]:
    """A zip file, to be read. Raises FileNotFoundError if it is not there, and DamagedTrace if it is damaged, also by
    what the body finds in it."""
    try:
        with open_regular(path) as file, ZipFile(file) as archive:
            yield archive
    except FileNotFoundError:
        raise
    except DAMAGE as error:
        remedy = "delete it: all other steps can be read without it"
        raise DamagedTrace(f"{path} is damaged or cannot be read ({describe(error, 200)}); {remedy}") from error


@contextmanager
def open_shard(folder: Path, stage: int, step: int) -> Iterator[ZipFile]:
    """The zip of one step of a run folder, alone or from among its hundred. Raises LmgymError if there is none, and as
    `opened` does."""
    traces, found = folder / TRACES, None
    with ExitStack() as stack:
        for name in (shard_name(stage, step), pack_name(stage, step)):
            try:
                found = stack.enter_context(opened(traces / name))
            except FileNotFoundError:  # the step may have been joined with others just now
                continue
            if name == pack_name(stage, step):
                inner = dict(members(found)).get((stage, step))
                found = stack.enter_context(ZipFile(stored(found, inner))) if inner else None
            break
        if found is None:
            raise LmgymError(
                f"{traces} holds nothing of stage {stage + 1}, step {step + 1}; logs.traces and logs.traces_gib say "
                "what a run keeps"
            )
        yield found


def members(pack: ZipFile) -> list[tuple[Place, ZipInfo]]:
    """The steps of a file of several, in order."""
    found = []
    for info in pack.infolist():
        parts = NAME.fullmatch(info.filename)
        if parts and not parts[2]:
            found.append(((int(parts[1]), int(parts[3])), info))
    return sorted(found, key=lambda one: one[0])


def read_member(archive: ZipFile, name: str) -> bytes:
    """A member's bytes. Raises ValueError for one of more than LONGEST_LINE bytes, BadZipFile for one that is packed in
    another way than lmgym does. No more is unpacked than that, whatever size the archive claims."""
    info = archive.getinfo(name)
    if info.file_size > LONGEST_LINE:
        raise ValueError(f"{name} is longer than {LONGEST_LINE:,} bytes")
    if info.compress_type not in (ZIP_STORED, ZIP_DEFLATED):  # others unpack a piece as a whole, of whatever size
        raise BadZipFile(f"{name} is compressed in another way than lmgym does")
    with archive.open(info) as file:
        data = file.read(info.file_size + 1)  # with a number, since read() unpacks everything and then cuts it
        file.read(1)  # the end, where the checksum is compared
    return data


def zipped(contents: Iterable[tuple[str, bytes]]) -> bytes:
    """A zip of these members. It has no times, so equal contents are equal bytes."""
    buffer = io.BytesIO()
    with ZipFile(buffer, "w", ZIP_DEFLATED, compresslevel=1) as archive:
        for name, data in contents:
            archive.writestr(_info(name, ZIP_DEFLATED), data, compresslevel=1)
    return buffer.getvalue()


def without_episodes(shard: ZipFile) -> bytes | None:
    """The zip of a step without its answers and their texts; None if it has none."""
    if not any(name == TEXTS or name.startswith(EPISODES) for name in shard.namelist()):
        return None
    tree = json.loads(read_member(shard, STEP))
    tree["episodes"]["kept"] = [False] * len(tree["episodes"]["index"])
    return zipped([(STEP, json.dumps(tree).encode())])


def write_pack(path: Path, contents: Contents) -> None:
    """Write the zips of several steps into one file, which is then on the disk."""

    def write(file: IO[bytes]) -> None:
        with ZipFile(file, "w", ZIP_STORED) as archive:
            for place, data in contents:
                archive.writestr(_info(shard_name(*place), ZIP_STORED), data)

    replace_file(path, write)


def _info(name: str, how: int) -> ZipInfo:
    info = ZipInfo(name)  # of 1980, so that equal contents are equal bytes
    info.compress_type = how
    return info


def stored(pack: ZipFile, info: ZipInfo) -> IO[bytes]:
    """The zip of one step of a file of several, opened where it lies; nothing is unpacked."""
    if info.compress_type != ZIP_STORED:  # it would unpack to any size
        raise BadZipFile(f"{info.filename} is compressed")
    return pack.open(info)
