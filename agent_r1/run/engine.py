"""The engine of a run: which sizes it has where nobody says."""

from __future__ import annotations

import copy
from typing import Any

import torch

from agent_r1.config import EngineConfig, RunConfig
from agent_r1.errors import ConfigError
from agent_r1.rollout.engine import Engine
from agent_r1.rollout.engines.gpu_attention import bytes_per_token
from agent_r1.rollout.engines.local import LocalEngine
from agent_r1.run.model import Model, model_dtype

GPU_ONLY = ("gpu_memory_share", "burst", "compile")
CPU_CACHE = 131_072  # tokens
GPU_MEMORY_SHARE = 0.3  # the learner, which comes later, needs the rest


def build_engine(config: RunConfig, model: Model) -> Engine:
    """A copy of the model, on the same device."""
    settings = config.engine
    network = copy.deepcopy(model.network).to(model_dtype(config))
    network.set_attn_implementation("eager")  # a learner may have set its own on the original
    on_gpu = network.device.type == "cuda"
    if not on_gpu:
        _refuse_gpu_settings(settings)
    return LocalEngine(
        network,
        seed=config.seed,
        max_running=settings.max_running or (512 if on_gpu else 256),
        max_batch_tokens=settings.max_batch_tokens or (16_384 if on_gpu else 2048),
        max_cached_tokens=settings.max_cached_tokens or (_affordable(config, network) if on_gpu else CPU_CACHE),
        threads=settings.threads,
        burst=settings.burst or 16,
        compile_layers=settings.compile,
    )


def _refuse_gpu_settings(settings: EngineConfig) -> None:
    given = [name for name in GPU_ONLY if getattr(settings, name) is not None]
    if given:
        raise ConfigError(f"engine.{given[0]} is for a GPU, and this run is on the CPU: leave it out")


def _affordable(config: RunConfig, network: Any) -> int:
    """Tokens for which there is memory, but no more than all episodes together can have."""
    share = config.engine.gpu_memory_share or GPU_MEMORY_SHARE
    free, _ = torch.cuda.mem_get_info(network.device)
    tokens = int(share * free) // bytes_per_token(network.config.get_text_config(), network.dtype)
    if tokens < config.rollout.max_context_tokens:
        raise ConfigError(
            f"{share:g} of the GPU's free memory holds {tokens} tokens of keys and values, and one context may have "
            f"{config.rollout.max_context_tokens}: raise engine.gpu_memory_share, or lower rollout.max_context_tokens"
        )
    return min(tokens, config.rollout.max_concurrent * config.rollout.max_context_tokens)
