"""The short form of tests/torture/io_faults.py: some of the calls fail, the power fails after some others."""

import random
import tempfile
from pathlib import Path

import pytest

from tests.torture import io_faults
from tests.torture.crash_images import Call, Disk, read_log

EVERY = 170


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(io_faults.compiler() is None, reason="the preloaded library is written in C for Linux on x86-64")
def test_some_calls_fail_and_the_power_fails_after_some() -> None:
    with tempfile.TemporaryDirectory(dir=io_faults.IN_MEMORY) as place, io_faults.Machine(Path(place)) as machine:
        seed = random.randrange(2**32)
        found = io_faults.torture(machine, EVERY, images=1, seed=seed, say=lambda line: None)
        assert not [what for what in found if "FAILED" in what], (seed, found)
        assert found["kill: resumed"] >= 3 and found["ENOSPC from there on: ended in a sentence"] >= 3, (seed, found)
        # The log leaves nothing out: played again, it gives the folder of the run that it is of.
        machine.put(None)
        disk = Disk(machine.disk)
        assert machine.train() == 0
        for call in read_log(machine.log):
            disk.play(call)
        disk.crash(Path(place) / "played", None)
        assert contents(Path(place) / "played") == contents(machine.disk)


def images(folder: Path, calls: list[Call], count: int = 200) -> list[dict[str, bytes | None]]:
    """What is found after so many power failures."""
    disk, found = Disk(folder), []
    for call in calls:
        disk.play(call)
    for number in range(count):
        disk.crash(folder.parent / "image", random.Random(number))
        found.append(contents(folder.parent / "image"))
    return found


def test_what_a_power_failure_may_take(tmp_path: Path) -> None:
    """By hand: what was flushed stays, what was not may stay, go, or be torn; a rename is whole or not at all."""
    folder = tmp_path / "disk"
    folder.mkdir()
    (folder / "old").write_bytes(b"old")
    one, other = str(folder / "one"), str(folder / "old")
    written = [Call("C", one, b"", 1), Call("W", one, b"abcd", 0)]
    found = images(folder, written)
    assert all(image["old"] == b"old" for image in found)
    assert {image.get("one") for image in found} == {None, b"", b"a", b"ab", b"abc", b"abcd"}
    assert {image.get("one") for image in images(folder, [*written, Call("S", one, b"", 0)])} == {None, b"abcd"}
    flushed = [*written, Call("S", one, b"", 0), Call("S", str(folder), b"", 0)]
    assert {image.get("one") for image in images(folder, flushed)} == {b"abcd"}
    renamed = [*flushed, Call("R", one, other.encode(), 0)]
    pairs = {(image.get("one"), image["old"]) for image in images(folder, renamed)}
    assert pairs == {(b"abcd", b"old"), (None, b"abcd")}
    deleted = [*flushed, Call("U", other, b"", 0)]
    assert {image.get("old") for image in images(folder, deleted)} == {None, b"old"}
    # The second of two writes may be there without the first: a hole reads as zeros.
    holes = [*flushed, Call("W", one, b"ef", 4), Call("W", one, b"gh", 6)]
    assert b"abcd\0\0gh" in {image["one"] for image in images(folder, holes)}
