"""The local engine as on a CPU, and as on a GPU in short bursts. Without a GPU, its kernels are in plain torch."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from agent_r1.engines.base import Completion, Prompt, Sampling
from agent_r1.engines.local.gpu import torch_kernels
from agent_r1.engines.local.local_engine import LocalEngine

CPU: dict[str, Any] = {}
GPU: dict[str, Any] = (
    {"device": "cuda", "burst": 3, "compile_layers": False}  # not compiled, or every test would wait for it
    if torch.cuda.is_available()
    else {"kernels": torch_kernels, "burst": 3}
)
both = pytest.mark.parametrize("side", [CPU, GPU], ids=["cpu", "gpu"])


def make_engine(model: Any, *, device: str = "cpu", **settings: Any) -> LocalEngine:
    sizes = {"max_running": 8, "max_batch_tokens": 64, "max_cached_tokens": 512, "block_size": 4, "burst": 1}
    return LocalEngine(copy.deepcopy(model).to(device), threads=1, **({"seed": 0} | sizes | settings))


@contextmanager
def engine(model: Any, **settings: Any) -> Iterator[LocalEngine]:
    """An engine on a copy of the model, with small blocks so that sequences span several."""
    local = make_engine(model, **({"max_running": 16, "max_cached_tokens": 1024} | settings))
    yield local
    asyncio.run(local.close())


def generate(local: LocalEngine, asked: list[list[int]], sampling: Sampling) -> list[Completion]:
    """Send all prompts at once, each in a separate session."""

    async def main() -> list[Completion]:
        return await asyncio.gather(
            *(local.generate(Prompt(prompt), sampling, session=str(i)) for i, prompt in enumerate(asked))
        )

    return asyncio.run(main())


def assert_logprobs_match(model: Any, prompt: list[int], completion: Completion, temperature: float = 1.0) -> None:
    """Compare with one plain forward over prompt and response."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion.token_ids])).logits[0].double()
    expected = torch.log_softmax(logits / temperature, dim=-1)[len(prompt) - 1 : -1]
    expected = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion.logprobs, dtype=torch.float64), expected, rtol=0, atol=1e-4)
