"""GSM8K with a calculator: the policy plans, the calculator computes.

Demonstrations come from the calculation marks in GSM8K's own solutions. For `48/2 = <<48/2=24>>24 clips`, the
demonstration calls the calculator with `48/2` and continues with `24 clips` after the result.
"""

from __future__ import annotations

import re
from dataclasses import replace

from agent_r1.recipes.gsm8k.data import Problem, problems
from agent_r1.recipes.gsm8k.task import as_row, judged, parts_of, sample
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.tools.base import FromRow, tool
from agent_r1.tools.calculator import NotAnExpression, calculator, evaluate
from agent_r1.types import TaskRow, Trajectory

__all__ = ["calculator", "demos", "oracle_check", "oracle_demos", "oracle_rows", "reward", "rows"]

SYSTEM = "Solve the problem step by step. Use the calculator. End with #### and the answer, a number."
MAX_STEPS, MAX_CHARS = 8, 320  # limits of a demonstration and of one of its steps; 3 percent are longer
MARK = re.compile(r"<<([^<>]*)=([^<>=]*)>>")


@tool
async def oracle_check(answer: str, ground_truth: FromRow[str]) -> str:
    """Whether an answer is right."""
    # The tool of the published recipe. It reveals the reward before the answer, so the policy learns to ask until it is
    # right. For comparisons only; never among the default tools.
    return "right" if judged(f"#### {answer}", ground_truth)["reward"] else "wrong"


def rows(split: str, count: int | None = None, path: str | None = None) -> list[TaskRow]:
    return [as_row(problem, SYSTEM) for problem in problems(split, path)[:count]]


def oracle_rows(split: str, count: int | None = None, path: str | None = None) -> list[TaskRow]:
    """Return the same rows with their answer passed to `oracle_check`."""
    return [_with_answer(row) for row in rows(split, count, path)]


def demos(count: int, seed: int, path: str | None = None) -> list[tuple[TaskRow, list[str]]]:
    """Return up to `count` training problems with a demonstration each, without the longest."""
    chosen = sample([problem for problem in problems("train", path) if _is_short(demonstration(problem))], count, seed)
    return [(as_row(problem, SYSTEM), demonstration(problem)) for problem in chosen]


def oracle_demos(count: int, seed: int, path: str | None = None) -> list[tuple[TaskRow, list[str]]]:
    """Return the same demonstrations with the oracle available but never called."""
    return [(_with_answer(row), texts) for row, texts in demos(count, seed, path)]


async def reward(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    """Pay 1 for the right number after the last #### of the answer; also report the use of the calculator. A truncated
    episode has no answer."""
    calls = [call for step in trajectory.steps for call in step.calls]
    return parts_of(row, trajectory) | {
        "calls": float(len(calls)),
        "bad_calls": float(sum(call.error is not None for call in calls)),
    }


def demonstration(problem: Problem) -> list[str]:
    """Return an expert's responses step by step; empty if the solution marks no calculation, or a wrong one."""
    *parts, rest = MARK.split(problem.solution)
    texts, currency = [], ""
    for said, expression, result in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        if not _is_right(expression, result):
            return []
        call = FORMATS["hermes"].write_call("calculator", {"expression": expression})
        texts.append(f"{(currency + said).strip().rstrip('$').rstrip()}\n{call}")
        currency = "$" if said.rstrip().endswith("$") else ""
    return [*texts, f"{(currency + rest).strip()}\n#### {problem.answer}"] if texts else []


def _with_answer(row: TaskRow) -> TaskRow:
    return replace(row, env_kwargs={"tools_kwargs": {"oracle_check": {"ground_truth": row.ground_truth}}})


def _is_short(texts: list[str]) -> bool:
    """Return whether a demonstration is non-empty and within the episode limits (a batch waits for its longest
    episode)."""
    return 0 < len(texts) <= MAX_STEPS and max(map(len, texts)) <= MAX_CHARS


def _is_right(expression: str, result: str) -> bool:
    try:
        return evaluate(expression) == evaluate(result)
    except (NotAnExpression, ZeroDivisionError):
        return False
