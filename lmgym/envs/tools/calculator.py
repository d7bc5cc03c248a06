"""A calculator for arithmetic in a model's text, with exact results: text in, a number or None out.

The text is never executed. Its length, its depth and the size of every number are bounded, so each call ends after a
bounded number of small operations, for any text."""

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Literal

from lmgym.core.registry import register

Style = Literal["lmgym", "llm_rl"]

LONGEST = 200  # characters of an expression; those of GSM8K have 30 at most
DEEPEST = 20  # nested brackets, signs and powers
BITS = 256  # of every numerator and denominator: 77 digits

# Digits are ASCII; "1,000" and "$5" are numbers. \u00d7 \u00f7 \u2212 are the printed signs for * / -.
TOKEN = re.compile(
    r"[ \t]*+(?:(?P<number>\$?(?:[0-9]{1,3}(?:,[0-9]{3})++|[0-9]++)(?:\.[0-9]*+)?|\$?\.[0-9]++)"
    r"|(?P<sign>\*\*|//|[-+*/^%()x\u00d7\u00f7\u2212]))"
)
SAME = {"\u00d7": "*", "x": "*", "\u00f7": "/", "\u2212": "-", "**": "^", "//": ":"}


class _Refused(Exception):
    """The text is not arithmetic, or exceeds a bound."""


def calculate(expression: str) -> int | Fraction | None:
    """The exact value of an expression, or None.

    It reads whole and decimal numbers ("1,000", ".5", "$5"), + - * / and // (rounding down), ^ or ** with a whole
    number as exponent, brackets, "20%" (as 1/5), x for times, and the Unicode signs for times, divided by and minus.
    The value is an int where Python's would be (whole numbers without /), otherwise a Fraction.

    Returns None for other text, a division by zero, or if a bound above is exceeded. Never raises.

    Example:
        >>> calculate("16-3-4"), calculate(".5*(3+4)"), calculate("9**9**9"), calculate("__import__('os')")
        (9, Fraction(7, 2), None, None)
    """
    if len(expression) > LONGEST:
        return None
    try:
        return _Parser(expression).parse()
    except (_Refused, ZeroDivisionError):
        return None


@register("tool", "calculator")
def calculator(expression: str) -> str:
    """Computes an arithmetic expression exactly: numbers, + - * / // ^, brackets and percent.

    Args:
        expression: such as (3 + 4.5) * 2"""
    value = calculate(expression)
    if value is None:
        raise ValueError(f"this is no arithmetic, divides by zero, is longer than {LONGEST} characters, or too large")
    return format_number(value, decimals=10)


def format_number(value: int | Fraction, decimals: int = 2, style: Style = "lmgym") -> str:
    """The value as text: whole numbers without a point, others rounded to `decimals`, without zeros at the end.

    A value in the middle is rounded to the even digit. The style `llm_rl` prints Python's
    `round(value, decimals)`: "1.0" for 2/2.

    Example:
        >>> format_number(Fraction(24)), format_number(Fraction(5, 3)), format_number(Fraction(1), style="llm_rl")
        ('24', '1.67', '1.0')
    """
    if style == "llm_rl":
        return str(value if isinstance(value, int) else round(float(value), decimals))
    scaled = round(Fraction(value) * 10**decimals)
    whole, rest = divmod(abs(scaled), 10**decimals)
    digits = f"{rest:0{decimals}d}".rstrip("0") if rest else ""
    return ("-" if scaled < 0 else "") + str(whole) + ("." + digits if digits else "")


class _Parser:
    """Recursive descent: each method reads the part of the grammar with its name, and returns the value.

        sum     = product {("+" | "-") product}
        product = signed {("*" | "/" | "//") signed}
        signed  = {"+" | "-"} power
        power   = atom {"%"} ["^" signed]
        atom    = number | "(" sum ")"

    Example: _Parser("2*(3+4)").parse() is 14"""

    def __init__(self, expression: str) -> None:
        self.tokens = list(_tokens(expression.rstrip(" \t")))
        self.position = 0
        self.depth = 0

    def parse(self) -> int | Fraction:
        value = self.sum()
        if self.position < len(self.tokens):
            raise _Refused
        return value

    def sum(self) -> int | Fraction:
        value = self.product()
        while sign := self.take("+-"):
            other = self.product()
            value = _bounded(value + other if sign == "+" else value - other)
        return value

    def product(self) -> int | Fraction:
        value = self.signed()
        while sign := self.take("*/:"):
            other = self.signed()
            value = _bounded(value * other if sign == "*" else _divided(value, other, down=sign == ":"))
        return value

    def signed(self) -> int | Fraction:
        # Every bracket, sign and power passes here, so this bounds the recursion.
        self.depth += 1
        if self.depth > DEEPEST:
            raise _Refused
        sign = self.take("+-")
        value = self.signed() if sign else self.power()
        self.depth -= 1
        return -value if sign == "-" else value

    def power(self) -> int | Fraction:
        value = self.atom()
        while self.take("%"):
            value = _bounded(Fraction(value) / 100)
        return _raised(value, self.signed()) if self.take("^") else value

    def atom(self) -> int | Fraction:
        if self.take("("):
            value = self.sum()
            if not self.take(")"):
                raise _Refused
            return value
        if self.position == len(self.tokens) or isinstance(number := self.tokens[self.position], str):
            raise _Refused
        self.position += 1
        return _bounded(number)

    def take(self, signs: str) -> str:
        """Take the next token if it is one of these signs; else return an empty text."""
        if self.position < len(self.tokens):
            token = self.tokens[self.position]
            if isinstance(token, str) and token in signs:
                self.position += 1
                return token
        return ""


def _tokens(expression: str) -> Iterator[int | Fraction | str]:
    index = 0
    while index < len(expression):
        match = TOKEN.match(expression, index)
        if match is None:
            raise _Refused
        index = match.end()
        if match["sign"]:
            yield SAME.get(match["sign"], match["sign"])
        else:
            digits = match["number"].replace("$", "").replace(",", "")
            yield Fraction(digits) if "." in digits else int(digits)


def _divided(value: int | Fraction, other: int | Fraction, down: bool) -> int | Fraction:
    if down and isinstance(value, int) and isinstance(other, int):
        return value // other
    return Fraction(value // other) if down else Fraction(value) / other


def _raised(base: int | Fraction, exponent: int | Fraction) -> int | Fraction:
    # Check the size before computing: 9**9**9 would take for ever.
    if exponent.denominator != 1 or abs(int(exponent)) * _bits(base) > BITS:
        raise _Refused
    if exponent < 0:
        return Fraction(base) ** int(exponent)
    return base ** int(exponent)


def _bounded(value: int | Fraction) -> int | Fraction:
    if _bits(value) > BITS:
        raise _Refused
    return value


def _bits(value: int | Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())
