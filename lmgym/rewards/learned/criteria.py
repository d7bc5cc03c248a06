"""Rubrics: criteria that a recipe or the data name, and the number of an answer that meets some of them."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmgym.core.errors import LmgymError, represent
from lmgym.core.registry import suggest
from lmgym.types import Example

ASK = ("ask", "criterion", "description", "text")  # lmgym's name, HealthBench's, Rubrics as Rewards', verifiers'
WEIGHT = ("weight", "points")  # points: HealthBench's
YES_NO = ("no", "yes")  # what verifiers' `choices` may be here, from the worst to the best
MOST = 256  # criteria of an answer
LARGEST_WEIGHT = 1e6


@dataclass(frozen=True)
class Criterion:
    """A question or a statement about an answer, to which a judge says yes or no. A yes adds `weight`, or takes it away
    if that is negative. With `gate` an answer that more likely has a no is worth 0.

    Example: Criterion("Is every step right?", weight=2.0)"""

    ask: str
    weight: float = 1.0
    gate: bool = False


def rubric_value(criteria: Sequence[Criterion], yes: Sequence[float]) -> float:
    """The number of an answer, of the probability of a yes to each criterion: 0 if a gate has less than one half, else
    the sum of weight times probability, over the sum of the positive weights, and never below 0.

    value = max(0, sum_i w_i p_i / sum_{w_i > 0} w_i), so it is 1 if all that adds has a yes and nothing takes away. The
    order of the criteria does not matter, to the last bit. Source: HealthBench (Arora and others, arXiv 2505.08775),
    where p_i is 0 or 1.

    Example: rubric_value([Criterion("Right?", 2.0), Criterion("Rude?", -1.0)], [1.0, 0.5]) -> 0.75"""
    if any(one.gate and p < 0.5 for one, p in zip(criteria, yes, strict=True)):
        return 0.0
    gained = math.fsum(one.weight * p for one, p in zip(criteria, yes, strict=True))
    return min(max(gained / math.fsum(one.weight for one in criteria if one.weight > 0), 0.0), 1.0)


def criteria_of(reward: str, example: Example, criteria: Any, column: str | None) -> tuple[Criterion, ...]:
    """The criteria for an answer to this example: those of the recipe, then those in this column of the data.

    Raises LmgymError, which names the key or the example, for what is no rubric."""
    key = f"key 'rewards.{reward}.criteria'"
    found = read_criteria(criteria or [], key, strict=True)
    if column is not None:
        if column not in example.meta:
            valid = suggest(column, example.meta)
            raise LmgymError(f"key 'rewards.{reward}.column': '{example.id}' has no column '{column}'; {valid}")
        found += read_criteria(example.meta[column], f"reward '{reward}': column '{column}' of '{example.id}'")
    elif not found:
        raise LmgymError(f"{key} is empty; write a list of questions, or name the data's column of them as 'column'")
    where = key if column is None else f"reward '{reward}': the rubric of '{example.id}'"
    if not any(one.weight > 0 for one in found):
        raise LmgymError(f"{where} has no positive weight, so no answer can earn anything")
    if len(found) > MOST:
        raise LmgymError(f"{where} has {len(found)} criteria; {MOST} are the most")
    return found


def read_criteria(given: Any, where: str, strict: bool = False) -> tuple[Criterion, ...]:
    """Criteria from a list of texts or mappings, from JSON of it, or from a mapping that has it as `criteria`, as
    verifiers' files do. A mapping has its question under one of ASK, and may have a weight and a gate. Its other keys
    (a title, tags) are ignored, unless `strict`. `where` begins each error."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise LmgymError(f"{where} is a text that is no JSON: {represent(given, 60)}") from None
    if isinstance(given, Mapping):
        given = given.get("criteria")
    if not isinstance(given, list | tuple):
        raise LmgymError(f"{where} is no list of criteria but {represent(given, 60)}; write [{{ask: ..., weight: 1}}]")
    return tuple(_criterion(one, f"{where}, number {place}", strict) for place, one in enumerate(given, start=1))


def _criterion(given: Any, where: str, strict: bool) -> Criterion:
    if isinstance(given, str):
        given = {"ask": given}
    if not isinstance(given, Mapping):
        raise LmgymError(f"{where}: it must be a text or {{ask: ..., weight: ...}}, not {represent(given, 60)}")
    valid = (*ASK, *WEIGHT, "gate")
    unknown = [name for name in given if name not in valid]
    if strict and unknown:
        raise LmgymError(f"{where}: unknown key {represent(unknown[0], 60)}; {suggest(str(unknown[0]), valid)}")
    choices = given.get("choices")
    if choices is not None and choices not in (list(YES_NO), YES_NO):
        raise LmgymError(f"{where}: 'choices' is {represent(choices, 60)}; a criterion is answered by no or yes only")
    ask, weight = _only(given, ASK, where), _only(given, WEIGHT, where, 1.0)
    if not isinstance(ask, str) or not ask.strip():
        raise LmgymError(f"{where}: the question must be a text, not {represent(ask, 60)}")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not abs(weight) <= LARGEST_WEIGHT:
        raise LmgymError(
            f"{where}: the weight must be a number of at most {LARGEST_WEIGHT:g} in size, not {represent(weight, 60)}"
        )
    gate = given.get("gate")
    if gate not in (None, True, False) or (gate and weight < 0):
        told = f"'gate' must be true or false, not {represent(gate, 60)}"
        raise LmgymError(
            f"{where}: {told if gate is not True else 'a gate must have a yes, so its weight cannot be negative'}"
        )
    return Criterion(ask, float(weight), bool(gate))


def _only(given: Mapping[str, Any], names: Sequence[str], where: str, default: Any = None) -> Any:
    """The value of the one of these names that is there and not null."""
    there = [name for name in names if given.get(name) is not None]
    if len(there) > 1:
        raise LmgymError(f"{where}: '{there[0]}' and '{there[1]}' mean the same; write one of them")
    if not there and default is None:
        raise LmgymError(f"{where}: it has no question; write it as '{names[0]}'")
    return given[there[0]] if there else default
