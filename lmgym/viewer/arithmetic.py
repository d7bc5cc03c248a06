"""Formulas as texts that people read and that can be computed, so that what a page shows is what was tested."""

import ast
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Number = Any  # a float, or an array of floats

FUNCTIONS: Mapping[str, Callable[..., Number]] = {
    "min": np.minimum,
    "max": np.maximum,
    "clip": np.clip,
    "exp": np.exp,
    "log": np.log,
    "sigmoid": lambda x: 1 / (1 + np.exp(-np.asarray(x, dtype=float))),
}
OPERATIONS: Mapping[type, Callable[[Number, Number], Number]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.Pow: lambda a, b: a**b,
}


def compute(formula: str, values: Mapping[str, Number]) -> Number:
    """The value of a formula of + - * / **, the functions above, numbers, and names that `values` has.

    Nothing of Python is executed. Raises KeyError for a name without a value and ValueError for anything else.

    Example:
        >>> compute("-min(r * A, clip(r, 1 - low, 1 + high) * A)", {"r": 1.5, "A": 2.0, "low": 0.2, "high": 0.28})
        -2.56
    """
    return _value(ast.parse(formula, mode="eval").body, values)


def names_in(formula: str) -> list[str]:
    """The names of numbers in a formula, in the order in which they appear.

    Example:
        >>> names_in("r * A - log(r)")
        ['r', 'A']
    """
    functions = set(FUNCTIONS)
    nodes = [node for node in ast.walk(ast.parse(formula, mode="eval")) if isinstance(node, ast.Name)]
    ordered = sorted(nodes, key=lambda node: node.col_offset)
    return list(dict.fromkeys(node.id for node in ordered if node.id not in functions))


def _value(node: ast.expr, values: Mapping[str, Number]) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name):
            return values[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, values)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in OPERATIONS:
            return OPERATIONS[type(operation)](_value(left, values), _value(right, values))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return FUNCTIONS[name](*(_value(argument, values) for argument in arguments))
    raise ValueError(f"a formula cannot hold {ast.unparse(node)}")
