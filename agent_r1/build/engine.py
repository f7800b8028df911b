"""Build the engine of a run and choose default sizes.

The engine itself is imported when it is built: a plan checks its sizes without loading transformers.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from agent_r1.build.models.device import model_dtype
from agent_r1.compiling import has_compiler
from agent_r1.config import RunConfig
from agent_r1.engines.base import Engine
from agent_r1.engines.local.blocks import BLOCK_SIZE
from agent_r1.errors import ConfigError
from agent_r1.learn.algorithms import ALGORITHMS

if TYPE_CHECKING:
    from agent_r1.build.models.load import Model

GPU_ONLY = ("gpu_memory_share", "burst", "compile")
CPU_CACHE = 131_072  # tokens
GPU_RUNNING = 1024  # sequences; more are hardly faster per token
GPU_BURST = 16  # tokens of a sequence before the host looks at them
GPU_MEMORY_SHARE = 0.3  # the learner needs the rest


def build_engine(config: RunConfig, model: Model) -> Engine:
    return BUILDERS[config.engine.kind](config, model)


def _build_local(config: RunConfig, model: Model) -> Engine:
    """Sample from a copy of the model, on the same device."""
    from agent_r1.engines.local.fp32_head import use_fp32_head
    from agent_r1.engines.local.local_engine import LocalEngine
    from agent_r1.engines.local.model_runner import cast_weights

    settings = config.engine
    network = cast_weights(copy.deepcopy(model.network), model_dtype(config))
    if config.model.fp32_head:
        use_fp32_head(network, model.network.get_output_embeddings())
    network.set_attn_implementation("eager")  # a learner may have set another on the original
    on_gpu = network.device.type == "cuda"
    if on_gpu and not has_compiler():
        raise ConfigError(
            "sampling on a GPU needs a C compiler for Triton's kernels, and none is on the path: install one "
            "(for example apt-get install gcc python3-dev), or set model.device=cpu"
        )
    return LocalEngine(
        network,
        seed=config.seed,
        max_running=settings.max_running or (min(GPU_RUNNING, max_episodes(config)) if on_gpu else 256),
        max_batch_tokens=settings.max_batch_tokens or (16_384 if on_gpu else 2048),
        max_cached_tokens=configured_cache_tokens(config, network.device) or _free_cache_tokens(config, network),
        burst=settings.burst or GPU_BURST,
        threads=None if on_gpu else settings.threads,
        compile_layers=settings.compile,
    )


BUILDERS: dict[str, Callable[[RunConfig, Model], Engine]] = {"local": _build_local}


def max_episodes(config: RunConfig) -> int:
    """Return how many episodes play at once at most. On a GPU, every batch size up to it is captured beforehand."""
    attempts = config.rollout.group_size + ALGORITHMS[config.algorithm.name].needs_greedy
    training = config.rollout.rows_per_step * attempts
    most = config.rollout.max_concurrent
    evaluation = most if config.eval.rows is None else config.eval.rows * config.eval.samples
    return min(most, max(training, evaluation))


def configured_cache_tokens(config: RunConfig, device: torch.device) -> int | None:
    """Return the size of the cache, or None if it depends on free GPU memory. Raises ConfigError if it is too small."""
    tokens = config.engine.max_cached_tokens or (None if device.type == "cuda" else CPU_CACHE)
    return None if tokens is None else _whole_blocks(config, tokens, setting="engine.max_cached_tokens")


def max_cached_tokens(config: RunConfig) -> int:
    """Return the tokens that all episodes together can have, each in its own blocks."""
    blocks = -(-config.rollout.max_context_tokens // BLOCK_SIZE)
    return max_episodes(config) * blocks * BLOCK_SIZE


def _free_cache_tokens(config: RunConfig, network: Any) -> int:
    """Return the tokens that fit into free GPU memory, at most what all episodes together can have."""
    from agent_r1.engines.local.gpu.gpu_attention import bytes_per_token

    share = config.engine.gpu_memory_share or GPU_MEMORY_SHARE
    gc.collect()  # compiled layers of a warm start refer to themselves
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(network.device)
    tokens = int(share * free) // bytes_per_token(network.config.get_text_config(), network.dtype)
    return _whole_blocks(config, min(tokens, max_cached_tokens(config)), setting="engine.gpu_memory_share")


def _whole_blocks(config: RunConfig, tokens: int, *, setting: str) -> int:
    """Round down to whole blocks. Raises ConfigError if the longest context would not fit."""
    held, longest = tokens // BLOCK_SIZE * BLOCK_SIZE, config.rollout.max_context_tokens
    if held < longest:
        raise ConfigError(
            f"the engine's cache of {tokens} tokens holds {held} in blocks of {BLOCK_SIZE}, less than "
            f"rollout.max_context_tokens={longest}: raise {setting}, or lower rollout.max_context_tokens"
        )
    return held
