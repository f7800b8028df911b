"""`agent-r1 bench step`: one whole GRPO step of multi-step tool use, alone or against another trainer.

Ours is made of the parts a run is made of: episodes through collector and engine, rewards, credit, update, weights back
to the engine. A rival owns its own loop; it is asked for steps and calls us after each of its own, so that the two take
turns in one process. Which rivals there are is not known here: whoever runs the benchmark passes one in.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch

from agent_r1.bench.episodes import Workload, check_lengths, episode_seed, make_collector
from agent_r1.bench.measure import free_memory, synchronize
from agent_r1.bench.models import SMOLLM2_135M, TINY, Shape, make_network
from agent_r1.bench.results import Figures, Row
from agent_r1.build.engine import GPU_BURST
from agent_r1.engines.local.local_engine import LocalEngine
from agent_r1.engines.local.model_runner import cast_weights
from agent_r1.learn.algorithms import get_algorithm
from agent_r1.learn.credit import assign_credit
from agent_r1.learn.learner import Learner
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.rollout.scoring import Scorer
from agent_r1.seeds import stable_seed
from agent_r1.train.garbage import set_parts_aside
from agent_r1.types import TaskRow, Trajectory

LR = 1e-6
BETAS = (0.9, 0.99)


class Rival(Protocol):
    """Another trainer, playing the same workload with a model of the same shape."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """What a reader has to know about it; goes into the row."""
        ...

    def run(self, steps: int, between: Callable[[], None]) -> list[float]:
        """Seconds of each of these GRPO steps; `between` is called after every one, outside its clock."""
        ...


MakeRival = Callable[[Workload, Shape, torch.device], Rival]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    shape: Shape
    workload: Workload
    tokens_per_pack: int
    batch_tokens: int


FULL = StepSizes(
    shape=SMOLLM2_135M,
    workload=Workload(
        rows=64,
        group_size=8,
        at_once=512,
        steps=5,
        prompt_tokens=128,
        response_tokens=64,
        observation_tokens=32,
    ),
    tokens_per_pack=131_072,
    batch_tokens=16_384,
)
QUICK = StepSizes(
    shape=TINY,
    workload=Workload(
        rows=2, group_size=2, at_once=4, steps=3, prompt_tokens=32, response_tokens=4, observation_tokens=24
    ),
    tokens_per_pack=512,
    batch_tokens=256,
)


class OurStep:
    """Called, it trains one step and says what each part of it took."""

    def __init__(self, sizes: StepSizes, device: torch.device) -> None:
        self._sizes, self._device, self._steps = sizes, device, 0
        gpu = device.type == "cuda"
        network = make_network(sizes.shape, dtype=torch.float32, device=device)
        workload = sizes.workload
        self._engine = LocalEngine(
            cast_weights(copy.deepcopy(network), torch.bfloat16 if gpu else torch.float32),
            seed=0,
            max_running=workload.at_once,
            max_batch_tokens=sizes.batch_tokens,
            max_cached_tokens=workload.at_once * (workload.episode_tokens + 64),
            burst=GPU_BURST,
        )
        self._algorithm = get_algorithm("grpo")
        self._learner = Learner(
            PolicyModel(network, autocast_dtype=torch.bfloat16 if gpu else None, compiled=gpu),
            loss=self._algorithm.loss,
            lr=LR,
            temperature=1.0,
            betas=BETAS,
            weight_decay=0.0,
            max_grad_norm=1.0,
            max_tokens_per_pack=sizes.tokens_per_pack,
            max_nonfinite_updates=1,
            prefix_sharing="auto",
        )
        self._collect = make_collector(workload, self._engine, sizes.shape.vocabulary)
        self._score = Scorer(reward=_reward, timeout=60.0)
        set_parts_aside()  # as a run does

    def __call__(self) -> Figures:
        self._steps += 1
        marks = [self._now()]
        rows = self._sizes.workload.task_rows(self._sizes.shape.vocabulary, seed=self._steps)

        async def play() -> Any:
            return await self._score(await self._collect(rows, seed=episode_seed(self._steps)))

        groups = asyncio.run(play())
        marks.append(self._now())
        credited = assign_credit(groups, self._algorithm)
        metrics = self._learner.update(credited)
        marks.append(self._now())
        asyncio.run(self._engine.load_weights(self._learner.weights().items(), self._steps))
        marks.append(self._now())
        check_lengths(groups, self._sizes.workload, self._sizes.shape.vocabulary)
        if metrics["skipped_updates"] or metrics["empty_update"]:
            raise AssertionError(f"this step trained nothing: {metrics}")
        collect, update, sync = (after - before for before, after in pairwise(marks))
        return {
            "seconds": marks[-1] - marks[0],
            "collect_seconds": collect,
            "update_seconds": update,
            "sync_seconds": sync,
        }

    def close(self) -> None:
        asyncio.run(self._engine.close())

    def _now(self) -> float:
        synchronize(self._device)
        return time.perf_counter()


async def _reward(row: TaskRow, trajectory: Trajectory) -> float:
    """A coin, so that attempts at a row differ."""
    return float(stable_seed(trajectory.trajectory_id) % 2)


@dataclass(kw_only=True)
class StepBench:
    sizes: StepSizes
    device: torch.device
    repeats: int
    make_rival: MakeRival | None = None
    start_up_seconds: float = field(default=0.0, init=False)

    @property
    def groups(self) -> dict[str, Callable[[], Iterator[Row]]]:
        return {"step": self.step}

    def close(self) -> None:
        free_memory(self.device)

    def step(self) -> Iterator[Row]:
        began = time.perf_counter()
        ours = OurStep(self.sizes, self.device)
        ours()
        self.start_up_seconds = time.perf_counter() - began
        try:
            yield self._against(ours) if self.make_rival is not None else self._alone(ours)
        finally:
            ours.close()

    def _alone(self, ours: OurStep) -> Row:
        return self._row("agent-r1", {}, [ours() for _ in range(self.repeats)])

    def _against(self, ours: OurStep) -> Row:
        assert self.make_rival is not None
        rival = self.make_rival(self.sizes.workload, self.sizes.shape, self.device)
        figures: list[Figures] = []
        seconds = rival.run(1 + self.repeats, between=lambda: figures.append(ours()))
        # Its first step is for warming up, and so is ours after it.
        repeats = [
            mine | {f"{rival.name}_seconds": theirs, "speed_ratio": theirs / mine["seconds"]}
            for mine, theirs in zip(figures[1:], seconds[1:], strict=True)
        ]
        return self._row(f"agent-r1 and {rival.name}", dict(rival.settings), repeats)

    def _row(self, name: str, more: dict[str, Any], repeats: list[Figures]) -> Row:
        sampled = self.sizes.workload.sampled_tokens
        return Row(
            name=f"step/{name}",
            settings={"shape": asdict(self.sizes.shape), **asdict(self.sizes.workload), **more},
            headline="seconds",
            repeats=[figures | {"sampled_tokens_per_second": sampled / figures["seconds"]} for figures in repeats],
            once={"start_up_seconds": self.start_up_seconds},
        )
