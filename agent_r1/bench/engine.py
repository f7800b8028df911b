"""`agent-r1 bench engine`: how fast the local engine samples, alone and under multi-step tool episodes.

decode     tokens per second at a concurrency, against `model.generate` and against the memory's bandwidth
episodes   the same through collector, flow and tools, as a share of pure decoding at that concurrency
append     what step t of a growing episode costs: only its new tokens should be computed
soak       thousands of short episodes with tool errors and cancelled requests: nothing may grow or get lost
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from statistics import fmean

import torch

from agent_r1.bench.append import Append
from agent_r1.bench.arithmetic import floor_tokens_per_second
from agent_r1.bench.decode import Decoding
from agent_r1.bench.episodes import Workload, check_lengths, episode_seed, make_collector
from agent_r1.bench.measure import alternate, copy_bytes_per_second, free_memory, synchronize
from agent_r1.bench.models import SMOLLM2_135M, TINY, Shape, make_network
from agent_r1.bench.results import Figures, Row
from agent_r1.bench.soak import Soak
from agent_r1.build.engine import GPU_BURST
from agent_r1.engines.local.local_engine import LocalEngine
from agent_r1.train.garbage import set_parts_aside


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    shape: Shape
    sequences: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    workload: Workload
    tool_seconds: tuple[float, ...]
    append: Append
    soak: Soak
    cached_tokens: int
    batch_tokens: int


FULL = EngineSizes(
    shape=SMOLLM2_135M,
    sequences=(32, 256, 1024),
    prompt_tokens=448,
    new_tokens=128,
    workload=Workload(
        rows=128,
        group_size=8,
        at_once=256,
        steps=5,
        prompt_tokens=128,
        response_tokens=128,
        observation_tokens=32,
    ),
    tool_seconds=(0.0, 0.05),
    append=Append(episodes=32, steps=20, prompt_tokens=256, response_tokens=64, observation_tokens=32),
    soak=Soak(rounds=8, episodes=512, impatient=64, at_once=256),
    cached_tokens=655_360,
    batch_tokens=16_384,
)
QUICK = EngineSizes(
    shape=TINY,
    sequences=(2, 4),
    prompt_tokens=32,
    new_tokens=6,
    workload=Workload(
        rows=2, group_size=2, at_once=4, steps=3, prompt_tokens=32, response_tokens=4, observation_tokens=24
    ),
    tool_seconds=(0.0, 0.002),
    append=Append(episodes=2, steps=6, prompt_tokens=32, response_tokens=4, observation_tokens=8),
    soak=Soak(rounds=4, episodes=50, impatient=6, at_once=50, response_tokens=2),
    cached_tokens=8_192,
    batch_tokens=256,
)


@dataclass(kw_only=True)
class EngineBench:
    """Makes the engine when the first row needs it, and keeps it for the others."""

    sizes: EngineSizes
    device: torch.device
    repeats: int
    start_up_seconds: float = field(default=0.0, init=False)
    _engine: LocalEngine | None = field(default=None, init=False)

    @property
    def groups(self) -> dict[str, Callable[[], Iterator[Row]]]:
        return {"decode": self.decode, "episodes": self.episodes, "append": self.append, "soak": self.soak}

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def engine(self) -> LocalEngine:
        """Ready to be measured: what is compiled and captured on first use is paid for, and reported, here."""
        if self._engine is None:
            began = time.perf_counter()
            self._engine = LocalEngine(
                make_network(self.sizes.shape, dtype=self.dtype, device=self.device),
                seed=0,
                max_running=max(*self.sizes.sequences, self.sizes.workload.at_once),
                max_batch_tokens=self.sizes.batch_tokens,
                max_cached_tokens=self.sizes.cached_tokens,
                burst=GPU_BURST,
            )
            for sequences in self.sizes.sequences:
                self._decoding(sequences, new_tokens=4).tokens_per_second(self._engine)
            synchronize(self.device)
            set_parts_aside()  # as a run does
            self.start_up_seconds = time.perf_counter() - began
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            asyncio.run(self._engine.close())
            self._engine = None
        free_memory(self.device)

    def decode(self) -> Iterator[Row]:
        engine, shape = self.engine(), self.sizes.shape
        rival = make_network(shape, dtype=self.dtype, device=self.device).eval()
        rival.set_attn_implementation("sdpa")
        bandwidth = copy_bytes_per_second(self.device)
        for sequences in self.sizes.sequences:
            decoding = self._decoding(sequences)
            replace(decoding, new_tokens=4).generate_tokens_per_second(rival)  # warm, as the engine is
            speeds = alternate(
                {
                    "engine": partial(decoding.tokens_per_second, engine),
                    "generate": partial(decoding.generate_tokens_per_second, rival),
                },
                self.repeats,
            )
            floor = floor_tokens_per_second(
                sequences=sequences,
                context=decoding.mean_context,
                weight_bytes=shape.parameters * self.dtype.itemsize,
                kv_bytes_per_token=shape.kv_bytes_per_token(self.dtype),
                bytes_per_second=bandwidth,
            )
            yield Row(
                name=f"decode/{sequences} sequences",
                settings={"shape": asdict(shape), **asdict(decoding)},
                headline="tokens_per_second",
                repeats=[
                    {
                        "tokens_per_second": speed["engine"],
                        "generate_tokens_per_second": speed["generate"],
                        "speed_ratio": speed["engine"] / speed["generate"],
                        "floor_share": speed["engine"] / floor,
                    }
                    for speed in speeds
                ],
                once={
                    "floor_tokens_per_second": floor,
                    "copy_tb_per_second": bandwidth / 1e12,
                    "start_up_seconds": self.start_up_seconds,
                },
            )

    def episodes(self) -> Iterator[Row]:
        engine = self.engine()
        few = replace(self.sizes.workload, rows=self.sizes.workload.at_once // self.sizes.workload.group_size)
        _Player(engine, few, self.sizes.shape.vocabulary)()  # warm, templates included
        for tool_seconds in self.sizes.tool_seconds:
            workload = replace(self.sizes.workload, tool_seconds=tool_seconds)
            # As many sequences as episodes under way, with the context they have on average.
            alone = Decoding(
                sequences=workload.at_once,
                prompt_tokens=round(workload.mean_context - workload.response_tokens / 2),
                new_tokens=workload.response_tokens,
                vocabulary=self.sizes.shape.vocabulary,
            )
            play = _Player(engine, workload, self.sizes.shape.vocabulary)
            sides: dict[str, Callable[[], float]] = {"play": play, "decode": partial(alone.tokens_per_second, engine)}
            speeds = alternate(sides, self.repeats)
            yield Row(
                name=f"episodes/tools of {1000 * tool_seconds:g} ms",
                settings={"shape": asdict(self.sizes.shape), **asdict(workload)},
                headline="tokens_per_second",
                repeats=[
                    {
                        "seconds": workload.sampled_tokens / speed["play"],
                        "tokens_per_second": speed["play"],
                        "decode_tokens_per_second": speed["decode"],
                        "decode_share": speed["play"] / speed["decode"],
                    }
                    for speed in speeds
                ],
            )

    def append(self) -> Iterator[Row]:
        """A line per step, and one that says how much more the last steps cost than the first that have a cache."""
        engine, append = self.engine(), self.sizes.append
        append.play(engine, self.sizes.shape.vocabulary)
        runs = [append.play(engine, self.sizes.shape.vocabulary) for _ in range(self.repeats)]
        settings = {"shape": asdict(self.sizes.shape), **asdict(append)}
        for index in range(append.steps):
            yield Row(
                name=f"append/step {index + 1}",
                settings=settings,
                headline="seconds",
                repeats=[run[index] for run in runs],
            )
        few = max(1, append.steps // 4)
        yield Row(
            name=f"append/last {few} steps over the {few} after the first",
            settings=settings,
            headline="seconds_ratio",
            repeats=[{"seconds_ratio": _mean_seconds(run[-few:]) / _mean_seconds(run[1 : 1 + few])} for run in runs],
        )

    def soak(self) -> Iterator[Row]:
        engine, began = self.engine(), time.perf_counter()
        figures = self.sizes.soak.run(engine, self.sizes.shape.vocabulary, self.device)
        seconds = time.perf_counter() - began
        yield Row(
            name="soak/all rounds",
            settings={"shape": asdict(self.sizes.shape), **asdict(self.sizes.soak)},
            headline="seconds",
            repeats=[],
            once={"seconds": seconds, **figures},
        )

    def _decoding(self, sequences: int, new_tokens: int | None = None) -> Decoding:
        sizes = self.sizes
        return Decoding(
            sequences=sequences,
            prompt_tokens=sizes.prompt_tokens,
            new_tokens=new_tokens or sizes.new_tokens,
            vocabulary=sizes.shape.vocabulary,
        )


class _Player:
    """Plays the workload's episodes, other rows each time; called, it says how many tokens per second were sampled."""

    def __init__(self, engine: LocalEngine, workload: Workload, vocabulary: int) -> None:
        self._workload, self._vocabulary = workload, vocabulary
        self._collect = make_collector(workload, engine, vocabulary)
        self._numbers = count()

    def __call__(self) -> float:
        number = next(self._numbers)
        rows = self._workload.task_rows(self._vocabulary, seed=number)
        began = time.perf_counter()
        groups = asyncio.run(self._collect(rows, seed=episode_seed(number)))
        seconds = time.perf_counter() - began
        check_lengths(groups, self._workload, self._vocabulary)
        return self._workload.sampled_tokens / seconds


def _mean_seconds(steps: list[Figures]) -> float:
    return fmean(step["seconds"] for step in steps)
