"""Thousands of short episodes with failing tools and cancelled requests, which must leave nothing behind."""

from __future__ import annotations

import asyncio
import logging
import random
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from agent_r1.bench.results import Figures
from agent_r1.bench.workload import AnsweringEnv, Workload, episode_seed, make_collector
from agent_r1.engines.base import Prompt, Sampling
from agent_r1.engines.local.local_engine import LocalEngine
from agent_r1.types import Action, StopReason, Transition

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    rounds: int  # the first warms up: what it allocates stays
    episodes: int  # per round
    impatient: int  # requests per round that are cancelled a little later
    at_once: int
    response_tokens: int = 8
    tool_error_share: float = 0.1

    def run(self, engine: LocalEngine, vocabulary: int, device: torch.device) -> Figures:
        """How episodes and requests of all rounds ended, and what has grown since the first round."""
        ended: Counter[str] = Counter()
        first = left = _usage(engine, device)
        for number in range(self.rounds):
            with _mute_tool_errors():
                ended += asyncio.run(self._round(engine, vocabulary, number))
            left = _usage(engine, device)
            first = left if number == 0 else first
        return {
            "episodes": float(self.rounds * self.episodes),
            "tool_errors": float(ended[StopReason.ERROR]),
            "cancelled_requests": float(ended["cancelled"]),
            "lost_episodes": float(self.rounds * self.episodes - ended[StopReason.ERROR] - ended[StopReason.ANSWERED]),
            "unanswered_requests": float(self.rounds * self.impatient - ended["cancelled"] - ended["completed"]),
        } | {f"{name}_growth": left[name] - first[name] for name in left}

    async def _round(self, engine: LocalEngine, vocabulary: int, number: int) -> Counter[str]:
        workload = Workload(
            rows=self.episodes,
            group_size=1,
            at_once=self.at_once,
            steps=3,
            prompt_tokens=40,
            response_tokens=self.response_tokens,
            observation_tokens=24,
        )
        answer = workload.answer(vocabulary)
        collect = make_collector(
            workload,
            engine,
            vocabulary,
            make_env=lambda row: FailingEnv(workload, answer, share=self.tool_error_share),
        )
        rng = random.Random(number)
        impatient = [_impatient(engine, vocabulary, rng.random(), index) for index in range(self.impatient)]
        rows = workload.task_rows(vocabulary, seed=number)
        played = asyncio.create_task(collect(rows, seed=episode_seed(number)))
        outcomes = Counter(await asyncio.gather(*impatient))
        return outcomes + Counter(str(each.stop) for group in await played for each in group.trajectories)


class FailingEnv(AnsweringEnv):
    """A tool raises, in a given share of the episodes."""

    def __init__(self, workload: Workload, answer: str, *, share: float) -> None:
        super().__init__(workload, answer)
        self._share = share

    async def step(self, action: Action) -> Transition:
        transition = await super().step(action)
        if self._taken == 2 and self._delays.random() < self._share:
            raise ConnectionError("the tool's server is gone")
        return transition


@contextmanager
def _mute_tool_errors() -> Iterator[None]:
    """Hundreds of expected tracebacks would hide an unexpected one."""
    logger = logging.getLogger("agent_r1.rollout.collect")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


async def _impatient(engine: LocalEngine, vocabulary: int, patience: float, index: int) -> str:
    """A request that is cancelled after up to 50 ms, unless it is answered by then."""
    prompt = [(index * 31 + position) % vocabulary for position in range(24)]
    session = f"impatient-{index}"
    try:
        await asyncio.wait_for(
            engine.generate(Prompt(prompt), Sampling(max_tokens=64), session=session), 0.05 * patience
        )
    except TimeoutError:
        return "cancelled"
    finally:
        engine.release(session)
    return "completed"


def _usage(engine: LocalEngine, device: torch.device) -> Figures:
    with open("/proc/self/statm", encoding="ascii") as file:
        resident_bytes = int(file.read().split()[1]) * resource.getpagesize()
    return {
        "resident_mib": resident_bytes / MIB,
        "gpu_mib": torch.cuda.memory_allocated(device) / MIB if device.type == "cuda" else 0.0,
        "free_blocks": float(engine.free_blocks),
        "pending_requests": float(engine.num_requests),
    }
