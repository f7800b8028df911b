"""Checks of a run before its model is loaded: machine, device, start, rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch

import torch

from agent_r1.build.engine import GPU_ONLY, configured_cache_tokens, merges_adapters
from agent_r1.build.models.device import compiles_layers, engine_device, model_device, model_dtype
from agent_r1.build.models.source import find_model
from agent_r1.build.task import Task, check_call
from agent_r1.config import RunConfig
from agent_r1.config.checks import is_data_source
from agent_r1.config.schema import TaskConfig, VLLMEngineConfig
from agent_r1.data.files import FORMATS
from agent_r1.envs.base import env_class
from agent_r1.errors import AgentR1Error, ConfigError
from agent_r1.flows.flow import AgentEnvLoop
from agent_r1.guard import explain
from agent_r1.learn.model.layers import require_compiler
from agent_r1.learn.model.lora import require_peft
from agent_r1.places import anchored
from agent_r1.runs.trajectories import EVALUATED, TRAINED, trajectories_of, trajectory_files
from agent_r1.tokens.formats.infer import TemplateFormat
from agent_r1.types import TaskRow

# Smaller updates of adapters vanish in bfloat16: neighbours of a weight of 0.02 are 1e-4 away.
SMALLEST_LORA_LR = 1e-5


def check_requirements(config: RunConfig) -> None:
    """Check that this machine has what the run needs."""
    device = model_device(config)
    engine_device(config)
    if compiles_layers(config):
        require_compiler(device)
    if config.lora is not None:
        require_peft()
    if not config.trainer.deterministic or device.type != "cuda":
        return
    for name, sampling in (("eval", config.eval), ("rollout", config.rollout)):
        if sampling.top_p < 1 or sampling.top_k > 0:
            raise ConfigError(f"{name}.top_p and {name}.top_k do not work on a GPU with trainer.deterministic=true")


def check_device(config: RunConfig) -> None:
    """Refuse settings without effect on this device. A run may later continue on another device."""
    on_cpu, dtype = model_device(config).type == "cpu", model_dtype(config)
    given = [f"engine.{name}" for name in GPU_ONLY if getattr(config.engine, name, None) is not None]
    given += ["learner.offload_optimizer"] if config.learner.offload_optimizer else []
    if given and on_cpu:
        raise ConfigError(f"{given[0]} has no effect on a CPU: leave it out")
    if config.model.fp32_head and dtype == torch.float32:
        raise ConfigError("model.fp32_head has no effect in float32: leave it out, or set model.dtype=bfloat16")
    vanishes = dtype == torch.bfloat16 and config.learner.lr < SMALLEST_LORA_LR
    if config.lora is not None and merges_adapters(config) and vanishes:
        raise ConfigError(
            f"learner.lr={config.learner.lr:g} is too small for lora in bfloat16: merging rounds updates away. Set "
            "learner.lr=1e-4, as is usual for adapters, lora.share_base=true or model.dtype=float32"
        )


def check_start(config: RunConfig) -> None:
    """Check the model, the engine's cache and the warm start without loading anything."""
    configured_cache_tokens(config, model_device(config))
    if isinstance(engine := config.engine, VLLMEngineConfig):
        from agent_r1.engines.vllm.assemble import check_servers

        check_servers(on_gpu=model_device(config).type == "cuda", **engine.model_dump(exclude={"kind"}))
    if config.model.path is not None:
        find_model(config.model.path)
    if config.model.make is not None:
        check_call(config, "model.make", config.model.make, ["directory", "seed"])
    if config.sft.demos is not None:
        check_call(config, "sft.demos", config.sft.demos, ["count", "seed"])
    if (place := config.sft.trajectories) is not None:
        if not anchored(place).exists():
            raise ConfigError(f"sft.trajectories={place!r}: there is no such run, folder or file")
        if any(fnmatch(file.name, EVALUATED) for file in trajectory_files(trajectories_of(place), TRAINED)):
            raise ConfigError(
                f"sft.trajectories={place!r} holds episodes of test rows: name the run, or a train_*.jsonl"
            )


def check_players(task: Task, template: TemplateFormat | None, rows: Iterable[TaskRow]) -> None:
    """Create one flow and env, without playing, for each combination of names, settings and tools in the rows."""
    make_flow = task.flows_for(template)
    seen = set()
    for row in rows:
        env_type = row.env_kwargs.get("env_type")
        values = row.env_kwargs.get("tools_kwargs")
        given = repr(list(values)) if isinstance(values, Mapping) else ""
        kind = (repr(row.agent_name), repr(env_type), repr(row.env_kwargs.get("tools")), given, *sorted(row.env_kwargs))
        if kind in seen:
            continue
        seen.add(kind)
        try:
            flow = make_flow(row)
            if isinstance(flow, AgentEnvLoop):  # other flows may need no env
                flow.make_env(row)
            elif env_type is not None:
                env_class(env_type)
        except Exception as error:  # constructors of flows and envs are user code
            why = error if isinstance(error, AgentR1Error) else explain(error)
            raise ConfigError(f"row {row.row_id!r} cannot be played: {why}") from error


def check_disjoint(config: RunConfig, train: Sequence[TaskRow], test: Sequence[TaskRow]) -> None:
    """Refuse test rows that are also training rows."""

    def content(row: TaskRow) -> str:
        extra = sorted((key, value) for key, value in row.extra_info.items() if key not in ("index", "split"))
        return repr((row.prompt, row.env_kwargs, extra))

    seen = {content(row): row.row_id for row in train}
    for row in test:
        if (twin := seen.get(content(row))) is not None:
            raise ConfigError(
                f"test row {row.row_id!r} is the same task as training row {twin!r}: same prompt, env_kwargs and "
                f"extra_info. {_how_to_split(config.task)}"
            )


def _how_to_split(task: TaskConfig) -> str:
    if is_data_source(task.rows) and task.rows.endswith(FORMATS) and "{split}" not in task.rows:
        return f"Both splits are read from {task.rows!r}: use {{split}} in task.rows, as in data/{{split}}.jsonl"
    if task.train_split == task.test_split:
        return f"Both splits are {task.test_split!r}: set task.test_split to another one"
    return "Remove it from one of the splits"
