"""LoRA (arXiv 2106.09685) through peft: small trainable matrices beside frozen weights."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.errors import LmgymError
from lmgym.models import quantization

CONFIG = "adapter_config.json"


def add_lora(model: PreTrainedModel, rank: int, alpha: float, targets: list[str] | str, seed: int) -> None:
    """Freeze the model and put adapters on the named linear layers ("all-linear": all but the LM head).

    The adapters are zero at first, so the model says what it said before. Raises LmgymError without peft, or where no
    layer has such a name.
    """
    peft = _peft()
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed & 0x7FFFFFFFFFFFFFFF)
        try:
            model.add_adapter(config)
        except ValueError as error:  # peft's, where no module has the name
            raise LmgymError(f"policy.lora_targets: {' '.join(str(error).split())[:300]}") from error
    _make_trainable(model)


def load_lora(model: PreTrainedModel, folder: Path) -> None:
    """Put the adapters of a checkpoint on the model that they were trained on."""
    from safetensors.torch import load_file

    peft = _peft()
    model.add_adapter(peft.LoraConfig.from_pretrained(str(folder)))
    _make_trainable(model)
    state = {name: tensor.clone() for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
    peft.set_peft_model_state_dict(model, state)


def has_adapter(model: Any) -> bool:
    """True if the model carries adapters."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Within it the model is what it was before its adapters were put on."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()
        _make_trainable(model)


@torch.no_grad()
def merged(model: PreTrainedModel) -> PreTrainedModel:
    """A plain copy of the model with W + (alpha / rank) B A in place of each adapted layer, computed in fp32 (or just a
    copy, where there are no adapters). Of a packed base, W is what its codes stand for, and all of the copy is fp32."""
    if not has_adapter(model):
        return copy.deepcopy(model)
    from peft.tuners.lora import LoraLayer

    packed = quantization.is_quantised(model)
    plain: Any = quantization.copy_beside(model) if packed else copy.deepcopy(model)
    modules: list[tuple[str, Any]] = list(plain.named_modules())
    for name, module in modules:
        if not isinstance(module, LoraLayer):
            continue
        base: Any = module.get_base_layer()
        layer: Any = module
        delta = layer.get_delta_weight("default")
        if packed and hasattr(base, "source_cls"):
            base = quantization.unpacked_layer(base, quantization.unpacked_weight(base) + delta)
        else:
            base.weight = nn.Parameter((base.weight.float() + delta).to(base.weight.dtype), requires_grad=False)
        plain.set_submodule(name, base)
    if packed:
        quantization.unpack(plain)
    plain._hf_peft_config_loaded = False
    for attribute in ("peft_config", "active_adapter"):
        plain.__dict__.pop(attribute, None)
    return plain


def _make_trainable(model: PreTrainedModel) -> None:
    """The adapters train, in fp32 whatever they stand beside, and nothing else. (peft names the layers in a set; a list
    is saved in one order.)"""
    configs: Any = model.peft_config
    for config in configs.values():
        if isinstance(config.target_modules, set):
            config.target_modules = sorted(config.target_modules)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise LmgymError("policy.lora_rank needs the library peft; pip install 'lmgym[lora]'") from error
    return peft


class AdapterDisabledPolicy:
    """A policy as it was before its adapters were put on: a reference that costs no second model."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def compute_logprobs_no_grad(self, batch: Batch) -> PolicyOutputs:
        """As `Policy.compute_logprobs_no_grad`, without the adapters."""
        with without_adapter(self.policy.model):
            outputs: PolicyOutputs = self.policy.compute_logprobs_no_grad(batch)
            return outputs
