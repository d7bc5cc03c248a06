"""Temporary changes of a Hugging Face model for one forward pass: its attention function, activation checkpointing."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lmgym.models.attention import packed
from lmgym.models.families import trunk_of

AttentionInterface.register(packed.NAME, packed.attend)


@contextmanager
def attention_through(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Within this context the model uses the attention function registered as `name` (packed.NAME is lmgym's own).
    Afterwards the model has its usual one again, so that Hugging Face's `generate` works."""
    usual = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = usual


@contextmanager
def trunk_says(model: PreTrainedModel, output: Any) -> Iterator[None]:
    """Within this context the model's trunk computes nothing and returns `output`, so that a call of the model is a
    call of what its own code does behind the trunk: the LM head, and what scales or caps its logits."""
    trunk = trunk_of(model)
    before = {name: vars(trunk)[name] for name in ("_forward_pre_hooks", "_forward_hooks")}
    vars(trunk).update({name: {} for name in before})  # with FSDP2 they would put its weights together
    trunk.forward = lambda *arguments, **named: output
    try:
        yield
    finally:
        del trunk.forward  # the method of the class is visible again
        vars(trunk).update(before)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers that transformers can checkpoint: all transformer blocks, in nearly every model family."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextmanager
def activation_checkpointing(
    model: PreTrainedModel, weights: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Iterator[None]:
    """Within this context a layer stores only its inputs; backward runs the layer again (arXiv 1604.06174).

    transformers' own switch works in training mode only, which also turns dropout on. So the layers are wrapped
    here, for one forward pass. The second run uses the attention function of the first, even if the model's setting
    has changed since, and runs within `weights`, a context that shows the weights of the first. torch restores
    autocast, and without dropout there is no random state to restore."""
    layers = layers_of(model)
    for layer in layers:
        layer.forward = _checkpointed(layer.forward, model, weights)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the method of the class is visible again


def _checkpointed(
    forward: Callable[..., Any], model: PreTrainedModel, weights: Callable[[], AbstractContextManager[None]]
) -> Callable[..., Any]:
    def run(*arguments: Any, **named: Any) -> Any:
        name = model.config._attn_implementation

        def contexts() -> tuple[Any, Any]:
            return nullcontext(), _both(attention_through(model, name), weights())

        return checkpoint(
            forward, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **named
        )

    return run


@contextmanager
def _both(first: AbstractContextManager[None], second: AbstractContextManager[None]) -> Iterator[None]:
    with first, second:
        yield
