"""Layers like Llama's or Gemma's (layer_form.py) in scoring and training, in bf16 on a CPU: each is one autograd
function of training.cpp.

torch computes a layer as some forty operations, each of which reads and writes all hidden states; on a processor that
multiplies in tiles these take longer than the products. Here what lies between the products is a pass each. Kept for
backward are the hidden states before both norms (fp32), queries, keys and values, attention's output, gate and up
(bf16; with norms of what attention and the MLP give, that as well): a third of what autograd keeps. Gradients of
weights are sums in fp32."""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lmgym.models import lora
from lmgym.models.attention import segments
from lmgym.models.attention.packed import Layout
from lmgym.models.attention.rules import Rule
from lmgym.models.kernels import training
from lmgym.models.kernels.layer_form import NORMS, QUERY_KEY_VALUE, Form
from lmgym.models.kernels.training_adapters import Adapters

LINEAR = (QUERY_KEY_VALUE, ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))  # those that are computed as one


@dataclass(frozen=True, eq=False)
class Weights:
    """A layer's parameters, as they train and as a pass computes with them: matrices and biases in bf16, what norms
    multiply by in fp32. `names` and `masters` have one order."""

    names: list[str]
    masters: list[nn.Parameter]
    computed: dict[str, Tensor]
    adapters: dict[Sequence[str], Adapters | None] = field(default_factory=dict)

    @classmethod
    def of(cls, layer: nn.Module, copies: Mapping[nn.Parameter, Tensor], form: Form) -> "Weights":
        """Of a layer; `copies` are those that are rounded stochastically. Names are those of the layer's own modules:
        q_proj.weight, and of its adapter q_proj.lora_A.weight."""
        names, masters, computed = [], [], {}
        for path, module in layer.named_modules():
            name = path.removesuffix(".base_layer").removesuffix(f".{lora.NAME}")
            name = ".".join(name.split(".")[-2 if ".lora_" in name else -1 :])
            for kind, master in module._parameters.items():
                if master is None:
                    continue
                own = f"{name}.{kind}"
                is_linear = type(module) is nn.Linear
                names.append(own)
                masters.append(master)
                found = copies.get(master, master).detach()
                found = found.to(torch.bfloat16 if is_linear else torch.float32)
                computed[own] = found + 1 if form.from_one and name.endswith("norm") else found
        parts: dict[str, Any] = {path.rpartition(".")[2]: module for path, module in layer.named_modules()}
        adapters: dict[Sequence[str], Adapters | None] = {
            linear: Adapters.of({name: parts[name] for name in linear}, copies) for linear in LINEAR
        }
        return cls(names, masters, computed, adapters)

    def product(self, linear: Sequence[str], inputs: Tensor, rows: int, residual: Tensor | None = None) -> Tensor:
        """These linear layers side by side, with their adapters."""
        adapters = self.adapters.get(linear)
        low = None if adapters is None else (adapters.low(inputs, rows), adapters.up)
        return training.product(inputs, self.matrices(linear), rows, self.bias(linear), residual, low)

    def product_back(self, linear: Sequence[str], by_product: Tensor, rows: int) -> tuple[Tensor, Tensor | None]:
        """The gradient by their input, and by what A makes of it."""
        adapters = self.adapters.get(linear)
        if adapters is None:
            return training.product_back(by_product, self.matrices(linear), rows), None
        by_low = training.product_back(by_product, [adapters.up], rows)
        return training.product_back(by_product, self.matrices(linear), rows, (by_low, adapters.down)), by_low

    def matrices(self, linear: Sequence[str]) -> list[Tensor]:
        return [self.computed[f"{name}.weight"] for name in linear]

    def bias(self, linear: Sequence[str]) -> Tensor | None:
        biases = [self.computed[f"{name}.bias"] for name in linear if f"{name}.bias" in self.computed]
        return torch.cat(biases) if biases else None

    def norms(self) -> list[Tensor | None]:
        """Of queries and keys."""
        return [self.computed.get(f"{name}.weight") for name in NORMS]


