"""What acts: tools, environments, flows and the contracts they keep. Imports no torch."""

from agent_r1.agent.check import check_env, check_tool
from agent_r1.agent.env import AgentEnv
from agent_r1.agent.flow import AgentEnvLoop, AgentFlowBase, Episode, EpisodeLimit, Limits, SingleStepFlow
from agent_r1.agent.replay import replay
from agent_r1.agent.text_env import Reply, TextEnv
from agent_r1.agent.tool import BaseTool, FromRow, ToolError, ToolResult, tool
from agent_r1.agent.tool_env import ToolEnv

__all__ = [
    "AgentEnv",
    "AgentEnvLoop",
    "AgentFlowBase",
    "BaseTool",
    "Episode",
    "EpisodeLimit",
    "FromRow",
    "Limits",
    "Reply",
    "SingleStepFlow",
    "TextEnv",
    "ToolEnv",
    "ToolError",
    "ToolResult",
    "check_env",
    "check_tool",
    "replay",
    "tool",
]
