"""A generator in a process of its own, an actor of Ray, and the form in which weights reach it."""

from collections.abc import Sequence

import numpy as np
import torch

from lmgym.distributed.parts import whole
from lmgym.inference.base import Completion
from lmgym.inference.pool.differences import applied
from lmgym.inference.pool.generator import Call, Generator
from lmgym.inference.sampler import Sampler
from lmgym.models.copies import with_weights
from lmgym.models.device import prepare_process
from lmgym.models.policy import Policy


class Process:
    """What runs in an actor: a generator, and the version of its weights."""

    def __init__(self, threads: int, rows: int, captured: bool) -> None:
        prepare_process(threads)
        self.settings = (rows, captured)
        self.generator: Generator | None = None
        self.version = -1

    def begin(self, empty: Policy, frozen: list[np.ndarray], trained: list[np.ndarray], version: int) -> None:
        """Take over a policy without weights, and its weights."""
        kinds = {False: iter(frozen), True: iter(trained)}
        weights = [tensor_of(next(kinds[parameter.requires_grad])) for parameter in empty.model.parameters()]
        self.generator, self.version = Generator(Sampler(with_weights(empty, weights), *self.settings)), version

    def load(self, trained: list[np.ndarray], version: int) -> None:
        """Take over the weights of an update."""
        assert self.generator is not None
        policy = self.generator.sampler.policy
        with torch.no_grad():
            for ours, theirs in zip(policy.parameters(), trained, strict=True):
                ours.copy_(tensor_of(theirs))
        self.generator.load(policy, version)
        self.version = version

    def change(self, changes: list[bytes], version: int) -> None:
        """Take over the weights of an update by what it has changed of those that are here."""
        assert self.generator is not None
        ours = self.generator.sampler.policy.parameters()
        self.load([applied(bits_of(one), sent) for one, sent in zip(ours, changes, strict=True)], version)

    def answer(self, loaded: None, call: Call, before: Sequence[Call]) -> tuple[int, list[Completion]]:
        """The completions of a call, and the version of the weights that sampled them. `loaded` is what `begin`, `load`
        or `change` returned: if these have failed, this fails as they did."""
        assert self.generator is not None
        return self.version, self.generator.answer(call, before)

    def drop(self, units: Sequence[int]) -> None:
        if self.generator is not None:
            self.generator.drop(units)


def arrays_of(policy: Policy, trained: bool) -> list[np.ndarray]:
    """The weights that train, or those that don't, in the order of the model's parameters. fp32 weights that a pass
    computes with in bf16 are sent as the bits of these numbers: half the bytes, and nothing else is ever read."""
    chosen = [parameter for parameter in policy.model.parameters() if parameter.requires_grad == trained]
    rounded = () if policy.rounded is None else policy.rounded.names
    tensors = (policy.computed(one).view(torch.int16) if one in rounded else whole(one).detach() for one in chosen)
    return [tensor.cpu().numpy() for tensor in tensors]


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """A weight of `arrays_of`, in fp32 if it came as bf16."""
    tensor = torch.tensor(array)
    return tensor.view(torch.bfloat16).float() if tensor.dtype == torch.int16 else tensor


def bits_of(parameter: torch.Tensor) -> np.ndarray:
    """The bf16 numbers that a parameter in fp32 holds, as `arrays_of` sent them."""
    return parameter.detach().bfloat16().view(torch.int16).cpu().numpy()
