"""Build the flow of a run whose agent was written elsewhere. The gateway is imported only by runs that use it."""

from __future__ import annotations

from importlib import import_module

from agent_r1.build.resolve import check_callable, recipe_folder, resolve
from agent_r1.config import RunConfig
from agent_r1.errors import ConfigError
from agent_r1.flows.flow import AgentFlowBase
from agent_r1.resources import Resource
from agent_r1.tokens.formats.table import get_format


def build_gateway(config: RunConfig) -> tuple[type[AgentFlowBase], list[Resource]]:
    """Return the flow that starts the agent, and the server that must be open while it plays."""
    settings, serve = config.gateway, "agent_r1.serve.gateway"
    assert settings is not None
    if config.backend != "local":
        raise ConfigError(f"task.flow=gateway works with backend=local, not with backend={config.backend}")
    get_format(settings.tool_format)
    if settings.agent is not None:
        function = resolve(settings.agent, recipe=config.recipe)
        check_callable("gateway.agent", settings.agent, function, None, None)
        agent = import_module(f"{serve}.agents").FunctionAgent(function=function, name=settings.agent)
    else:
        command = import_module(f"{serve}.command")
        agent = command.CommandAgent(
            command=command.split_command(settings.command),
            recipe=recipe_folder(config.recipe),
            stdin=settings.stdin,
            env=settings.env,
        )
    server = import_module(f"{serve}.server").GatewayServer(episode_seconds=config.rollout.episode_seconds)
    flow = import_module(f"{serve}.flow").gateway_flow(
        server=server,
        agent=agent,
        **settings.model_dump(include={"tool_format", "tool_role", "on_failure", "shows_ground_truth"}),
    )
    return flow, [server]
