"""Tensors of which each rank holds a part (torch's DTensor, cut along the first dimension), and the way back."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lmgym.distributed.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def mesh_of(ranks: Ranks, device: str) -> "DeviceMesh":
    """All ranks in one row, for devices of this kind ("cpu", "cuda")."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, (ranks.size,))


def cut(tensor: Tensor, mesh: "DeviceMesh") -> Tensor:
    """This rank's part of a tensor of which every rank has all."""
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(tensor.detach(), mesh, [Shard(0)], src_data_rank=None)


def cut_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a tensor that belongs to `parameter` and has its shape, as a moment has; any other tensor as
    it is."""
    like: Any = parameter
    return cut(tensor.to(like.device), like.device_mesh) if is_part(like) and tensor.shape == like.shape else tensor


def is_part(tensor: Tensor) -> bool:
    """True if this rank holds only a part of the tensor."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which each rank may hold a part, with gradient: the ranks' gradients are added. All ranks must
    ask at once."""
    if not is_part(tensor):
        return tensor
    from torch.distributed.tensor import Partial

    part: Any = tensor
    found: Tensor = part.full_tensor(grad_placements=[Partial()])
    return found


def shown_whole(modules: Iterable[nn.Module]) -> Callable[[], AbstractContextManager[None]]:
    """Put all of these modules' weights together now, with gradient; a context in which they compute with them. All
    ranks must ask at once, but then each may run the modules as often as it has to, in backward too.

    Example: whole_head = shown_whole([model.lm_head])
             with whole_head(): logits = model.lm_head(hidden)"""
    own: list[dict[str, Any]] = [module._parameters for module in modules]
    found = {part: whole(part) for held in own for part in held.values() if part is not None and is_part(part)}
    if not found:
        return nullcontext

    @contextmanager
    def shown() -> Iterator[None]:
        before = [dict(held) for held in own]
        for held in own:
            held.update({name: found.get(part, part) for name, part in held.items()})
        try:
            yield
        finally:
            for held, parts in zip(own, before, strict=True):
                held.update(parts)

    return shown
