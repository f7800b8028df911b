"""The context policy that a config names, as an object for each episode."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from agent_r1.agent.context import ContextPolicy, DropResults, Notes, Rewrite, Summary, Window
from agent_r1.agent.flow import AgentFlowBase
from agent_r1.config import RunConfig
from agent_r1.errors import ConfigError
from agent_r1.run.resolve import resolve

_POLICIES: dict[str, Callable[..., ContextPolicy]] = {
    "window": Window,
    "drop_results": DropResults,
    "summary": Summary,
    "rewrite": Rewrite,
    "notes": Notes,
}


def context_maker(config: RunConfig) -> Callable[[], ContextPolicy] | None:
    """Makes the policy of an episode; None for `append`, which needs none."""
    context = config.context
    if context.policy == "append":
        return None
    settings: dict[str, Any] = context.model_dump(exclude={"policy", "demo_summary"})
    if context.policy == "rewrite":
        settings["function"] = message_function(config, "context.function", context.function)
    if context.policy == "summary" and context.demo_summary is not None:
        message_function(config, "context.demo_summary", context.demo_summary)  # found wrong before the run
    return lambda: _POLICIES[context.policy](**settings)


def message_function(config: RunConfig, setting: str, name: str) -> Callable[..., Any]:
    """A function of the recipe that takes a conversation."""
    found: Callable[..., Any] = resolve(name, recipe=config.recipe)
    if not callable(found):
        raise ConfigError(f"{setting}={name!r} is {found!r}, not a function to be called with messages")
    try:
        inspect.signature(found).bind([])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{setting}={name!r} cannot be called with messages: {error}") from error
    return found


def check_flow(flow: type[AgentFlowBase], config: RunConfig) -> None:
    """A policy that would be ignored is a mistake."""
    if config.context.policy != "append" and not flow.uses_context:
        raise ConfigError(
            f"context.policy={config.context.policy} does nothing with the flow {flow.__name__}, which chooses what is "
            "shown itself. Use append, or have it pass context=self.context to episode.act and say uses_context = True"
        )
