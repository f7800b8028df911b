"""`PythonEnv`: a `ToolEnv` whose tool "python" keeps its variables until the episode ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from agent_r1.envs.tool_env import ToolEnv
from agent_r1.errors import ConfigError
from agent_r1.tools.base import BaseTool
from agent_r1.tools.python.tool import PythonTool


@ToolEnv.register("python")
class PythonEnv(ToolEnv):
    def __init__(
        self, *, tools: Sequence[str | BaseTool], tools_kwargs: Mapping[str, Any] | None = None, **settings: Any
    ):
        python = [tool for tool in tools if isinstance(tool, PythonTool)]
        if len(python) != 1:
            raise ConfigError(f"PythonEnv needs one PythonTool among its tools, got {len(python)}")
        self._python = python[0]
        self._session = uuid4().hex
        given = dict(tools_kwargs or {})
        given["python"] = {**given.get("python", {}), "session": self._session}
        # Not parallel: calls share variables.
        super().__init__(tools=tools, tools_kwargs=given, parallel=False, **settings)

    async def close(self) -> None:
        await self._python.sandbox.release(self._session)
        await super().close()
