"""Frozen models beside the policy: "reference", "mask" and "teacher" for an algorithm, "opponent" for a game.

A copy of the policy is named by the step at which it was taken and written once, when a checkpoint first refers to it:

    copies/stage-1-reference-step-000000/       what `from_pretrained` reads

so a copy costs a model's size per refresh, not per checkpoint, and a resumed run goes on with the same copy.
"""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.models.load import PolicySection, load_policy
from lmgym.models.policy import Policy
from lmgym.training import checkpoint
from lmgym.updates.protocols import FrozenPolicy


class FrozenModels:
    """The frozen models of one stage, by name.

    `models` are all of them. `copies` are those that are copies of the policy, each `taken` at a step; the others are
    borrowed: a teacher, the policy without its adapters.

    Example:
        >>> frozen = FrozenModels(folder, stage=0, section=section, seed=0)
        >>> frozen.take("reference", policy, step=0); frozen.models["reference"].compute_logprobs_no_grad(batch)
    """

    def __init__(self, folder: Path, stage: int, section: PolicySection, seed: int) -> None:
        self.folder, self.stage, self.section, self.seed = folder / "copies", stage, section, seed
        self.models: dict[str, FrozenPolicy] = {}
        self.copies: dict[str, Policy] = {}
        self.taken: dict[str, int] = {}

    def take(self, name: str, policy: Policy, step: int) -> None:
        """Copy the policy as it is now. Models that sample are kept in the precision of the forward pass."""
        copied = policy.frozen_copy(policy.compute if name in ("mask", "opponent") else None)
        self.models[name] = self.copies[name] = copied
        self.taken[name] = step

    def restore(self, name: str, step: int) -> None:
        """Read a copy back. Raises LmgymError if it is gone."""
        path = self._path(self.stage, name, step)
        if not path.is_dir():
            raise LmgymError(f"{path} is gone, so the run cannot be resumed exactly; start it anew in another folder")
        self.take(name, load_policy(self.section, self.seed, path), step)

    def save(self) -> None:
        """Write the copies that are not on the disk yet."""
        for name, step in self.taken.items():
            path = self._path(self.stage, name, step)
            if not path.is_dir():
                checkpoint.save_model(path, self.copies[name])

    def prune(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Delete copies that no checkpoint (given by its state) refers to."""
        wanted = {self._path(state["stage"], *taken) for state in states for taken in state["copies"].items()}
        for path in self.folder.glob("stage-*"):
            if path not in wanted:
                shutil.rmtree(path, ignore_errors=True)

    def _path(self, stage: int, name: str, step: int) -> Path:
        return self.folder / f"stage-{stage}-{name}-step-{step:06d}"
