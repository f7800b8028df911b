"""`PythonTool`: the tool "python", which runs code in a sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agent_r1.tools.base import BaseTool, ToolError, ToolResult
from agent_r1.tools.python.process import Limits, Outcome
from agent_r1.tools.python.sandbox import LIBRARIES, Sandbox

QUEUE_SECONDS = 600.0  # a call may wait this long for its turn; its own time starts when it runs
DEFAULTS = Limits()
NO_OUTPUT = "(no output; print what you want to see)"


class PythonTool(BaseTool):
    """Runs the code it is sent in a sandbox. `session` comes from the environment, never from the model."""

    name = "python"
    parallel = True  # each call is a separate program; `PythonEnv` shares variables, so it runs calls in order
    parameters: dict[str, Any] = {  # noqa: RUF012 (as in BaseTool)
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The program. What it prints is the answer."}},
        "required": ["code"],
    }

    def __init__(
        self,
        *,
        level: str = "namespaces",  # or process, which isolates nothing
        seconds: float = DEFAULTS.seconds,
        memory_mb: int = DEFAULTS.memory_mb,
        processes: int = DEFAULTS.processes,
        output_chars: int = 4000,
        libraries: Sequence[str] = LIBRARIES,
        slots: int | None = None,
    ) -> None:
        limits = Limits(seconds=seconds, memory_mb=memory_mb, processes=processes, output_chars=output_chars)
        # `Limits` has checked that `seconds` is a number.
        limits = replace(limits, cpu_seconds=max(limits.cpu_seconds, int(seconds) + 1))
        self.sandbox = Sandbox(level=level, limits=limits, libraries=libraries, slots=slots)
        self.timeout = QUEUE_SECONDS + seconds
        offered = f" {', '.join(libraries)} are installed." if libraries else ""
        self.description = (
            f"Run a Python program of at most {seconds:g} seconds and read what it prints. The value of a last line "
            f"that is an expression is printed, too. No network, no files.{offered}"
        )

    async def execute(self, args: dict[str, Any], session: str | None = None) -> ToolResult:  # type: ignore[override]
        return self.result(await self.sandbox.run(args["code"], session=session))

    def result(self, outcome: Outcome) -> ToolResult:
        """What the model reads of a run. Raises ToolError if the program failed."""
        printed = outcome.stdout.rstrip("\n")
        if outcome.error is not None:
            raise ToolError(f"{printed}\n{outcome.error}" if printed else outcome.error)
        return ToolResult(printed or NO_OUTPUT, info={"seconds": round(outcome.seconds, 4)})
