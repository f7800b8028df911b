"""The parts of the training loop for a run: engine, collectors, scorer and learner, tied to a run directory.

Takes plain parts; `build/trainer.py` makes them from a config.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from agent_r1.data.rows import rows_for_step
from agent_r1.engines.base import Engine, Sleeper
from agent_r1.errors import ConfigError
from agent_r1.learn.algorithms import Algorithm
from agent_r1.learn.credit import assign_credit, attempts_of, trainable
from agent_r1.learn.learner import Learner
from agent_r1.learn.rewards import RewardShaper, is_uniform
from agent_r1.ranks.crew import Crew
from agent_r1.rollout.collect import Collector, OnEpisode, RowQueue, check_failures
from agent_r1.rollout.scoring import Scorer
from agent_r1.runs.metrics import Metrics, count_tokens, nonfinite, role_advantages
from agent_r1.runs.observer import Observer
from agent_r1.runs.run_dir import Evaluation, RunDir
from agent_r1.seeds import stable_seed
from agent_r1.text import first_names
from agent_r1.train.checkpoint import Saveable, save_checkpoint
from agent_r1.train.evaluate import episode_metrics, evaluate, in_order, shared_queue
from agent_r1.train.rng import restore_rng, rng_state
from agent_r1.types import CreditedTrajectory, Group, TaskRow, Trajectory

STATE_FORMAT = 3  # format of `_state`; raised when older checkpoints cannot be continued
EVAL_SEED = "eval"  # every evaluation draws the same noise, so only the policy makes a difference


class Progress(Protocol):
    """Shows the progress of training; see `cli/display.py`."""

    def note(self, text: str) -> None: ...
    def episodes(self, finished: int, total: int) -> None: ...
    def evaluating(self, finished: int, total: int, success: float) -> None: ...
    def step(self, step: int, metrics: Metrics) -> None: ...
    def evaluation(self, step: int, metrics: Metrics) -> None: ...


@dataclass(frozen=True, slots=True)
class Gates:
    """Limits that concurrent episodes share."""

    episodes: asyncio.Semaphore  # how many play at once
    scoring: asyncio.Semaphore  # how many rewards are computed at once
    count: OnEpisode  # reports progress


@dataclass(kw_only=True)
class Trainer:
    """Implements `loop.Parts`."""

    run: RunDir
    train_rows: list[TaskRow]
    test_rows: list[TaskRow]
    algorithm: Algorithm
    shaper: RewardShaper
    learner: Learner
    tokenizer: Any
    input_files: Saveable  # saved beside the weights, like the tokenizer
    engine: Engine
    collector: Collector
    greedy_collector: Collector | None  # for algorithms with a greedy baseline
    eval_collector: Collector
    scorer: Scorer
    progress: Progress
    seed: int
    rows_per_step: int
    success_reward: float
    max_error_fraction: float
    dump_every: int
    keep_checkpoints: int
    code: str  # digest of the recipe's code when the run began or was resumed
    crew: Crew = field(default_factory=Crew)
    observer: Observer = field(default_factory=Observer)
    last_evaluation: Evaluation | None = None
    _rng: dict[str, Any] | None = None  # random state before the unfinished step, which is repeated after a save

    async def collect(self, step: int) -> list[Group]:
        """Return scored groups of this step's rows, which are a function of (seed, step).

        With several sampling rounds, further rows make up for those whose attempts all had the same return. These stay
        in the result, so that metrics describe the policy and not the selection.
        """
        self._rng = rng_state()
        groups: list[Group] = []
        for number in range(self.algorithm.sampling_rounds):
            rows = self._rows(step, number, groups)
            if not rows:
                break
            # The first round draws the same noise as a step with a single round.
            groups += await self._play(rows, stable_seed(self.seed, "train", step, *([number] if number else [])))
        # Over the whole step, not per round: in a late round with a single row, all attempts may well fail.
        check_failures(groups, self.max_error_fraction)
        if isinstance(self.engine, Sleeper):
            await self.crew.all(self.engine.sleep())  # fails on all ranks if it fails on one
        return groups

    def _rows(self, step: int, number: int, groups: list[Group]) -> list[TaskRow]:
        """Return rows for this round: as many as are missing, and none that this step has played."""
        wanted = self.rows_per_step
        missing = wanted - sum(not is_uniform(group, self.shaper) for group in groups)
        seed = stable_seed(self.seed, "round", number) if number else self.seed
        rows = rows_for_step(self.train_rows, step=step, count=wanted, seed=seed)
        played = {group.row.row_id for group in groups}
        return [row for row in rows if row.row_id not in played][: max(0, missing)]

    async def _play(self, rows: list[TaskRow], seed: int) -> list[Group]:
        """Play and score rows, spread over all ranks."""
        gates = self._gates(len(rows) * self.collector.group_size)
        sampled, greedy = (shared_queue(rows, self.crew) for _ in range(2))
        parts = await self.crew.all(self._play_share(sampled, greedy, seed, gates))
        groups = in_order(part for part, _ in parts)
        if self.greedy_collector is None:
            return groups
        pairs = zip(groups, in_order(part for _, part in parts), strict=True)
        return [replace(group, greedy=other.trajectories[0]) for group, other in pairs]

    async def _play_share(
        self, rows: RowQueue, greedy_rows: RowQueue, seed: int, gates: Gates
    ) -> tuple[dict[int, Group], dict[int, Group]]:
        """Play and score the rows that this rank claims, and those for the greedy baseline."""
        gate = gates.episodes
        play = self.collector.claimed(rows, seed=seed, on_episode=gates.count, gate=gate)
        if self.greedy_collector is None:
            return await self._score(await play, gates), {}
        play_greedy = self.greedy_collector.claimed(greedy_rows, seed=stable_seed(seed, "greedy"), gate=gate)
        both = [asyncio.create_task(play), asyncio.create_task(play_greedy)]
        try:
            sampled, greedy = await asyncio.gather(*both)
        finally:
            for task in both:  # if one failed, do not wait for the other
                task.cancel()
        return await self._score(sampled, gates), await self._score(greedy, gates)

    async def _score(self, played: dict[int, Group], gates: Gates) -> dict[int, Group]:
        positions = sorted(played)
        scored = await self.scorer([played[position] for position in positions], gates.scoring)
        return dict(zip(positions, scored, strict=True))

    def assign_credit(self, groups: list[Group]) -> list[CreditedTrajectory]:
        """Assign credit. Restores the shaper's running scales if that fails."""
        algorithm, before = self.algorithm, self.shaper.state_dict()
        groups = trainable(groups, algorithm, self.shaper)
        attempts = attempts_of(groups)
        values = self.learner.values(attempts) if algorithm.needs_critic else None
        kl = self.learner.kl_to_reference(attempts) if self.shaper.kl is not None else None
        try:
            credited = assign_credit(groups, algorithm, shaper=self.shaper, values=values, kl=kl)
        except BaseException:
            self.shaper.load_state_dict(before)
            raise
        if broken := nonfinite(credited):
            names = list(dict.fromkeys(item.trajectory.row_id for item in broken))
            self.progress.note(
                f"{self.algorithm.name}: {len(broken)} of {len(credited)} trajectories have non-finite advantages "
                f"(rows {first_names(names)}). Optimizer steps with them are skipped"
            )
        return credited

    def update(self, credited: list[CreditedTrajectory]) -> Metrics:
        return self.learner.update(credited)

    async def sync_weights(self, version: int) -> None:
        await self.engine.load_weights(self.learner.weights().items(), version)

    async def evaluate(self, step: int) -> None:
        self._rng = rng_state()
        self.last_evaluation = await evaluate(
            self.test_rows,
            collector=self.eval_collector,
            scorer=self.scorer,
            max_error_fraction=self.max_error_fraction,
            success_reward=self.success_reward,
            seed=stable_seed(self.seed, EVAL_SEED),
            on_progress=self.progress.evaluating,
            crew=self.crew,
        )
        if self.crew.ranks.is_main:
            self.run.write_evaluation(step, self.last_evaluation)
        self._rng = None
        self.progress.evaluation(step, self.last_evaluation.metrics)
        if self.crew.ranks.is_main:
            self.observer.evaluation(step, self.last_evaluation)

    def save(self, step: int) -> None:
        save_checkpoint(
            self.run.checkpoints,
            step,
            model=self.learner.policy,
            input_files=self.input_files,
            state=self._state(step),
            keep=self.keep_checkpoints,
            ranks=self.learner.ranks,
        )

    def report(self, step: int, groups: list[Group], batch: list[CreditedTrajectory], metrics: Metrics) -> None:
        metrics |= episode_metrics(groups, success_reward=self.success_reward) | self.shaper.metrics
        metrics |= role_advantages(batch)
        metrics["nonfinite_advantages"] = float(len(nonfinite(batch)))
        metrics["tokens_per_second"] = count_tokens(groups) / metrics["time/collect"]
        if self.crew.ranks.is_main:
            if step % self.dump_every == 0:
                numbers = {item.trajectory.trajectory_id: {"advantages": item.advantages} for item in batch}
                for name, notes in self.learner.noted.items():
                    numbers[name] |= notes
                self.run.write_trajectories("train", step, groups, numbers)
            self.run.append_metrics("train", step, metrics)
        self._rng = None
        self.progress.step(step, metrics)

    def tell(self, step: int, groups: list[Group], metrics: Metrics) -> None:
        """Tell the observer of a finished step. An exception in it ends the run, after the step is saved."""
        if self.crew.ranks.is_main:
            self.observer.step(step, groups, metrics)

    async def restore(self, state: dict[str, Any]) -> None:
        """Continue exactly from a checkpoint."""
        if state.get("format") != STATE_FORMAT:
            raise ConfigError(
                f"{self.run} was written by another version of agent-r1 and cannot be resumed. Start a new run from "
                f"its weights with model.path={self.run}"
            )
        if state.get("code", self.code) != self.code:
            self.progress.note(
                f"warning: the code of the recipe or of agent-r1 has changed since {self.run} was saved; it continues "
                "with the new code and will not match an uninterrupted run exactly"
            )
        self.learner.load_state_dict(state["learner"])
        self.shaper.load_state_dict(state["shaper"])
        restore_rng(state["rng"])
        await self.sync_weights(state["step"])

    def _state(self, step: int) -> dict[str, Any]:
        return {
            "format": STATE_FORMAT,
            "step": step,
            "learner": self.learner.state_dict(),
            "shaper": self.shaper.state_dict(),
            "rng": self._rng or rng_state(),
            "code": self.code,
        }

    def _gates(self, total: int) -> Gates:
        finished = self.crew.counter()

        def count(trajectory: Trajectory) -> None:
            self.progress.episodes(finished(1), total)

        return Gates(asyncio.Semaphore(self.collector.max_concurrent), self.scorer.gate(), count)
