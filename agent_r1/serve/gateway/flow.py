"""`flow: gateway`: the user's agent plays the row, and every call it makes is a step of the episode."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, ClassVar, Literal

from agent_r1.flows.episode import Episode
from agent_r1.flows.flow import AgentFlowBase
from agent_r1.serve.gateway.agents import Agent, AgentFailed, Ended
from agent_r1.serve.gateway.scribe import Scribe
from agent_r1.serve.gateway.server import GatewayServer
from agent_r1.serve.gateway.session import Session
from agent_r1.text import sanitize
from agent_r1.tokens.formats.base import ToolCallFormat
from agent_r1.tokens.formats.infer import template_format
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import StopReason, TaskRow, Trajectory, Transition

MAX_RESULT_CHARS = 20_000


class GatewayFlow(AgentFlowBase):
    """Plays a row with an agent that was written elsewhere. `gateway_flow` makes a class of it for a run."""

    uses_env = False
    server: ClassVar[GatewayServer]
    agent: ClassVar[Agent]
    tool_format: ClassVar[str]
    tool_role: ClassVar[str | None]
    on_failure: ClassVar[Literal["fail", "score"]]
    shows_ground_truth: ClassVar[bool]

    async def run(self, row: TaskRow, episode: Episode) -> StopReason:
        tool_format = format_for(episode.renderer, self.tool_format)
        session = Session(episode, Scribe(renderer=episode.renderer, tool_format=tool_format, tool_role=self.tool_role))

        def keep_log(text: str) -> None:
            episode.log = text

        with self.server.serving(session) as client:
            ended = await self.agent.play(
                row if self.shows_ground_truth else row.without_ground_truth(), client, keep_log
            )
        if session.fault is not None:  # ours, for example the engine's; the agent only saw an error
            raise session.fault
        if episode.steps:
            episode.observe(Transition(terminated=True, info=_info(ended)), source="the agent")
        elif episode.limit is None:
            raise ended.failure or AgentFailed(
                "the agent ended without a call to the model. Does it use the base URL and the key of its session "
                f"(OPENAI_BASE_URL, OPENAI_API_KEY)? It wrote: {episode.log.strip()[-300:] or 'nothing'}"
            )
        # An agent may well fail after it was told that a budget is used up.
        if ended.failure is not None and episode.limit is None and self.on_failure == "fail":
            raise ended.failure
        return StopReason.ANSWERED


def gateway_flow(
    *,
    server: GatewayServer,
    agent: Agent,
    tool_format: str,
    tool_role: str | None,
    on_failure: Literal["fail", "score"],
    shows_ground_truth: bool,
) -> type[GatewayFlow]:
    """Make the flow class of one run, with its settings as class attributes."""
    settings = {
        "server": server,
        "agent": agent,
        "tool_format": tool_format,
        "tool_role": tool_role,
        "on_failure": on_failure,
        "shows_ground_truth": shows_ground_truth,
    }
    return type("GatewayFlow", (GatewayFlow,), settings)


@lru_cache(maxsize=8)
def format_for(renderer: Renderer, asked: str) -> ToolCallFormat:
    """The tool-call format of the model's chat template."""
    return template_format(renderer).choose(asked)


def agent_reward(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    """A reward function: the number that the agent returned, or left in reward.json or reward.txt."""
    given = trajectory.steps[-1].info.get("agent_reward") if trajectory.steps else None
    if given is None:
        raise AgentFailed(
            "the agent gave no reward: return a number or a dict with the key 'reward', or write reward.json or "
            "reward.txt to the working folder"
        )
    return {name: float(value) for name, value in given.items()}


def _info(ended: Ended) -> dict[str, Any]:
    info: dict[str, Any] = {} if ended.reward is None else {"agent_reward": ended.reward}
    if ended.failure is not None:
        info["agent_failure"] = sanitize(f"{type(ended.failure).__name__}: {ended.failure}"[:MAX_RESULT_CHARS])
    if ended.result is not None:
        text = json.dumps(ended.result, default=str)
        info["agent_result"] = ended.result if len(text) <= MAX_RESULT_CHARS else text[:MAX_RESULT_CHARS]
        info["agent_result"] = json.loads(json.dumps(info["agent_result"], default=str))
    return info
