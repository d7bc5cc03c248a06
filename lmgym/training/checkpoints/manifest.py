"""manifest.json: the size and the SHA-256 of every file of a folder, so that damage is noticed before it is read."""

import hashlib
import json
from pathlib import Path
from typing import Any

NAME = "manifest.json"
LARGEST = 16 * 2**20
"""Bytes. A real one has about 120 for each file; anything larger is not read."""


def write(folder: Path) -> None:
    """Write the manifest of all files that are in the folder now."""
    files = _files(folder, hidden=True)
    entries = {name: {"bytes": path.stat().st_size, "sha256": digest(path)} for name, path in files.items()}
    (folder / NAME).write_text(json.dumps(entries, indent=1))


def damage(folder: Path) -> str | None:
    """What is wrong with a folder that has a manifest, or None: each file that the manifest names is there with its
    contents, and no other file is. Hidden files, such as a desktop leaves, do not count."""
    try:
        entries = _read(folder / NAME)
        there = _files(folder, hidden=False)
        for name in sorted(there.keys() - entries.keys()):
            return f"{name} is not in its {NAME}"
        for name, entry in entries.items():
            path = folder / name
            if ".." in Path(name).parts or not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != entry["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {entry['bytes']}"
        for name, entry in entries.items():  # the sizes of all first: they cost nothing
            if digest(folder / name) != entry["sha256"]:
                return f"{name} has other contents than were written"
    except OSError as error:
        return f"{type(error).__name__}: {error.strerror or error}"
    except ValueError as error:
        return str(error)
    return None


def digest(path: Path) -> str:
    """The SHA-256 of a file's contents, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path, hidden: bool) -> dict[str, Path]:
    """The files below a folder by their relative names, without the manifest itself."""
    found = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        name.as_posix(): path
        for name, path in found.items()
        if name.as_posix() != NAME and (hidden or not any(part.startswith(".") for part in name.parts))
    }


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The entries of a manifest. Raises ValueError, with the reason, if it is none."""
    if not path.is_file():
        raise ValueError(f"{NAME} is missing")
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{NAME} has {path.stat().st_size} bytes, more than any list of files needs")
    try:
        tree = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{NAME} is no JSON") from error
    if not isinstance(tree, dict) or not tree:
        raise ValueError(f"{NAME} names no files")
    for name, entry in tree.items():
        if not (isinstance(entry, dict) and type(entry.get("bytes")) is int and isinstance(entry.get("sha256"), str)):
            raise ValueError(f"{NAME} does not say size and SHA-256 of {name[:100]!r}")
    return tree
