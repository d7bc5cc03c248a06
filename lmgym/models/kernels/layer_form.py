"""What layers like Llama's differ in, as far as the kernels of this folder know them.

Llama's, Mistral's and Qwen's layers are a norm, attention, a norm and a gated MLP. Gemma's norms multiply by one plus
their weights, its gate is a GELU, and since Gemma 2 what attention and the MLP give has a norm of its own before it is
added to the hidden states."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN, SiLUActivation

from lmgym.models import lora
from lmgym.models.families import LIKE_GEMMA, LIKE_LLAMA, trunk_of
from lmgym.models.kernels import native

QUERY_KEY_VALUE, NORMS = ("q_proj", "k_proj", "v_proj"), ("q_norm", "k_norm")
ATTENTION, MLP = {*QUERY_KEY_VALUE, "o_proj"}, {"gate_proj", "up_proj", "down_proj", "act_fn"}
READ, READ_OF_GEMMA = ("input_layernorm", "post_attention_layernorm"), ("input_layernorm", "pre_feedforward_layernorm")
GIVEN = ("post_attention_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class Form:
    """One layer's form.

    Example: form_of(layer) of Gemma 3
    -> Form(read=("input_layernorm", "pre_feedforward_layernorm"), given=("post_attention_layernorm",
       "post_feedforward_layernorm"), gelu=True, from_one=True, epsilon=1e-6)"""

    read: tuple[str, str]
    """The norms of what attention and the MLP read."""
    given: tuple[str, str] | None
    """Those of what they give, before it is added to the hidden states."""
    gelu: bool
    """The gate is GELU's approximation by a tanh (arXiv 1606.08415), not SiLU."""
    from_one: bool
    """Norms multiply by one plus their weights and round once, as Gemma's, where Llama's round before the weights."""
    epsilon: float
    """Of all norms."""


def form_of(layer: nn.Module) -> Form | None:
    """The form of a layer whose modules are Llama's or Gemma's by name, and of sizes that decoding.cpp knows; None of
    any other. The linear ones may have adapters."""
    parts: dict[str, dict[str, Any]] = {name: dict(part.named_children()) for name, part in layer.named_children()}
    names = set(parts) - {"self_attn", "mlp"}
    read, given = (READ_OF_GEMMA, GIVEN) if names == {*READ_OF_GEMMA, *GIVEN} else (READ, None)
    if {"self_attn", "mlp"} - set(parts) or names != {*read, *(given or ())}:
        return None
    attention, mlp = parts["self_attn"], parts["mlp"]
    if set(mlp) != MLP or set(attention) - set(NORMS) != ATTENTION:
        return None
    linear = [part for name, part in [*attention.items(), *mlp.items()] if name.endswith("_proj")]
    if not all(map(lora.is_plain, linear)):
        return None
    biased = {attention[name].bias is not None for name in QUERY_KEY_VALUE}
    biased_mlp = {mlp[name].bias is not None for name in ("gate_proj", "up_proj")}
    norms = [getattr(layer, name) for name in names] + [attention[name] for name in NORMS if name in attention]
    from_one = hasattr(norms[0], "eps")  # Gemma's name for it; Llama's is variance_epsilon
    epsilons: set[Any] = {getattr(norm, "eps" if from_one else "variance_epsilon", None) for norm in norms}
    gelu = isinstance(mlp["act_fn"], type(ACT2FN["gelu_pytorch_tanh"]))
    known = (
        (gelu or isinstance(mlp["act_fn"], nn.SiLU | SiLUActivation))
        and len({name in attention for name in NORMS}) == len(biased) == len(biased_mlp) == len(epsilons) == 1
        and None not in epsilons
        and getattr(layer.self_attn, "head_dim", 0) in native.SIZES
        and len(attention["q_proj"].weight) <= native.MOST_QUERIES * len(attention["k_proj"].weight)
        and all(number % native.LANES == 0 for part in linear for number in part.weight.shape)
    )
    return Form(read, given, gelu, from_one, epsilons.pop()) if known else None


def forms_of(model: PreTrainedModel) -> tuple[Form, ...]:
    """The forms of all layers of a model, which may have adapters; none if one of them is not known."""
    if model.config.model_type not in (*LIKE_LLAMA, *LIKE_GEMMA):
        return ()
    forms = [form_of(layer) for layer in getattr(trunk_of(model), "layers", ())]
    return () if None in forms else tuple(form for form in forms if form is not None)
