"""What is told of a failed episode: the tool, the exception and the line; and that one bug counts as one cause."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from pydantic import BaseModel

from agent_r1.envs.tool_env import ToolEnv
from agent_r1.rollout.collect import most_common_failure
from agent_r1.tools.base import FunctionTool, ToolError, tool
from agent_r1.types import Failure, StopReason, Trajectory
from tests.chatml import collector
from tests.rollout.test_collect import play


class Query(BaseModel):
    text: str


@tool
def reverse(text: str) -> str:
    """Reverse a text."""
    if text == "no":
        raise ToolError("not this one")
    return {"abc": "cba"}[text]


@tool
async def parse(text: str) -> str:
    """Read JSON."""
    return str(json.loads(text))


@tool(batch=True)
def together(queries: list[Query]) -> list[str]:
    """Reverse several."""
    return [{"abc": "cba"}[query.text] for query in queries]


def line_of(function: FunctionTool, offset: int) -> str:
    return f"(test_failure_causes.py:{function.function.__code__.co_firstlineno + offset})"


def called(name: str, text: str) -> Trajectory:
    said = json.dumps({"name": name, "arguments": {"text": text}})
    script = [f"<tool_call>{said}</tool_call>", "done"]
    [trajectory] = play(
        collector(script, make_env=lambda _: ToolEnv(tools=[reverse, parse, together]), max_response_tokens=200)
    )
    return trajectory


def test_a_tool_that_raises_is_named_with_the_line_of_its_code(caplog: pytest.LogCaptureFixture) -> None:
    assert called("reverse", "xy").error == f"tool 'reverse' raised KeyError: 'xy' {line_of(reverse, 5)}"
    assert "failed: tool 'reverse' raised KeyError: 'xy'" in caplog.text
    assert "in reverse" in caplog.text  # the traceback
    assert called("together", "xy").error == f"tool 'together' raised KeyError: 'xy' {line_of(together, 3)}"
    # json raised it, deep in the standard library: what matters is who called
    parsing = called("parse", "{").error or ""
    assert parsing.startswith("tool 'parse' raised JSONDecodeError: ")
    assert parsing.endswith(line_of(parse, 3))


def test_a_tool_that_says_no_has_not_failed() -> None:
    trajectory = called("reverse", "no")
    assert (trajectory.stop, trajectory.error) == (StopReason.ANSWERED, None)
    assert trajectory.steps[0].calls[0].result == "not this one"


def failed(*failures: Failure) -> list[Trajectory]:
    return [
        Trajectory(row_id="r", trajectory_id=str(i), steps=[], stop=StopReason.ERROR, failure=failure)
        for i, failure in enumerate(failures)
    ]


def test_failures_of_one_bug_count_together_whatever_their_messages() -> None:
    same = [
        Failure(kind="KeyError", message=f"KeyError: {key}", source="tool 'x'", place="task.py:11") for key in "abc"
    ]
    others = [replace(same[0], place="task.py:12"), replace(same[0], kind="IndexError"), replace(same[0], source="")]
    assert most_common_failure(failed(*others, *same)) == (same[0], 3)
