"""Linear layers prepared for decoding on a CPU: a step multiplies few rows, always as many, with weights that stay as
they are until the answers have ended. MKL then reads weights that it has laid out once for so many rows, where it
otherwise lays them out in every product (32 rows with 32,000 x 288: 4.8 ms for 12.1, two cores of a Xeon).

Nothing else knows of it: a layer's `forward` is another one meanwhile, which for any other number of rows is the usual
product. What is laid out takes as much memory as the weights do, and only layers that train have it, so that together
they take no more than an update, which has their gradients in its place.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lmgym.models.policy import Policy

FIRST_STEP = 2  # of as many rows, for which layers are prepared: laying out costs about what two steps gain


class PreparedLayers:
    """The layers of a policy that computes in fp32 on a CPU; none, and nothing happens, elsewhere.

    Example: prepared.expect(rows) before each step of so many rows; prepared.release() when the weights may change.
    """

    def __init__(self, policy: Policy) -> None:
        here = policy.device.type == "cpu" and policy.compute == torch.float32 and _available()
        idle = set(policy.model.get_encoder().modules()) if policy.encoder_decoder else set()  # it runs once a source
        self.layers = [layer for layer in policy.model.modules() if here and layer not in idle and _plain(layer)]
        self.rows = self.steps = 0

    def expect(self, rows: int) -> None:
        if rows != self.rows:
            self.release()
            self.rows = rows
        self.steps += 1
        if self.steps == FIRST_STEP and rows > 1:  # for a single row both products read the weights once
            for layer in self.layers:
                layer.forward = _through(layer, rows)  # type: ignore[method-assign]

    def release(self) -> None:
        self.rows = self.steps = 0
        for layer in self.layers:
            layer.__dict__.pop("forward", None)


def _available() -> bool:
    return torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")


def _plain(layer: nn.Module) -> bool:
    if type(layer) not in (nn.Linear, Conv1D) or "forward" in layer.__dict__:
        return False
    return bool(layer.weight.requires_grad) and layer.weight.dtype == torch.float32


def _through(layer: nn.Module, rows: int) -> Callable[[Tensor], Tensor]:
    weight: Tensor = layer.weight.detach()  # type: ignore[operator,assignment]
    weight = weight.T if type(layer) is Conv1D else weight  # GPT-2's own linear layer keeps it [in, out]
    laid_out, bias = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows), layer.bias

    def forward(hidden: Tensor) -> Tensor:
        return torch.ops.mkl._mkl_linear(hidden, laid_out, weight, bias, rows)  # type: ignore[no-any-return]

    return forward
