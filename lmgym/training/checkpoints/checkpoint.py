"""Checkpoints: plain files, written whole or not at all, and enough to go on bit for bit.

    checkpoints/stage-1-step-000050/
        model.safetensors, config.json, tokenizer files     what `from_pretrained` reads (or an adapter)
        value_head.safetensors, critic/                     the value function, if the algorithm needs one
        optimizer.safetensors                               moments, by parameter
        algorithm.json                                      the algorithm's own state
        ahead.json                                          answers that were sampled ahead (engine.ahead)
        champions.json                                      the best answers so far, if a reward compares with them
        state.json                                          format, stage, step, records, frozen copies, early stopping
        fingerprint.json                                    data, recipe, versions, machine: see resuming/fingerprint.py
        manifest.json                                       size and SHA-256 of each file above

A checkpoint is written to a hidden folder, flushed and renamed, so a kill leaves either the old state or the new one.
A damaged one is noticed by its manifest, or by that of a frozen copy that it refers to, and the one before is taken."""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lmgym.core.errors import LmgymError
from lmgym.core.files import flush, replacing, usual_modes
from lmgym.logs.writer import disk_errors, make_folder
from lmgym.models.policy import Policy
from lmgym.training.checkpoints import manifest
from lmgym.training.checkpoints.manifest import damage as damage
from lmgym.training.checkpoints.moments import MOMENTS

FORMAT = 3
READABLE = (2, 3)  # 2 has no fingerprint.json, no "records" in state.json, and no manifest in its frozen copies
REQUIRED = ("state.json", "algorithm.json", MOMENTS)
SAVING, OLD = ".saving-", ".old-"  # beginnings of hidden names: not yet whole; replaced, about to be deleted


def save(
    folder: Path,
    policy: Policy,
    moments: Mapping[str, torch.Tensor],
    algorithm: Mapping[str, Any],
    state: Mapping[str, Any],
    fingerprint: Mapping[str, Any],
    parts: Mapping[str, Mapping[str, Any]] | None = None,
) -> Path:
    """Write one checkpoint below `folder` atomically; returns its path. `moments` are the optimizer's; `algorithm`,
    `state` (with "stage" and "step"), `fingerprint` and `parts` (by the name of their file; empty ones are left out)
    are plain JSON. Raises LmgymError if the disk is full, and for an algorithm's state that is none; earlier
    checkpoints are left as they were."""
    path = folder / _name(state["stage"], state["step"])
    of_algorithm = _plain_json(algorithm)

    def write(hidden: Path) -> None:
        policy.save(hidden)
        save_file(dict(moments), hidden / MOMENTS)
        (hidden / "algorithm.json").write_text(of_algorithm)
        for name, part in (parts or {}).items():
            if part:
                (hidden / f"{name}.json").write_text(json.dumps(part))
        (hidden / "state.json").write_text(json.dumps({**state, "format": FORMAT}))
        (hidden / "fingerprint.json").write_text(json.dumps(fingerprint, indent=1, sort_keys=True))
        manifest.write(hidden)

    write_folder(path, write)
    return path


def _plain_json(algorithm: Mapping[str, Any]) -> str:
    """What a user's algorithm returned as its state, as JSON."""
    wanted = "return a dictionary of numbers, texts, lists and dictionaries"
    if not isinstance(algorithm, Mapping):
        raise LmgymError(f"the algorithm's state_dict() returned a {type(algorithm).__name__}; {wanted}")
    try:
        return json.dumps(algorithm)
    except (TypeError, ValueError) as error:
        raise LmgymError(f"the algorithm's state_dict() is no plain JSON ({error}); {wanted}") from error


def save_model(path: Path, policy: Policy) -> None:
    """Write a model folder, as `from_pretrained` reads it, whole or not at all."""
    write_folder(path, policy.save_pretrained)


def save_copy(path: Path, policy: Policy) -> None:
    """Write a frozen copy: a model folder with a manifest."""

    def write(hidden: Path) -> None:
        policy.save_pretrained(hidden)
        manifest.write(hidden)

    write_folder(path, write)


def copy_path(run: Path, stage: int, name: str, step: int) -> Path:
    """The folder of the frozen copy `name` that a stage took at a step."""
    return run / "copies" / f"stage-{stage}-{name}-step-{step:06d}"


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a hidden folder, flush it to the disk, and rename it to `path`, which it replaces. Raises
    LmgymError if the disk is full; `path` is then left as it was."""
    hidden, old = path.with_name(SAVING + path.name), path.with_name(OLD + path.name)
    for stale in (hidden, old):
        _remove(stale)
    with disk_errors(path):
        make_folder(path.parent)
        try:
            hidden.mkdir()
            write(hidden)
            usual_modes(hidden)
            for file in [*hidden.rglob("*"), hidden]:
                flush(file)
        except Exception as error:
            _remove(hidden)
            number = re.search(r"\(os error (\d+)\)", str(error))  # how safetensors and tokenizers word a failed write
            if isinstance(error, OSError) or number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        if os.path.lexists(path):
            os.replace(path, old)
        try:
            os.replace(hidden, path)
        except OSError:
            with suppress(OSError):  # else put_back does it when the run is resumed
                os.replace(old, path)
            raise
        flush(path.parent)  # before the old one goes: a crash may keep a deletion and lose a rename
        _remove(old)


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    with disk_errors(path), replacing(path) as file:
        file.write(text.encode())


def put_back(run: Path) -> None:
    """Finish what a kill between the two renames of `write_folder` has left: what was moved aside is moved back."""
    for folder in (run, run / "checkpoints", run / "copies"):
        for old in folder.glob(OLD + "*"):
            path = folder / old.name.removeprefix(OLD)
            if not os.path.lexists(path):
                with disk_errors(path):
                    os.replace(old, path)
                    flush(folder)


def newest(folder: Path, resumes: bool = False) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint below `folder`, and a sentence for each newer one that was damaged and for all else
    that does not belong there. A run that `resumes` needs the frozen copies of the checkpoint too. Raises LmgymError if
    there are checkpoints and all are damaged: to begin anew would be to throw the run away."""
    complaints = [f"{path} is no checkpoint of this run and is ignored" for path in _strangers(folder)]
    problem = None
    for path in reversed(all_checkpoints(folder)):
        problem = _problem(path, resumes)
        if problem is None:
            return path, complaints
        complaints.append(f"checkpoint {path} is damaged ({problem}); falling back to the one before")
    if problem is not None:
        raise LmgymError(
            f"every checkpoint in {folder} is damaged ({problem} in {path.name}); put a whole one back, or delete "
            f"{folder.parent} to begin anew"
        )
    return None, complaints


