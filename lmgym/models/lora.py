"""LoRA (arXiv 2106.09685) through peft: small trainable matrices added to frozen weights.

peft is called itself, not through the methods that transformers has for it (`add_adapter` and its like): these refuse
every peft older than the one that they were written with, though nothing that is used here has changed."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from lmgym.batch import Batch, PolicyOutputs
from lmgym.core.errors import LmgymError
from lmgym.core.files import usual_modes
from lmgym.models import quantization
from lmgym.models.seeded import seeded

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAME = "default"  # what peft calls a model's only adapter
PREFIX = "base_model.model."  # of every name in a file of adapters


def add_lora(
    model: PreTrainedModel,
    rank: int,
    alpha: float,
    targets: list[str] | str,
    seed: int,
    spared: str | None = None,
) -> None:
    """Freeze the model and add adapters to the named linear layers ("all-linear": all but the LM head), but for those
    whose whole names match `spared`, a regular expression. The adapters are zero at first, so outputs do not change.
    Raises LmgymError without peft, without such a layer, or for the weights that an encoder and its decoder share."""
    peft = _peft()
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=targets, exclude_modules=spared)
    with seeded(seed):
        try:
            _inject(config, model)
        except ValueError as error:  # from peft, if no module has the name
            raise LmgymError(f"policy.lora_targets: {' '.join(str(error).split())[:300]}") from error
    unread = [
        name for name, module in model.named_modules() if hasattr(module, "base_layer") and name.endswith("shared")
    ]
    if unread and model.config.is_encoder_decoder:
        raise LmgymError(
            f"policy.lora_targets: the model reads '{unread[0]}' through the embed_tokens of encoder and decoder, so "
            "an adapter there would change nothing; write embed_tokens"
        )


def load_lora(model: PreTrainedModel, folder: Path) -> None:
    """Add the adapters of a checkpoint to the model with which they were trained. Raises LmgymError if it is another
    one, whose layers they do not fit."""
    peft = _peft()
    try:
        _inject(peft.LoraConfig.from_pretrained(str(folder)), model)
    except ValueError as error:  # no layer has a name that the adapters are for
        raise _misfit(folder, error) from error
    state = {name.removeprefix(PREFIX): tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    try:
        result: Any = peft.set_peft_model_state_dict(model, state)
    except RuntimeError as error:  # other shapes
        raise _misfit(folder, error) from error
    missing = [name for name in result.missing_keys if "lora_" in name]
    if missing or result.unexpected_keys:
        raise _misfit(folder, f"{[*missing, *result.unexpected_keys][0]} is in one of them only")


def save(model: PreTrainedModel, folder: Path) -> None:
    """Write a model to a folder; of one with adapters these alone, in peft's format."""
    if not has_adapter(model):
        model.save_pretrained(folder)
        usual_modes(folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    state = _peft().get_peft_model_state_dict(model, adapter_name=NAME)
    tensors = {f"{PREFIX}{name}": tensor.detach().contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    usual_modes(folder)
    configs: Any = model.peft_config
    configs[NAME].save_pretrained(folder)


def _inject(config: Any, model: Any) -> None:
    """Add adapters of this configuration, which alone will train. Raises ValueError if no layer has a name in it."""
    peft = _peft()
    config.base_model_name_or_path = model.__dict__.get("name_or_path")
    try:
        peft.inject_adapter_in_model(config, model, NAME)
    except (ImportError, AttributeError, TypeError) as error:
        raise _versions_differ(peft.__version__, error) from error
    model._hf_peft_config_loaded = True  # by which transformers knows a model with adapters
    _make_trainable(model)


def _misfit(folder: Path, why: object) -> LmgymError:
    return LmgymError(
        f"the adapters in {folder} do not fit the recipe's model ({' '.join(str(why).split())[:200]}); name the recipe "
        "of the model with which they were trained"
    )


@dataclass(frozen=True)
class Adapter:
    """What a linear layer W gets besides: W x + scale * up (down x)."""

    down: Float[Tensor, "K I"]  # A
    up: Float[Tensor, "O K"]  # B
    scale: float


def base_of(layer: Any) -> nn.Linear:
    """A linear layer without its adapter."""
    base: nn.Linear = getattr(layer, "base_layer", layer)
    return base


def adapter_of(layer: Any) -> Adapter | None:
    """The adapter of a linear layer, as it is now; None if it has none, or it is switched off."""
    if not hasattr(layer, "base_layer") or layer.disable_adapters:
        return None
    down, up = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
    return Adapter(down.detach(), up.detach(), layer.scaling[NAME])


def is_plain(layer: Any) -> bool:
    """True for torch's own linear layer, alone or with an adapter that is no more than `Adapter` says."""
    if type(layer) is nn.Linear:
        return True
    if type(getattr(layer, "base_layer", None)) is not nn.Linear:
        return False
    from peft.tuners.lora import Linear

    return (
        type(layer) is Linear
        and layer.active_adapters == [NAME]
        and not (layer.merged or layer.lora_variant or layer.lora_bias[NAME])
        and isinstance(layer.lora_dropout[NAME], nn.Identity)
    )


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Give adapters that say nothing yet numbers of their own: outputs change by about a tenth."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name and not bool(parameter.any()):
            drawn = torch.randn(parameter.shape, generator=generator) * (0.1 / parameter.shape[1] ** 0.5)
            parameter.data = drawn.to(parameter)


def has_adapter(model: Any) -> bool:
    """True if the model has adapters."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Within this context the model's adapters are switched off: it is the base model."""
    from peft.tuners.lora import LoraLayer

    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        _make_trainable(model)


@torch.no_grad()
def merged(model: PreTrainedModel, copied: bool = False) -> PreTrainedModel:
    """A copy of the model without adapters, in fp32: each adapted weight W becomes W + (alpha / rank) B A. `copied`
    says that the model is a copy already, which is then changed itself.

    Without adapters it is simply a copy. Of a quantized base, W is the dequantized weight."""
    if not has_adapter(model):
        return model if copied else copy.deepcopy(model)
    from peft.tuners.lora import LoraLayer

    quantized = quantization.is_quantised(model)
    result: Any = model
    if not copied:
        result = quantization.copy_beside(model) if quantized else copy.deepcopy(model)
    modules: list[tuple[str, Any]] = list(result.named_modules())
    for name, module in modules:
        if not isinstance(module, LoraLayer):
            continue
        base: Any = module.get_base_layer()
        layer: Any = module
        delta = layer.get_delta_weight(NAME)
        if quantized and hasattr(base, "source_cls"):
            base = quantization.unpacked_layer(base, quantization.unpacked_weight(base) + delta)
        else:
            base.weight = nn.Parameter(base.weight.to(delta.dtype) + delta, requires_grad=False)
        result.set_submodule(name, base)
    if quantized:
        quantization.unpack_model(result)
    for parameter in result.parameters():  # a narrow base (frozen_base.py) would lose what the adapters have learnt
        if parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.float()
    result._hf_peft_config_loaded = False
    for attribute in ("peft_config", "active_adapter"):
        result.__dict__.pop(attribute, None)
    return result


def adapted_names(model: PreTrainedModel) -> list[str]:
    """The names that the adapted weights have in the merged model."""
    from peft.tuners.lora import LoraLayer

    return [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def base_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The weights of the model without its adapters, by their names there."""
    own = {name.replace(".base_layer.", "."): tensor for name, tensor in model.state_dict().items()}
    return {name: tensor.detach() for name, tensor in own.items() if "lora_" not in name}


def _make_trainable(model: PreTrainedModel) -> None:
    """Let only the adapters train, in fp32. (peft stores layer names as a set; a sorted list is always saved alike.)"""
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
        try:
            installed = version("peft")
        except PackageNotFoundError:
            raise LmgymError("policy.lora_rank needs the library peft; pip install 'lmgym[lora]'") from error
        raise _versions_differ(installed, error) from error
    return peft


def _versions_differ(installed: str, error: Exception) -> LmgymError:
    return LmgymError(
        f"policy.lora_rank: peft {installed} does not work with transformers {transformers_version} "
        f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); install another version of one of them, such "
        "as constraints.txt names"
    )


class AdapterDisabledPolicy:
    """The policy with its adapters switched off: a reference policy that needs no second model.
    Example: AdapterDisabledPolicy(policy).compute_logprobs_no_grad(batch).logprobs"""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def compute_logprobs_no_grad(self, batch: Batch) -> PolicyOutputs:
        """`Policy.compute_logprobs_no_grad` without the adapters."""
        with without_adapter(self.policy.model):
            outputs: PolicyOutputs = self.policy.compute_logprobs_no_grad(batch)
            return outputs
