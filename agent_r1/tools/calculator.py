"""A calculator that is safe in the hands of a policy: its own small grammar, exact numbers, bounded size, no `eval`.

    12 * (3 + 4) / 2      1,250 + 75      $5.50 x 3      20% * 80      2^10      -3 - -4

Numbers are exact fractions, so 0.1 + 0.2 is 0.3, and are written with at most `DECIMALS` digits after the point. Every
expression is refused or computed within microseconds: its length and the size of its numbers are limited.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from fractions import Fraction

from agent_r1.tools.base import ToolError, tool

MAX_CHARS = 200
MAX_BITS = 256  # limit for numerator and denominator after every operation
DECIMALS = 6

# Texts also contain typographic signs for times (\u00d7, \u00b7), division (\u00f7) and minus (\u2212).
TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+)"
    r"|(?P<symbol>\*\*|[-+*/^()%x\u00d7\u00b7\u00f7\u2212]))",
    re.ASCII,
)
SYNONYMS = {"x": "*", "\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "^": "**"}
MONEY = str.maketrans("$€£", "   ")  # replaced by blanks, so that 1$2 does not become 12


class NotAnExpression(ValueError):
    """The text is not in the grammar, or its value is too large."""


@tool(parallel=True)
async def calculator(expression: str) -> str:
    """The value of an arithmetic expression, such as (48 + 24) / 2."""
    try:
        return format_number(evaluate(expression))
    except (NotAnExpression, ZeroDivisionError) as error:
        raise ToolError(str(error)) from error


def evaluate(expression: str) -> Fraction:
    """The exact value. Raises `NotAnExpression` or `ZeroDivisionError`."""
    if len(expression) > MAX_CHARS:
        raise NotAnExpression(f"the expression has {len(expression)} characters, {MAX_CHARS} are allowed")
    tokens = list(_tokens(expression.translate(MONEY)))[::-1]  # reversed: the next token is last
    try:
        value = _read(tokens)
    except ZeroDivisionError:
        raise ZeroDivisionError("division by zero") from None
    if tokens:
        raise NotAnExpression(f"unexpected {tokens[-1]!r} in {expression!r}")
    return value


def format_number(value: Fraction) -> str:
    """As a decimal, rounded to `DECIMALS` digits."""
    scaled = round(value * 10**DECIMALS)
    whole, rest = divmod(abs(scaled), 10**DECIMALS)
    digits = f"{rest:0{DECIMALS}d}".rstrip("0")
    return f"{'-' if scaled < 0 else ''}{whole}{f'.{digits}' if digits else ''}"


def _tokens(expression: str) -> Iterator[str]:
    at = 0
    text = expression.rstrip()
    while at < len(text):
        found = TOKEN.match(text, at)
        if found is None:
            raise NotAnExpression(f"cannot read {text[at:].lstrip()[:12]!r} in {expression!r}")
        yield found["number"] or SYNONYMS.get(found["symbol"], found["symbol"])
        at = found.end()


def _read(tokens: list[str], least: int = 0) -> Fraction:
    """Read an operand and the operations after it whose strength is at least `least` (precedence climbing)."""
    value = _operand(tokens)
    while tokens and tokens[-1] in OPERATIONS and OPERATIONS[tokens[-1]][0] >= least:
        sign = tokens.pop()
        strength, operation = OPERATIONS[sign]
        # Powers are computed from the right, 2^3^2 is 2^9, and all others from the left.
        value = _bounded(operation(value, _read(tokens, strength + (sign != "**"))))
    return value


def _operand(tokens: list[str]) -> Fraction:
    if not tokens:
        raise NotAnExpression("the expression ends where a number is expected")
    token = tokens.pop()
    if token in ("+", "-"):
        value = _read(tokens, SIGN)
        return value if token == "+" else -value
    if token == "(":
        value = _read(tokens)
        if not tokens or tokens.pop() != ")":
            raise NotAnExpression("a bracket is not closed")
    elif token[0].isdigit() or token[0] == ".":
        number = token.replace(",", "").rstrip(".")
        value = _bounded(Fraction(int(number) if number.isdigit() else number))  # reading a text takes longer
    else:
        raise NotAnExpression(f"unexpected {token!r} where a number is expected")
    while tokens and tokens[-1] == "%":
        tokens.pop()
        value = _bounded(value / 100)
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise NotAnExpression(f"the exponent {format_number(exponent)} is not a whole number")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) * bits > 2 * MAX_BITS:
        raise NotAnExpression("the power is too large")
    return Fraction(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise NotAnExpression("the number is too large")
    return value


# How strongly each operation binds, and its function. A sign binds less than a power: -2^2 is -(2^2).
SIGN = 3
OPERATIONS: dict[str, tuple[int, Callable[[Fraction, Fraction], Fraction]]] = {
    "+": (1, operator.add),
    "-": (1, operator.sub),
    "*": (2, operator.mul),
    "/": (2, operator.truediv),
    "**": (4, _power),
}
