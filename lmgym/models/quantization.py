"""Base models whose linear layers are quantized to 4 or 8 bits by bitsandbytes (QLoRA, arXiv 2305.14314).

The base is frozen; adapters added to it train. 4bit is NF4 in blocks of 64 with quantized scales, 0.52 bytes a weight;
8bit is one int8 per weight and a scale per row (LLM.int8, arXiv 2208.07339), 1 byte a weight. Adapters are fp32, the
rest has the precision of the forward pass. Sampling and scoring use the same model, so the sampler needs no copy."""

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
SCALE = 1 / 127  # of an int8 code: the largest weight of a row has the code 127


def check_possible(device: torch.device) -> None:
    """Raise LmgymError if bitsandbytes is missing or too old, or cannot compute on this device."""
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
    """Raise LmgymError if bitsandbytes would read its own 4-bit weights wrongly: on a CPU (version 0.50) it packs them
    in blocks of 64 across rows, but unpacks them row by row. So 64 must divide the length of the rows."""
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
    """The arguments of `from_pretrained` that quantize a model while it is loaded, layer by layer."""
    config = BitsAndBytesConfig(
        load_in_4bit=bits == "4bit",
        load_in_8bit=bits == "8bit",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )
    return {"quantization_config": config, "dtype": compute, "device_map": {"": str(device)}}


def is_quantised(model: Any) -> bool:
    """True if the model's linear layers are quantized."""
    return getattr(model, "hf_quantizer", None) is not None


def packed_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The quantized linear layers, with their names. They are found by their weights: peft's layers are named alike."""
    for name, module in model.named_modules():
        if _bits(module) is not None:
            yield name, module


def _bits(module: nn.Module) -> Bits | None:
    kinds: dict[str, Bits] = {"Params4bit": "4bit", "Int8Params": "8bit"}
    return kinds.get(type(module._parameters.get("weight")).__name__)


def freeze_quantized(model: PreTrainedModel) -> None:
    """Freeze a quantized model, and make its outputs depend on its inputs alone.

    4bit: on some CPUs bitsandbytes would pack the weights again at the first pass without gradient, with coarser scales
    and without support for gradients; this is switched off. 8bit: the product of LLM.int8 also rounds activations to 8
    bits, except in columns that depend on all rows of the pass. Here activations are not rounded, so log-probabilities
    depend neither on micro-batches nor on the sampler's other rows."""
    model.requires_grad_(False)
    for _, layer in packed_layers(model):
        if _bits(layer) == "4bit":
            layer.support_avx512bf16_for_cpu = False
            continue
        if layer.weight.CB is not None:
            layer.init_8bit_state()  # codes and scales move to layer.state
        layer.forward = MethodType(_forward_8bit, layer)


class ByRow(torch.autograd.Function):
    """apply(x [... I], codes [O I], scales [O]) -> x W^T [... O] with W = codes * scales / 127; W itself is not stored.
    Codes are whole numbers up to 127, which are exact in bf16; the product is multiplied by the scales."""

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
    """The dequantized weight of a layer, in fp32."""
    if _bits(layer) == "8bit":
        return layer.state.CB.float() * (layer.state.SCB.float() * SCALE)[:, None]
    import bitsandbytes

    return bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()


def unpacked_layer(layer: Any, weight: Float[Tensor, "O I"]) -> nn.Module:
    """A usual layer of the class that was quantized, with this weight (GPT-2's class stores it transposed)."""
    kind = getattr(layer, "source_cls", nn.Linear)
    out, into = weight.shape
    with torch.device("meta"):
        result: Any = Conv1D(out, into) if kind is Conv1D else nn.Linear(into, out, bias=layer.bias is not None)
    result.weight = nn.Parameter(weight.T.contiguous() if kind is Conv1D else weight, requires_grad=False)
    if layer.bias is not None:
        result.bias = nn.Parameter(layer.bias.detach().float(), requires_grad=False)
    return result


def copy_beside(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with its own adapters on the same quantized base, which is shared because it never changes."""
    memo: dict[int, Any] = {id(p): p for p in model.parameters() if not p.requires_grad}
    memo |= {id(buffer): buffer for buffer in model.buffers()}
    for _, layer in packed_layers(model):
        for shared in (getattr(layer, "state", None), getattr(layer, "quant_state", None)):
            memo |= {} if shared is None else {id(shared): shared}
    return copy.deepcopy(model, memo)


@torch.no_grad()
def unpack_model(model: Any) -> None:
    """Turn a model with a shared quantized base (`copy_beside`) into a usual one in fp32 that shares no parameter."""
    for name, layer in list(packed_layers(model)):
        model.set_submodule(name, unpacked_layer(layer, unpacked_weight(layer)))
    copies: dict[int, nn.Parameter] = {}  # by id of the original, so that tied weights stay tied
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            fresh = nn.Parameter(parameter.detach().float().clone(), requires_grad=False)
            setattr(module, name, copies.setdefault(id(parameter), fresh))
    for attribute in ("hf_quantizer", "quantization_method", "is_loaded_in_4bit", "is_loaded_in_8bit"):
        model.__dict__.pop(attribute, None)
    model.config.__dict__.pop("quantization_config", None)
    model.config.dtype = torch.float32
