"""`agent-r1 bench step`: one whole GRPO step of multi-step tool use.

The step uses the parts of a run: episodes through collector and engine, rewards, credit, update, weights back to the
engine.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import torch

from agent_r1.bench.measure import free_memory, synchronize
from agent_r1.bench.models import BenchModel
from agent_r1.bench.results import Figures, Row
from agent_r1.bench.workload import Workload, check_lengths, episode_seed, make_collector
from agent_r1.build.engine import GPU_BURST
from agent_r1.engines.local.local_engine import LocalEngine
from agent_r1.engines.local.weights import cast_weights
from agent_r1.learn.algorithms import get_algorithm
from agent_r1.learn.credit import assign_credit
from agent_r1.learn.learner import Learner
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.rollout.scoring import Scorer
from agent_r1.seeds import stable_seed
from agent_r1.train.garbage import freeze_parts
from agent_r1.types import TaskRow, Trajectory

LR = 1e-6
BETAS = (0.9, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    workload: Workload
    tokens_per_pack: int
    batch_tokens: int


FULL = StepSizes(
    workload=Workload(
        rows=64, group_size=8, at_once=512, steps=5, prompt_tokens=128, response_tokens=64, observation_tokens=32
    ),
    tokens_per_pack=131_072,
    batch_tokens=16_384,
)
QUICK = StepSizes(
    workload=Workload(
        rows=2, group_size=2, at_once=4, steps=3, prompt_tokens=32, response_tokens=4, observation_tokens=24
    ),
    tokens_per_pack=512,
    batch_tokens=256,
)


class OurStep:
    """Trains one step per call and returns the time of each part."""

    def __init__(self, model: BenchModel, sizes: StepSizes, device: torch.device) -> None:
        self._model, self._workload, self._device, self._steps = model, sizes.workload, device, 0
        gpu, workload = device.type == "cuda", sizes.workload
        network = model.network(dtype=torch.float32, device=device)
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
        self._collect = make_collector(workload, self._engine, model.vocabulary)
        self._score = Scorer(reward=_reward, timeout=60.0)
        freeze_parts()  # as a run does

    def __call__(self) -> Figures:
        self._steps += 1
        marks = [self._now()]
        rows = self._workload.task_rows(self._model.vocabulary, seed=self._steps)

        async def play() -> Any:
            return await self._score(await self._collect(rows, seed=episode_seed(self._steps)))

        groups = asyncio.run(play())
        marks.append(self._now())
        credited = assign_credit(groups, self._algorithm)
        metrics = self._learner.update(credited)
        marks.append(self._now())
        asyncio.run(self._engine.load_weights(self._learner.weights().items(), self._steps))
        marks.append(self._now())
        check_lengths(groups, self._workload, self._model.vocabulary)
        if metrics["skipped_updates"] or metrics["empty_update"]:
            raise AssertionError(f"the step did not train: {metrics}")
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
    """A coin flip, so that attempts at a row differ."""
    return float(stable_seed(trajectory.trajectory_id) % 2)


@dataclass(kw_only=True)
class StepBench:
    model: BenchModel
    sizes: StepSizes
    device: torch.device
    repeats: int
    start_up_seconds: float = field(default=0.0, init=False)

    @property
    def groups(self) -> dict[str, Callable[[], Iterator[Row]]]:
        return {"step": self.step}

    def close(self) -> None:
        free_memory(self.device)

    def step(self) -> Iterator[Row]:
        began = time.perf_counter()
        ours = OurStep(self.model, self.sizes, self.device)
        try:
            ours()
            self.start_up_seconds = time.perf_counter() - began
            yield self.measure(ours)
        finally:
            ours.close()

    def measure(self, ours: OurStep) -> Row:
        return self.row("agent-r1", {}, [ours() for _ in range(self.repeats)])

    def row(self, name: str, settings: dict[str, Any], repeats: list[Figures]) -> Row:
        sampled = self.sizes.workload.sampled_tokens
        return Row(
            name=f"step/{name}",
            settings={**self.model.settings, **asdict(self.sizes.workload), **settings},
            headline="seconds",
            repeats=[figures | {"sampled_tokens_per_second": sampled / figures["seconds"]} for figures in repeats],
            once={"start_up_seconds": self.start_up_seconds},
        )
