"""How far two correct computations may lie apart. A tolerance follows from the arithmetic, never from what was seen on
one machine: processors add the same numbers in different orders."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

Outputs = torch.Tensor | Sequence[float]


def rounding(terms: int, size: float = 1.0, precision: torch.dtype = torch.float32) -> float:
    """The difference between two orders of adding `terms` numbers whose sums are at most `size`: terms x eps x size.
    Each addition rounds a sum of at most `size` by at most eps / 2, and both computations do so.

    Example:
        >>> rounding(16, size=4.0)
        7.6e-06
    """
    return terms * torch.finfo(precision).eps * size


def typical(terms: int, size: float = 1.0, precision: torch.dtype = torch.float32) -> float:
    """The same in the root mean square of many results, and so in their mean: roundings go up as often as down, and
    then `terms` of them add up to sqrt(terms) x eps x size (Higham and Mary, SIAM Journal on Scientific Computing 41,
    2019).

    Example:
        >>> typical(16, size=4.0)
        1.9e-06
    """
    return rounding(terms, size, precision) / math.sqrt(terms)


def terms_of(model: Any, tokens: int = 64) -> int:
    """The numbers that are added on the longest way through a network: the inputs of each matrix, the width of each
    norm, in each layer a sum over up to `tokens` keys, and the softmax over the vocabulary."""
    config = model.config.get_text_config()
    attentions = config.num_hidden_layers * (3 if config.is_encoder_decoder else 1)  # a decoder's layer has two
    return sum(map(_inputs, model.modules())) + attentions * tokens + config.vocab_size


def size_of(model: Any) -> float:
    """The numbers whose difference a log-probability is, however small it is itself: a logit, at most the longest row
    of the LM head times a hidden state behind a norm (numbers around 1), and the logarithm of a sum over the
    vocabulary."""
    head = model.get_output_embeddings().weight.detach()
    return float(head.norm(dim=1).max()) * math.sqrt(head.shape[1]) + math.log(len(head))


def tolerance(model: Any, values: Iterable[float] = (), tokens: int = 64) -> float:
    """How far such outputs of a model in fp32, of rows of up to `tokens`, may move with the batch and the processor."""
    return rounding(terms_of(model, tokens), max([size_of(model), *map(abs, values)]))


def typical_tolerance(model: Any, values: Iterable[float] = (), tokens: int = 64) -> float:
    """The same for a mean or root mean square over many such outputs."""
    return typical(terms_of(model, tokens), max([size_of(model), *map(abs, values)]))


def near(model: Any, ours: Outputs, theirs: Outputs, tokens: int = 64) -> bool:
    """Whether two computations of the same outputs differ by rounding alone: each by no more than all roundings of one
    direction make, and their root mean square by no more than roundings of any direction do."""
    one, other = (torch.as_tensor(values).detach().double().flatten() for values in (ours, theirs))
    assert len(one) == len(other)
    gaps, size = one - other, [float(other.abs().max())]
    largest, usual = float(gaps.abs().max()), float(gaps.square().mean().sqrt())
    return largest <= tolerance(model, size, tokens) and usual <= typical_tolerance(model, size, tokens)


def near_in_bf16(model: Any, ours: Outputs, theirs: Outputs) -> bool:
    """Whether two computations of the same log-probabilities, one of them or both in bf16, differ by rounding alone, in
    the root mean square. A product in bf16 adds up in fp32, so what rounds to bf16 is what goes into each matrix and
    norm and what comes out, and it rounds by a share of itself: outputs move by a share of how much they vary."""
    one, other = (torch.as_tensor(values).detach().double().flatten() for values in (ours, theirs))
    assert len(one) == len(other)
    usual = float((one - other).square().mean().sqrt())
    return usual <= typical(bf16_roundings_of(model), float(other.std()), torch.bfloat16)


def bf16_roundings_of(model: Any) -> int:
    """How often a forward pass in bf16 rounds: what goes into each matrix and norm and what comes out."""
    return 2 * sum(_inputs(module) > 0 for module in model.modules())


def near_gradient(
    model: Any,
    ours: torch.Tensor,
    theirs: torch.Tensor,
    outputs: int,
    tokens: int = 64,
    precision: torch.dtype = torch.float32,
) -> bool:
    """The same of the gradient of a sum over so many log-probabilities: what backward multiplies has rounded in
    forward, and backward sums as many terms again. A gradient that is 0 (a key's bias) is a sum of numbers around 1."""
    terms = 2 * terms_of(model, tokens) + outputs
    allowed = rounding(terms, float(theirs.norm()), precision) + rounding(terms, precision=precision)
    return float((ours - theirs).norm()) <= allowed


def _inputs(module: torch.nn.Module) -> int:
    """The numbers that one output of this module is a sum of."""
    weight = getattr(module, "weight", None)
    if weight is None or isinstance(module, torch.nn.Embedding):
        return 0
    return int(weight.shape[0] if type(module).__name__ == "Conv1D" else weight.shape[-1])
