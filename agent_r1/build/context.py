"""The context policy that a config names, as an object for each episode."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from agent_r1.build.resolve import resolve
from agent_r1.config import RunConfig, SummaryContext
from agent_r1.envs.base import AgentEnv, env_class
from agent_r1.errors import ConfigError
from agent_r1.flows.context import ContextPolicy, DropResults, Notes, Rewrite, Summary, Window, append_text
from agent_r1.flows.flow import AgentFlowBase
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import Message, Observation

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
    task = config.task
    env: type[AgentEnv] = resolve(task.env, recipe=config.recipe) if "." in task.env else env_class(task.env)
    check_env_repeats(env, task.env_kwargs, config)
    settings: dict[str, Any] = context.model_dump(exclude={"policy", "demo_summary"})
    if context.policy == "rewrite":
        settings["function"] = message_function(config, "context.function", context.function)
    if context.policy == "summary" and context.demo_summary is not None:
        message_function(config, "context.demo_summary", context.demo_summary)  # found wrong before the run
    return lambda: _POLICIES[context.policy](**settings)


def check_env_repeats(env: type[AgentEnv], kwargs: Mapping[str, Any], config: RunConfig) -> None:
    """An env that says "as above" of what is not shown says nothing. What a rewrite shows, only its author knows.
    Rows may choose another env than the recipe, or set it to something else."""
    policy = config.context.policy
    for name, needed in env.if_forgotten.items():
        if policy not in ("append", "rewrite") and kwargs.get(name) != needed:
            raise ConfigError(
                f"context.policy={policy} leaves out earlier messages, and {env.__name__} does not show again what "
                f"stands in them: set task.env_kwargs.{name}={json.dumps(needed)}, or use context.policy=append"
            )


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


def check_room(config: RunConfig, renderer: Renderer) -> None:
    """Settings under which no summary could ever be written, or one before nearly every action, are a mistake, and only
    a tokenizer can tell."""
    context, limit = config.context, config.rollout.max_context_tokens
    if not isinstance(context, SummaryContext):
        return
    shown: list[Message] = [{"role": "user", "content": "?"}]
    exchange: list[Message] = [{"role": "assistant", "content": "?"}, *shown]
    before, asked, stays = (
        len(renderer.render(Observation(messages=messages)))
        for messages in (shown, append_text(shown, context.instruction), shown + exchange * context.keep_turns)
    )
    needed = context.max_tokens + asked - before + context.summary_tokens
    if needed > limit:
        raise ConfigError(
            f"context.max_tokens ({context.max_tokens}), context.instruction ({asked - before} tokens) and "
            f"context.summary_tokens ({context.summary_tokens}) need {needed} tokens together, and "
            f"rollout.max_context_tokens is {limit}: no summary could be written. Lower context.max_tokens"
        )
    if context.max_tokens < stays:
        raise ConfigError(
            f"context.max_tokens={context.max_tokens} is less than what no summary takes the place of: the first "
            f"observation and the last exchanges (context.keep_turns={context.keep_turns}) are {stays} tokens even "
            "where each says a single one. Raise context.max_tokens"
        )


def check_flow(flow: type[AgentFlowBase], config: RunConfig) -> None:
    """A policy that would be ignored is a mistake."""
    if config.context.policy != "append" and not flow.uses_context:
        raise ConfigError(
            f"context.policy={config.context.policy} does nothing with the flow {flow.__name__}, which chooses what is "
            "shown itself. Use append, or have it pass context=self.context to episode.act and say uses_context = True"
        )