@dataclass(frozen=True, eq=False)
class Pass:
    """What a layer's pass has beside its hidden states."""

    weights: Weights
    form: Form
    cosines: Float[Tensor, "L D"]
    sines: Float[Tensor, "L D"]
    starts: Tensor
    spans: Tensor
    size: int
    scale: float

    @property
    def heads(self) -> tuple[int, int]:
        """Of queries, and of keys."""
        query, key, _ = self.weights.matrices(QUERY_KEY_VALUE)
        return len(query) // self.size, len(key) // self.size

    def with_positions(self, joined: Float[Tensor, "L_ J"]) -> Float[Tensor, "L_ QK"]:
        """Queries and keys with their norms and positions."""
        rows, (queries, keys) = len(self.cosines), self.heads
        out = training.empty(rows, (queries + keys) * self.size)
        places = [tensor.data_ptr() for tensor in (self.cosines, self.sines)]
        norms = [None if norm is None else norm.data_ptr() for norm in self.weights.norms()]
        numbers = rows, queries, queries + keys, self.size, self.form.epsilon, self.form.from_one
        training.library().positions(joined.data_ptr(), joined.shape[1], *places, *norms, out.data_ptr(), *numbers)
        return out

    def norm(self, hidden: Float[Tensor, "L H"], name: str) -> tuple[Float[Tensor, "L_ H"], Float[Tensor, " L"]]:
        return training.norm(hidden, self.weights.computed[f"{name}.weight"], self.form.epsilon)

    def add(
        self, hidden: Float[Tensor, "L H"], linear: Sequence[str], inputs: Tensor, norm: str | None
    ) -> tuple[Float[Tensor, "L H"], tuple[Tensor, ...]]:
        """The hidden states and what these layers give, after its norm if it has one; and then what `add_back` needs:
        what they give, and its norm's factors."""
        rows = len(hidden)
        if norm is None:
            return self.weights.product(linear, inputs, rows, hidden), ()
        given = self.weights.product(linear, inputs, rows)
        normed, factors = self.norm(given[:rows].float(), norm)
        return hidden + normed[:rows], (given, factors)

    def add_back(
        self, by_sum: Float[Tensor, "L H"], narrow: Tensor | None, norm: str | None, kept: Sequence[Tensor]
    ) -> tuple[Float[Tensor, "L_ H"], dict[str, Tensor]]:
        """The gradient by what the layers of `add` give, in bf16, and by their norm's weights. `narrow` is `by_sum` in
        bf16, if that is there already."""
        narrow = training.narrowed(by_sum) if narrow is None else narrow
        if norm is None:
            return narrow, {}
        (given, factors), name = kept, f"{norm}.weight"
        _, by_given, _, by_weight = training.norm_backward(
            narrow, given[: len(by_sum)].float(), factors, self.weights.computed[name], torch.zeros_like(by_sum), True
        )
        assert by_given is not None
        return by_given, {name: by_weight}

    def attention(self, joined: Tensor, turned: Tensor, **tensors: Tensor) -> training.PackedAttention:
        queries, keys = self.heads
        return training.PackedAttention(
            query_key=turned.data_ptr(),
            value=joined.data_ptr() + (queries + keys) * self.size * joined.element_size(),
            **{name: tensor.data_ptr() for name, tensor in tensors.items()},
            starts=self.starts.data_ptr(),
            spans=self.spans.data_ptr(),
            stride=joined.shape[1],
            segments=len(self.starts) - 1,
            rows=len(self.cosines),
            heads=queries,
            key_heads=keys,
            size=self.size,
            scale=self.scale,
        )


