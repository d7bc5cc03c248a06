"""Several processes train a policy that reads pictures: the same gradients as one process, of the vision tower too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmgym.algorithms.grpo.algorithm import GRPO
from lmgym.distributed.process_group import ranks_of_environment
from lmgym.models.load import load_policy
from lmgym.models.policy_section import PolicySection
from lmgym.updates.optimizer import OptimizerSection, make_optimizer
from lmgym.updates.prepare import prepare
from lmgym.updates.update import update
from tests import vision_models
from tests.parity.test_vision import pictures, sampled
from tests.ranks import NEAR, Group

LIMIT = 600.0  # seconds; on a busy machine a rank may wait long for another


def gradients(models: str, folder: str) -> None:
    """Of each architecture, the gradient of an optimizer step. Each rank has the same batch, of prompts with one
    picture, two and none, and computes its share of the rows."""
    ranks = ranks_of_environment(LIMIT)
    for family in vision_models.FAMILIES:
        section = PolicySection(model=f"{models}/{family}", device="cpu", compute="float32", train_vision=True)
        policy, algorithm = load_policy(section), GRPO(group_size=2)
        assert policy.vision is not None
        policy.vision.reader.pictures = pictures()[0]
        batch = sampled(policy, answers=1)
        policy.ranks = ranks
        optimizer = make_optimizer(algorithm, policy, OptimizerSection())
        batch = prepare(batch, policy, {}, algorithm)
        weights = torch.sin(torch.arange(batch.tokens.numel()).view(batch.tokens.shape) + 1.0)
        found: dict[str, torch.Tensor] = {}

        def keep(found: dict[str, torch.Tensor] = found, parameters: Any = optimizer.parameters) -> None:
            found.update({str(n): parameter.grad.clone() for n, parameter in enumerate(parameters)})

        optimizer.torch.step = keep  # type: ignore[method-assign]
        update(algorithm, policy, batch.replace(advantages=weights * batch.actions), optimizer)
        save_file(found, Path(folder) / f"{family}-{ranks.rank}.safetensors")
    ranks.close()


@pytest.mark.slow
def test_gradients_do_not_depend_on_the_number_of_ranks(group: Group, tmp_path: Path) -> None:
    for family in vision_models.FAMILIES:  # here, since transformers lets the first rank alone write one
        vision_models.write(family, tmp_path / "models" / family)
    for size in (1, 2):
        (tmp_path / str(size)).mkdir()
        folders = (str(tmp_path / name) for name in ("models", str(size)))
        statuses = group.run(size, *folders, target=f"{__name__}:gradients")
        assert statuses == [0] * size, group.said() + group.said(size - 1)
    for family in vision_models.FAMILIES:
        names = (f"{number}/{family}-{rank}.safetensors" for number, rank in ((1, 0), (2, 0), (2, 1)))
        alone, *both = (load_file(tmp_path / name) for name in names)
        assert all(torch.equal(both[0][name], both[1][name]) for name in alone)
        one, other = (torch.cat([found[name].flatten() for name in alone]).double() for found in (alone, both[0]))
        assert float(one.norm()) > 0 and float((other - one).norm() / one.norm()) < NEAR
