"""GSM8K with a calculator: the policy plans, the calculator computes.

Demonstrations come from the marks that GSM8K's own solutions carry. Where a solution says `48/2 = <<48/2=24>>24 clips`,
the demonstration calls the calculator with `48/2`, and goes on with `24 clips` when it has the result.
"""

from __future__ import annotations

import re
from dataclasses import replace

from agent_r1.recipes.gsm8k.data import Problem, problems
from agent_r1.recipes.gsm8k.task import as_row, judged, parts_of, sample
from agent_r1.tokens.tool_calls import FORMATS
from agent_r1.tools.base import FromRow, tool
from agent_r1.tools.calculator import NotAnExpression, calculator, evaluate
from agent_r1.types import TaskRow, Trajectory

__all__ = ["calculator", "demos", "oracle_check", "oracle_demos", "oracle_rows", "reward", "rows"]

SYSTEM = "Solve the problem step by step. Use the calculator. End with #### and the answer, a number."
MAX_STEPS, MAX_CHARS = 8, 320  # of a demonstration, and of a step of it: 3 percent have more
MARK = re.compile(r"<<([^<>]*)=([^<>=]*)>>")


@tool
async def oracle_check(answer: str, ground_truth: FromRow[str]) -> str:
    """Whether an answer is right."""
    # What the published recipe trains with. It tells the policy its reward before it answers, so what is learnt is to
    # ask until it is right: for comparisons alone, and never among the tools by default.
    return "right" if judged(f"#### {answer}", ground_truth)["reward"] else "wrong"


def rows(split: str, count: int | None = None, path: str | None = None) -> list[TaskRow]:
    return [as_row(problem, SYSTEM) for problem in problems(split, path)[:count]]


def oracle_rows(split: str, count: int | None = None, path: str | None = None) -> list[TaskRow]:
    """The same rows, which tell `oracle_check` their answer."""
    return [_with_answer(row) for row in rows(split, count, path)]


def demos(count: int, seed: int, path: str | None = None) -> list[tuple[TaskRow, list[str]]]:
    """Training problems with a demonstration each, without the longest; at most as many as there are."""
    chosen = sample([problem for problem in problems("train", path) if _is_short(demonstration(problem))], count, seed)
    return [(as_row(problem, SYSTEM), demonstration(problem)) for problem in chosen]


def oracle_demos(count: int, seed: int, path: str | None = None) -> list[tuple[TaskRow, list[str]]]:
    """The same demonstrations, in which the oracle is there and never asked."""
    return [(_with_answer(row), texts) for row, texts in demos(count, seed, path)]


async def reward(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    """1 for the right number after the last #### of the answer; beside it, what the episode did with the calculator.
    An episode that was cut off has no answer."""
    calls = [call for step in trajectory.steps for call in step.calls]
    return parts_of(row, trajectory) | {
        "calls": float(len(calls)),
        "bad_calls": float(sum(call.error is not None for call in calls)),
    }


def demonstration(problem: Problem) -> list[str]:
    """What an expert says step by step; empty if the solution marks no calculation, or a wrong one."""
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
    """Whether it is one, and fits what an episode allows. The slowest episodes are what a whole batch waits for."""
    return 0 < len(texts) <= MAX_STEPS and max(map(len, texts)) <= MAX_CHARS


def _is_right(expression: str, result: str) -> bool:
    try:
        return evaluate(expression) == evaluate(result)
    except (NotAnExpression, ZeroDivisionError):
        return False
