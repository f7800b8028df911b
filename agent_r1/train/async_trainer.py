"""The parts of the asynchronous loop for a run: like `Trainer`, but ticket by ticket, with a learner in its own thread.

On a GPU, the learner has its own stream, so its kernels do not wait for the kernels of an engine on the same device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from agent_r1.data.rows import rows_for_step
from agent_r1.learn.rewards import is_uniform
from agent_r1.rollout.collect import RowQueue, check_failures
from agent_r1.runs.metrics import Metrics
from agent_r1.seeds import stable_seed
from agent_r1.train.tickets import Ledger
from agent_r1.train.trainer import Trainer
from agent_r1.types import CreditedTrajectory, Group


@dataclass(kw_only=True)
class AsyncTrainer(Trainer):
    """What `async_loop.train_async` needs."""

    ledger: Ledger = field(default_factory=Ledger)

    def __post_init__(self) -> None:
        self._threads = torch.get_num_threads()  # a new thread would start with the engine's number
        self._shared = self._gates(self.rows_per_step * self.collector.group_size)
        self._rows_of = lru_cache(maxsize=4)(
            lambda step: rows_for_step(self.train_rows, step=step, count=self.rows_per_step, seed=self.seed)
        )
        device = self.learner.policy.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def max_rounds(self) -> int:
        """One step considers at most this many times its number of groups."""
        return self.algorithm.sampling_rounds

    async def play(self, ticket: int) -> Group:
        """Play and score the group of a ticket, with the row, names and noise that `collect` would give it."""
        before, position = divmod(ticket, self.rows_per_step)
        step = before + 1
        seed = stable_seed(self.seed, "train", step)
        rows = [self._rows_of(step)[position]]
        own, baseline = (RowQueue(rows, first=position) for _ in range(2))
        sampled, greedy = await self._play_share(own, baseline, seed, self._shared)
        group = sampled[position]
        return replace(group, greedy=greedy[position].trajectories[0]) if greedy else group

    def drops(self, group: Group) -> bool:
        """Whether the algorithm plays another row in place of this one, because all attempts at it earned the same."""
        return self.max_rounds > 1 and is_uniform(group, self.shaper)

    def check(self, groups: list[Group]) -> None:
        check_failures(groups, self.max_error_fraction)

    def learn(self, groups: list[Group]) -> tuple[list[CreditedTrajectory], Metrics]:
        with self._beside_the_engine():
            credited = self.assign_credit(groups)
            return credited, self.update(credited)

    async def swap_weights(self, version: int) -> None:
        """Replace the engine's weights now. Running responses continue with them."""
        self.engine.abort()
        await self.sync_weights(version)

    def report(self, step: int, groups: list[Group], batch: list[CreditedTrajectory], metrics: Metrics) -> None:
        super().report(step, groups, batch, metrics)
        self._shared = replace(self._shared, count=self._gates(self.rows_per_step * self.collector.group_size).count)

    async def restore(self, state: dict[str, Any]) -> None:
        await super().restore(state)
        self.ledger.load_state_dict(state["tickets"])

    def _state(self, step: int) -> dict[str, Any]:
        return super()._state(step) | {"tickets": self.ledger.state_dict()}

    @contextmanager
    def _beside_the_engine(self) -> Iterator[None]:
        torch.set_num_threads(self._threads)
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))  # weights are still being copied
        with torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()  # before the engine reads the new weights
