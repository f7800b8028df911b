"""`agent-r1 bench engine`: how fast the local engine samples, alone and in multi-step tool episodes.

decode     tokens per second by number of sequences, and as a share of what the memory's bandwidth allows
prompts    seconds from new prompts to complete responses
episodes   the same through collector, flow and tools, as a share of pure decoding with as many sequences
actions    episodes per second if every action is short, by the number of steps
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch

from agent_r1.bench.measure import (
    alternate,
    copy_bytes_per_second,
    floor_tokens_per_second,
    free_memory,
    synchronize,
)
from agent_r1.bench.models import BenchModel
from agent_r1.bench.results import Figures, Row
from agent_r1.bench.short_actions import Actions
from agent_r1.bench.workload import Workload, check_lengths, episode_seed, make_collector
from agent_r1.build.engine import GPU_BURST
from agent_r1.engines.base import Prompt, Sampler, Sampling
from agent_r1.engines.local.local_engine import LocalEngine
from agent_r1.train.garbage import freeze_parts

MAX_CACHE_BYTES = 60e9  # two engines must fit beside each other
Run = Callable[[Coroutine[Any, Any, Any]], Any]  # such as asyncio.run


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    sequences: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    workload: Workload
    tool_seconds: tuple[float, ...]
    cached_tokens: int
    batch_tokens: int
    actions: Actions


FULL = EngineSizes(
    sequences=(32, 256, 1024),
    prompt_tokens=448,
    new_tokens=128,
    workload=Workload(
        rows=128, group_size=8, at_once=256, steps=5, prompt_tokens=128, response_tokens=128, observation_tokens=32
    ),
    tool_seconds=(0.0, 0.05),
    cached_tokens=655_360,
    batch_tokens=16_384,
    actions=Actions(
        workload=Workload(
            rows=32, group_size=16, at_once=512, steps=1, prompt_tokens=160, response_tokens=24, observation_tokens=32
        ),
        steps=(5, 10, 30),
        mean_tokens=8,
    ),
)
QUICK = EngineSizes(
    sequences=(2, 4),
    prompt_tokens=32,
    new_tokens=6,
    workload=Workload(
        rows=2, group_size=2, at_once=4, steps=3, prompt_tokens=32, response_tokens=4, observation_tokens=24
    ),
    tool_seconds=(0.0, 0.002),
    cached_tokens=8_192,
    batch_tokens=256,
    actions=Actions(
        workload=Workload(
            rows=2, group_size=2, at_once=4, steps=1, prompt_tokens=32, response_tokens=6, observation_tokens=24
        ),
        steps=(2, 4),
        mean_tokens=3,
    ),
)


def sizes_for(sizes: EngineSizes, model: BenchModel) -> EngineSizes:
    """Half as many sequences at most, for models whose cache would take too much memory."""
    if model.kv_bytes_per_token(torch.bfloat16) * sizes.cached_tokens <= MAX_CACHE_BYTES:
        return sizes
    fewer = tuple(dict.fromkeys(min(each, max(sizes.sequences) // 2) for each in sizes.sequences))
    return replace(sizes, sequences=fewer, cached_tokens=sizes.cached_tokens // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """A number of sequences that each sample their next token, side by side."""

    sequences: int
    prompt_tokens: int
    new_tokens: int
    vocabulary: int

    @property
    def mean_context(self) -> float:
        return self.prompt_tokens + self.new_tokens / 2

    def prompts(self) -> list[list[int]]:
        shape = self.sequences, self.prompt_tokens
        drawn: list[list[int]] = np.random.default_rng().integers(self.vocabulary, size=shape).tolist()
        return drawn

    def tokens_per_second(self, engine: Sampler, run: Run = asyncio.run) -> float:
        """Prompts are computed before the clock starts, and the time of a request for one token is subtracted."""
        return self.sequences * self.new_tokens / float(run(self._seconds(engine)))

    def whole_seconds(self, engine: Sampler, run: Run = asyncio.run) -> float:
        """From new prompts to complete responses."""
        return float(run(self._whole_seconds(engine)))

    async def _whole_seconds(self, engine: Sampler) -> float:
        prompts, sampling = self.prompts(), Sampling(max_tokens=self.new_tokens)
        began = time.perf_counter()
        calls = [engine.generate(Prompt(ids), sampling, session=f"whole-{n}") for n, ids in enumerate(prompts)]
        completions = await asyncio.gather(*calls)
        seconds = time.perf_counter() - began
        assert all(len(completion.token_ids) == self.new_tokens for completion in completions)
        for number in range(len(prompts)):
            engine.release(f"whole-{number}")
        return seconds

    async def _seconds(self, engine: Sampler) -> float:
        contexts = {f"decode-{index}": prompt for index, prompt in enumerate(self.prompts())}

        async def extend(new_tokens: int) -> float:
            began, sampling = time.perf_counter(), Sampling(max_tokens=new_tokens)
            calls = [engine.generate(Prompt(ids), sampling, session=session) for session, ids in contexts.items()]
            for session, completion in zip(contexts, await asyncio.gather(*calls), strict=True):
                assert len(completion.token_ids) == new_tokens  # there are no stop ids
                contexts[session] = contexts[session] + completion.token_ids
            return time.perf_counter() - began

        await extend(1)
        overhead = await extend(1)
        seconds = await extend(1 + self.new_tokens) - overhead
        for session in contexts:
            engine.release(session)
        return seconds


@dataclass(kw_only=True)
class EngineBench:
    """Builds the engine when the first row needs it, and keeps it for the others."""

    model: BenchModel
    sizes: EngineSizes
    device: torch.device
    repeats: int
    start_up_seconds: float = field(default=0.0, init=False)
    _engine: LocalEngine | None = field(default=None, init=False)

    @property
    def groups(self) -> dict[str, Callable[[], Iterator[Row]]]:
        return {"decode": self.decode, "prompts": self.whole, "episodes": self.episodes, "actions": self.actions}

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def engine(self) -> LocalEngine:
        """The engine, warm: compilation and capture on first use are reported as start-up time."""
        if self._engine is None:
            began = time.perf_counter()
            self._engine = self._make_engine(self.model.network(dtype=self.dtype, device=self.device))
            for sequences in self.sizes.sequences:
                replace(self._decoding(sequences), new_tokens=4).tokens_per_second(self._engine)
            synchronize(self.device)
            freeze_parts()  # as a run does
            self.start_up_seconds = time.perf_counter() - began
        return self._engine

    def _make_engine(self, network: Any) -> LocalEngine:
        return LocalEngine(
            network,
            seed=0,
            max_running=max(*self.sizes.sequences, self.sizes.workload.at_once),
            max_batch_tokens=self.sizes.batch_tokens,
            max_cached_tokens=self.sizes.cached_tokens,
            burst=GPU_BURST,
        )

    def close(self) -> None:
        if self._engine is not None:
            asyncio.run(self._engine.close())
            self._engine = None
        free_memory(self.device)

    def decode(self) -> Iterator[Row]:
        bandwidth = copy_bytes_per_second(self.device)
        for sequences in self.sizes.sequences:
            decoding = self._decoding(sequences)
            speeds = alternate(self.decoders(decoding), self.repeats)
            floor = floor_tokens_per_second(
                sequences=sequences,
                context=decoding.mean_context,
                weight_bytes=(self.model.body_parameters + self.model.head_parameters) * self.dtype.itemsize,
                kv_bytes_per_token=self.model.kv_bytes_per_token(self.dtype),
                bytes_per_second=bandwidth,
            )
            yield Row(
                name=f"decode/{sequences} sequences",
                settings={**self.model.settings, **asdict(decoding), **self.rival_settings},
                headline="tokens_per_second",
                repeats=[self.decode_figures(speed) | {"floor_share": speed["engine"] / floor} for speed in speeds],
                once={
                    "floor_tokens_per_second": floor,
                    "copy_tb_per_second": bandwidth / 1e12,
                    "start_up_seconds": self.start_up_seconds,
                },
            )

    def decoders(self, decoding: Decoding) -> dict[str, Callable[[], float]]:
        """Functions that measure tokens per second, by name; subclasses add others."""
        return {name: partial(decoding.tokens_per_second, *side) for name, side in self.samplers().items()}

    def samplers(self) -> dict[str, tuple[Sampler, Run]]:
        """Samplers by name, each with a function that runs its coroutines; subclasses add other engines."""
        return {"engine": (self.engine(), asyncio.run)}

    def decode_figures(self, speed: Figures) -> Figures:
        return self.compare("tokens_per_second", speed)

    def compare(self, figure: str, sides: Figures) -> Figures:
        """Return our figure, the figure of each other engine, and how many times as fast ours is."""
        ours, others = sides["engine"], [name for name in self.samplers() if name != "engine"]
        figures = {figure: ours} | {f"{name}_{figure}": sides[name] for name in others}
        slower = figure == "seconds"
        ratios = {name: sides[name] / ours if slower else ours / sides[name] for name in others}
        return figures | {f"{name}_speed_ratio": ratio for name, ratio in ratios.items()}

    def whole(self) -> Iterator[Row]:
        for sequences in self.sizes.sequences:
            decoding = self._decoding(sequences)
            sides = {name: partial(decoding.whole_seconds, *side) for name, side in self.samplers().items()}
            for side in sides.values():
                side()  # warm up
            yield Row(
                name=f"prompts/{sequences} sequences",
                settings={**self.model.settings, **asdict(decoding), **self.rival_settings},
                headline="seconds",
                repeats=[self.compare("seconds", each) for each in alternate(sides, self.repeats)],
            )

    @property
    def rival_settings(self) -> dict[str, Any]:
        """Further settings of the rows that measure other engines too."""
        return {}

    def episodes(self) -> Iterator[Row]:
        engine, workload = self.engine(), self.sizes.workload
        few = replace(workload, rows=workload.at_once // workload.group_size)
        for side in self.samplers().values():
            _Player(*side, few, self.model.vocabulary)()  # warm up, chat template included
        # As many sequences as concurrent episodes, with their mean context.
        decoding = Decoding(
            sequences=workload.at_once,
            prompt_tokens=round(workload.mean_context - workload.response_tokens / 2),
            new_tokens=workload.response_tokens,
            vocabulary=self.model.vocabulary,
        )
        for tool_seconds in self.sizes.tool_seconds:
            timed = replace(workload, tool_seconds=tool_seconds)
            sides: dict[str, Callable[[], float]] = {
                name: _Player(*side, timed, self.model.vocabulary) for name, side in self.samplers().items()
            }
            sides["decode"] = partial(decoding.tokens_per_second, engine)
            speeds = alternate(sides, self.repeats)
            yield Row(
                name=f"episodes/tools of {1000 * tool_seconds:g} ms",
                settings={**self.model.settings, **asdict(timed), **self.rival_settings},
                headline="tokens_per_second",
                repeats=[
                    {
                        "seconds": timed.sampled_tokens / speed["engine"],
                        **self.compare("tokens_per_second", speed),
                        "decode_tokens_per_second": speed["decode"],
                        "decode_share": speed["engine"] / speed["decode"],
                    }
                    for speed in speeds
                ],
            )

    def actions(self) -> Iterator[Row]:
        """Replace the engine by one whose model ends its responses: two engines would not fit into memory."""
        self.close()
        self._engine = self._make_engine(self.sizes.actions.network(self.model, dtype=self.dtype, device=self.device))
        freeze_parts()
        yield from self.sizes.actions.rows(self._engine, self.model, self.repeats)
        self.close()

    def _decoding(self, sequences: int) -> Decoding:
        return Decoding(
            sequences=sequences,
            prompt_tokens=self.sizes.prompt_tokens,
            new_tokens=self.sizes.new_tokens,
            vocabulary=self.model.vocabulary,
        )


class _Player:
    """Plays a workload's episodes, with new rows at each call, and returns sampled tokens per second."""

    def __init__(self, engine: Sampler, run: Run, workload: Workload, vocabulary: int) -> None:
        self._workload, self._vocabulary, self._run = workload, vocabulary, run
        self._collect = make_collector(workload, engine, vocabulary)
        self._numbers = count()

    def __call__(self) -> float:
        number = next(self._numbers)
        rows = self._workload.task_rows(self._vocabulary, seed=number)
        began = time.perf_counter()
        groups = self._run(self._collect(rows, seed=episode_seed(number)))
        seconds = time.perf_counter() - began
        check_lengths(groups, self._workload, self._vocabulary)
        return self._workload.sampled_tokens / seconds