def all_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first; also one that was moved aside when a kill came (see `put_back`)."""
    found = {path.name: path for path in folder.glob(OLD + "stage-*")}
    found = {name.removeprefix(OLD): path for name, path in found.items()}
    found |= {path.name: path for path in folder.glob("stage-*")}
    return sorted((path for path in found.values() if path.is_dir() and _place(path)), key=stage_and_step)


def stage_and_step(path: Path) -> tuple[int, int]:
    """Stage and step of a checkpoint, from its name."""
    place = _place(path)
    if place is None:
        raise ValueError(f"{path.name} is not the name of a checkpoint")
    return place


def read_state(path: Path) -> dict[str, Any]:
    """The state.json of a checkpoint. Raises LmgymError if it was written by another format, or is damaged."""
    state = _read_json(path / "state.json")
    if type(state.get("format")) is not int or state["format"] not in READABLE:
        newer = type(state.get("format")) is int and state["format"] > FORMAT
        remedy = "; a newer lmgym wrote it, so update lmgym" if newer else ""
        raise LmgymError(f"{path} has format {state.get('format')}, and this lmgym reads formats 2 and 3{remedy}")
    counts = [state.get(name) for name in ("stage", "step", "steps", "version")]
    kept = [state.get(name) for name in ("progress", "copies", *["records"] * (state["format"] > 2))]
    for own in kept[1:]:  # steps by name, numbers of records by name
        counts += own.values() if isinstance(own, dict) else []
    if not (all(type(count) is int and count >= 0 for count in counts) and all(isinstance(own, dict) for own in kept)):
        raise LmgymError(f"{path / 'state.json'} lacks a part of a checkpoint's state, or has it in another form")
    return state


def read_fingerprint(path: Path) -> dict[str, Any] | None:
    """The fingerprint.json of a checkpoint; None for one of format 2, which has none."""
    return None if read_state(path)["format"] == 2 else _read_json(path / "fingerprint.json")


def read_algorithm(path: Path) -> dict[str, Any]:
    """The algorithm's own state in a checkpoint."""
    return _read_json(path / "algorithm.json")


def read_part(path: Path, name: str) -> dict[str, Any]:
    """A part of a checkpoint that not every run has, such as the answers that were "ahead"; empty without it."""
    file = path / f"{name}.json"
    return _read_json(file) if file.exists() else {}


def prune(newest: Path, keep: int) -> list[Path]:
    """Delete all checkpoints but `newest` and the keep - 1 before it, and what an interrupted save left behind; returns
    those that stay. Any after it were damaged, since the run went on from one before them."""
    folder = newest.parent
    everything = all_checkpoints(folder)
    end = everything.index(newest) + 1
    kept = everything[max(end - keep, 0) : end]
    for path in (*({*everything} - {*kept}), *folder.glob(SAVING + "*"), *folder.glob(OLD + "*")):
        _remove(path)
    return kept


def _problem(path: Path, resumes: bool) -> str | None:
    """Why a run cannot go on from a checkpoint, or None. Raises LmgymError for one that a newer lmgym wrote."""
    problem = damage(path)
    if problem is not None:
        return problem
    for name in REQUIRED:
        if not (path / name).is_file():
            return f"{name} is missing"
    state = read_state(path)
    if stage_and_step(path) != (state["stage"], state["step"]):
        return f"it is of stage {state['stage']}, step {state['step']}, and its name says another place"
    if not resumes or state["format"] == 2:
        return None
    for name, step in state["copies"].items():
        copy = copy_path(path.parent.parent, state["stage"], name, step)
        if problem := damage(copy):
            return f"its frozen copy {copy.name}: {problem}"
    return None


def _strangers(folder: Path) -> list[Path]:
    """What lies beside the checkpoints and is none: a copy, a file, a broken link."""
    own = {*all_checkpoints(folder)}
    return sorted(path for path in folder.glob("*") if path not in own and not path.name.startswith("."))


def _name(stage: int, step: int) -> str:
    return f"stage-{stage}-step-{step:06d}"


def _place(path: Path) -> tuple[int, int] | None:
    """Stage and step that a name says; None if it is not the name of a checkpoint."""
    name = path.name.removeprefix(OLD)
    found = re.fullmatch(r"stage-([0-9]{1,9})-step-([0-9]{6,12})", name)
    place = (int(found[1]), int(found[2])) if found else None
    return place if place and _name(*place) == name else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise LmgymError(f"{path} cannot be read ({type(error).__name__}: {str(error)[:200]})") from error
    if not isinstance(tree, dict):
        raise LmgymError(f"{path} holds a {type(tree).__name__} where it should hold keys and values")
    return tree


def _remove(path: Path) -> None:
    """Delete a file or a folder, if it is there and can be deleted."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
