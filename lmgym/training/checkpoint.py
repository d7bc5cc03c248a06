"""Checkpoints: plain files, written whole or not at all, and enough to go on bit for bit.

    checkpoints/stage-1-step-000050/
        model.safetensors, config.json, tokenizer files     what `from_pretrained` reads (or an adapter)
        value_head.safetensors, critic/                     the value function, if the algorithm needs one
        optimizer.safetensors                               moments, by parameter
        algorithm.json                                      the algorithm's own state
        state.json                                          stage, step, frozen copies, early stopping
        manifest.json                                       size and SHA-256 of each file above

A checkpoint is written to a hidden folder, flushed and renamed, so a kill leaves either the old state or the new one.
A damaged one is noticed by its manifest, and the one before is taken.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lmgym.core.errors import LmgymError
from lmgym.logs.writer import disk_errors
from lmgym.models.policy import Policy

FORMAT = 2


def save(
    folder: Path,
    policy: Policy,
    optimizer: torch.optim.Optimizer | None,
    algorithm: Mapping[str, Any],
    state: Mapping[str, Any],
) -> Path:
    """Write one checkpoint below `folder` atomically; returns its path. `algorithm` and `state` (with "stage" and
    "step") are plain JSON. Raises LmgymError if the disk is full; earlier checkpoints are left as they were."""
    path = folder / f"stage-{state['stage']}-step-{state['step']:06d}"

    def write(hidden: Path) -> None:
        policy.save(hidden)
        save_file(_moments(optimizer), hidden / "optimizer.safetensors")
        (hidden / "algorithm.json").write_text(json.dumps(algorithm))
        (hidden / "state.json").write_text(json.dumps({**state, "format": FORMAT}))
        files = sorted(p for p in hidden.rglob("*") if p.is_file())
        manifest = {p.relative_to(hidden).as_posix(): {"bytes": p.stat().st_size, "sha256": _digest(p)} for p in files}
        (hidden / "manifest.json").write_text(json.dumps(manifest, indent=1))

    write_folder(path, write)
    return path


def save_model(path: Path, policy: Policy) -> None:
    """Write a model folder, as `from_pretrained` reads it, whole or not at all."""
    write_folder(path, policy.save_pretrained)


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a hidden folder, flush it to the disk, and rename it to `path`, which it replaces. Raises
    LmgymError if the disk is full; `path` is then left as it was."""
    hidden, old = path.with_name(f".saving-{path.name}"), path.with_name(f".old-{path.name}")
    for stale in (hidden, old):
        shutil.rmtree(stale, ignore_errors=True)
    with disk_errors(path):
        try:
            hidden.mkdir(parents=True)
            write(hidden)
            for file in [*hidden.rglob("*"), hidden]:
                _flush(file)
        except Exception as error:
            shutil.rmtree(hidden, ignore_errors=True)
            number = re.search(r"\(os error (\d+)\)", str(error))  # how safetensors and tokenizers word a failed write
            if isinstance(error, OSError) or number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        if path.exists():
            os.replace(path, old)
        os.replace(hidden, path)
        shutil.rmtree(old, ignore_errors=True)
        _flush(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    hidden = path.with_name(f".saving-{path.name}")
    with disk_errors(path):
        hidden.write_text(text, encoding="utf-8")
        _flush(hidden)
        os.replace(hidden, path)


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint below `folder`, and a sentence for each newer one that was damaged. Raises LmgymError
    if there are checkpoints and all are damaged: to begin anew would be to throw the run away."""
    complaints: list[str] = []
    for path in reversed(all_checkpoints(folder)):
        problem = damage(path)
        if problem is None:
            return path, complaints
        complaints.append(f"checkpoint {path} is damaged ({problem}); falling back to the one before")
    if complaints:
        raise LmgymError(
            f"every checkpoint in {folder} is damaged ({problem} in {path.name}); put a whole one back, or delete "
            f"{folder.parent} to begin anew"
        )
    return None, complaints


def all_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    for old in folder.glob(".old-stage-*"):  # killed between the two renames of `write_folder`
        path = folder / old.name.removeprefix(".old-")
        if not path.exists():
            os.replace(old, path)
    return sorted(folder.glob("stage-*-step-*"), key=stage_and_step)


def stage_and_step(path: Path) -> list[int]:
    """Stage and step of a checkpoint, from its name."""
    return [int(part) for part in path.name.split("-")[1::2]]


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


def read_algorithm(path: Path) -> dict[str, Any]:
    """The algorithm's own state in a checkpoint."""
    return json.loads((path / "algorithm.json").read_text())


def load_optimizer(path: Path, optimizer: torch.optim.Optimizer) -> None:
    """Put the saved moments back, bit for bit; rates, betas and the like stay as the recipe has them now."""
    file, state = path / "optimizer.safetensors", dict[int, dict[str, Any]]()
    try:
        for name, tensor in load_file(file).items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = tensor.clone()  # off the mapped file, which will be deleted
    except (SafetensorError, OSError, ValueError) as error:
        raise LmgymError(f"{file} holds no state of an optimizer ({error}); take the checkpoint before it") from error
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def prune(newest: Path, keep: int) -> None:
    """Delete all checkpoints but `newest` and the keep - 1 before it, and what an interrupted save left behind. Any
    after it were damaged, since the run went on from one before them."""
    folder = newest.parent
    everything = all_checkpoints(folder)
    end = everything.index(newest) + 1
    older = {*everything} - {*everything[max(end - keep, 0) : end]}
    for path in (*older, *folder.glob(".saving-*"), *folder.glob(".old-*")):
        shutil.rmtree(path, ignore_errors=True)


def _moments(optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    state = optimizer.state_dict()["state"] if optimizer else {}
    return {f"{index}.{key}": value.contiguous() for index, entry in state.items() for key, value in entry.items()}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
