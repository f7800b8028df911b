"""Build the engine of a run and choose default sizes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import torch

from agent_r1.build.model import Model, model_dtype
from agent_r1.compiling import has_compiler
from agent_r1.config import RunConfig
from agent_r1.engines.base import Engine
from agent_r1.engines.local.fp32_head import use_fp32_head
from agent_r1.engines.local.gpu.gpu_attention import bytes_per_token
from agent_r1.engines.local.local_engine import BLOCK_SIZE, LocalEngine
from agent_r1.engines.local.model_runner import cast_weights
from agent_r1.errors import ConfigError
from agent_r1.learn import ALGORITHMS

GPU_ONLY = ("gpu_memory_share", "burst", "compile")
CPU_CACHE = 131_072  # tokens
GPU_RUNNING = 1024  # sequences at most; more are hardly faster per token
GPU_BURST = 16  # tokens of a sequence before the host looks at them
GPU_MEMORY_SHARE = 0.3  # the learner, which comes later, needs the rest


def build_engine(config: RunConfig, model: Model) -> Engine:
    return BUILDERS[config.engine.kind](config, model)


def _local(config: RunConfig, model: Model) -> Engine:
    """Sample from a copy of the model, on the same device."""
    settings = config.engine
    network = cast_weights(copy.deepcopy(model.network), model_dtype(config))
    if config.model.fp32_head:
        use_fp32_head(network, model.network.get_output_embeddings())
    network.set_attn_implementation("eager")  # a learner may have set its own on the original
    on_gpu = network.device.type == "cuda"
    if on_gpu and not has_compiler():
        raise ConfigError(
            "sampling on a GPU needs a C compiler for Triton's kernels, and there is none on the path: install one "
            "(for example apt-get install gcc python3-dev), or set model.device=cpu"
        )
    return LocalEngine(
        network,
        seed=config.seed,
        max_running=settings.max_running or (min(GPU_RUNNING, episodes_at_once(config)) if on_gpu else 256),
        max_batch_tokens=settings.max_batch_tokens or (16_384 if on_gpu else 2048),
        max_cached_tokens=given_cache(config, network.device) or _affordable(config, network),
        burst=settings.burst or GPU_BURST,
        threads=None if on_gpu else settings.threads,
        compile_layers=settings.compile,
    )


BUILDERS: dict[str, Callable[[RunConfig, Model], Engine]] = {"local": _local}


def episodes_at_once(config: RunConfig) -> int:
    """The most there will be. On a GPU every size of a batch up to it is captured beforehand, so not more."""
    attempts = config.rollout.group_size + ALGORITHMS[config.algorithm.name].needs_greedy
    training = config.rollout.rows_per_step * attempts
    most = config.rollout.max_concurrent
    evaluation = most if config.eval.rows is None else config.eval.rows * config.eval.samples
    return min(most, max(training, evaluation))


def given_cache(config: RunConfig, device: torch.device) -> int | None:
    """Tokens of the cache, where that can be told before there is a model; None: it depends on what memory is free."""
    tokens = config.engine.max_cached_tokens or (None if device.type == "cuda" else CPU_CACHE)
    return None if tokens is None else _whole_blocks(config, tokens, knob="engine.max_cached_tokens")


def most_cached(config: RunConfig) -> int:
    """Tokens of all episodes together, each in blocks of its own."""
    blocks = -(-config.rollout.max_context_tokens // BLOCK_SIZE)
    return episodes_at_once(config) * blocks * BLOCK_SIZE


def _affordable(config: RunConfig, network: Any) -> int:
    """Tokens for which there is memory, but no more than all episodes together can have."""
    share = config.engine.gpu_memory_share or GPU_MEMORY_SHARE
    gc.collect()  # compiled layers of a warm start refer to themselves
    torch.cuda.empty_cache()  # what the allocator keeps is free too
    free, _ = torch.cuda.mem_get_info(network.device)
    tokens = int(share * free) // bytes_per_token(network.config.get_text_config(), network.dtype)
    return _whole_blocks(config, min(tokens, most_cached(config)), knob="engine.gpu_memory_share")


def _whole_blocks(config: RunConfig, tokens: int, *, knob: str) -> int:
    """What a cache of so many tokens can hold. An episode that outgrew it would fail when it gets there."""
    held, longest = tokens // BLOCK_SIZE * BLOCK_SIZE, config.rollout.max_context_tokens
    if held < longest:
        raise ConfigError(
            f"the engine's cache of {tokens} tokens holds {held} in whole blocks of {BLOCK_SIZE}, and "
            f"rollout.max_context_tokens lets one context have {longest}: raise {knob}, or lower "
            "rollout.max_context_tokens"
        )
    return held
