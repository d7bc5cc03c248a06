"""What tests run in each of several ranks (tests/ranks.py)."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from lmgym.algorithms.grpo import GRPO
from lmgym.algorithms.trpo import TRPO
from lmgym.batch import Batch
from lmgym.config.build import build_config
from lmgym.core.errors import LmgymError
from lmgym.distributed.process_group import ranks_of_environment
from lmgym.envs.base import Step
from lmgym.logs.console import Console
from lmgym.training.loop import begin_step, collate_step, gather
from lmgym.training.setup import start
from lmgym.training.stage import begin_stage
from lmgym.types import Example
from lmgym.updates.fisher import FisherProduct
from lmgym.updates.prepare import prepare
from lmgym.updates.trust_region import surrogate_gradient
from lmgym.updates.update import update
from tests import runs
from tests.parity.test_resume import ALGORITHMS, SETTINGS


@dataclass(kw_only=True)
class CrashesOnce(GRPO):
    """Raises what nobody foresees, as a driver may, until the file `marker` is there; it makes that file."""

    marker: str = ""

    def advantages(self, batch: Batch) -> Batch:
        if not Path(self.marker).exists():
            Path(self.marker).touch()
            raise RuntimeError("the device went away")
        return super().advantages(batch)


class FailsOnTheSecondRank:
    """A question that the second rank cannot even ask, for a reason of its own."""

    def reset(self, example: Example, seed: int) -> str:
        if os.environ.get("RANK") == "1":
            raise LmgymError("the second rank has no questions")
        return "?"

    def step(self, text: str, stop: str) -> Step:
        return Step(reward=float(len(text)), terminated=True)


def gradients(folder: str) -> None:
    """For each algorithm the gradient of its first optimizer step, and the policy after one step of training. Each rank
    makes the batch by itself, so all have the same one; the update is shared out."""
    ranks = ranks_of_environment(60)
    for name, section in ALGORITHMS.items():
        out = Path(folder) / f"{name}-{ranks.rank}"
        config = build_config(runs.tiny(out=str(out), algorithm=section, **SETTINGS.get(name, {})))
        with start(config, Console(quiet=True)) as run, begin_stage(run) as stage:
            begin_step(stage, 0)
            batch = collate_step(stage, gather(stage, 0), 0)
            run.policy.ranks = stage.optimizer.ranks = ranks
            for model in stage.frozen_models.models.values():
                model.ranks = ranks
            found: dict[str, torch.Tensor] = {}
            usual = stage.optimizer.torch.step

            def step(found: dict[str, torch.Tensor] = found, usual=usual, optimizer=stage.optimizer) -> None:
                if not found:
                    found.update({f"gradient {n}": p.grad.clone() for n, p in enumerate(optimizer.parameters)})
                usual()

            stage.optimizer.torch.step = step
            prepared = prepare(batch, run.policy, stage.frozen_models.models, stage.algorithm)
            if isinstance(stage.algorithm, TRPO):  # its optimizer moves the critic only
                own, _ = surrogate_gradient(run.policy, prepared)
                product = FisherProduct(run.policy, prepared)(own)
                found_by = Path(folder) / f"{name} policy-{ranks.rank}.safetensors"
                save_file({"gradient": own, "product": product}, found_by)
            before = {f"change {n}": p.detach().clone() for n, p in enumerate(run.policy.parameters())}
            metrics = update(stage.algorithm, run.policy, prepared, stage.optimizer)
            found |= {f"change {n}": p.detach() - before[f"change {n}"] for n, p in enumerate(run.policy.parameters())}
            save_file(found, Path(folder) / f"{name}-{ranks.rank}.safetensors")
            (Path(folder) / f"{name}-{ranks.rank}.json").write_text(json.dumps(metrics))
    ranks.close()
