"""The sizes on which a model's memory depends, from its configuration: no weights are loaded, nothing is computed."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lmgym.models.families import context_length, supports_fast_path
from lmgym.models.hooks import layers_of
from lmgym.models.kernels.layer_form import forms_of
from lmgym.models.model_info import skeleton, stored_precision
from lmgym.models.policy_section import PolicySection
from lmgym.models.vision import family_of, language_of, vision_names, vision_pattern


@dataclass(frozen=True)
class Shapes:
    """Numbers of parameters, and the sizes of a layer.

    Example: of Qwen2.5-0.5B, with adapters of rank 8: parameters 494 million, linear 358 million, adapter 4.4 million,
    layers 24, width 896, inner 4864, heads 14, attention 896, keys 128, vocabulary 151,936."""

    parameters: int  # of the base
    linear: int  # of them in linear layers except the LM head: those that get adapters and are quantized
    linear_rows: int  # rows of these layers' weights
    adapter: int  # parameters of the adapters, 0 without
    layers: int  # of the decoder
    encoder_layers: int  # of an encoder-decoder's encoder, else 0
    width: int
    inner: int  # width of the MLP
    gated: bool  # the MLP has two matrix products before its activation
    heads: int
    attention: int  # heads times the size of a head
    keys: int  # key-value heads times the size of a head
    norm_values: int  # tensors of the model's width that a norm stores for backward
    vocabulary: int
    pair_values: int  # numbers that attention stores for each head and pair of tokens; 0 with a fused kernel
    fast: bool
    context: int | None
    tried: bool = False  # whether it is fast, a trial decides when its weights are loaded
    frozen: int = 0  # parameters that make features of pictures, and do not train
    known: bool = False  # layers of which lmgym's own kernels for a CPU are made (kernels/layer_form.py)
    narrow: bool = False  # a base of adapters that is stored in bf16, and in passes in bf16 is held so

    @property
    def encoder_decoder(self) -> bool:
        return self.encoder_layers > 0

    @property
    def trained(self) -> int:
        return self.adapter or self.parameters - self.frozen


def shapes_of(section: PolicySection) -> Shapes:
    """The shapes of a recipe's policy. Raises LmgymError if the model's configuration cannot be loaded."""
    model = skeleton(section)
    config = model.config.get_text_config(decoder=True)
    sees = family_of(model.config) is not None
    language = language_of(model) if sees else model
    linear = dict(_linear_layers(model if section.train_vision else language))
    vocabulary, width = map(int, model.get_output_embeddings().weight.shape)
    heads = _size(config, "num_attention_heads") or 1  # recurrent models have none
    size = _size(config, "head_dim") or _size(config, "d_kv") or width // heads
    layers = layers_of(language)
    frozen = set(vision_names(model)) if sees and not section.train_vision else set()
    encoder = len(layers_of(model.get_encoder())) if model.config.is_encoder_decoder else 0
    first = dict(_linear_layers(layers[-1])) if layers else linear
    inner = max((max(sizes) for name, sizes in first.items() if "attn" not in name.lower()), default=width)
    layer_norm = any(isinstance(module, nn.LayerNorm) for module in model.modules())
    # Where scores are explicit, their softmax; with capped scores (Gemma 2) also the tangent (attention/rules.py).
    pairs = int(hasattr(config, "relative_attention_num_buckets") or config._attn_implementation == "eager")
    pairs = 2 if getattr(config, "attn_logit_softcapping", None) else pairs
    return Shapes(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        linear=sum(into * out for into, out in linear.values()),
        linear_rows=sum(out for _, out in linear.values()),
        adapter=_adapter(model, linear, section),
        layers=(len(layers) or _size(config, "num_hidden_layers") or 1) - encoder,
        encoder_layers=encoder,
        width=width,
        inner=inner,
        gated=sum(out == inner for name, (_, out) in first.items() if "attn" not in name.lower()) > 1,
        heads=heads,
        attention=heads * size,
        keys=(_size(config, "num_key_value_heads") or heads) * size,
        norm_values=2 if layer_norm else 3,
        vocabulary=vocabulary,
        pair_values=pairs,
        fast=supports_fast_path(model.config) and section.path != "plain",
        context=context_length(model),
        known=bool(forms_of(model)),
        narrow=_is_narrow(section),
        frozen=sum(parameter.numel() for name, parameter in model.named_parameters() if name in frozen),
        tried=section.path != "plain" and not (supports_fast_path(model.config) or model.config.is_encoder_decoder),
    )


def _is_narrow(section: PolicySection) -> bool:
    """Whether a base of adapters is stored in bf16, and nothing asks for fp32 (models/frozen_base.py)."""
    if section.lora_rank is None or section.quantise is not None or section.parity == "exact":
        return False
    return stored_precision(section) == torch.bfloat16


def _size(config: Any, name: str) -> int | None:
    """A size of a configuration; None if it has none of this name, or another in each layer."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # transformers: "is a per-layer attribute"
        return None
    return value if isinstance(value, int) else None


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, tuple[int, int]]]:
    """Name and (inputs, outputs) of every linear layer except the LM head."""
    get_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = get_head()
    for name, module in model.named_modules():
        if module is head or not isinstance(module, nn.Linear | Conv1D):
            continue
        rows, columns = module.weight.shape
        yield name, (rows, columns) if isinstance(module, Conv1D) else (columns, rows)


def _adapter(model: PreTrainedModel, linear: dict[str, tuple[int, int]], section: PolicySection) -> int:
    """Parameters of the adapters. By names, peft's rule counts: an embedding or the LM head may be among them."""
    targets, spared = section.lora_targets, re.compile("(?!)")
    if section.lora_rank is None:
        return 0
    if targets == "all-linear":
        return section.lora_rank * sum(into + out for into, out in linear.values())
    if family_of(model.config) is not None and not section.train_vision:
        spared = re.compile(vision_pattern(model))

    def hit(name: str) -> bool:
        if isinstance(targets, str):
            return re.fullmatch(targets, name) is not None
        return any(name == target or name.endswith(f".{target}") for target in targets)

    adapted = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D | nn.Embedding) and hit(name) and not spared.fullmatch(name)
    ]
    return section.lora_rank * sum(sum(module.weight.shape) for module in adapted)
