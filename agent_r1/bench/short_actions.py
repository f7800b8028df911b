"""Episodes of many short actions, in which the host, not the model, is the limit.

A response ends when the model says so, after eight tokens on average, so the engine cannot know its length: the output
head gets a bias that makes the stop token as likely as that. Everything else is as in `workload.py`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

import torch

from agent_r1.bench.models import PAD, BenchModel, make_tokenizer
from agent_r1.bench.results import Figures, Row
from agent_r1.bench.workload import Workload, episode_seed, make_collector
from agent_r1.engines.base import Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """Episodes whose responses have up to `workload.response_tokens` tokens, `mean_tokens` on average."""

    workload: Workload
    steps: tuple[int, ...]  # steps per episode; one row of results each
    mean_tokens: int

    def network(self, model: BenchModel, *, dtype: torch.dtype, device: torch.device) -> Any:
        """A network that ends a response with probability 1 / `mean_tokens` at every token."""
        made = model.network(dtype=dtype, device=device)
        head, stop = made.get_output_embeddings(), stop_id(model.vocabulary)
        biased = torch.nn.Linear(head.in_features, head.out_features, bias=True, dtype=dtype, device=device)
        biased.weight = head.weight
        with torch.no_grad():
            biased.bias.zero_()
            # The other logits are near zero, as random weights are small.
            biased.bias[stop] = math.log(head.out_features / (self.mean_tokens - 1))
        made.set_output_embeddings(biased)
        return made

    def rows(self, engine: Sampler, model: BenchModel, repeats: int) -> Iterator[Row]:
        numbers = count()
        for steps in self.steps:
            workload = replace(self.workload, steps=steps)
            self._play(engine, model.vocabulary, workload, next(numbers))  # warm up
            yield Row(
                name=f"actions/{steps} steps",
                settings={**model.settings, **asdict(workload), "mean_tokens": self.mean_tokens},
                headline="episodes_per_second",
                repeats=[self._play(engine, model.vocabulary, workload, next(numbers)) for _ in range(repeats)],
            )

    def _play(self, engine: Sampler, vocabulary: int, workload: Workload, number: int) -> Figures:
        collect = make_collector(workload, engine, vocabulary, stop_ids=(stop_id(vocabulary),))
        rows = workload.task_rows(vocabulary, seed=number)
        began, host = time.perf_counter(), time.process_time()
        groups = asyncio.run(collect(rows, seed=episode_seed(number)))
        host, seconds = time.process_time() - host, time.perf_counter() - began
        played = [trajectory for group in groups for trajectory in group.trajectories]
        calls = sum(len(trajectory.steps) for trajectory in played)
        if calls != workload.episodes * workload.steps:
            raise AssertionError(f"expected {workload.steps} steps per episode, got {calls} in all: {played[0].error}")
        tokens = sum(trajectory.num_response_tokens for trajectory in played)
        return {
            "episodes_per_second": workload.episodes / seconds,
            "calls_per_second": calls / seconds,
            "tokens_per_second": tokens / seconds,
            "tokens_per_call": tokens / calls,
            "host_ms_per_call": 1000 * host / calls,
        }


def stop_id(vocabulary: int) -> int:
    """Padding, which no template writes."""
    found: int = make_tokenizer(vocabulary).convert_tokens_to_ids(PAD)
    return found
