"""The weights that a pass in bf16 computes with, rounded stochastically from the fp32 masters.

Rounding to the nearest bf16 number hides small updates: a weight of 0.05 has neighbours at 2^-12 to each side, and an
update of 1e-5 moves it past the middle between two of them after ten steps or more. Rounded up or down with a
probability by its distance, a weight is right on average, and so each update is seen at once by a share of the weights
(arXiv 1502.02551, section 3.1). Optimizers round so to train without masters (arXiv 2010.06192); here the masters
stay, and one copy serves everything that computes: sampler, scorer and critic.

The random bits are a function of (seed, updates so far, name of the tensor, position), so that a resumed run and each
rank have the same. What lies on bf16's grid stays as it is: an untrained bf16 checkpoint is computed with as it was."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lmgym.core import seeds
from lmgym.models.kernels import training

CHUNK = 2**18  # numbers rounded at once, so that they stay in a processor's cache
WINDOWS = 2**20  # places in a table of random numbers at which a chunk may begin


class RoundedWeights:
    """A bf16 copy of a model's parameters, renewed after each update. Its gradients reach the fp32 masters.

    Example:
        >>> weights = RoundedWeights(model, seed=0)
        >>> with weights.shown_in(model):
        ...     model(ids).logits.sum().backward()         # computes with the copy, moves the masters' gradients
        >>> weights.updates += 1                           # after an update, for other random numbers
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.seed, self.updates = seed, 0
        self.native = False  # by a kernel of lmgym's own, with the same bits
        self._copies = {parameter: torch.empty_like(parameter, dtype=torch.bfloat16) for parameter in self.names}
        self._made_of: list[Any] = []  # the number of updates, and the masters' storages and how often they changed

    @property
    def copies(self) -> dict[nn.Parameter, Tensor]:
        """The bf16 copy of each parameter that trains, without gradient; made anew if a master has changed (a
        change in place of `parameter.data` is not seen: torch does not count these). Within an update the random
        numbers stay the same: copies of two policies differ by their masters, not by chance."""
        now = [self.updates, *((master.data_ptr(), master._version) for master in self.names)]
        if now != self._made_of:
            self._made_of = now
            self._round((name, master, self._copies[master]) for master, name in self.names.items())
        return self._copies

    def rounded(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Other fp32 weights in bf16, by name, with the random numbers of this update: adapters that were merged."""
        copies = {name: torch.empty_like(master, dtype=torch.bfloat16) for name, master in weights.items()}
        self._round((name, master, copies[name]) for name, master in weights.items())
        return copies

    def _round(self, weights: Iterable[tuple[str, Tensor, Tensor]]) -> None:
        """Write each named master to its copy, with the random numbers of this update."""
        table_on = cache(random_table(seeds.key(self.seed, "rounding", self.updates)).to)  # one copy for each device
        for name, master, copy in weights:
            round_stochastically(master, table_on(master.device), seeds.key(name), copy, self.native)

    @contextmanager
    def shown_in(self, model: nn.Module) -> Iterator[None]:
        """Within this context the model's modules compute with the copy. An attribute of the module itself hides its
        parameter of the same name, which stays what `parameters()` gives."""
        copies = self.copies
        with ExitStack() as hidden:
            for module in model.modules():
                weight: Any = module._parameters.get("weight")
                if _looks_up(module) and weight in copies:
                    forward = partial(_look_up, module, copies[weight])
                    hidden.enter_context(_attributes(module, forward=forward))
                    continue
                dtype = torch.bfloat16 if type(module) in (nn.Linear, Conv1D) else torch.float32
                computed = {
                    name: Computed.apply(parameter, copies[parameter], dtype)  # type: ignore[no-untyped-call]
                    for name, parameter in module._parameters.items()
                    if parameter in copies
                }
                if computed:  # adapters make most modules that hold none
                    hidden.enter_context(_attributes(module, **computed))
            yield


class Computed(torch.autograd.Function):
    """apply(master, copy, dtype) -> the copy in this precision, whose gradient is the master's."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, copy: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = master.dtype
        return copy.to(dtype) if copy.dtype != dtype else copy.detach()

    @staticmethod
    def backward(ctx: Any, by_copy: Tensor) -> tuple[Tensor, None, None]:
        return by_copy.to(ctx.dtype), None, None


class Rows(torch.autograd.Function):
    """apply(master [V H], copy [V H], ids [U], padding id or None) -> rows of the copy [U H] in the master's precision.
    `ids` are distinct. As in torch's embedding, the row of the padding id has no gradient."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, copy: Tensor, ids: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.like, ctx.padding = master, padding
        return copy[ids].to(master.dtype)

    @staticmethod
    def backward(ctx: Any, by_rows: Tensor) -> tuple[Tensor, None, None, None]:
        (ids,) = ctx.saved_tensors
        if ctx.padding is not None:
            by_rows = by_rows.masked_fill((ids == ctx.padding)[:, None], 0.0)
        return torch.zeros_like(ctx.like).index_copy_(0, ids, by_rows), None, None, None


def _looks_up(module: nn.Module) -> bool:
    """A table of words, scaled behind the lookup or not. (BART's positions add an offset to the ids before it.)"""
    return type(module) is nn.Embedding or (isinstance(module, nn.Embedding) and hasattr(module, "embed_scale"))


def _look_up(module: Any, copy: Tensor, ids: Int[Tensor, "..."]) -> Tensor:
    """A module's own lookup, in a table of those rows alone that occur: hidden states stay in fp32, and the gradients
    of a row are added in fp32."""
    distinct, index = ids.long().unique(return_inverse=True)
    rows = Rows.apply(module.weight, copy, distinct, module.padding_idx)  # type: ignore[no-untyped-call]
    with _attributes(module, weight=rows, padding_idx=None):
        return type(module).forward(module, index)


@contextmanager
def _attributes(module: nn.Module, **values: Any) -> Iterator[None]:
    """Within this context the module has these attributes of its own."""
    own = module.__dict__
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        for name in values:
            del own[name]
        own.update(before)


def random_table(key: int) -> Int[Tensor, " W"]:
    """Uniform random integers from -2^15 to 2^15 - 1, int16, of which chunks take windows. A function of the key alone.

    Example: random_table(seeds.key(0, "rounding", 3, 0))[:4]"""
    words = -(-(WINDOWS + CHUNK) // 4)
    counter = np.arange(1, words + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        bits = seeds.mixed(np.uint64(key) + counter * np.uint64(seeds.GOLDEN))
    return torch.from_numpy(bits.view(np.int16))


def round_stochastically(
    master: Float[Tensor, "..."], table: Int[Tensor, " W"], key: int, out: Float[Tensor, "..."], native: bool = False
) -> None:
    """Write fp32 numbers to `out` as bf16, each rounded up or down (in size) with a probability by its distance.

    bf16 is the upper half of fp32: a random number below 2^16 is added to the bits, and the lower half cut off. The
    carry happens with probability (lower half) / 2^16, and never if that is zero.

    Example:
        >>> out = torch.empty(1000, dtype=torch.bfloat16)
        >>> round_stochastically(torch.full((1000,), 1 + 2**-9), random_table(0), 0, out)
        >>> out.float().mean()                             # about 1 + 2^-9; to nearest, all would be 1
    """
    bits, rounded = master.detach().reshape(-1).view(torch.int32), out.view(torch.int16).reshape(-1)
    windows = [seeds.key(number, parent=key) % WINDOWS for number in range(-(-len(bits) // CHUNK))]
    if native:
        training.round_randomly(bits, table, windows, rounded, CHUNK)
        return
    for window, start in zip(windows, range(0, len(bits), CHUNK), strict=True):
        part = bits[start : start + CHUNK]
        added = part + table[window : window + len(part)]
        rounded[start : start + CHUNK] = added.add_(2**15).bitwise_right_shift_(16)


@torch.no_grad()
def share_seen_by_nearest(parameters: Sequence[nn.Parameter], rate: float, updates: int = 10) -> float:
    """The share that bf16 weights, rounded to nearest, show of so many updates that each move every weight by `rate`
    in one direction (AdamW's steps are about that long).

    Example: share_seen_by_nearest([nn.Parameter(torch.full((8,), 0.05))], 1e-6)  # 0.0: it has 0.0002 to the next"""
    sample, moved = UpdateSample(parameters), rate * updates
    weights = torch.cat([parameter.detach().reshape(-1)[:: sample.stride].float() for parameter in parameters])
    before, after = weights.bfloat16().cpu(), (weights + moved).bfloat16().cpu()  # Apple's GPUs have no fp64
    seen = after.double() - before.double()
    return float(seen.mean()) / moved


class UpdateSample:
    """Some of the weights, to tell how much of an update a forward pass sees.

    Example: sample.share_seen(lambda parameter: parameter.bfloat16())  # None the first time"""

    def __init__(self, parameters: Sequence[nn.Parameter], numbers: int = 2**19) -> None:
        total = sum(parameter.numel() for parameter in parameters)
        self.parameters, self.stride = parameters, max(total // numbers, 1)
        self.before: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def share_seen(self, computed: Callable[[nn.Parameter], Tensor]) -> float | None:
        """The projection of the change of the computed weights on that of the masters since the last call, as a share
        of it: 1 if all of it is seen, 0 if none. None if nothing has changed."""
        masters, copies = (  # on the CPU, since Apple's GPUs have no fp64
            torch.cat([one.detach().reshape(-1)[:: self.stride] for one in weights]).cpu().double()
            for weights in (self.parameters, map(computed, self.parameters))
        )
        before, self.before = self.before, (masters, copies)
        if before is None:
            return None
        moved, seen = masters - before[0], copies - before[1]
        size = float(moved @ moved)
        return float(seen @ moved) / size if size > 0 else None
