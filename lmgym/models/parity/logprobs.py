"""Log-probabilities from hidden states whose bits are those of the sampler: the same product with the LM head, the same
sums over the vocabulary (functional/sampling.py). Backward is fused_logprobs.py's."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lmgym.functional.sampling import exact_logprobs
from lmgym.models.kernels.fused_logprobs import Adjust, FusedLogprobs, HeadGradient, logits_gradient, tiles, wide_of


class ExactLogprobs(FusedLogprobs):
    """FusedLogprobs with `product`, from hidden states [R H] to logits [R V], in place of its own product.

    apply(hidden [R H], weight [V H], bias [V] or None, targets [R], adjust, scale, entropy, chunk, logprob_gradient,
    computed, product)"""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Float[Tensor, "R H"],
        weight: Float[Tensor, "V H"],
        bias: Float[Tensor, " V"] | None,
        targets: Int[Tensor, " R"],
        adjust: Adjust,
        scale: float,
        entropy: bool,
        chunk: int,
        logprob_gradient: Float[Tensor, " R"] | None,
        computed: Float[Tensor, "V H"] | None,
        product: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        head = weight.to(hidden.dtype) if computed is None else computed
        logprobs, normaliser, entropies = (hidden.new_zeros(len(hidden), dtype=wide_of(hidden.dtype)) for _ in range(3))
        gradient = None if logprob_gradient is None else HeadGradient(ctx, hidden, weight, head, False)
        for tile in tiles(hidden, head, bias, adjust, chunk, False, product):
            part, logits = tile.part, tile.logits
            logprobs[part], normaliser[part] = exact_logprobs(logits, targets[part])
            if entropy:
                probs = (logits - normaliser[part, None]).exp()
                # Excluded tokens have -inf, and 0 * -inf would be NaN.
                entropies[part] = normaliser[part] - (probs * logits.masked_fill(probs == 0, 0.0)).sum(-1)
            if gradient is not None and logprob_gradient is not None:
                share = scale * logprob_gradient[part, None]
                gradient.add(tile, logits_gradient(logits.sub_(normaliser[part, None]), share, targets[part, None]))
        finished = (None, None) if gradient is None else gradient.both
        softmax = (normaliser, normaliser, torch.ones_like(normaliser))  # exponentials of log-probabilities add up to 1
        ctx.save_for_backward(hidden, weight, bias, targets, *softmax, entropies, logprob_gradient, *finished)
        ctx.settings = adjust, scale, entropy, chunk, False, computed
        return logprobs, entropies if entropy else entropies[:0]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, by_logprob: Tensor, by_entropy: Tensor) -> tuple[Tensor | None, ...]:
        return FusedLogprobs.backward(ctx, by_logprob, by_entropy)  # type: ignore[no-any-return]
