"""An optimizer's moments in a checkpoint, by parameter."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lmgym.core.errors import LmgymError
from lmgym.distributed.parts import cut_like, is_part, whole

MOMENTS = "optimizer.safetensors"


def moments_of(optimizer: torch.optim.Optimizer, keep: bool = True) -> dict[str, torch.Tensor]:
    """The optimizer's state by parameter, to be written; where each rank holds a part, they come together in memory of
    the CPU, on the ranks that `keep` them, and all ranks must ask at once."""
    found = {}
    for index, entry in optimizer.state_dict()["state"].items():
        # bitsandbytes counts steps in an int, and shows its 8-bit moments in a dictionary of their own.
        inner = [item for value in entry.values() if isinstance(value, dict) for item in value.items()]
        for key, value in (*(item for item in entry.items() if not isinstance(item[1], dict)), *inner):
            together = whole(torch.as_tensor(value)).contiguous()
            if keep:
                found[f"{index}.{key}"] = together.cpu() if is_part(value) else together
    return found


def load_optimizer(path: Path, optimizer: torch.optim.Optimizer) -> None:
    """Put the saved moments back, bit for bit; rates, betas and the like stay as the recipe has them now."""
    file, state = path / MOMENTS, dict[int, dict[str, Any]]()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    try:
        for name, tensor in load_file(file).items():
            index, _, key = name.partition(".")
            own = cut_like(tensor.clone(), parameters[int(index)])  # off the mapped file, which will be deleted
            state.setdefault(int(index), {})[key] = int(own) if own.dtype == torch.int64 else own
    except (SafetensorError, OSError, ValueError, IndexError) as error:
        raise LmgymError(f"{file} holds no state of an optimizer ({error}); take the checkpoint before it") from error
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
