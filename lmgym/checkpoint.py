"""Checkpoints: plain files, written whole or not at all, and enough to go on bit for bit.

    checkpoints/stage-1-step-000050/
        model.safetensors, config.json, tokenizer files     what `from_pretrained` reads
        optimizer.safetensors                               moments, by parameter
        state.json                                          stage, step, the algorithm's own state, early stopping
        manifest.json                                       size and SHA-256 of each file above

A checkpoint is written to a hidden folder, flushed to the disk and renamed, so a kill at any moment leaves either the
old state or the new one. A damaged one is noticed by its manifest, and the one before is taken.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from lmgym.errors import LmgymError

FORMAT = 1


@dataclass(kw_only=True)
class CheckpointSection:
    """The `checkpoint:` section of a recipe."""

    every: int = 50
    """Steps between checkpoints; one is always written at the end of a stage and on Ctrl-C. 0: only those."""
    keep: int = 2
    """How many of the newest to keep."""


def save(folder: Path, policy: Any, optimizer: torch.optim.Optimizer | None, state: dict[str, Any]) -> Path:
    """Write one checkpoint below `folder` atomically; returns its path. `state` is plain JSON with "stage" and "step".

    Raises LmgymError if the disk is full; earlier checkpoints are left as they were.
    """
    path = folder / f"stage-{state['stage']}-step-{state['step']:06d}"
    hidden = folder / f".saving-{path.name}"
    shutil.rmtree(hidden, ignore_errors=True)
    with disk_full_is_clear(folder):
        hidden.mkdir(parents=True)
        policy.save_pretrained(hidden)
        tensors, groups = _flatten(optimizer)
        save_file(tensors, hidden / "optimizer.safetensors")
        (hidden / "state.json").write_text(json.dumps({**state, "format": FORMAT, "optimizer_groups": groups}))
        files = sorted(p for p in hidden.iterdir() if p.is_file())
        manifest = {p.name: {"bytes": p.stat().st_size, "sha256": _digest(p)} for p in files}
        (hidden / "manifest.json").write_text(json.dumps(manifest, indent=1))
        for file in hidden.iterdir():
            _flush(file)
        if path.exists():  # the same step, saved again after a resume
            shutil.rmtree(path)
        os.replace(hidden, path)
        _flush(folder)
    return path


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint below `folder`, and a sentence for each newer one that was damaged."""
    complaints: list[str] = []
    for path in reversed(all_checkpoints(folder)):
        problem = damage(path)
        if problem is None:
            return path, complaints
        complaints.append(f"checkpoint {path} is damaged ({problem}); falling back to the one before")
    return None, complaints


def all_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted(folder.glob("stage-*-step-*"), key=lambda path: [int(part) for part in path.name.split("-")[1::2]])


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        for name, entry in manifest.items():
            if (path / name).stat().st_size != entry["bytes"]:
                return f"{name} has {(path / name).stat().st_size} bytes instead of {entry['bytes']}"
            if _digest(path / name) != entry["sha256"]:
                return f"{name} has other contents than were written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def read_state(path: Path) -> dict[str, Any]:
    """The state.json of a checkpoint. Raises LmgymError if it was written by another format."""
    state = json.loads((path / "state.json").read_text())
    if state.get("format") != FORMAT:
        raise LmgymError(f"{path} has format {state.get('format')}, and this lmgym reads format {FORMAT}")
    return state


def load_optimizer(path: Path, optimizer: torch.optim.Optimizer) -> None:
    """Put the saved moments back, bit for bit."""
    tensors = load_file(path / "optimizer.safetensors")
    groups = read_state(path)["optimizer_groups"]
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and what an interrupted save left behind."""
    for path in all_checkpoints(folder)[: -max(keep, 1)]:
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".saving-*"):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def disk_full_is_clear(folder: Path) -> Iterator[None]:
    """Turn "no space left on device", however the writing library words it, into one sentence."""
    try:
        yield
    except Exception as error:  # safetensors has its own exception type
        full = (
            getattr(error, "errno", None) == errno.ENOSPC
            or "No space left" in str(error)
            or "StorageFull" in str(error)
        )
        if not full:
            raise
        raise LmgymError(
            f"{folder}: the disk is full, so this could not be saved (earlier checkpoints are whole); "
            "free some space and run the same command again to resume"
        ) from error


def _flatten(optimizer: torch.optim.Optimizer | None) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    if optimizer is None:
        return {}, []
    state = optimizer.state_dict()
    tensors = {
        f"{index}.{key}": value.contiguous() for index, entry in state["state"].items() for key, value in entry.items()
    }
    return tensors, state["param_groups"]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
