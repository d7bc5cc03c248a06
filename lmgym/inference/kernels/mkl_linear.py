"""Linear layers with prepacked weights, for decoding in fp32 on a CPU.

Every decoding step multiplies the same few rows with weights that do not change until the answers are finished. MKL can
pack the weights once for this number of rows instead of in every product (32 rows with 32,000 x 288: 4.8 ms against
12.1, two cores of a Xeon).

Only the `forward` of the layers changes for that time; with any other number of rows it is the usual product. Only
trainable layers are packed, so the packed weights take no more memory than the gradients of an update."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lmgym.models.policy import Policy
from lmgym.models.vision import vision_names

PACK_AT_STEP = 2  # with the same number of rows: packing costs about as much as two steps save


class MKLLinearLayers:
    """The linear layers of a policy that computes in fp32 on a CPU; for any other policy there are none.

    Example: layers.begin_step(rows) before each decoding step of so many rows; layers.release() before weights change.
    """

    def __init__(self, policy: Policy) -> None:
        usable = policy.device.type == "cpu" and policy.compute == torch.float32 and policy.prepacked and _available()
        self.layers = [layer for layer in decoding_modules(policy) if _is_trainable_linear(layer)] if usable else []
        self.rows = self.steps = 0

    def begin_step(self, rows: int) -> None:
        if rows != self.rows:
            self.release()
            self.rows = rows
        self.steps += 1
        if self.steps == PACK_AT_STEP and rows > 1:  # for a single row both products read the weights once
            for layer in self.layers:
                layer.forward = _packed_forward(layer, rows)  # type: ignore[method-assign]

    def release(self) -> None:
        """Drop the packed weights; the layers have their usual `forward` again."""
        self.rows = self.steps = 0
        for layer in self.layers:
            layer.__dict__.pop("forward", None)


def decoding_modules(policy: Policy) -> list[nn.Module]:
    """The modules that run in decoding steps: not an encoder, which runs once a source, and not a vision tower, whose
    features are kept and must have the same bits whenever they are computed.

    Example: [layer for layer in decoding_modules(policy) if type(layer) is nn.Linear]"""
    encoder = set(policy.model.get_encoder().modules()) if policy.encoder_decoder else set()  # type: ignore[no-untyped-call]
    seeing = set() if policy.vision is None else set(vision_names(policy.model))
    named = policy.model.named_modules()
    return [layer for name, layer in named if layer not in encoder and f"{name}.weight" not in seeing]


def _available() -> bool:
    return torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")


def _is_trainable_linear(layer: nn.Module) -> bool:
    if type(layer) not in (nn.Linear, Conv1D) or "forward" in layer.__dict__:
        return False
    return bool(layer.weight.requires_grad) and layer.weight.dtype == torch.float32


def _packed_forward(layer: nn.Module, rows: int) -> Callable[[Tensor], Tensor]:
    weight: Tensor = layer.weight.detach()  # type: ignore[operator,assignment]
    weight = weight.T if type(layer) is Conv1D else weight  # GPT-2's own linear layer stores it as [in, out]
    packed, bias = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows), layer.bias

    def forward(hidden: Tensor) -> Tensor:
        return torch.ops.mkl._mkl_linear(hidden, packed, weight, bias, rows)  # type: ignore[no-any-return]

    return forward
