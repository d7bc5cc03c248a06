"""Bases whose linear layers are packed into 4 or 8 bits by bitsandbytes: they stay as they are, adapters beside them
train (QLoRA, arXiv 2305.14314).

4bit is NF4 in blocks of 64 whose scales are packed too, 0.52 bytes a weight; 8bit is one int8 and a scale per row
(LLM.int8, arXiv 2208.07339), 1 byte a weight. Embeddings, norms, biases and the LM head keep the precision of the
forward pass, the adapters fp32. Sampling and scoring run the same model, so nothing is copied for the sampler.
"""

import copy
import importlib.util
from collections.abc import Iterator
from types import MethodType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int8
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import is_bitsandbytes_available

from lmgym.core.errors import LmgymError

Bits = Literal["4bit", "8bit"]
BLOCK = 64  # weights that share a scale, in 4 bits
SCALE = 1 / 127  # of an int8 code: the largest weight of a row is 127


def check_possible(device: torch.device) -> None:
    """Raise LmgymError where bitsandbytes is not there, or cannot compute on this device."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise LmgymError("policy.quantise needs the library bitsandbytes; pip install 'lmgym[quantised]'")
    if not is_bitsandbytes_available():
        raise LmgymError("policy.quantise: this bitsandbytes is too old; pip install -U 'lmgym[quantised]'")
    import bitsandbytes

    able = getattr(bitsandbytes, "supported_torch_devices", {"cuda"})
    if device.type not in able:
        raise LmgymError(
            f"policy.quantise: bitsandbytes {bitsandbytes.__version__} computes on {', '.join(sorted(able))}, not on "
            f"{device.type}; choose another policy.device, or remove policy.quantise"
        )


def check_layers(skeleton: PreTrainedModel, bits: Bits, device: torch.device) -> None:
    """Raise LmgymError where bitsandbytes would misread its own codes: on a CPU (0.50) it unpacks 4-bit weights row by
    row, but has packed them in blocks of 64 across the rows, so rows must be whole blocks."""
    if bits != "4bit" or device.type != "cpu":
        return
    for name, module in skeleton.named_modules():
        if module is skeleton.get_output_embeddings() or not isinstance(module, nn.Linear | Conv1D):
            continue
        inputs = module.weight.shape[0 if isinstance(module, Conv1D) else 1]
        if inputs % BLOCK:
            raise LmgymError(
                f"policy.quantise: on a CPU bitsandbytes unpacks 4-bit weights wrongly unless {BLOCK} divides the "
                f"inputs of every layer, and {name} has {inputs}; write quantise: 8bit, or take a GPU"
            )


def loading(bits: Bits, compute: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The keyword arguments of `from_pretrained` that pack a model while it is read, layer by layer."""
    config = BitsAndBytesConfig(
        load_in_4bit=bits == "4bit",
        load_in_8bit=bits == "8bit",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )
    return {"quantization_config": config, "dtype": compute, "device_map": {"": str(device)}}


def is_quantised(model: Any) -> bool:
    """True if the model's linear layers are packed."""
    return getattr(model, "hf_quantizer", None) is not None


def packed_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The packed linear layers, with their names; known by their weights, since peft's own layers around them bear the
    same names."""
    for name, module in model.named_modules():
        if _bits(module) is not None:
            yield name, module


def _bits(module: nn.Module) -> Bits | None:
    kinds: dict[str, Bits] = {"Params4bit": "4bit", "Int8Params": "8bit"}
    return kinds.get(type(module._parameters.get("weight")).__name__)


def freeze_quantized(model: PreTrainedModel) -> None:
    """Freeze a packed model, and make what it computes a function of its inputs alone.

    On some CPUs bitsandbytes would repack 4-bit weights, with coarser scales and without a way back for gradients, at
    the first pass without gradient. LLM.int8's own product rounds the activations to 8 bits as well, and which of their
    columns it spares depends on who shares the pass; here activations are not rounded, so log-probabilities depend on
    neither micro-batches nor the sampler's rows.
    """
    model.requires_grad_(False)
    for _, layer in packed_layers(model):
        if _bits(layer) == "4bit":
            layer.support_avx512bf16_for_cpu = False
            continue
        if layer.weight.CB is not None:
            layer.init_8bit_state()  # codes and scales move to layer.state
        layer.forward = MethodType(_forward_8bit, layer)


class ByRow(torch.autograd.Function):
    """apply(x [... I], codes [O I], scales [O]) -> x W^T [... O] with W = codes * scales / 127; W itself is not kept.

    Codes are whole numbers up to 127, which bf16 holds exactly; the scales go on the product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Int8[Tensor, "O I"], scales: Float[Tensor, " O"]) -> Tensor:
        ctx.save_for_backward(codes, scales)
        return F.linear(x, codes.to(x.dtype)) * (scales * SCALE).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, by_output: Tensor) -> tuple[Tensor, None, None]:
        codes, scales = ctx.saved_tensors
        return (by_output * (scales * SCALE).to(by_output.dtype)) @ codes.to(by_output.dtype), None, None


def _forward_8bit(layer: Any, x: Tensor) -> Tensor:
    product: Tensor = ByRow.apply(x, layer.state.CB, layer.state.SCB)  # type: ignore[no-untyped-call]
    return product if layer.bias is None else product + layer.bias.to(product.dtype)


def unpacked_weight(layer: Any) -> Float[Tensor, "O I"]:
    """The weight that a packed layer stands for, in fp32."""
    if _bits(layer) == "8bit":
        return layer.state.CB.float() * (layer.state.SCB.float() * SCALE)[:, None]
    import bitsandbytes

    return bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()


def unpacked_layer(layer: Any, weight: Float[Tensor, "O I"]) -> nn.Module:
    """A plain layer of the kind that was packed, with this weight (GPT-2 stores its own transposed)."""
    kind = getattr(layer, "source_cls", nn.Linear)
    out, into = weight.shape
    with torch.device("meta"):
        plain: Any = Conv1D(out, into) if kind is Conv1D else nn.Linear(into, out, bias=layer.bias is not None)
    plain.weight = nn.Parameter(weight.T.contiguous() if kind is Conv1D else weight, requires_grad=False)
    if layer.bias is not None:
        plain.bias = nn.Parameter(layer.bias.detach().float(), requires_grad=False)
    return plain


def copy_beside(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with adapters of its own over the same packed base, which is not copied: it never changes."""
    memo: dict[int, Any] = {id(p): p for p in model.parameters() if not p.requires_grad}
    memo |= {id(buffer): buffer for buffer in model.buffers()}
    for _, layer in packed_layers(model):
        for shared in (getattr(layer, "state", None), getattr(layer, "quant_state", None)):
            memo |= {} if shared is None else {id(shared): shared}
    return copy.deepcopy(model, memo)


@torch.no_grad()
def unpack(model: Any) -> None:
    """Make a model whose base is shared (`copy_beside`) an ordinary one in fp32: what is still packed is unpacked, and
    every parameter is the model's own."""
    for name, layer in list(packed_layers(model)):
        model.set_submodule(name, unpacked_layer(layer, unpacked_weight(layer)))
    own: dict[int, nn.Parameter] = {}  # tied weights stay tied
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            fresh = own.setdefault(id(parameter), nn.Parameter(parameter.detach().float().clone(), requires_grad=False))
            setattr(module, name, fresh)
    for attribute in ("hf_quantizer", "quantization_method", "is_loaded_in_4bit", "is_loaded_in_8bit"):
        model.__dict__.pop(attribute, None)
    model.config.__dict__.pop("quantization_config", None)
    model.config.dtype = torch.float32
