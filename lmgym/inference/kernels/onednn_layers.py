"""Linear layers with weights laid out for oneDNN, for decoding in fp32 on a CPU.

oneDNN brings weights into its own order again in each product, which for the few rows of a decoding step takes as long
as the product itself. One order serves any number of rows, so it is made once for a call of the sampler. In bf16 the
same is done once after each update (models/kernels/onednn_linear.py), on a copy that only samples; here the layers also
train. Frozen ones stay as they are, so that the weights laid out take no more memory than the gradients of an update.

They serve `policy.products: onednn`, and on processors that are not Intel's every policy in fp32: there MKL takes its
slower code (an LM head of 49,152 x 576 by 32 rows on two cores of an AMD EPYC: 63 GFLOP/s, MKL's packed weights 28),
and packs them anew for each number of rows (mkl_linear.py)."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lmgym.inference.kernels import mkl_linear
from lmgym.inference.kernels.mkl_linear import MKLLinearLayers, decoding_modules
from lmgym.models.kernels import onednn_linear
from lmgym.models.kernels.onednn_products import weight_of
from lmgym.models.policy import Policy

INFORMATION = Path("/proc/cpuinfo")  # of Linux; on macOS MKL's processors are Intel's
# Laying out costs as much as some twenty of oneDNN's steps save, or three of MKL's. In short answers it does not pay.
PACK_AT_STEP = 8  # where the usual products are oneDNN's; mkl_linear.PACK_AT_STEP where they are MKL's


class OneDNNLinearLayers:
    """The linear layers of a policy, whose products while it decodes are oneDNN's. It has the methods of
    MKLLinearLayers."""

    def __init__(self, policy: Policy) -> None:
        weights = [(layer, weight_of(layer)) for layer in decoding_modules(policy)]
        own = [layer for layer, weight in weights if weight is not None and weight.requires_grad]
        self.layers = own if policy.onednn else MKLLinearLayers(policy).layers
        self.pack_at = PACK_AT_STEP if policy.onednn else mkl_linear.PACK_AT_STEP
        self.fewest = 1 if policy.onednn else 2  # rows; for a single one MKL reads the weights once as well
        self.usual: list[Any] = []
        self.steps = 0

    def begin_step(self, rows: int) -> None:
        self.steps += rows >= self.fewest
        if self.steps == self.pack_at and not self.usual:
            self.usual = [vars(layer).get("forward") for layer in self.layers]
            for layer in self.layers:
                layer.forward = _packed_forward(layer)  # type: ignore[method-assign]

    def release(self) -> None:
        """Drop the weights that are laid out; the layers have their usual `forward` again."""
        for layer, usual in zip(self.layers, self.usual, strict=False):
            del layer.forward
            if usual is not None:
                layer.forward = usual  # type: ignore[method-assign]
        self.usual, self.steps = [], 0


def prepared_layers(policy: Policy) -> OneDNNLinearLayers | MKLLinearLayers:
    """The linear layers of a policy that are laid out for decoding.

    Example: layers = prepared_layers(policy); layers.begin_step(rows) before each step; layers.release()"""
    return OneDNNLinearLayers(policy) if policy.onednn or mkl_is_slow() else MKLLinearLayers(policy)


@cache
def mkl_is_slow() -> bool:
    """True where torch multiplies by MKL, has oneDNN, and the processor is not Intel's. It measures nothing, so that
    all processes on one machine compute the same bits."""
    if not (torch.backends.mkl.is_available() and onednn_linear.can_pack()):
        return False
    lines = INFORMATION.read_text(encoding="utf-8", errors="replace").splitlines() if INFORMATION.is_file() else []
    vendors = {line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")}
    return bool(vendors) and "GenuineIntel" not in vendors


def _packed_forward(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    weight: Tensor = layer.weight.detach()  # type: ignore[operator,assignment]
    packed, bias = onednn_linear.pack(weight.T if type(layer) is Conv1D else weight), layer.bias
    return lambda hidden: onednn_linear.product(hidden, packed, bias)  # type: ignore[arg-type]
