"""Shapes that most of the mathematics shares: N rows of T tokens."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

PerToken = Float[Tensor, "N T"]
TokenIds = Int[Tensor, "N T"]
Mask = Bool[Tensor, "N T"]
PerRow = Float[Tensor, " N"]
RowIds = Int[Tensor, " N"]
"""A number for each row, such as that of its episode or its group."""
