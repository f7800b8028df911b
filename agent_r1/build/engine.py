"""Build the engine of a run and choose default sizes.

The engine itself is imported when it is built: a plan checks its sizes without loading transformers.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from agent_r1.build.models.device import engine_device, model_device, model_dtype
from agent_r1.compute.compiling import has_compiler
from agent_r1.config import RunConfig
from agent_r1.config.schema import LocalEngineConfig, TransformersEngineConfig, VLLMEngineConfig
from agent_r1.engines.base import Engine
from agent_r1.engines.local.blocks import BLOCK_SIZE
from agent_r1.errors import ConfigError, UnsupportedModelError
from agent_r1.learn.algorithms import ALGORITHMS
from agent_r1.learn.model.lora import LoRA

if TYPE_CHECKING:
    from agent_r1.build.models.load import Model

GPU_ONLY = ("gpu_memory_share", "burst", "compile")
CPU_CACHE = 131_072  # tokens
TRANSFORMERS_RUNNING = 64  # requests that `generate` computes together
GPU_RUNNING = 1024  # sequences; more are hardly faster per token
GPU_BURST = 16  # tokens of a sequence before the host looks at them
GPU_MEMORY_SHARE = 0.3  # the learner needs the rest


def build_engine(config: RunConfig, model: Model, *, logs: Path | None = None, adapters: LoRA | None = None) -> Engine:
    """Build the engine of a run.

    logs: the folder for the logs of servers that the engine starts; None: a temporary one.
    adapters: what the engine will load; its other weights stay. A local engine shares them with the model.
    """
    if model.pictures is not None and config.engine.kind != "local":
        raise ConfigError(
            f"engine.kind={config.engine.kind} takes no pictures, but the model does: set engine.kind=local"
        )
    return BUILDERS[config.engine.kind](config, model, logs, adapters)


def _build_local(config: RunConfig, model: Model, logs: Path | None, adapters: LoRA | None) -> Engine:
    """Sample from a copy of the model."""
    from agent_r1.engines.local.local_engine import LocalEngine
    from agent_r1.engines.local.weights import LowRank, adopt_weights, cast_weights, sharing_copy

    settings, low_rank = config.engine, None
    assert isinstance(settings, LocalEngineConfig)
    if model.pictures is not None and adapters is not None:
        raise ConfigError("lora.share_base does not work with a model that takes pictures: leave it out")
    if adapters is not None:
        network = sharing_copy(model.network)
        low_rank = LowRank(names=adapters.layers_of(network), rank=adapters.rank, scale=adapters.scale)
    else:
        network = cast_weights(copy.deepcopy(model.network), model_dtype(config))
    _prepare_network(config, model, network)
    on_gpu = network.device.type == "cuda"
    if on_gpu and not has_compiler():
        raise ConfigError(
            "sampling on a GPU needs a C compiler on the path, for example from apt-get install gcc python3-dev"
        )
    try:
        engine = LocalEngine(
            network,
            seed=config.seed,
            max_running=settings.max_running or (min(GPU_RUNNING, max_episodes(config)) if on_gpu else 256),
            max_batch_tokens=settings.max_batch_tokens or (16_384 if on_gpu else 2048),
            max_cached_tokens=configured_cache_tokens(config, network.device) or _free_cache_tokens(config, network),
            burst=settings.burst or GPU_BURST,
            threads=None if on_gpu else settings.threads,
            compile_layers=settings.compile,
            adapters=low_rank,
            pictures=model.pictures,
        )
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{error}: set engine.kind=transformers, which is slower but exact") from error
    if adapters is not None:
        adopt_weights(model.network, network)
    return engine


def _build_vllm(config: RunConfig, model: Model, logs: Path | None, adapters: LoRA | None) -> Engine:
    from agent_r1.engines.vllm.assemble import assemble_engine
    from agent_r1.engines.vllm.shared_weights import AdapterShape

    assert isinstance(config.engine, VLLMEngineConfig)
    shape = None
    if adapters is not None:
        layers = adapters.layers_of(model.network)
        shape = AdapterShape(rank=adapters.rank, alpha=adapters.alpha, layers=layers)
    return assemble_engine(
        model.network,
        dtype=model_dtype(config),
        device=model_device(config),
        seed=config.seed,
        max_context_tokens=config.rollout.max_context_tokens,
        top_k=config.rollout.top_k,
        logs=logs,
        adapters=shape,
        **config.engine.model_dump(exclude={"kind", "send_adapters"}),
    )


def _build_transformers(config: RunConfig, model: Model, logs: Path | None, adapters: LoRA | None) -> Engine:
    """Sample from a copy of the model."""
    from agent_r1.engines.local.weights import cast_weights
    from agent_r1.engines.transformers_engine import TransformersEngine

    settings = config.engine
    assert isinstance(settings, TransformersEngineConfig)
    network = cast_weights(copy.deepcopy(model.network), model_dtype(config))
    _prepare_network(config, model, network)
    return TransformersEngine(
        network,
        seed=config.seed,
        max_running=settings.max_running or TRANSFORMERS_RUNNING,
        max_cached_tokens=settings.max_cached_tokens or max(CPU_CACHE, config.rollout.max_context_tokens),
        threads=settings.threads if network.device.type == "cpu" else None,
    )


def _prepare_network(config: RunConfig, model: Model, network: Any) -> None:
    from agent_r1.engines.local.weights import use_fp32_head
    from agent_r1.vision.eyes import Eyes

    if config.model.fp32_head:
        use_fp32_head(network, model.network.get_output_embeddings())
    network.to(engine_device(config))
    # A learner may have set another attention on the original. A vision tower keeps its own, which is faster than
    # eager.
    decoder = network if model.pictures is None else Eyes(network, model.pictures).decoder
    decoder.set_attn_implementation("eager")


BUILDERS: dict[str, Callable[[RunConfig, Model, Path | None, LoRA | None], Engine]] = {
    "local": _build_local,
    "transformers": _build_transformers,
    "vllm": _build_vllm,
}


def merges_adapters(config: RunConfig) -> bool:
    """Whether the engine loads weights with the adapters merged into them, instead of the adapters alone."""
    shared = config.lora is not None and config.lora.share_base
    return not shared and not (config.engine.kind == "vllm" and config.engine.send_adapters)


def max_episodes(config: RunConfig) -> int:
    """Return how many episodes play at once at most. On a GPU, every batch size up to it is captured beforehand."""
    attempts = config.rollout.group_size + ALGORITHMS[config.algorithm.name].needs_greedy
    ahead = config.trainer.max_staleness if config.trainer.mode == "async" else 0
    training = config.rollout.rows_per_step * attempts * (1 + ahead)
    most = config.rollout.max_concurrent
    evaluation = most if config.eval.rows is None else config.eval.rows * config.eval.samples
    return min(most, max(training, evaluation))


def configured_cache_tokens(config: RunConfig, device: torch.device) -> int | None:
    """Return the size of the cache, or None if it depends on free GPU memory. Raises ConfigError if it is too small."""
    if not isinstance(config.engine, LocalEngineConfig):
        return None
    tokens = config.engine.max_cached_tokens or (None if device.type == "cuda" else CPU_CACHE)
    return None if tokens is None else _whole_blocks(config, tokens, setting="engine.max_cached_tokens")


def max_cached_tokens(config: RunConfig) -> int:
    """Return the tokens that all episodes together can have, each in its own blocks."""
    blocks = -(-config.rollout.max_context_tokens // BLOCK_SIZE)
    return max_episodes(config) * blocks * BLOCK_SIZE


def _free_cache_tokens(config: RunConfig, network: Any) -> int:
    """Return the tokens that fit into free GPU memory, but no more than all episodes together can have."""
    from agent_r1.engines.local.gpu.gpu_attention import bytes_per_token

    assert isinstance(config.engine, LocalEngineConfig)
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
            f"a cache of {tokens} tokens holds {held}, less than rollout.max_context_tokens={longest}: raise {setting}"
        )
    return held
