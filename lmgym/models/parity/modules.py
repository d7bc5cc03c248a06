"""Activations and rotary embeddings whose results for a token depend on that token alone; and all of a model's modules
that need another forward pass for it.

What else a model computes token by token is exact already: sums, products and roots round in one way only, and norms
and lookups go row by row."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Int
from torch import Tensor, nn

from lmgym.functional.pieces import in_pieces
from lmgym.models.parity import products

ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
PAGE = 64  # positions whose angles are computed together
Angles = tuple[Tensor, Tensor]

_angles: "WeakKeyDictionary[nn.Module, dict[Any, Angles]]" = WeakKeyDictionary()


def use_in(model: nn.Module) -> None:
    """Give a model's layers, and those of all copies of it, forward passes that do not depend on the batch."""
    products.use_in(model)
    for module in model.modules():
        if type(module).__module__ in ACTIVATIONS and not list(module.parameters()):
            module.forward = MethodType(_activation, module)  # type: ignore[method-assign]
        elif is_rotary(module):
            module.forward = MethodType(_rotary, module)  # type: ignore[method-assign]


def is_rotary(module: nn.Module) -> bool:
    """A module of transformers that turns positions into cosines and sines."""
    return type(module).__name__.endswith("RotaryEmbedding")


@contextmanager
def set_aside(model: nn.Module) -> Iterator[None]:
    """Within this context the model's modules have their usual forward passes."""
    ours = (products.forward, _activation, _rotary)
    found = [
        (module, module.__dict__["forward"])
        for module in model.modules()
        if getattr(module.__dict__.get("forward"), "__func__", None) in ours
    ]
    for module, _ in found:
        del module.forward  # the method of the class is visible again
    try:
        yield
    finally:
        for module, forward in found:
            module.forward = forward  # type: ignore[method-assign]


def _activation(module: nn.Module, numbers: Tensor) -> Tensor:
    return in_pieces(partial(type(module).forward, module), numbers)


def _rotary(module: nn.Module, hidden: Tensor, position_ids: Int[Tensor, "B L"], *kind: Any, **named: Any) -> Angles:
    """Cosines and sines [B L D] from a table that is computed page by page."""
    tables = _angles.setdefault(module, {})
    key = (kind, tuple(named.items()), hidden.dtype)
    wanted = int(position_ids.max()) + 1
    while key not in tables or len(tables[key][0]) < wanted:
        known = tables.get(key)
        places = torch.arange(PAGE)[None] + (0 if known is None else len(known[0]))
        page = [of_page[0] for of_page in type(module).forward(module, hidden, places, *kind, **named)]
        both = page if known is None else [torch.cat(pair) for pair in zip(known, page, strict=True)]
        tables[key] = (both[0], both[1])
    cosines, sines = (of_place.index_select(0, position_ids.flatten()) for of_place in tables[key])
    return cosines.view(*position_ids.shape, -1), sines.view(*position_ids.shape, -1)
