"""An Apple GPU that is not there: tensors that say so, know no fp64, and meet no tensor of the CPU."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class OnMps(Tensor):
    """A tensor that lies on mps, as far as code can tell; the CPU computes.

    Example: torch.zeros(3).as_subclass(OnMps).double() -> TypeError, as on an Apple GPU"""

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(function, "__self__", None) is Tensor.device:
            return torch.device("mps", 0)
        if function is Tensor.cpu:
            with torch._C.DisableTorchFunctionSubclass():
                return args[0].as_subclass(Tensor)
        given = [one for value in args for one in (value if isinstance(value, (tuple, list)) else [value])]
        if any(isinstance(one, Tensor) and not isinstance(one, OnMps) and one.dim() for one in given):
            raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices")
        result = super().__torch_function__(function, types, args, dict(kwargs or {}))  # type: ignore[no-untyped-call]
        if isinstance(result, Tensor) and result.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support it")
        return result


def on_mps(model: nn.Module) -> None:
    """Let a model's parameters lie there."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                data = parameter.detach().as_subclass(OnMps)
                module._parameters[name] = nn.Parameter(data, requires_grad=parameter.requires_grad)
