"""AdamW of 8-bit moments is bitsandbytes' own, saved and put back bit for bit, and close to AdamW."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lmgym.core.errors import LmgymError
from lmgym.training.checkpoints.moments import load_optimizer, moments_of
from lmgym.updates.optimizer import Optimizer, OptimizerSection

bitsandbytes = pytest.importorskip("bitsandbytes")


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in ((128, 64), (64,))]


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(size, generator=generator) / 100 for size in ((128, 64), (64,))]


def walk(optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        for own, gradient in zip(optimizer.parameters, gradients(step), strict=True):
            own.grad = gradient.clone()
        optimizer.step()


def made(name: str) -> Optimizer:
    return Optimizer(parameters(), OptimizerSection(name=name, learning_rate=0.01, warmup=0, max_gradient_norm=0.0))


def test_it_is_the_librarys() -> None:
    ours, theirs = made("adamw_8bit"), parameters()
    groups = [{"params": [theirs[0]], "weight_decay": 0.01}, {"params": [theirs[1]], "weight_decay": 0.0}]
    other = bitsandbytes.optim.AdamW8bit(groups, lr=0.01, betas=(0.9, 0.999), eps=1e-8)
    walk(ours, range(5))
    for step in range(5):
        for own, gradient in zip(theirs, gradients(step), strict=True):
            own.grad = gradient.clone()
        other.step()
    assert all(torch.equal(one, two) for one, two in zip(ours.parameters, theirs, strict=True))
    assert ours.torch.state[ours.parameters[0]]["state1"].dtype == torch.uint8


def test_it_stays_close_to_adamw() -> None:
    coarse, fine, start = made("adamw_8bit"), made("adamw"), parameters()
    walk(coarse, range(10))
    walk(fine, range(10))
    moved = torch.cat([(a - b).flatten() for a, b in zip(fine.parameters, start, strict=True)])
    apart = torch.cat([(a - b).flatten() for a, b in zip(fine.parameters, coarse.parameters, strict=True)])
    assert 0 < float(apart.detach().norm()) < 0.1 * float(moved.detach().norm())


def test_its_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    whole, first = made("adamw_8bit"), made("adamw_8bit")
    walk(whole, range(6))
    walk(first, range(3))
    save_file(moments_of(first.torch), tmp_path / "optimizer.safetensors")
    second = made("adamw_8bit")
    for own, saved in zip(second.parameters, first.parameters, strict=True):
        own.data.copy_(saved.data)
    load_optimizer(tmp_path, second.torch)
    walk(second, range(3, 6))
    assert all(torch.equal(one, two) for one, two in zip(whole.parameters, second.parameters, strict=True))


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "bitsandbytes", None)
    with pytest.raises(LmgymError, match=r"needs the library bitsandbytes; pip install 'lmgym\[quantised\]'"):
        made("adamw_8bit")