class FusedLayer(torch.autograd.Function):
    """apply(hidden [L H] in fp32, pass, the layer's parameters in the order of `Weights`) -> [L H]"""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, this: Pass, *masters: Tensor) -> Tensor:
        rows, weights, form = len(hidden), this.weights, this.form
        (first, second), after = form.read, form.given or (None, None)
        normed, factors = this.norm(hidden, first)
        joined = weights.product(LINEAR[0], normed, rows)
        heads = this.heads[0]
        attended, normaliser = training.empty(rows, heads * this.size), torch.empty(rows, heads)
        attend(this, joined, attended, normaliser)
        middle, kept = this.add(hidden, LINEAR[1], attended, after[0])
        normed, middle_factors = this.norm(middle, second)
        gate_up = weights.product(LINEAR[2], normed, rows)
        inner = training.gated(gate_up, rows, form.gelu)
        out, kept_last = this.add(middle, LINEAR[3], inner, after[1])
        saved = hidden, factors, joined, attended, normaliser, middle, middle_factors, gate_up
        ctx.save_for_backward(*saved, *kept, *kept_last)
        ctx.this = this
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, by_out: Tensor) -> tuple[Tensor | None, ...]:
        hidden, factors, joined, attended, normaliser, middle, middle_factors, gate_up, *kept = ctx.saved_tensors
        this, rows = ctx.this, len(hidden)
        weights, form, by_out = this.weights, this.form, by_out.contiguous()
        (first, second), after = (f"{name}.weight" for name in form.read), form.given or (None, None)
        found: dict[str, Tensor] = {}
        wanted = {name for name, needs in zip(weights.names, ctx.needs_input_grad[2:], strict=True) if needs}

        def through(linear: Sequence[str], by_product: Tensor, inputs: Tensor, by_low: Tensor | None) -> None:
            """The gradients of the linear layers of one product."""
            adapters = weights.adapters.get(linear)
            if adapters is not None and by_low is not None:
                found.update(adapters.gradients(by_product, by_low, inputs, rows))
            if not any(f"{name}.weight" in wanted for name in linear):
                return
            matrices = weights.matrices(linear)
            sizes = [len(matrix) for matrix in matrices]
            parts = training.weight_gradient(by_product, inputs, rows).split(sizes)
            found.update({f"{name}.weight": part for name, part in zip(linear, parts, strict=True)})
            if f"{linear[0]}.bias" in weights.computed:
                parts = by_product[:rows].float().sum(0).split(sizes)
                found.update({f"{name}.bias": part for name, part in zip(linear, parts, strict=True)})

        # 1. Down, gate and up, the second norm.
        by_given, of_norm = this.add_back(by_out, None, after[1], kept[2:])
        found.update(of_norm)
        by_inner, by_low = weights.product_back(LINEAR[3], by_given, rows)
        by_gate_up, inner = training.gated_backward(by_inner, gate_up, rows, form.gelu)
        through(LINEAR[3], by_given, inner, by_low)
        by_normed, by_low = weights.product_back(LINEAR[2], by_gate_up, rows)
        by_middle, by_middle_in_bf16, normed, found[second] = training.norm_backward(
            by_normed, middle, middle_factors, weights.computed[second], by_out, narrow=True
        )
        through(LINEAR[2], by_gate_up, normed, by_low)
        # 2. The output of attention, attention, positions.
        by_given, of_norm = this.add_back(by_middle, by_middle_in_bf16, after[0], kept[:2])
        found.update(of_norm)
        by_attended, by_low = weights.product_back(LINEAR[1], by_given, rows)
        through(LINEAR[1], by_given, attended, by_low)
        by_joined = attend_backward(this, joined, attended, normaliser, by_attended, found)
        # 3. Queries, keys and values, the first norm.
        by_normed, by_low = weights.product_back(LINEAR[0], by_joined, rows)
        by_hidden, _, normed, found[first] = training.norm_backward(
            by_normed, hidden, factors, weights.computed[first], by_middle, narrow=False
        )
        through(LINEAR[0], by_joined, normed, by_low)
        return by_hidden, None, *(found.get(name) if name in wanted else None for name in weights.names)


def attend(this: Pass, joined: Float[Tensor, "L_ J"], attended: Tensor, normaliser: Tensor) -> None:
    """Write attention's outputs and the logarithms of its normalisers."""
    turned = this.with_positions(joined)
    asked = this.attention(joined, turned, out=attended, normaliser=normaliser)
    training.library().attend_packed(ctypes.byref(asked))


