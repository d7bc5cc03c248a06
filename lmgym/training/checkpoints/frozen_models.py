"""Frozen models beside the policy: "reference", "mask", "rival" and "teacher" for an algorithm, "opponent" for a game.

A copy of the policy is named by the step at which it was taken and written once, when a checkpoint first refers to it:

    copies/stage-1-reference-step-000000/       what `from_pretrained` reads, and a manifest.json

so a copy costs a model's size per refresh, not per checkpoint, and a resumed run goes on with the same copy. A
checkpoint whose copies do not match their manifests counts as damaged (`checkpoint.newest`)."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lmgym.core.errors import LmgymError
from lmgym.distributed.ranks import ALONE, Ranks
from lmgym.models import copies
from lmgym.models.load import load_policy
from lmgym.models.policy import Policy
from lmgym.models.policy_section import PolicySection
from lmgym.models.sharding import shard_policy
from lmgym.training.checkpoints import checkpoint, manifest
from lmgym.updates.protocols import FrozenPolicy


class FrozenModels:
    """The frozen models of one stage, by name.

    `models` are all of them. `copies` are those that are copies of the policy, each `taken` at a step; the others are
    borrowed: a teacher, the policy without its adapters. Of several ranks each may hold a part of those that only score
    (`sharded`); those that sample are whole.

    Example:
        >>> frozen = FrozenModels(folder, stage=0, section=section, seed=0)
        >>> frozen.take("reference", policy, step=0); frozen.models["reference"].compute_logprobs_no_grad(batch)
    """

    def __init__(self, folder: Path, stage: int, section: PolicySection, seed: int, sharded: bool = False) -> None:
        self.folder, self.stage, self.section, self.seed, self.sharded = folder, stage, section, seed, sharded
        self.models: dict[str, FrozenPolicy] = {}
        self.copies: dict[str, Policy] = {}
        self.taken: dict[str, int] = {}
        self.unsaved: set[str] = set()
        self.teacher: str | None = None  # the checksum of a teacher's weights, which no checkpoint holds

    def take(self, name: str, policy: Policy, step: int) -> None:
        """Copy the policy as it is now. Models that sample are kept in the precision of the forward pass."""
        samples = name in ("mask", "opponent", "rival")
        copied = copies.frozen(policy, policy.compute if samples else None)
        if self.sharded and not samples:
            copied = shard_policy(copied, copied.ranks)
        self.models[name] = self.copies[name] = copied
        self.taken[name] = step
        self.unsaved.add(name)

    def restore(self, name: str, step: int, ranks: Ranks = ALONE) -> None:
        """Read a copy back. Raises LmgymError if it is gone."""
        path = checkpoint.copy_path(self.folder, self.stage, name, step)
        if not path.is_dir():
            raise LmgymError(f"{path} is gone, so the run cannot be resumed exactly; start it anew in another folder")
        self.take(name, load_policy(self.section, self.seed, path).but(ranks=ranks), step)
        if (path / manifest.NAME).is_file():  # a copy of an older version has none: it is written again, with one
            self.unsaved.discard(name)

    def save(self) -> None:
        """Write the copies that are not on the disk yet; a damaged one of the same name is replaced. The first rank
        writes, all take part."""
        for name in sorted(self.unsaved):
            path = checkpoint.copy_path(self.folder, self.stage, name, self.taken[name])
            copied = copies.gathered(self.copies[name])
            if copied is not None:
                checkpoint.save_copy(path, copied)
            self.unsaved.discard(name)

    def prune(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Delete copies that no checkpoint (given by its state) refers to."""
        wanted = {
            checkpoint.copy_path(self.folder, state["stage"], *taken)
            for state in states
            for taken in state["copies"].items()
        }
        for path in (self.folder / "copies").glob("*stage-*"):  # also those that are hidden: a kill has left them
            if path not in wanted:
                shutil.rmtree(path, ignore_errors=True)
