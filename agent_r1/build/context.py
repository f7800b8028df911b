"""Build the context policy of an episode, and check that task and policy fit together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from agent_r1.build.resolve import check_callable, resolve
from agent_r1.config import RunConfig
from agent_r1.config.schema import SummaryContext
from agent_r1.envs.base import AgentEnv
from agent_r1.errors import ConfigError, did_you_mean
from agent_r1.flows.context import ContextPolicy, DropResults, Notes, Rewrite, Summary, Window, append_text
from agent_r1.flows.flow import AgentFlowBase
from agent_r1.flows.reasoning import StripReasoning
from agent_r1.tokens.formats.infer import TemplateFormat, template_format
from agent_r1.tokens.formats.table import FALLBACK, get_format
from agent_r1.tokens.rendering import Renderer
from agent_r1.tokens.template_check import verify_template
from agent_r1.types import Message, Observation

_POLICIES: dict[str, Callable[..., ContextPolicy]] = {
    "window": Window,
    "drop_results": DropResults,
    "summary": Summary,
    "rewrite": Rewrite,
    "notes": Notes,
}


def context_maker(config: RunConfig, env: type[AgentEnv]) -> Callable[[TemplateFormat | None], ContextPolicy] | None:
    """Return a factory of context policies, one per episode; None if everything is shown."""
    context = config.context
    if not changes_history(config):
        return None
    check_env_repeats(env, config.task.env_kwargs, config)
    settings: dict[str, Any] = context.model_dump(exclude={"policy", "reasoning", "demo_summary"})
    if context.policy == "rewrite":
        settings["function"] = message_function(config, "context.function", context.function)
    if context.policy == "summary" and context.demo_summary is not None:
        message_function(config, "context.demo_summary", context.demo_summary)

    def make(template: TemplateFormat | None) -> ContextPolicy:
        policy = _POLICIES[context.policy](**settings) if context.policy != "append" else None
        if policy is not None and context.reasoning != "strip":
            return policy
        written = get_format((template and template.name) or FALLBACK)
        return StripReasoning(policy, tool_format=written.for_prompt(thinks=template is not None and template.thinks))

    return make


def changes_history(config: RunConfig) -> bool:
    """Whether the model may be shown anything but the whole conversation."""
    return config.context.policy != "append" or config.context.reasoning == "strip"


def message_function(config: RunConfig, setting: str, name: str) -> Callable[..., Any]:
    """Return a function of the recipe that takes messages."""
    found: Callable[..., Any] = resolve(name, recipe=config.recipe)
    check_callable(setting, name, found, [])
    return found


def check_env_repeats(env: type[AgentEnv], kwargs: Mapping[str, Any], config: RunConfig) -> None:
    """Refuse an env that refers to earlier messages if the policy hides them. A rewrite decides that for itself."""
    policy = config.context.policy
    for name, needed in env.if_forgotten.items():
        if policy not in ("append", "rewrite") and kwargs.get(name) != needed:
            raise ConfigError(
                f"context.policy={policy} hides earlier messages, which {env.__name__} refers to: set "
                f"task.env_kwargs.{name}={json.dumps(needed)}, or use context.policy=append"
            )


def check_flow(flow: type[AgentFlowBase], config: RunConfig) -> None:
    """Refuse a context policy and settings of roles that the flow would ignore."""
    for name in config.rollout.roles:
        if name not in flow.roles:
            raise ConfigError(
                f"rollout.roles has settings for {name!r}, but the flow {flow.__name__} has the roles {flow.roles}."
                f"{did_you_mean(name, flow.roles)}"
            )
    if config.rewards.by_role and not flow.roles:
        raise ConfigError(f"rewards.by_role has no effect with the flow {flow.__name__}, whose class names no roles")
    if changes_history(config) and not flow.uses_context:
        policy = config.context.policy
        name, instead = ("policy", "append") if policy != "append" else ("reasoning", "null")
        raise ConfigError(
            f"context.{name}={getattr(config.context, name)} has no effect with the flow {flow.__name__}. Set it to "
            f"{instead}, or pass context=self.context to episode.act and set uses_context = True"
        )


def check_keeps_reasoning(config: RunConfig, renderer: Renderer, *, calls_tools: bool) -> None:
    """Refuse context.reasoning=keep if prompts are rendered from scratch by a template that drops earlier thinking."""
    report, policy = verify_template(renderer), config.context.policy
    extends = report.extends_after_tool if calls_tools else report.extends
    if config.context.reasoning != "keep" or (policy == "append" and extends):
        return
    thought = "a thought</think>" if template_format(renderer).thinks else "<think>a thought</think>"
    roles = ("user", "assistant", "tool" if calls_tools and report.tool_role else "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, ("?", thought, "!"), strict=True)]
    if "a thought" not in renderer.decode(renderer.render(Observation(messages=messages))):
        raise ConfigError(
            f"context.reasoning=keep: with context.policy={policy}, this chat template drops the thinking of earlier "
            "replies. Set context.reasoning=strip or another model.chat_template"
        )


def check_summary_budget(config: RunConfig, renderer: Renderer) -> None:
    """Refuse token limits under which no summary could be written, or one before nearly every action."""
    context, limit = config.context, config.rollout.max_context_tokens
    if not isinstance(context, SummaryContext):
        return
    asked: list[Message] = [{"role": "user", "content": "?"}]
    exchange: list[Message] = [{"role": "assistant", "content": "?"}, *asked]
    before, after, stays = (
        len(renderer.render(Observation(messages=messages)))
        for messages in (asked, append_text(asked, context.instruction), asked + exchange * context.keep_turns)
    )
    if context.max_tokens + after - before + context.summary_tokens > limit:
        raise ConfigError(
            f"context.max_tokens={context.max_tokens}, context.instruction ({after - before} tokens) and "
            f"context.summary_tokens={context.summary_tokens} exceed rollout.max_context_tokens={limit}: lower one"
        )
    if context.max_tokens < stays:
        raise ConfigError(
            f"context.max_tokens={context.max_tokens} is too small: what is never summarised, the first observation "
            f"and the last exchanges (context.keep_turns={context.keep_turns}), takes at least {stays} tokens"
        )
