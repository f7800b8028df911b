"""Checks across settings: contradictions, and settings that have no effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent_r1.config.schema import RunConfig, SummaryContext, TransformersEngineConfig, VLLMEngineConfig
from agent_r1.data.files import FORMATS
from agent_r1.engines.base import MAX_SUPPORT
from agent_r1.errors import ConfigError

Tree = dict[str, Any]  # section -> key -> value, as people wrote it


def check_together(config: RunConfig) -> None:
    """Refuse settings that are valid one by one but contradict each other."""
    _check_one_of("model", {"path": config.model.path, "make": config.model.make})
    if config.sft.demos is not None and config.sft.trajectories is not None:
        raise ConfigError("sft takes demos or trajectories, not both")
    limits = {"rollout": config.rollout.max_response_tokens}
    limits |= {f"rollout.roles.{name}": role.max_response_tokens or 0 for name, role in config.rollout.roles.items()}
    for name, limit in limits.items():
        if limit >= config.rollout.max_context_tokens:
            raise ConfigError(
                f"{name}.max_response_tokens ({limit}) must be smaller than rollout.max_context_tokens "
                f"({config.rollout.max_context_tokens}): the prompt needs room too"
            )
    if (config.gateway is None) == (config.task.flow == "gateway"):
        raise ConfigError("set both task.flow=gateway and gateway.agent or gateway.command, or neither")
    if config.gateway is not None:
        _check_one_of("gateway", {"agent": config.gateway.agent, "command": config.gateway.command})
    _check_engine(config)
    _check_context(config)
    _check_training(config)
    _check_strict(config.model_dump())
    if config.eval.samples > 1 and config.eval.temperature == 0:
        raise ConfigError("eval.samples > 1 with eval.temperature=0 repeats one greedy attempt; set a temperature")
    if config.eval.temperature == 0 and (config.eval.top_p < 1 or config.eval.top_k > 0):
        raise ConfigError("eval.top_p and eval.top_k do nothing at eval.temperature=0 (greedy); set a temperature")


def _check_one_of(section: str, settings: Mapping[str, object]) -> None:
    """Refuse alternatives unless exactly one of them is given."""
    if sum(bool(value) for value in settings.values()) != 1:
        names = " and ".join(f"{section}.{name}" for name in settings)
        raise ConfigError(f"{section} needs exactly one of {names}")


def _check_engine(config: RunConfig) -> None:
    engine = config.engine
    if isinstance(engine, VLLMEngineConfig):
        _check_vllm(engine)
        if engine.sleep and config.trainer.mode == "async":
            raise ConfigError("engine.sleep stops sampling during updates: leave it out with trainer.mode=async")
    elif isinstance(engine, TransformersEngineConfig):
        size, longest = engine.max_cached_tokens, config.rollout.max_context_tokens
        if size is not None and size < longest:
            raise ConfigError(f"engine.max_cached_tokens={size} is less than rollout.max_context_tokens={longest}")
    elif engine.max_cached_tokens is not None and engine.gpu_memory_share is not None:
        raise ConfigError("engine.gpu_memory_share does nothing beside engine.max_cached_tokens; leave one out")


def _check_vllm(engine: VLLMEngineConfig) -> None:
    _check_one_of("engine", {"urls (running servers)": engine.urls, "python (to start servers with)": engine.python})
    for url in engine.urls:
        if not url.startswith(("http://", "https://")) or engine.urls.count(url) > 1:
            raise ConfigError(f"engine.urls must be addresses like http://node1:8000, each given once, not {url!r}")
    gpus, size = engine.gpus, engine.tensor_parallel
    if engine.servers is not None and gpus:
        raise ConfigError("engine.servers is the number of servers on a CPU: leave it out with engine.gpus")
    if len(gpus) % size or len(set(gpus)) < len(gpus) or (size > 1 and not gpus):
        raise ConfigError(f"engine.gpus={gpus} cannot be divided into servers of engine.tensor_parallel={size} GPUs")


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
            "sft.demos with context.policy=summary need context.demo_summary, a function (messages) -> text"
        )


def _check_training(config: RunConfig) -> None:
    algorithm, correction, rollout = config.algorithm, config.correction, config.rollout
    if algorithm.kl_in == "reward" and algorithm.kl_estimator != "k3":
        raise ConfigError("algorithm.kl_estimator applies only with algorithm.kl_in=loss; a KL in the reward uses k1")
    chunk, pack = config.learner.mlp_chunk_tokens, config.learner.max_tokens_per_pack
    if chunk is not None and pack is not None and chunk >= pack:
        raise ConfigError(f"learner.mlp_chunk_tokens={chunk} does nothing with learner.max_tokens_per_pack={pack}")
    elsewhere = config.engine.kind != "local" or config.engine.device is not None
    if config.lora is not None and config.lora.share_base and elsewhere:
        raise ConfigError("lora.share_base needs engine.kind=local without engine.device: the two share memory")
    if correction is not None and not correction.floor < 1 <= correction.cap:
        floor, cap = correction.floor, correction.cap
        raise ConfigError(f"correction.floor={floor:g} must be below 1 and correction.cap={cap:g} at least 1")
    if (rollout.top_p < 1 or rollout.top_k > 0) and not 2 <= rollout.top_k <= MAX_SUPPORT:
        raise ConfigError(
            f"rollout.top_p={rollout.top_p:g}, rollout.top_k={rollout.top_k}: training needs a top_k of 2 to "
            f"{MAX_SUPPORT}, because every kept id is stored, and with a single id there is nothing to learn"
        )


def _check_strict(tree: Tree) -> None:
    for (needed, has_effect), settings in STRICT:
        for setting in settings:
            if value_of(tree, setting) and not has_effect(tree):
                raise ConfigError(f"{setting} does nothing without {needed}; set that or leave {setting} out")


def check_idle(written: Sequence[Tree], merged: Sequence[Tree]) -> None:
    """Refuse settings that have no effect; `merged` are the settings after each layer of the `written` ones.

    A layer may set what a later layer turns off, as with `sft.demos=null`. The config.json of a run, which holds every
    field, is not checked.
    """
    for (needed, has_effect), settings in RULES:
        idle = [not has_effect(stage) for stage in merged]
        for setting in settings if idle[-1] else ():
            values = [value_of(layer, setting) for layer in written]
            given = [value is not False and value not in (None, [], {}) for value in values]  # 0 is given
            if any(map(all, zip(given, idle, strict=True))):
                raise ConfigError(f"{setting} does nothing without {needed}; set that or leave {setting} out")


def is_data_source(rows: str) -> bool:
    """Whether `task.rows` is a file, folder or dataset, and not a function."""
    return rows.startswith("hf:") or rows.endswith(FORMATS) or "/" in rows


def value_of(tree: Tree, setting: str) -> Any:
    found: Any = tree
    for key in setting.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _needs(*names: str, idle: tuple[Any, ...] = (None, 0, []), which: str = "") -> tuple[str, Callable[[Tree], bool]]:
    """Return a condition for a setting to have an effect, in words and as a function: one of `names` has a value other
    than `idle`."""
    return " or ".join(names) + which, lambda tree: any(value_of(tree, name) not in idle for name in names)


def _reads_data(tree: Tree) -> bool:
    return is_data_source(str(value_of(tree, "task.rows")))


RULES: list[tuple[tuple[str, Callable[[Tree], bool]], list[str]]] = [
    (_needs("sft.demos"), ["sft.count", "context.demo_summary"]),
    (_needs("sft.trajectories"), ["sft.min_reward", "sft.max_per_row"]),
    (
        _needs("sft.demos", "sft.trajectories"),
        [f"sft.{key}" for key in ("epochs", "batch_size", "lr", "warmup_steps", "schedule", "target_loss")],
    ),
    (_needs("algorithm.kl_coef"), [f"algorithm.{key}" for key in ("kl_estimator", "kl_in", "kl_target")]),
    (_needs("algorithm.kl_in", idle=(None, "loss"), which="=reward"), ["algorithm.kl_target"]),
    (_needs("algorithm.kl_target"), ["algorithm.kl_horizon"]),
    (  # only gigpo has this setting, and its default is not 0
        _needs("algorithm.settings.step_weight", idle=(0,)),
        [f"algorithm.settings.{key}" for key in ("gamma", "anchor", "similarity")],
    ),
    (
        _needs("learner.num_epochs", "learner.num_minibatches", idle=(None, 1), which=" above 1"),
        ["critic.value_clip", "learner.target_kl"],
    ),
    (_needs("critic.shared", which="=true"), ["critic.value_coef"]),
    (_needs("correction.kind", idle=(None, "truncate"), which="=reject"), ["correction.floor"]),
    (_needs("rewards.process", idle=("ignored",), which=" other than ignored"), ["rewards.process_weight"]),
    (
        _needs("learner.schedule", "critic.schedule", idle=(None, "constant"), which=" other than constant"),
        ["learner.min_lr_ratio"],
    ),
    (_needs("trainer.mode", idle=(None, "sync"), which="=async"), ["trainer.max_staleness"]),
    (_needs("engine.python"), ["engine.gpus", "engine.servers", "engine.args"]),
    (_needs("engine.gpus", "engine.urls"), ["engine.sleep"]),
    (_needs("lora", idle=(None,)), ["engine.send_adapters"]),
    (_needs("gateway.command"), ["gateway.stdin", "gateway.env"]),
    (_needs("backend", idle=(None, "local"), which="=verl"), ["verl"]),
]
# These are refused whichever layer sets them: nobody who chooses another engine, flow or rows means to give them up.
STRICT: list[tuple[tuple[str, Callable[[Tree], bool]], list[str]]] = [
    (_needs("engine.kind", idle=("vllm",), which=" other than vllm"), ["model.fp32_head"]),
    (_needs("task.flow", idle=("gateway",), which=" other than gateway"), ["task.tools", "task.env_kwargs"]),
    (("task.rows that is a file or dataset", _reads_data), ["data.map"]),
    (("task.rows that is a function", lambda tree: not _reads_data(tree)), ["task.rows_kwargs"]),
]
