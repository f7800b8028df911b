"""agent-r1: train language-model agents end to end with reinforcement learning.

Recipes and scripts use the names below. They are imported on first use, so that importing the package loads neither
torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_r1.api.agent import Agent, Answer
    from agent_r1.api.results import EvalResult, Transcript
    from agent_r1.api.run import Run, load_run
    from agent_r1.api.settings import Config
    from agent_r1.api.training import evaluate, train
    from agent_r1.envs.base import AgentEnv
    from agent_r1.envs.check import check_env, check_tool
    from agent_r1.envs.text_env import Reply, TextEnv
    from agent_r1.envs.tool_env import ToolEnv
    from agent_r1.errors import AgentR1Error, ConfigError, DataError
    from agent_r1.flows.budgets import EpisodeLimit, Limits
    from agent_r1.flows.episode import Episode
    from agent_r1.flows.flow import AgentEnvLoop, AgentFlowBase, SingleStepFlow
    from agent_r1.flows.replay import replay
    from agent_r1.resources import Resource
    from agent_r1.tools.base import BaseTool, FromRow, ToolError, ToolResult, tool
    from agent_r1.tools.mcp.tool_set import MCPTools
    from agent_r1.types import Action, Observation, StopReason, TaskRow, Trajectory, Transition

__version__: str  # the installed version; an editable installation keeps the version of its last `pip install`

_HOME = {
    "api.agent": ["Agent", "Answer"],
    "api.results": ["EvalResult", "Transcript"],
    "api.run": ["Run", "load_run"],
    "api.settings": ["Config"],
    "api.training": ["evaluate", "train"],
    "errors": ["AgentR1Error", "ConfigError", "DataError"],
    "envs.base": ["AgentEnv"],
    "envs.check": ["check_env", "check_tool"],
    "envs.text_env": ["Reply", "TextEnv"],
    "envs.tool_env": ["ToolEnv"],
    "flows.budgets": ["EpisodeLimit", "Limits"],
    "flows.episode": ["Episode"],
    "flows.flow": ["AgentEnvLoop", "AgentFlowBase", "SingleStepFlow"],
    "flows.replay": ["replay"],
    "resources": ["Resource"],
    "tools.base": ["BaseTool", "FromRow", "ToolError", "ToolResult", "tool"],
    "tools.mcp.tool_set": ["MCPTools"],
    "types": ["Action", "Observation", "StopReason", "TaskRow", "Trajectory", "Transition"],
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Action",
    "Agent",
    "AgentEnv",
    "AgentEnvLoop",
    "AgentFlowBase",
    "AgentR1Error",
    "Answer",
    "BaseTool",
    "Config",
    "ConfigError",
    "DataError",
    "Episode",
    "EpisodeLimit",
    "EvalResult",
    "FromRow",
    "Limits",
    "MCPTools",
    "Observation",
    "Reply",
    "Resource",
    "Run",
    "SingleStepFlow",
    "StopReason",
    "TaskRow",
    "TextEnv",
    "ToolEnv",
    "ToolError",
    "ToolResult",
    "Trajectory",
    "Transcript",
    "Transition",
    "check_env",
    "check_tool",
    "evaluate",
    "load_run",
    "replay",
    "tool",
    "train",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _installed_version()
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'agent_r1' has no attribute {name!r}")
    return getattr(import_module(f"agent_r1.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("agent-r1")
    except PackageNotFoundError:  # a source tree on PYTHONPATH
        return "0+unknown"