def attend_backward(
    this: Pass, joined: Tensor, attended: Tensor, normaliser: Tensor, by_attended: Tensor, found: dict[str, Tensor]
) -> Float[Tensor, "L_ J"]:
    """The gradient by queries, keys and values; those of their norms' weights go to `found`."""
    library, (queries, keys), rows = training.library(), this.heads, len(this.cosines)
    turned, by_joined = this.with_positions(joined), torch.empty_like(joined)
    tensors = {"out": attended, "normaliser": normaliser, "by_out": by_attended, "by_joined": by_joined}
    asked = this.attention(joined, turned, **tensors)
    room = torch.empty(library.room(ctypes.byref(asked)))
    library.attend_packed_backward(ctypes.byref(asked), room.data_ptr())
    norms = this.weights.norms()
    parts = torch.empty(-(-rows // training.PART), 2, this.size)
    places = [None if one is None else one.data_ptr() for one in (this.cosines, this.sines, *norms, parts)]
    numbers = rows, queries, queries + keys, this.size, this.form.epsilon, this.form.from_one
    library.positions_backward(by_joined.data_ptr(), joined.data_ptr(), joined.shape[1], *places, *numbers)
    if norms[0] is not None:
        found.update({f"{name}.weight": part for name, part in zip(NORMS, parts.sum(0), strict=True)})
    return by_joined


@dataclass
class LastLayout:
    """A layout as the kernels read it, kept for the layers of a pass."""

    layout: Layout | None = None
    found: tuple[Tensor, Tensor] | None = field(default=None)

    def of(self, layout: Layout) -> tuple[Tensor, Tensor] | None:
        if layout is not self.layout:
            self.layout = layout
            self.found = segments.packed(layout.segments) if isinstance(layout, segments.InSegments) else None
        return self.found


@contextmanager
def fused(
    layers: nn.ModuleList,
    forms: Sequence[Form],
    copies: Mapping[nn.Parameter, Tensor],
    rules: Sequence[Rule] = (),
) -> Iterator[None]:
    """Within this context layers of these forms compute packed rows as one function each, unless rows are longer than a
    layer's window. `copies` are the weights that are rounded stochastically; others are rounded to nearest. `rules` are
    those of the layers, if any has one."""
    last = LastLayout()
    training.library().use_threads(torch.get_num_threads())  # where torch brings an OpenMP of its own
    for layer, form, rule in zip(layers, forms, rules or [Rule()] * len(layers), strict=True):
        layer.forward = partial(_forward, layer, layer.forward, copies, last, form, rule)
    try:
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _forward(
    layer: Any,
    usual: Any,
    copies: Mapping[nn.Parameter, Tensor],
    last: LastLayout,
    form: Form,
    rule: Rule,
    hidden: Float[Tensor, "1 L H"],
    *arguments: Any,
    lmgym_layout: Layout | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **named: Any,
) -> Tensor:
    known = last.of(lmgym_layout) if lmgym_layout is not None and rule.is_plain(lmgym_layout.reach) else None
    cosines, sines = (part.flatten(0, -2) for part in position_embeddings or (hidden, hidden))
    attention = layer.self_attn
    if known is None or cosines.shape != (hidden.shape[-2], attention.head_dim):
        given = {} if lmgym_layout is None else {"lmgym_layout": lmgym_layout}
        return usual(hidden, *arguments, position_embeddings=position_embeddings, **given, **named)  # type: ignore[no-any-return]
    weights = Weights.of(layer, copies, form)
    places = cosines.float().contiguous(), sines.float().contiguous()
    this = Pass(weights, form, *places, *known, attention.head_dim, attention.scaling)
    out = FusedLayer.apply(hidden.float().flatten(0, -2).contiguous(), this, *weights.masters)  # type: ignore[no-untyped-call]
    return out.view_as(hidden)  # type: ignore[no-any-return]
