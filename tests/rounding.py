"""How far two correct computations may lie apart. A tolerance follows from the arithmetic, never from what was seen on
one machine: processors add the same numbers in different orders."""

from collections.abc import Iterable
from typing import Any

import torch


def rounding(terms: int, size: float = 1.0, precision: torch.dtype = torch.float32) -> float:
    """The difference between two orders of adding `terms` numbers whose sums are at most `size`: terms x eps x size.
    Each addition rounds a sum of at most `size` by at most eps / 2, and both computations do so.

    Example:
        >>> rounding(16, size=4.0)
        7.6e-06
    """
    return terms * torch.finfo(precision).eps * size


def terms_of(model: Any, tokens: int) -> int:
    """The numbers that are added on the longest way through a network: the inputs of each matrix, the width of each
    norm, in each layer a sum over up to `tokens` keys, and the softmax over the vocabulary."""
    config = model.config.get_text_config()
    attentions = config.num_hidden_layers * (3 if config.is_encoder_decoder else 1)  # a decoder's layer has two
    return sum(map(_inputs, model.modules())) + attentions * tokens + config.vocab_size


def tolerance(model: Any, values: Iterable[float], tokens: int = 64) -> float:
    """How far such outputs of a model in fp32, of rows of up to `tokens`, may move with the batch and the processor."""
    return rounding(terms_of(model, tokens), max(1.0, *map(abs, values)))


def near(model: Any, ours: torch.Tensor, theirs: torch.Tensor, tokens: int = 64) -> bool:
    """Whether two computations of the same outputs differ by rounding alone."""
    largest = float(theirs.detach().abs().max())
    return torch.allclose(ours, theirs, rtol=0, atol=tolerance(model, [largest], tokens))


def near_gradient(model: Any, ours: torch.Tensor, theirs: torch.Tensor, outputs: int, tokens: int = 64) -> bool:
    """The same of the gradient of a sum over so many log-probabilities: what backward multiplies has rounded in
    forward, and backward sums as many terms again. A gradient that is 0 (a key's bias) is a sum of numbers around 1."""
    terms = 2 * terms_of(model, tokens) + outputs
    return float((ours - theirs).norm()) <= rounding(terms, float(theirs.norm())) + rounding(terms)


def _inputs(module: torch.nn.Module) -> int:
    """The numbers that one output of this module is a sum of."""
    weight = getattr(module, "weight", None)
    if weight is None or isinstance(module, torch.nn.Embedding):
        return 0
    return int(weight.shape[0] if type(module).__name__ == "Conv1D" else weight.shape[-1])
