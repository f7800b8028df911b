"""agent-r1: train language-model agents end to end with reinforcement learning.

Recipes and scripts use the names below. They are imported on first use, so that importing the package loads neither
torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # "as": these names are public
    from agent_r1.api.agent import Agent as Agent
    from agent_r1.api.agent import Answer as Answer
    from agent_r1.api.results import EvalResult as EvalResult
    from agent_r1.api.results import Transcript as Transcript
    from agent_r1.api.run import Run as Run
    from agent_r1.api.run import load_run as load_run
    from agent_r1.api.settings import Config as Config
    from agent_r1.api.training import evaluate as evaluate
    from agent_r1.api.training import train as train
    from agent_r1.envs.base import AgentEnv as AgentEnv
    from agent_r1.envs.check import check_env as check_env
    from agent_r1.envs.check import check_tool as check_tool
    from agent_r1.envs.text_env import Reply as Reply
    from agent_r1.envs.text_env import TextEnv as TextEnv
    from agent_r1.envs.tool_env import ToolEnv as ToolEnv
    from agent_r1.errors import AgentR1Error as AgentR1Error
    from agent_r1.errors import ConfigError as ConfigError
    from agent_r1.errors import DataError as DataError
    from agent_r1.flows.budgets import EpisodeLimit as EpisodeLimit
    from agent_r1.flows.budgets import Limits as Limits
    from agent_r1.flows.episode import Episode as Episode
    from agent_r1.flows.flow import AgentEnvLoop as AgentEnvLoop
    from agent_r1.flows.flow import AgentFlowBase as AgentFlowBase
    from agent_r1.flows.flow import SingleStepFlow as SingleStepFlow
    from agent_r1.flows.replay import replay as replay
    from agent_r1.resources import Resource as Resource
    from agent_r1.tools.base import BaseTool as BaseTool
    from agent_r1.tools.base import FromRow as FromRow
    from agent_r1.tools.base import ToolError as ToolError
    from agent_r1.tools.base import ToolResult as ToolResult
    from agent_r1.tools.base import tool as tool
    from agent_r1.tools.mcp.tool_set import MCPTools as MCPTools
    from agent_r1.types import Action as Action
    from agent_r1.types import Observation as Observation
    from agent_r1.types import StopReason as StopReason
    from agent_r1.types import TaskRow as TaskRow
    from agent_r1.types import Trajectory as Trajectory
    from agent_r1.types import Transition as Transition

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

__all__ = sorted(_MODULE_OF)


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
