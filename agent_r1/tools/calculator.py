"""A calculator that is safe in the hands of a policy: its own small grammar, exact numbers, bounded size, no `eval`.

    12 * (3 + 4) / 2      1,250 + 75      $5.50 x 3      20% * 80      2^10      -3 - -4

Numbers are exact fractions, so 0.1 + 0.2 is 0.3, and are written with at most `DECIMALS` digits after the point. Every
expression is refused or computed within microseconds: its length, the size of its numbers and the depth of its
brackets are limited.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from fractions import Fraction

from agent_r1.tools.base import ToolError, tool

MAX_CHARS = 200
MAX_BITS = 256  # of numerator and denominator, after every operation
MAX_DEPTH = 20  # of nested brackets; each takes five calls of Python's limited stack
DECIMALS = 6

# People also write a times sign (\u00d7, \u00b7), a division sign (\u00f7) or a minus (\u2212) that no keyboard has.
TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+)"
    r"|(?P<symbol>\*\*|[-+*/^()%x\u00d7\u00b7\u00f7\u2212]))",
    re.ASCII,
)
SYNONYMS = {"x": "*", "\u00d7": "*", "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "^": "**"}
MONEY = str.maketrans("$€£", "   ")  # blanks, so that 1$2 does not become 12
# Precedence and function.
OPERATIONS = {"+": (1, operator.add), "-": (1, operator.sub), "*": (2, operator.mul), "/": (2, operator.truediv)}


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
    parser = _Parser(list(_tokens(expression.translate(MONEY))))
    try:
        value = parser.expression()
    except ZeroDivisionError:
        raise ZeroDivisionError("division by zero") from None
    if parser.next is not None:
        raise NotAnExpression(f"unexpected {parser.next!r} in {expression!r}")
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


class _Parser:
    """Recursive descent."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0  # of open brackets

    @property
    def next(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def expression(self, precedence: int = 1) -> Fraction:
        value = self._signed()
        while (found := OPERATIONS.get(self.next or "")) and found[0] >= precedence:
            self._at += 1
            own_precedence, operation = found
            value = _bounded(operation(value, self.expression(own_precedence + 1)))
        return value

    def _signed(self) -> Fraction:
        if self.next in ("+", "-"):
            sign = self.next
            self._at += 1
            value = self._signed()
            return -value if sign == "-" else value
        return self._power()

    def _power(self) -> Fraction:
        base = self._atom()
        if self.next != "**":
            return base
        self._at += 1
        exponent = self._signed()  # from the right: 2^3^2 is 2^9
        if exponent.denominator != 1:
            raise NotAnExpression(f"the exponent {format_number(exponent)} is not a whole number")
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(exponent) * bits > 2 * MAX_BITS:
            raise NotAnExpression("the power is too large")
        return _bounded(Fraction(base ** int(exponent)))

    def _atom(self) -> Fraction:
        token = self.next
        if token is None:
            raise NotAnExpression("the expression ends where a number is expected")
        self._at += 1
        if token == "(":
            value = self._bracket()
        elif token[0].isdigit() or token[0] == ".":
            number = token.replace(",", "").rstrip(".")
            value = _bounded(Fraction(int(number) if number.isdigit() else number))  # reading a text takes longer
        else:
            raise NotAnExpression(f"unexpected {token!r} where a number is expected")
        while self.next == "%":
            self._at += 1
            value = _bounded(value / 100)
        return value

    def _bracket(self) -> Fraction:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotAnExpression(f"brackets are nested more than {MAX_DEPTH} deep")
        value = self.expression()
        if self.next != ")":
            raise NotAnExpression("a bracket is not closed")
        self._at += 1
        self._depth -= 1
        return value


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise NotAnExpression("the number is too large")
    return value
