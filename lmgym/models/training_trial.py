"""Whether a policy scores and trains with kernels/fused_training.py and kernels/fused_head.py: if the kernels can be
had, and agree in a trial. Layers are Llama's or Gemma's; a model of another family has its LM head computed by them.

The trial is about the compiler and the processor at hand, so one layer and a part of the LM head are enough. Outputs
and all gradients of some packed rows are computed three times, in fp32, by torch in bf16, and by the kernels; these may
not be much further from the first than torch is."""

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lmgym.core.errors import LmgymError
from lmgym.models import lora
from lmgym.models.attention import packed
from lmgym.models.attention.cpu import BlockGroups
from lmgym.models.distributions import bias_of, has_plain_head
from lmgym.models.families import trunk_of
from lmgym.models.kernel_choice import Kernels, chosen
from lmgym.models.kernels import onednn_linear, training
from lmgym.models.kernels.fused_head import FusedHead
from lmgym.models.kernels.fused_training import fused
from lmgym.models.kernels.layer_form import forms_of
from lmgym.models.policy import Policy

PROMPTS, ANSWERS, PROMPT_OF_ANSWER = (37, 5), (40, 3, 17, 20), (0, 0, 1, 1)  # tokens of the trial's rows
WORDS = 1024  # of the head, at most
FACTOR = 2.0  # of the kernels' distance to fp32 over torch's


def trains_native_where(policy: Policy, wanted: Kernels) -> tuple[bool, str]:
    """`kernel_choice.chosen` for scoring and updates."""
    made_for = (
        "layers like Llama's or Gemma's, or with AMX a plain LM head, that train in bf16 on a CPU, with weights in fp32"
    )
    return chosen(policy, "update_kernels", wanted, made_for, serves, partial(_compile, policy), try_out)


def serves(policy: Policy) -> bool:
    """True if the native kernels are made for such a policy on such a device."""
    if policy.exact or policy.skeleton is not None or policy.encoder_decoder or not policy.fast or policy.flex:
        return False
    if policy.device.type != "cpu" or policy.compute != torch.bfloat16 or not onednn_linear.available():
        return False
    precisions = {parameter.dtype for parameter in policy.model.parameters()}  # bf16 below adapters (frozen_base.py)
    known = policy.master == torch.float32 and precisions <= {torch.float32, torch.bfloat16}
    return known and (policy.has_known_layers or (has_known_head(policy) and training.may_have_products()))


def _compile(policy: Policy) -> None:
    training.library()
    if not policy.has_known_layers and not training.has_products():
        raise LmgymError("of this family they have the LM head alone, and the system keeps AMX from this process")


def has_known_head(policy: Policy) -> bool:
    """True if the LM head is a plain linear map, of a size that the kernels know."""
    sizes = policy.model.get_output_embeddings().weight.shape
    known = has_plain_head(policy) and bias_of(policy) is None
    return known and all(number % training.SIDE == 0 for number in sizes)


def try_out(policy: Policy) -> None:
    """Raise LmgymError if a layer or the head computes something else with the kernels than with torch."""
    tried = {"layer": _layer_ways(policy.model)} if policy.has_known_layers else {}
    if has_known_head(policy) and training.has_products():
        tried["LM head"] = _head_ways(policy.model)
    for what, ways in tried.items():
        exact, torchs, ours = ({name: one.double() for name, one in way().items()} for way in ways)
        for name, expected in exact.items():
            far, bound = float((ours[name] - expected).norm()), FACTOR * float((torchs[name] - expected).norm())
            if not far <= bound + torch.finfo(torch.float32).eps * float(expected.norm()):
                raise LmgymError(
                    f"{name} of a {what} are {far:.2g} from those in fp32, where {bound:.2g} is explained by rounding"
                )


Way = Callable[[], dict[str, Tensor]]


def _layer_ways(model: PreTrainedModel) -> tuple[Way, Way, Way]:
    """The first layer's outputs and gradients in fp32, by torch in bf16, and by the kernels."""
    trunk = trunk_of(model)
    layer: Any = copy.deepcopy(trunk.layers[0])
    if not lora.has_adapter(model):
        layer.requires_grad_(True)
    lora.fill(layer)
    for parameter in layer.parameters():
        parameter.data = parameter.data.bfloat16().float()  # what all three compute with
    layer.self_attn.config._attn_implementation = packed.NAME
    layout = BlockGroups(PROMPTS, ANSWERS, torch.tensor(PROMPT_OF_ANSWER), torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    hidden, by_out = torch.randn(2, 1, len(layout.positions), model.config.hidden_size, generator=draw)
    by_type = "layer_type" in inspect.signature(trunk.rotary_emb.forward).parameters  # Gemma 3 has two kinds of layers
    kind = {"layer_type": layer.self_attn.layer_type} if by_type else {}
    places = trunk.rotary_emb(hidden, position_ids=layout.positions[None], **kind)

    def run() -> dict[str, Tensor]:
        states = hidden.clone().requires_grad_(True)
        out = layer(states, position_embeddings=places, lmgym_layout=layout) - states  # what passes by would hide it
        trained = [(name, parameter) for name, parameter in layer.named_parameters() if parameter.requires_grad]
        names, parameters = zip(*trained, strict=True)
        by_hidden, *gradients = torch.autograd.grad(out, [states, *parameters], by_out)
        found = dict(zip((f"gradients by {name}" for name in names), gradients, strict=True))
        return {"outputs": out.detach(), "gradients by hidden states": by_hidden, **found}

    def narrow() -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return run()

    def ours() -> dict[str, Tensor]:
        with fused(nn.ModuleList([layer]), forms_of(model)[:1], {}):
            return narrow()

    return run, narrow, ours


def _head_ways(model: Any) -> tuple[Way, Way, Way]:
    """Log-probabilities and gradients of a part of the head."""
    words = model.get_output_embeddings().weight.detach()[:WORDS].bfloat16()
    draw, rows = torch.Generator().manual_seed(0), 40
    states = torch.randn(rows, words.shape[1], generator=draw).bfloat16()
    targets = torch.randint(len(words), (rows,), generator=draw)
    by_logprob = torch.randn(rows, generator=draw)

    def plain(dtype: torch.dtype) -> Way:
        def run() -> dict[str, Tensor]:
            hidden, weight = (one.to(dtype, copy=True).requires_grad_(True) for one in (states, words))
            logprobs = (hidden @ weight.T).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
            return _named(logprobs, torch.autograd.grad(logprobs, [hidden, weight], by_logprob))

        return run

    def ours() -> dict[str, Tensor]:
        hidden, weight = states.clone().requires_grad_(True), words.float().requires_grad_(True)
        nothing = torch.ones(0, rows, dtype=torch.bool)
        logprobs = FusedHead.apply(hidden, weight, words, targets, (), nothing, 1.0, 32, None)  # type: ignore[no-untyped-call]
        return _named(logprobs, torch.autograd.grad(logprobs, [hidden, weight], by_logprob))

    return plain(torch.float32), plain(torch.bfloat16), ours


def _named(logprobs: Tensor, gradients: tuple[Tensor, ...]) -> dict[str, Tensor]:
    by_hidden, by_weight = gradients
    found = {"gradients by hidden states": by_hidden, "gradients by weights": by_weight}
    return {"log-probabilities": logprobs.detach(), **found}
