"""Layers like Llama's or Gemma's (layer_form.py) of a model that only samples, in bf16 on a CPU: seven matrix products
become four, and what lies between them is a call each of decoding.cpp.

A decoding step of a small model is hundreds of small calls of torch, which take as long as its products. Only the
`forward` of the layers changes; it has no gradient. Keys and values are cached in bf16, as which they are computed."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lmgym.core.errors import LmgymError
from lmgym.models.attention.cached_rows import CachedRows
from lmgym.models.attention.packed import Layout
from lmgym.models.attention.rules import Asked, Rule
from lmgym.models.kernels import native
from lmgym.models.kernels.layer_form import NORMS, QUERY_KEY_VALUE, form_of
from lmgym.models.kernels.native import Product


class FusedLayers:
    """Layers of a known form, and the LM head, of a model in bf16 that only samples. `rules` are those of its layers,
    if any has one.

    Example: fused = FusedLayers(model.model.layers, model.lm_head, policy.rules); fused.lay_out() before sampling;
    fused.release() when the weights have changed"""

    def __init__(self, layers: nn.ModuleList, head: Any, rules: Sequence[Rule]) -> None:
        every = rules or [Rule()] * len(layers)
        self.layers = [FusedLayer(layer, rule) for layer, rule in zip(layers, every, strict=True)]
        self.head = head

    def lay_out(self) -> None:
        """Lay out the weights, where this has not been done, and let the layers compute with them."""
        for layer in self.layers:
            layer.lay_out()
        plain = type(self.head) is nn.Linear
        if plain and "forward" not in vars(self.head):
            product = Product(self.head)
            self.head.forward = lambda hidden: product(hidden.flatten(0, -2)).unflatten(0, hidden.shape[:-1])

    def release(self) -> None:
        """Drop the weights that are laid out; the layers have their usual `forward` again."""
        for layer in self.layers:
            layer.release()
        vars(self.head).pop("forward", None)


class FusedLayer:
    """One layer with its four products: queries, keys and values; the output of attention; gate and up; down. Adapters
    are parts of the products."""

    def __init__(self, layer: Any, rule: Rule) -> None:
        form = form_of(layer)
        assert form is not None
        self.layer, self.rule, self.form, attention = layer, rule, form, layer.self_attn
        self.size, self.scale, self.index = attention.head_dim, attention.scaling, attention.layer_idx
        self.heads = len(attention.q_proj.weight) // self.size
        self.key_heads = len(attention.k_proj.weight) // self.size
        self.stride = (self.heads + 2 * self.key_heads) * self.size
        self.products: list[Product] = []
        self.asked = native.Attention(
            heads=self.heads, key_heads=self.key_heads, size=self.size, stride=self.stride, scale=self.scale,
            window=rule.window or 0, from_one=form.from_one, epsilon=form.epsilon,
        )  # fmt: skip

    def lay_out(self) -> None:
        if self.products:
            return
        attention, mlp = self.layer.self_attn, self.layer.mlp
        together = [getattr(attention, name) for name in QUERY_KEY_VALUE], [attention.o_proj]
        self.products = [Product(*layers) for layers in (*together, [mlp.gate_proj, mlp.up_proj], [mlp.down_proj])]
        if hasattr(attention, NORMS[0]):
            self.asked.query_norm, self.asked.key_norm = (getattr(attention, name).weight.data_ptr() for name in NORMS)
        self.usual, self.layer.forward = self.layer.forward, self.forward

    def release(self) -> None:
        vars(self.layer).pop("forward", None)
        self.products = []

    def forward(self, hidden: Tensor, *arguments: Any, lmgym_layout: Layout | None = None, **named: Any) -> Any:
        """hidden [B L H], which is changed in place, as the layer's own; with another attention, the usual layer."""
        if lmgym_layout is None:
            return self.usual(hidden, *arguments, **named)
        joined, out, gate_up, down = self.products
        rows = hidden.view(-1, hidden.shape[-1])
        attend = self._attend_slots if isinstance(lmgym_layout, CachedRows) else self._attend_rows
        together, (cosines, sines) = joined(self._norm(rows, self.form.read[0])), named["position_embeddings"]
        self._add(rows, out, attend(together, cosines, sines, lmgym_layout), 0)
        inner = gate_up(self._norm(rows, self.form.read[1]))
        self._add(rows, down, native.gated(inner, self.form.gelu), 1)
        return hidden

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        return native.norm(hidden, getattr(self.layer, name).weight, self.form.epsilon, self.form.from_one)

    def _add(self, rows: Tensor, product: Product, inputs: Tensor, place: int) -> None:
        """Add what attention (place 0) or the MLP (1) gives."""
        if self.form.given is None:
            product.add_to(rows, inputs)
        else:
            rows += self._norm(product(inputs), self.form.given[place])

    def _attend_slots(self, joined: Tensor, cosines: Tensor, sines: Tensor, layout: Any) -> Float[Tensor, "S HD"]:
        """A decoding step: the new token of each slot."""
        cache, queries, keys = layout.cache, self.heads * self.size, self.key_heads * self.size
        rows = joined.shape[0]  # len() of a tensor takes longer
        new = joined[:, queries : queries + keys].view(rows, self.key_heads, 1, self.size)
        if cosines.shape != (rows, 1, self.size):
            raise LmgymError("their positions turn a part of each head")
        cache.widens = False
        cache.allocate(self.index, new, new)
        out, asked, start = joined.new_empty(rows, queries), self.asked, joined.data_ptr()
        asked.query, asked.key = start, start + queries * joined.element_size()
        asked.value = asked.key + keys * joined.element_size()
        asked.cosines, asked.sines, asked.out = cosines.data_ptr(), sines.data_ptr(), out.data_ptr()
        asked.keys, asked.values = cache.keys[self.index].data_ptr(), cache.values[self.index].data_ptr()
        asked.lengths, asked.slots, asked.capacity = layout.lengths.data_ptr(), rows, cache.capacity
        prompts = cache.prompts
        asked.prompt_keys = asked.order = None
        if prompts is not None:
            shared = prompts.cache
            asked.prompt_keys, asked.prompt_values = (
                of_layer[self.index].data_ptr() for of_layer in (shared.keys, shared.values)
            )
            asked.prompt_capacity, asked.order = shared.capacity, prompts.order.data_ptr()
            asked.prompt_of_slot, asked.prompt_lengths = prompts.prompt_of_slot.data_ptr(), prompts.lengths.data_ptr()
        native.library().attend(ctypes.byref(asked))
        return out

    def _attend_rows(self, joined: Tensor, cosines: Tensor, sines: Tensor, layout: Any) -> Float[Tensor, "L HD"]:
        """New prompts, and next ones of conversations: through their own layouts."""
        parts = joined.unflatten(-1, (-1, self.size)).split([self.heads, self.key_heads, self.key_heads], 1)
        query, key, value = (part.transpose(0, 1)[None] for part in parts)  # [1 H L D]
        if self.asked.query_norm:
            query, key = self.layer.self_attn.q_norm(query), self.layer.self_attn.k_norm(key)
        query, key = (part * cosines + _turned(part) * sines for part in (query, key))
        layout.cache.widens = False
        asked = Asked(self.scale, None if self.rule.is_plain(layout.reach) else self.rule)
        attended = layout.attend(self.index, query, key, value, asked)  # [1 L H D]
        return attended.reshape(len(joined), -1)


def _turned(heads: Float[Tensor, "*R D"]) -> Float[Tensor, "*R D"]:
    first, second = heads.chunk(2, -1)
    return torch.cat([-second, first], -1)
