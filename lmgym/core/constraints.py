"""Types of fields with their bounds: `group_size: PositiveInt = 1`.

core/validation.py checks them, in a recipe and where the dataclass is built in Python, and `lmgym schema` prints them.
A field with a bound of its own says it in place: `decimals: Annotated[int, Ge(0), Le(20)] = 3`. A `Rule` beside it says
in words what would be right; a `FormerKey` is a name that the field had in older recipes."""

import math
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt, Predicate

FINITE = Predicate(math.isfinite)
"""Neither inf nor nan. (No bound lets nan through; only this one refuses inf.)"""

LARGEST_REWARD = 1e15
"""Most that may be trained on: fp32, which ends at 3.4e38, holds the sum of squares of a hundred million of them."""


@dataclass(frozen=True)
class Rule:
    """The end of the error sentence of a field, in place of one made from its bounds.

    Example: Annotated[int, Ge(1), Rule("it must be at least 1; leave it out to keep all")]"""

    text: str


@dataclass(frozen=True)
class FormerKey:
    """An earlier name of the field, with a warning for recipes that use it: Annotated[float, FormerKey("old_name")]."""

    name: str


PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
PositiveFloat = Annotated[float, Gt(0)]
ExampleCount = Annotated[int, Le(10_000_000)]
"""How many examples a task makes; all are in memory, a few kilobytes each."""
NonNegativeFloat = Annotated[float, Ge(0), FINITE]
Coefficient = Annotated[float, Ge(0), Rule("it must be 0 or more")]
"""The weight of a term."""
Share = Annotated[float, Ge(0), Le(1), Rule("it must lie between 0 and 1")]
ShareBelowOne = Annotated[float, Ge(0), Lt(1)]
"""Such as the memory of a running average."""
