"""Turn GSM8K's solutions, which mark every calculation (`48/2 = <<48/2=24>>24`), into demonstrations with programs.

Each marked calculation becomes a line with the surrounding sentence as a comment above it; a number computed by an
earlier line becomes that line's variable. A solution is kept only if the program, run by a small evaluator, prints the
right answer.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable
from fractions import Fraction

from agent_r1.data.downloads import data_folder
from agent_r1.data.rows import Demo
from agent_r1.errors import DataError
from agent_r1.recipes.retool.data import FOLDER, SOURCES, judged, marks, solved
from agent_r1.recipes.retool.synthetic import demonstration
from agent_r1.recipes.retool.task import as_row

MARK = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")
RESULT = re.compile(r"\s*=?\s*\$?<<[^<>]*>>\s*-?[\d.,]*\d%?")  # the mark and its result
NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")
THOUGHT = "I compute it step by step."
OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def demos(count: int, seed: int, path: str | None = None) -> list[Demo]:
    """Return up to `count` training problems of GSM8K in random order."""
    folder = data_folder(FOLDER, path)
    taboo = judged(folder)
    shown: list[Demo] = []
    found = list(solved(folder, "gsm8k_train"))
    random.Random(f"gsm8k:{seed}").shuffle(found)
    for record, problem in found:
        if marks(problem) & taboo:
            continue
        program = as_program(record["answer"], problem.answer)
        if program is not None:
            row = as_row(problem.text, problem.answer, f"gsm8k-demo-{seed}-{len(shown)}", "gsm8k_train")
            shown.append((row, demonstration(THOUGHT, program, problem.answer)))
        if len(shown) == count:
            break
    if not shown:
        raise DataError(f"no solution of {SOURCES['gsm8k_train'].file} in {folder} could be turned into a program")
    return shown


def as_program(solution: str, answer: str) -> str | None:
    """Return the program of a solution, or None if its marks do not lead to the answer."""
    lines: list[str] = []
    computed: dict[Fraction, str] = {}
    values: dict[str, Fraction] = {}
    name = ""
    for sentence in solution.partition("####")[0].splitlines():
        for index, mark in enumerate(MARK.finditer(sentence)):
            expression = _with_names(mark[1].replace(",", "").strip(), computed)
            value = evaluate(expression, values)
            if value is None:
                return None
            if index == 0:
                lines.append(f"# {RESULT.sub('', sentence).strip()}")
            name = f"step{len(values) + 1}"
            lines.append(f"{name} = {expression}")
            values[name] = value
            computed[value] = name
    if not values or values[name] != _fraction(answer):
        return None
    return "\n".join([*lines, f"print({name})"])


def _with_names(expression: str, computed: dict[Fraction, str]) -> str:
    def named(match: re.Match[str]) -> str:
        return computed.get(Fraction(match[0]), match[0])

    return NUMBER.sub(named, expression)


def evaluate(expression: str, values: dict[str, Fraction]) -> Fraction | None:
    """Return the exact value of a sum, difference, product or quotient of numbers and earlier results, or None."""
    try:
        return _value(ast.parse(expression, mode="eval").body, values)
    except (SyntaxError, KeyError, ZeroDivisionError, ValueError):
        return None


def _value(node: ast.expr, values: dict[str, Fraction]) -> Fraction:
    if isinstance(node, ast.BinOp):
        return OPERATIONS[type(node.op)](_value(node.left, values), _value(node.right, values))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, values)
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return Fraction(str(node.value))
    raise ValueError(f"{ast.dump(node)} is not arithmetic")


def _fraction(text: str) -> Fraction | None:
    try:
        return Fraction(text)
    except ValueError:
        return None
