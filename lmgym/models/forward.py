"""How a forward pass runs: through which attention function, and whether backward finds what the layers computed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lmgym.models.attention import packed

AttentionInterface.register(packed.NAME, packed.attend)


@contextmanager
def attention_through(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Within it the model's attention is the function of this name (attention.NAME: lmgym's own); afterwards the model
    is as it was, and its own `generate` works."""
    usual = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = usual


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers that transformers knows how to compute again: all of the trunk's, for nearly every family."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextmanager
def activation_checkpointing(model: PreTrainedModel) -> Iterator[None]:
    """Within it a layer keeps what enters it and nothing else; backward runs the layer again (arXiv 1604.06174).

    transformers' own switch acts in training mode only, where dropout is on; a policy never is in that mode. So the
    same layers are wrapped here, for the time of one forward pass: sampling and scoring never see it. The second run
    goes through the attention function of the first, whatever the model is set to by then; autocast is restored by
    torch, and there is no randomness to restore.
    """
    layers = layers_of(model)
    for layer in layers:
        layer.forward = _keeping_its_inputs(layer.forward, model)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's own shows again


def _keeping_its_inputs(forward: Callable[..., Any], model: PreTrainedModel) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
        name = model.config._attn_implementation

        def contexts() -> tuple[Any, Any]:
            return nullcontext(), attention_through(model, name)

        return checkpoint(
            forward, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **named
        )

    return run
