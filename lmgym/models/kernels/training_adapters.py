"""The adapters of linear layers with one input, as fused_training.py computes them: as two linear layers more.

`down` has all A's, one below the other; `up` has s B of each layer beside its own A, and zeros elsewhere. So what
training.cpp knows of products is enough. Ranks are filled up with zeros to what its tiles hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lmgym.models import lora
from lmgym.models.kernels import training

DOWN, UP = "lora_A.weight", "lora_B.weight"


@dataclass(frozen=True)
class Place:
    """Where an adapter lies: its outputs (rows of `up`), and its rank (rows of `down`, columns of `up`)."""

    name: str
    outputs: slice
    ranks: slice
    scale: float


@dataclass(frozen=True, eq=False)
class Adapters:
    """Those of some layers, in bf16."""

    places: list[Place]
    down: Float[Tensor, "W I"]
    up: Float[Tensor, "O W"]

    @classmethod
    def of(cls, layers: Mapping[str, Any], copies: Mapping[nn.Parameter, Tensor]) -> "Adapters | None":
        """Of these layers, by their names; None if none has an adapter. `copies` are rounded stochastically."""
        found = {name: adapter for name, layer in layers.items() if (adapter := lora.adapter_of(layer)) is not None}
        if not found:
            return None
        sizes = [len(layer.weight) for layer in layers.values()]
        starts = dict(zip(layers, accumulate(sizes, initial=0), strict=False))
        width = -(-max(len(adapter.down) for adapter in found.values()) // training.SIDE) * training.SIDE
        inputs = next(iter(found.values())).down.shape[1]
        down = torch.zeros(width * len(found), inputs, dtype=torch.bfloat16)
        up, places = torch.zeros(sum(sizes), len(down), dtype=torch.bfloat16), []
        for number, (name, adapter) in enumerate(found.items()):
            ranks = slice(number * width, number * width + len(adapter.down))
            place = Place(name, slice(starts[name], starts[name] + len(adapter.up)), ranks, adapter.scale)
            first, second = (getattr(layers[name], part)[lora.NAME].weight for part in ("lora_A", "lora_B"))
            down[ranks] = copies.get(first, first).detach()
            up[place.outputs, ranks] = place.scale * copies.get(second, second).detach()
            places.append(place)
        return cls(places, down, up)

    def low(self, inputs: Float[Tensor, "L_ I"], rows: int) -> Float[Tensor, "L_ W"]:
        """What the A's make of the layers' input."""
        return training.product(inputs, [self.down], rows)

    def gradients(
        self, by_product: Float[Tensor, "L_ O"], by_low: Float[Tensor, "L_ W"], inputs: Float[Tensor, "L_ I"], rows: int
    ) -> dict[str, Tensor]:
        """Of A and B of each layer, in fp32, by `name.lora_A.weight` and so on."""
        by_down = training.weight_gradient(by_low, inputs, rows)
        by_up = training.weight_gradient(by_product, self.low(inputs, rows), rows)
        found = {f"{place.name}.{DOWN}": by_down[place.ranks] for place in self.places}
        return found | {f"{place.name}.{UP}": place.scale * by_up[place.outputs, place.ranks] for place in self.places}
