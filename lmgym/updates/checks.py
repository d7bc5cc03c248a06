"""What an algorithm's methods return, held against the contract: a mistake is one sentence, which names the method.

These look at types and shapes alone, so they cost nothing beside a pass."""

from collections.abc import Collection, Mapping
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor

from lmgym.algorithms.base import Algorithm, Terms
from lmgym.batch import Batch
from lmgym.core.errors import LmgymError
from lmgym.functional.reductions import Reduction

REDUCTIONS = get_args(Reduction)


def checked_batch(algorithm: Algorithm, method: str, returned: Any) -> Batch:
    """The batch that a method returned; advantages with one number for each row are written to its tokens. Raises
    LmgymError for what is no batch, and for advantages that are not floating-point numbers for each token or row.

    Example: checked_batch(algorithm, "advantages", algorithm.advantages(batch))"""
    if not isinstance(returned, Batch):
        _refuse(algorithm, method, f"returned {_kind(returned)}", "return the batch, such as batch.replace(...)")
    given = returned.advantages
    if given is None:
        return returned
    if not isinstance(given, Tensor) or not _of_tokens_or_rows(given, returned.actions):
        _refuse(
            algorithm, method, f"gives advantages that are {_kind(given)}, not [N T] {_shape(returned.actions)}",
            "batch.per_token makes a number for each token of one for each row",
        )  # fmt: skip
    if not given.is_floating_point():
        _refuse(algorithm, method, f"gives advantages of {given.dtype}", "make them floating-point numbers: .float()")
    if given.shape != returned.actions.shape:
        return returned.replace(advantages=returned.per_token(given[:, 0]))
    return returned


def checked_loss(algorithm: Algorithm, batch: Batch, returned: Any) -> tuple[Terms, Mapping[str, Tensor]]:
    """The terms and metrics that `loss` returned. Raises LmgymError for what is no pair of them, for a term that is not
    one number for each token or row [N 1] with a known reduction, and for a metric that is no tensor or not of these
    tokens."""
    terms, metrics = _pair(algorithm, "loss", returned, "terms, such as {'policy': (term, 'token')}, and metrics")
    for name, term in terms.items():
        if not (isinstance(term, tuple | list) and len(term) == 2 and isinstance(term[0], Tensor)):
            _refuse(
                algorithm, "loss", f"returned the term '{name}' as {_kind(term)}",
                f"return a tensor [N T] and its reduction, {_listed(REDUCTIONS)}",
            )  # fmt: skip
        if not _of_tokens_or_rows(term[0], batch.actions):
            _refuse(
                algorithm, "loss", f"returned the term '{name}' as {_kind(term[0])}, not [N T] {_shape(batch.actions)}",
                "return a number for each token, which the driver averages, or write batch_loss",
            )  # fmt: skip
        if term[1] not in REDUCTIONS:
            _refuse(algorithm, "loss", f"returned the reduction {term[1]!r}", f"write {_listed(REDUCTIONS)}")
    for name, value in metrics.items():
        if not (isinstance(value, Tensor) and (value.dim() == 0 or _of_tokens_or_rows(value, batch.actions))):
            _refuse(
                algorithm, "loss", f"returned the metric '{name}' as {_kind(value)}, not [N T] {_shape(batch.actions)}",
                "return a tensor with a number for each token, or write the method `metrics`",
            )  # fmt: skip
    return terms, metrics


def checked_batch_loss(algorithm: Algorithm, returned: Any) -> tuple[Mapping[str, Tensor], dict[str, float]]:
    """The losses and metrics that `batch_loss` returned. Raises LmgymError for what is no pair of them, or no
    number."""
    losses, metrics = _pair(algorithm, "batch_loss", returned, "losses, such as {'policy': loss}, and metrics")
    for name, loss in losses.items():
        if not (isinstance(loss, Tensor) and loss.numel() == 1):
            _refuse(algorithm, "batch_loss", f"returned the loss '{name}' as {_kind(loss)}", "return one number")
    return losses, checked_numbers(algorithm, "batch_loss", metrics)


def checked_rows(algorithm: Algorithm, batch: Batch, returned: Any) -> Tensor:
    """The rows that `active` returned, bool [N]. Raises LmgymError for anything else."""
    if not (isinstance(returned, Tensor) and returned.dtype == torch.bool and returned.shape == (len(batch),)):
        _refuse(algorithm, "active", f"returned {_kind(returned)}", f"return a tensor of bool [N] ({len(batch)})")
    return returned


def checked_numbers(algorithm: Algorithm, method: str, returned: Any) -> dict[str, float]:
    """The metrics that a method returned, as Python's numbers. Raises LmgymError for what is no mapping, or holds more
    than a number."""
    if not isinstance(returned, Mapping):
        _refuse(algorithm, method, f"returned {_kind(returned)}", "return a dictionary of numbers, {} for none")
    numbers = {}
    for name, value in returned.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            _refuse(algorithm, method, f"returned the metric '{name}' as {_kind(value)}", "return one number")
    return numbers


def refuse_taken(algorithm: Algorithm, metrics: Collection[str], taken: Collection[str], of: str) -> None:
    """Raise LmgymError for a metric with a name that something else has: one would replace the other.

    Example: refuse_taken(algorithm, {"reward"}, {"reward", "step"}, "the step's record")"""
    if both := {*metrics} & {*taken}:
        name = min(both)
        raise LmgymError(
            f"{type(algorithm).__name__} has a metric '{name}', and {of} has a '{name}' already; choose another name"
        )


def _pair(algorithm: Algorithm, method: str, returned: Any, wanted: str) -> tuple[Any, Any]:
    if not (
        isinstance(returned, tuple | list) and len(returned) == 2 and all(isinstance(m, Mapping) for m in returned)
    ):
        _refuse(algorithm, method, f"returned {_kind(returned)}", f"return two dictionaries: {wanted} ({{}} for none)")
    if not returned[0]:
        _refuse(algorithm, method, "returned nothing to minimise", f"return two dictionaries: {wanted}")
    return returned[0], returned[1]


def _of_tokens_or_rows(value: Tensor, actions: Tensor) -> bool:
    """Whether a tensor has a number for each token [N T], or one for all tokens of a row [N 1]."""
    return value.shape in (actions.shape, (len(actions), 1))


def _kind(value: Any) -> str:
    """What a value is, for a sentence: of a tensor its shape and type, of a pair what it holds."""
    if isinstance(value, Tensor):
        return f"a tensor {_shape(value)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, tuple | list) and len(value) <= 3:
        return f"{type(value).__name__} of ({', '.join(map(_kind, value))})"
    return "None" if value is None else f"a {type(value).__name__}"


def _shape(value: Tensor) -> str:
    return str(list(value.shape)).replace(",", "")


def _listed(words: Collection[str]) -> str:
    return " or ".join(f"'{word}'" for word in words)


def _refuse(algorithm: Algorithm, method: str, what: str, instead: str) -> NoReturn:
    raise LmgymError(f"{type(algorithm).__name__}.{method} {what}; {instead}")
