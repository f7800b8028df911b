"""Checks across settings."""

from __future__ import annotations

from agent_r1.config.schema import CorrectionConfig, RunConfig, SummaryContext
from agent_r1.engines.base import MAX_SUPPORT
from agent_r1.errors import ConfigError


def check_together(config: RunConfig) -> None:
    """Refuse settings that are valid one by one but contradict each other."""
    if (config.model.path is None) == (config.model.make is None):
        raise ConfigError("model needs exactly one of model.path (load) and model.make (create)")
    if config.sft.demos is not None and config.sft.trajectories is not None:
        raise ConfigError("sft takes demos or trajectories, not both")
    if config.rollout.max_response_tokens >= config.rollout.max_context_tokens:
        raise ConfigError(
            f"rollout.max_response_tokens ({config.rollout.max_response_tokens}) must be smaller than "
            f"rollout.max_context_tokens ({config.rollout.max_context_tokens}): the prompt needs room too"
        )
    if config.engine.max_cached_tokens is not None and config.engine.gpu_memory_share is not None:
        raise ConfigError("engine.gpu_memory_share does nothing beside engine.max_cached_tokens; leave one out")
    _check_context(config)
    _check_training(config)
    if config.eval.samples > 1 and config.eval.temperature == 0:
        raise ConfigError("eval.samples > 1 with eval.temperature=0 repeats one greedy attempt; set a temperature")
    if config.eval.temperature == 0 and (config.eval.top_p < 1 or config.eval.top_k > 0):
        raise ConfigError("eval.top_p and eval.top_k do nothing at eval.temperature=0 (greedy); set a temperature")


def _check_context(config: RunConfig) -> None:
    context, limit = config.context, config.rollout.max_context_tokens
    if not isinstance(context, SummaryContext):
        return
    if context.max_tokens + context.summary_tokens > limit:
        raise ConfigError(
            f"context.max_tokens ({context.max_tokens}) and context.summary_tokens ({context.summary_tokens}) must fit "
            f"into rollout.max_context_tokens ({limit}) together: the summary is written below the prompt"
        )
    if config.sft.demos is not None and context.demo_summary is None:
        raise ConfigError(
            "sft.demos with context.policy=summary need context.demo_summary, a function (messages) -> text that "
            "writes an expert's summary"
        )


def _check_training(config: RunConfig) -> None:
    if config.algorithm.kl_target is not None and config.algorithm.kl_in == "loss":
        raise ConfigError("algorithm.kl_target adapts a KL in the reward; set algorithm.kl_in=reward too")
    if config.algorithm.kl_in == "reward" and config.algorithm.kl_estimator != "k3":
        raise ConfigError(
            "algorithm.kl_estimator applies only with algorithm.kl_in=loss; in the reward it is always k1"
        )
    if config.rewards.process == "ignored" and config.rewards.process_weight != 1:
        raise ConfigError("rewards.process_weight does nothing with rewards.process=ignored")
    if config.critic is not None and config.critic.value_coef != 1 and not config.critic.shared:
        raise ConfigError("critic.value_coef does nothing for a critic with its own optimizer; set critic.shared=true")
    if config.lora is not None and not config.lora.target_modules:
        raise ConfigError(
            "lora.target_modules is empty: name some modules, or leave it out to adapt every linear layer"
        )
    _check_correction(config.correction)
    rollout = config.rollout
    if (rollout.top_p < 1 or rollout.top_k > 0) and not 2 <= rollout.top_k <= MAX_SUPPORT:
        raise ConfigError(
            f"rollout.top_p={rollout.top_p:g}, rollout.top_k={rollout.top_k}: training needs a top_k of 2 to "
            f"{MAX_SUPPORT}, because every kept id is stored, and with a single id there is nothing to learn"
        )


def _check_correction(correction: CorrectionConfig | None) -> None:
    if correction is None:
        return
    if correction.floor and correction.kind == "truncate":
        raise ConfigError("correction.floor does nothing with correction.kind=truncate; use kind=reject")
    if not correction.floor < 1 <= correction.cap:
        raise ConfigError(
            f"correction.floor={correction.floor:g} must be below 1 and correction.cap={correction.cap:g} at least 1: "
            "the weight is 1 if sampler and learner agree"
        )
