"""What a disk may hold after a power failure, from a log of the calls that changed files (io_faults.c).

A file's contents are safe once the file was flushed, a name once its folder was. Of what was not, a crash keeps any
part: each write or none of it or its beginning, and of the changes of names those of each folder up to any moment.
"""

import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Call:
    """One call of the log."""

    op: str
    path: str
    data: bytes
    number: int


def read_log(path: Path) -> list[Call]:
    """The calls of a log in order."""
    calls, text, at = [], path.read_bytes(), 0
    while at < len(text):
        end = text.index(b"\n", at)
        op, first, second, number = text[at:end].split()
        begin, middle = end + 1, end + 1 + int(first)
        at = middle + int(second)
        calls.append(Call(op.decode(), os.fsdecode(text[begin:middle]), text[middle:at], int(number)))
    return calls


@dataclass
class File:
    """A file: its contents on the disk, and what was not flushed."""

    safe: bytes = b""
    now: bytearray = field(default_factory=bytearray)
    waiting: list[tuple[str, int, bytes]] = field(default_factory=list)

    def change(self, op: str, number: int, data: bytes) -> None:
        _apply(self.now, op, number, data)
        self.waiting.append((op, number, data))

    def flush(self) -> None:
        self.safe, self.waiting = bytes(self.now), []

    def after_crash(self, dice: random.Random) -> bytes:
        kept, lost = bytearray(self.safe), dice.random()
        for op, number, data in self.waiting:
            if dice.random() < lost:
                continue
            torn = dice.random() < 0.25
            _apply(kept, op, number, data[: dice.randrange(len(data) + 1)] if torn else data)
        return bytes(kept)


@dataclass
class Folder:
    """A folder: its names on the disk, and the changes of names that were not flushed, in order."""

    safe: dict[str, "File | Folder"] = field(default_factory=dict)
    now: dict[str, "File | Folder"] = field(default_factory=dict)
    waiting: list[tuple[tuple[str, "File | Folder | None"], ...]] = field(default_factory=list)

    def change(self, *names: tuple[str, "File | Folder | None"]) -> None:
        """Change several names in one: of a rename a crash keeps all or nothing."""
        for name, node in names:
            _name(self.now, name, node)
        self.waiting.append(names)

    def flush(self) -> None:
        self.safe, self.waiting = dict(self.now), []

    def after_crash(self, dice: random.Random) -> dict[str, "File | Folder"]:
        kept = dict(self.safe)
        for names in self.waiting[: dice.randint(0, len(self.waiting))]:
            for name, node in names:
                _name(kept, name, node)
        return kept


class Disk:
    """The folder that a log is about, as the calls so far have left it."""

    def __init__(self, folder: Path) -> None:
        """From the folder as it is now, all of it flushed."""
        self.place, found = folder, _read(folder)
        assert isinstance(found, Folder)
        self.root = found

    def play(self, call: Call) -> None:
        """Do what a call did."""
        if call.path == str(self.place):
            assert call.op == "S", call
            self.root.flush()
            return
        parent, name = self._parent(call.path)
        node = parent.now.get(name)
        if call.op in "CM":
            if node is None:
                parent.change((name, File() if call.op == "C" else Folder()))
            elif call.op == "C" and call.number:
                assert isinstance(node, File)
                node.change("T", 0, b"")
        elif call.op in "UD":
            parent.change((name, None))
        elif call.op == "R":
            other, target = self._parent(os.fsdecode(call.data))
            assert other is parent and node is not None, f"a rename between folders: {call}"
            parent.change((name, None), (target, node))
        elif call.op == "S":
            assert node is not None, call
            node.flush()
        else:
            assert isinstance(node, File), call
            node.change(call.op, call.number, call.data)

    def crash(self, to: Path, dice: random.Random | None) -> None:
        """Write to a folder what a power failure now may leave (without dice: what a kill leaves)."""
        shutil.rmtree(to, ignore_errors=True)
        _write(self.root, to, dice)

    def _parent(self, path: str) -> tuple[Folder, str]:
        """The folder that holds a path, and the name there."""
        folder, parts = self.root, Path(path).relative_to(self.place).parts
        for part in parts[:-1]:
            found = folder.now[part]
            assert isinstance(found, Folder), path
            folder = found
        return folder, parts[-1]


def _apply(text: bytearray, op: str, number: int, data: bytes) -> None:
    end = number if op == "T" else number + len(data)
    if len(text) < end:
        text.extend(bytes(end - len(text)))  # a hole reads as zeros
    if op == "T":
        del text[number:]
    else:
        text[number:end] = data


def _name(names: dict[str, File | Folder], name: str, node: File | Folder | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def _read(path: Path) -> File | Folder:
    if path.is_dir():
        folder = Folder()
        folder.now = {own.name: _read(own) for own in path.iterdir()}
        folder.flush()
        return folder
    file = File(now=bytearray(path.read_bytes()))
    file.flush()
    return file


def _write(node: File | Folder, path: Path, dice: random.Random | None) -> None:
    if isinstance(node, File):
        path.write_bytes(bytes(node.now) if dice is None else node.after_crash(dice))
        return
    path.mkdir()
    for name, own in (node.now if dice is None else node.after_crash(dice)).items():
        _write(own, path / name, dice)
