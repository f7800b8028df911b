"""The tool `python` with process rewards, for the preset `process`.

ran       the first program of the episode that runs to its end and prints something
raised    each program that raises, ends itself or is too long
stopped   each program that exceeds a limit of the sandbox or crashes its interpreter

Only one program is paid, so that programs nobody needs do not pay, and an episode earns `ran` at most. The defaults are
small beside the 1 for a right answer. Nothing here knows whether a program helps: the reward at the end says that.
"""

from __future__ import annotations

import math
from copy import copy
from typing import Any

from agent_r1.errors import ConfigError
from agent_r1.tools.base import ToolError, ToolResult
from agent_r1.tools.python.process import Outcome
from agent_r1.tools.python.tool import PythonTool


class PaidPythonTool(PythonTool):
    """Runs the code it is sent in a sandbox, and rewards the call."""

    parallel = False  # which program is the first must not depend on which one ends first

    def __init__(self, *, ran: float = 0.1, raised: float = -0.1, stopped: float = -0.2, **settings: Any) -> None:
        for name, value, sign in (("ran", ran, 1), ("raised", raised, -1), ("stopped", stopped, -1)):
            if type(value) not in (int, float) or not math.isfinite(value) or value * sign < 0:
                wanted = "0 or more" if sign > 0 else "0 or less"
                raise ConfigError(f"{name} of the tool python is a reward of {wanted}, got {value!r}")
        super().__init__(**settings)
        self._ran, self._raised, self._stopped = ran, raised, stopped
        self._is_paid = False  # in this episode

    def for_episode(self, episode: str) -> PaidPythonTool:
        return copy(self)  # with the same sandbox

    def result(self, outcome: Outcome) -> ToolResult:
        try:
            result = super().result(outcome)
        except ToolError as error:
            cost = self._raised if outcome.killed_by is None else self._stopped
            raise ToolError(str(error), reward=cost) from None
        if self._is_paid or not outcome.stdout.strip():
            return result
        self._is_paid = True
        return ToolResult(result.text, reward=self._ran, info=result.info)
