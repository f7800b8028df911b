"""The calculator: right, exact, and impossible to hurt with text."""

from __future__ import annotations

import asyncio
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agent_r1.envs.check import check_tool
from agent_r1.tools.base import ToolError
from agent_r1.tools.calculator import (
    MAX_BITS,
    MAX_CHARS,
    NotAnExpression,
    calculator,
    evaluate,
    format_number,
)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", "14"),  # products first: 2 + 12
        ("(2+3)*4", "20"),
        ("20-5-3", "12"),  # from the left: 15 - 3
        ("100/5/2", "10"),
        ("12 * (3 + 4) / 2", "42"),  # 84 / 2
        ("2^10", "1024"),
        ("2**10", "1024"),
        ("2^3^2", "512"),  # to the right: 2^9, not 8^2
        ("-2^2", "-4"),  # the power binds first: -(2^2)
        ("(-2)^2", "4"),
        ("2^-2", "0.25"),
        ("2*-3", "-6"),
        ("-3 - -4", "1"),
        ("+-+5", "-5"),
        ("0^0", "1"),
        ("20% * 80", "16"),
        ("(10+10)%", "0.2"),
        ("50%%", "0.005"),  # 0.5 / 100
        ("50%^2", "0.25"),
        ("1,250 + 75", "1325"),
        ("1,234,567", "1234567"),
        ("$5.50 x 3", "16.5"),
        ("-$5 + £2 + 3€", "0"),
        ("6 × 7 ÷ 2 − 1 · 1", "20"),  # noqa: RUF001 (these signs are the point)
        (".5 + 5.", "5.5"),
        ("0.1 + 0.2", "0.3"),
        ("1/3*3", "1"),  # exact inside, whatever is written
        ("  7\t", "7"),
    ],
)
def test_values_by_hand(expression: str, value: str) -> None:
    assert format_number(evaluate(expression)) == value
    assert asyncio.run(calculator(expression=expression)) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "ends where a number is expected"),
        ("$", "ends where a number is expected"),
        ("2 +", "ends where a number is expected"),
        ("2 3", "unexpected '3'"),
        ("1$2", "unexpected '2'"),  # no twelve
        ("10 % 3", "unexpected '3'"),  # no remainder
        ("2(3)", r"unexpected '\('"),
        ("* 2", r"unexpected '\*' where a number is expected"),
        ("()", r"unexpected '\)' where a number is expected"),
        ("(2", "a bracket is not closed"),
        ("2)", r"unexpected '\)'"),
        ("1,2345", "cannot read ',2345'"),
        ("1,00", "cannot read ',00'"),
        ("1.2.3", "unexpected '.3'"),
        ("two + 2", "cannot read 'two"),
        ("x", r"unexpected '\*' where a number is expected"),
        ("2e3", "cannot read 'e3'"),
        ("٣ + 1", "cannot read"),  # digits of one script only
        ("__import__('os')", "cannot read"),
        ("4^0.5", r"exponent 0\.5 is not a whole number"),
    ],
)
def test_other_text_is_refused_with_the_place(expression: str, message: str) -> None:
    with pytest.raises(NotAnExpression, match=message):
        evaluate(expression)


@pytest.mark.parametrize("expression", ["1/0", "1/(2-2)", "0^-1", "5/0%"])
def test_division_by_zero_is_reported(expression: str) -> None:
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        evaluate(expression)
    with pytest.raises(ToolError, match="division by zero"):
        asyncio.run(calculator(expression=expression))


def test_size_is_bounded_everywhere() -> None:
    with pytest.raises(NotAnExpression, match=f"has {MAX_CHARS + 1} characters, {MAX_CHARS} are allowed"):
        evaluate("1" * (MAX_CHARS + 1))
    for large in ("9^9^9^9", "10^100", "2^(2^200)", "2^-(2^200)", "9" * MAX_CHARS, "2^255*2", "1" + "%" * 60):
        with pytest.raises(NotAnExpression, match="too large"):
            evaluate(large)
    assert evaluate("2^255") == 2**255  # exactly as many bits as are allowed
    assert (2**255).bit_length() == MAX_BITS


def test_brackets_and_signs_nest_as_deeply_as_they_fit() -> None:
    depth = (MAX_CHARS - 1) // 2
    assert evaluate("(" * depth + "1" + ")" * depth) == 1
    with pytest.raises(NotAnExpression, match="ends where a number is expected"):
        evaluate("(" * MAX_CHARS)
    assert evaluate("1+(" * 49 + "1" + ")" * 49) == 50
    assert evaluate("+".join(["(1)"] * 50)) == 50
    assert evaluate("-" * (MAX_CHARS - 1) + "1") == -1  # 199 signs


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction(24), "24"),
        (Fraction(-1, 2), "-0.5"),
        (Fraction(1, 3), "0.333333"),
        (Fraction(2, 3), "0.666667"),
        (Fraction(-2, 3), "-0.666667"),
        (Fraction(1, 10**6), "0.000001"),
        (Fraction(-1, 10**7), "0"),  # no minus zero
        (Fraction(9999999, 10**7), "1"),  # 0.9999999, carried over
        (Fraction(123456789), "123456789"),
        (Fraction(1000), "1000"),  # zeros before the point stay
    ],
)
def test_numbers_have_at_most_six_decimals(value: Fraction, text: str) -> None:
    assert format_number(value) == text


@given(st.fractions(min_value=-(10**9), max_value=10**9))
def test_formatted_numbers_are_rounded_and_read_back(value: Fraction) -> None:
    text = format_number(value)
    assert abs(evaluate(text) - value) <= Fraction(1, 2 * 10**6)
    assert format_number(evaluate(text)) == text


Tree = tuple[str, Fraction | None]  # an expression and its value; None: a division by zero
NUMBERS = st.decimals(min_value=0, max_value=999, places=2).map(lambda number: (str(number), Fraction(number)))


def _joined(parts: tuple[Tree, str, Tree]) -> Tree:
    (left, a), sign, (right, b) = parts
    text = f"({left}{sign}{right})"
    if a is None or b is None or (sign == "/" and b == 0):
        return text, None
    return text, {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[sign]


def _negated(tree: Tree) -> Tree:
    text, value = tree
    return f"(-{text})", None if value is None else -value


TREES = st.recursive(
    NUMBERS,
    lambda below: st.tuples(below, st.sampled_from("+-*/"), below).map(_joined) | below.map(_negated),
    max_leaves=8,
)


@given(TREES)
def test_it_agrees_with_fractions_on_every_expression_tree(tree: Tree) -> None:
    text, value = tree
    assume(len(text) <= MAX_CHARS)
    # Never too large: each of 8 numbers, of 17 bits at most, multiplies a numerator or denominator once at most.
    if value is None:
        with pytest.raises(ZeroDivisionError):
            evaluate(text)
    else:
        assert evaluate(text) == value


@given(st.text() | st.text(alphabet="0123456789+-*/^%().,x$ ×−", max_size=MAX_CHARS + 5))  # noqa: RUF001
def test_any_text_is_refused_or_gives_a_bounded_number(text: str) -> None:
    try:
        value = evaluate(text)
    except (NotAnExpression, ZeroDivisionError):
        return
    assert max(value.numerator.bit_length(), value.denominator.bit_length()) <= MAX_BITS
    format_number(value)


def test_the_tool_keeps_its_contract() -> None:
    asyncio.run(check_tool(calculator, {"expression": "(48 + 24) / 2"}))
    assert list(calculator.schema["function"]["parameters"]["properties"]) == ["expression"]
