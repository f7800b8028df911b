"""Checks across settings."""

from __future__ import annotations

from agent_r1.config.schema import (
    CorrectionConfig,
    RunConfig,
    SummaryContext,
    TransformersEngineConfig,
    VLLMEngineConfig,
)
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
    if config.verl is not None and config.backend != "verl":
        raise ConfigError("the section verl has no effect with backend=local: set backend=verl, or leave it out")
    for name, role in config.rollout.roles.items():
        if (role.max_response_tokens or 0) >= config.rollout.max_context_tokens:
            raise ConfigError(
                f"rollout.roles.{name}.max_response_tokens ({role.max_response_tokens}) must be smaller than "
                f"rollout.max_context_tokens ({config.rollout.max_context_tokens}): the prompt needs room too"
            )
    _check_gateway(config)
    _check_engine(config)
    _check_context(config)
    _check_training(config)
    if config.eval.samples > 1 and config.eval.temperature == 0:
        raise ConfigError("eval.samples > 1 with eval.temperature=0 repeats one greedy attempt; set a temperature")
    if config.eval.temperature == 0 and (config.eval.top_p < 1 or config.eval.top_k > 0):
        raise ConfigError("eval.top_p and eval.top_k do nothing at eval.temperature=0 (greedy); set a temperature")


def _check_gateway(config: RunConfig) -> None:
    gateway, task = config.gateway, config.task
    if (gateway is None) == (task.flow == "gateway"):
        problem = "needs a section gateway with agent or command" if gateway is None else "is needed by section gateway"
        raise ConfigError(f"task.flow=gateway {problem}")
    if gateway is None:
        return
    if (gateway.agent is None) == (gateway.command is None):
        raise ConfigError("gateway needs exactly one of gateway.agent (a function) and gateway.command (a program)")
    changed = gateway.model_dump(exclude_defaults=True)
    for name in ("stdin", "env"):
        if gateway.agent is not None and name in changed:
            raise ConfigError(f"gateway.{name} has no effect on a function: leave it out, or set gateway.command")
    for name, given in {"tools": task.tools, "env_kwargs": task.env_kwargs}.items():
        if given:
            raise ConfigError(f"task.{name} has no effect with task.flow=gateway: the agent brings its own tools")


def _check_engine(config: RunConfig) -> None:
    engine = config.engine
    if isinstance(engine, VLLMEngineConfig):
        _check_vllm(engine)
        if engine.sleep and config.trainer.mode == "async":
            raise ConfigError("engine.sleep stops sampling during updates: leave it out with trainer.mode=async")
        if config.model.fp32_head:
            raise ConfigError("model.fp32_head has no effect on vLLM: leave it out, or set engine.kind=local")
    elif isinstance(engine, TransformersEngineConfig):
        size, longest = engine.max_cached_tokens, config.rollout.max_context_tokens
        if size is not None and size < longest:
            raise ConfigError(
                f"engine.max_cached_tokens={size} is less than rollout.max_context_tokens={longest}: raise it, or "
                "lower the other"
            )
    elif engine.max_cached_tokens is not None and engine.gpu_memory_share is not None:
        raise ConfigError("engine.gpu_memory_share does nothing beside engine.max_cached_tokens; leave one out")


def _check_vllm(engine: VLLMEngineConfig) -> None:
    if bool(engine.urls) == (engine.python is not None):
        raise ConfigError(
            "engine.kind=vllm needs exactly one of engine.urls (running servers) and engine.python (start servers "
            "with this interpreter)"
        )
    gpus, size = engine.gpus, engine.tensor_parallel
    bad_urls = [url for url in engine.urls if not url.startswith(("http://", "https://")) or engine.urls.count(url) > 1]
    problems = {
        "gpus": gpus and engine.urls and "has no effect on running servers (engine.urls): leave it out",
        "args": engine.args and engine.urls and "has no effect on running servers (engine.urls): leave it out",
        "urls": bad_urls and f"must be addresses like http://node1:8000, each given once, not {bad_urls[0]!r}",
        "servers": engine.servers and (gpus or engine.urls) and "is the number of servers on a CPU: leave it out",
        f"gpus={gpus}": (len(gpus) % size or len(set(gpus)) < len(gpus) or (size > 1 and not gpus))
        and f"cannot be divided into servers of {size} different GPUs (engine.tensor_parallel)",
        "sleep": engine.sleep and not gpus and not engine.urls and "has no effect on a CPU: leave it out",
    }
    for name, problem in problems.items():
        if problem:
            raise ConfigError(f"engine.{name} {problem}")


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
    elsewhere = config.engine.kind != "local" or config.engine.device is not None
    if config.lora is not None and config.lora.share_base and elsewhere:
        raise ConfigError(
            "lora.share_base needs engine.kind=local without engine.device: it shares the learner's memory"
        )
    if config.engine.kind == "vllm" and config.engine.send_adapters and config.lora is None:
        raise ConfigError("engine.send_adapters needs a section lora: without adapters, all weights are sent")
    chunk, pack = config.learner.mlp_chunk_tokens, config.learner.max_tokens_per_pack
    if chunk is not None and pack is not None and chunk >= pack:
        raise ConfigError(
            f"learner.mlp_chunk_tokens={chunk} has no effect on packs of {pack} tokens (learner.max_tokens_per_pack)"
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
