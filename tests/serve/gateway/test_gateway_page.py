"""The agent that docs/gateway.md shows plays as the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from agent_r1.types import StopReason, TaskRow
from tests.serve.gateway.agent_runs import play

PAGE = Path(__file__).parents[3] / "docs" / "gateway.md"


def test_the_agent_of_the_page_calls_its_tool_and_answers() -> None:
    namespace: dict[str, Any] = {"__name__": "page"}
    for body in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        exec(compile(body, str(PAGE), "exec"), namespace)
    call = '<tool_call>\n{"name": "count", "arguments": {"fruit": "plums"}}\n</tool_call>'
    row = TaskRow(prompt=[{"role": "user", "content": "How many plums are left?"}])
    [trajectory] = play(namespace["shopkeeper"], [call, "Eight."], rows=[row])
    assert trajectory.stop is StopReason.ANSWERED, trajectory.error
    assert trajectory.steps[0].calls[0].result == "8"
    assert trajectory.steps[1].info == {"history": "continued", "agent_result": "Eight."}
