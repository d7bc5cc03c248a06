"""Receivers of scalar metrics besides the run folder's own files: TensorBoard, Weights & Biases, Trackio."""

import importlib
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from lmgym.core.errors import LmgymError, describe
from lmgym.core.registry import suggest


class Sink(Protocol):
    """A receiver of scalar metrics."""

    def write(self, scalars: dict[str, float], position: int) -> None: ...

    def close(self) -> None: ...


class Tensorboard:
    """TensorBoard files in tensorboard/ of the run folder. Steps that a resumed run repeats replace the old ones."""

    def __init__(self, folder: Path):
        self._module = importlib.import_module("torch.utils.tensorboard")
        self._folder = folder / "tensorboard"
        self._events: Any = None

    def write(self, scalars: dict[str, float], position: int) -> None:
        if self._events is None:
            # + 1: the evaluation at this position was written before the checkpoint, and stays
            self._events = self._module.SummaryWriter(str(self._folder), purge_step=position + 1)
        for name, value in scalars.items():
            self._events.add_scalar(name, value, position)
        self._events.flush()

    def close(self) -> None:
        if self._events is not None:
            self._events.close()


class Wandb:
    """A Weights & Biases run of project lmgym (or WANDB_PROJECT); a resumed run goes on in the same one."""

    def __init__(self, folder: Path):
        self._wandb = importlib.import_module("wandb")
        known = folder / "wandb_id.txt"  # stored in the run folder: another run with the same name is a new one
        if not known.exists():
            known.write_text(uuid.uuid4().hex[:16])
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "lmgym"),
            name=folder.name,
            id=known.read_text(),
            dir=str(folder),
            resume="allow",
        )
        # wandb refuses steps that go back, as on resume; an x axis of ours may
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, scalars: dict[str, float], position: int) -> None:
        self._run.log({**scalars, "step": position})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A Trackio run of project lmgym (or TRACKIO_PROJECT), on this machine unless TRACKIO_SPACE_ID names a Space; a
    resumed run goes on in the same one. `trackio show` opens the pages."""

    def __init__(self, folder: Path):
        trackio = importlib.import_module("trackio")
        known = folder / "trackio_name.txt"  # Trackio identifies runs by name, and many are called seed-0
        if not known.exists():
            known.write_text(f"{folder.name}-{uuid.uuid4().hex[:8]}")
        project = os.environ.get("TRACKIO_PROJECT", "lmgym")
        self._run = trackio.init(project=project, name=known.read_text(), resume="allow", embed=False)

    def write(self, scalars: dict[str, float], position: int) -> None:
        self._run.log(dict(scalars), step=position)  # repeated steps of a resumed run appear twice, with equal values

    def close(self) -> None:
        self._run.finish()


SINKS: dict[str, Callable[[Path], Sink]] = {"tensorboard": Tensorboard, "wandb": Wandb, "trackio": Trackio}
EXTRAS = {"trackio": "trackio"}  # extra to install, if it is not lmgym[track]


def open_sink(name: str, folder: Path) -> Sink:
    """The sink of this name for a run folder. Raises LmgymError if it is unknown, not installed or does not start."""
    if name not in SINKS:
        raise LmgymError(f"unknown sink '{name}'; {suggest(name, SINKS)}")
    try:
        return SINKS[name](folder)
    except ModuleNotFoundError as error:
        lacking = f"sink '{name}' is not installed (no module '{error.name}')"
        raise LmgymError(f"{lacking}; pip install 'lmgym[{EXTRAS.get(name, 'track')}]'") from error
    except Exception as error:  # no login, no network ...: refuse before any training
        raise LmgymError(f"sink '{name}' did not start ({describe(error)}); mend it or leave it out") from error
