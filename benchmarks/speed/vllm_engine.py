"""vLLM's asynchronous engine, as a rival of `python -m benchmarks.speed engine --shape 1.5b --against vllm`.

What is equal on both sides: the shape of the model, bf16, random weights, the prompts, the number of new tokens,
sampling at temperature 1 with the log-prob of each sampled token, the collector and its episodes, the GPU. Where vLLM
has a choice it gets the faster one: CUDA graphs for every batch up to the largest, asynchronous scheduling, prefix
caching, prompt batches of the same size as ours, its asynchronous API with one answer per request, no detokenisation,
no statistics, and no search for our end-of-text token, which lies beyond the vocabulary. Its engine runs in a process
of its own, as usual.

Needs `pip install vllm`. Tried on a CPU with 0.32; GPU settings have not been run yet.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Coroutine
from itertools import count
from typing import Any

import torch
import vllm  # type: ignore[import-not-found, unused-ignore]
from vllm import SamplingParams  # type: ignore[import-not-found, unused-ignore]
from vllm.engine.arg_utils import AsyncEngineArgs  # type: ignore[import-not-found, unused-ignore]
from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found, unused-ignore]
from vllm.v1.engine.async_llm import AsyncLLM  # type: ignore[import-not-found, unused-ignore]

from agent_r1.bench.engine_speed import EngineSizes
from agent_r1.bench.measure import GIB
from agent_r1.bench.models import BenchModel
from agent_r1.engines.base import Completion, Prompt, Sampling

WORKSPACE = 6 * GIB  # activations of a prompt batch and graphs, beside weights and cache


class VLLMEngine:
    """Implements `EngineRival` and `Sampler`."""

    name = "vllm"

    def __init__(self, model: BenchModel, sizes: EngineSizes, device: torch.device) -> None:
        self._numbers, self._loop, self._vocabulary = count(), asyncio.new_event_loop(), model.vocabulary
        self._folder = tempfile.TemporaryDirectory()
        model.config.architectures = ["LlamaForCausalLM"]
        model.config.save_pretrained(self._folder.name)
        gpu = device.type == "cuda"
        most = max(*sizes.sequences, sizes.workload.at_once)
        own: dict[str, Any] = {"enforce_eager": True}
        if gpu:
            cache = model.kv_bytes_per_token(torch.bfloat16) * sizes.cached_tokens
            needed = 2 * model.parameters + cache + WORKSPACE
            own = {
                "kv_cache_memory_bytes": cache,
                "gpu_memory_utilization": min(0.9, needed / torch.cuda.get_device_properties(device).total_memory),
                "max_cudagraph_capture_size": most,
                "async_scheduling": True,
            }
        else:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        self._llm = self.run(
            self._start(
                model=self._folder.name,
                load_format="dummy",
                skip_tokenizer_init=True,
                dtype="bfloat16" if gpu else "float32",
                max_model_len=min(model.config.max_position_embeddings, 8192),
                max_num_seqs=most,
                max_num_batched_tokens=max(sizes.batch_tokens, most),
                enable_prefix_caching=True,
                logprobs_mode="processed_logprobs",
                generation_config="vllm",
                disable_log_stats=True,
                seed=0,
                **own,
            )
        )
        self.settings = {
            "vllm": vllm.__version__,
            **{name: str(value) for name, value in own.items()},
        }
        self.sampler = self

    async def _start(self, **settings: Any) -> Any:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    async def generate(self, prompt: Prompt, sampling: Sampling, *, session: str) -> Completion:
        asked = SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            stop_token_ids=[token for token in sampling.stop_ids if token < self._vocabulary],
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request = f"{session}:{next(self._numbers)}"
        final: Any = None
        async for output in self._llm.generate({"prompt_token_ids": list(prompt.ids)}, asked, request_id=request):
            final = output
        answer = final.outputs[0]
        ids = list(answer.token_ids)
        logprobs = [step[token].logprob for token, step in zip(ids, answer.logprobs, strict=True)]
        return Completion(token_ids=ids, logprobs=logprobs, stop="length", versions=((0, len(ids)),))

    def release(self, session: str) -> None:
        """Its prefix cache forgets by itself."""

    def close(self) -> None:
        self._llm.shutdown()
        self._loop.close()
        self._folder.cleanup()


make_rival = VLLMEngine
