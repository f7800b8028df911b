"""The parts of the training loop, made of a built model, task, engine and learner, and tied to a run directory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from agent_r1.build.plan import (
    Model,
    Plan,
    build_engine,
    build_learner,
    build_shaper,
    eval_collector,
    greedy_collector,
    rehearse,
    train_collector,
)
from agent_r1.config import RunConfig
from agent_r1.data.rows import rows_for_step
from agent_r1.engines.base import Engine
from agent_r1.errors import ConfigError
from agent_r1.learn.credit import assign_credit, attempts_of, trainable
from agent_r1.learn.learner import MAX_NAMED, Learner
from agent_r1.learn.rewards import RewardShaper, is_uniform
from agent_r1.rollout.collect import Collector, check_failures
from agent_r1.rollout.scoring import Scorer
from agent_r1.runs.metrics import Metrics, count_tokens, nonfinite, rollout_metrics
from agent_r1.runs.run_dir import Evaluation, RunDir
from agent_r1.seeds import stable_seed
from agent_r1.train.checkpoint import save_checkpoint
from agent_r1.train.evaluate import evaluate
from agent_r1.train.rng import restore_rng, rng_state
from agent_r1.train.start import code_digest
from agent_r1.types import CreditedTrajectory, Group, TaskRow, Trajectory

STATE_FORMAT = 2  # of what `_state` saves; raised when an older one cannot be read any more
EVAL_SEED = "eval"  # evaluation draws the same noise at every step, so that curves differ by the policy alone


class Progress(Protocol):
    """Shows the progress of training; see `cli/display.py`."""

    def note(self, text: str) -> None: ...
    def episodes(self, finished: int, total: int) -> None: ...
    def step(self, step: int, metrics: Metrics) -> None: ...
    def evaluation(self, step: int, metrics: Metrics) -> None: ...


@dataclass(kw_only=True)
class Trainer:
    """Implements `train.Parts`."""

    config: RunConfig
    run: RunDir
    plan: Plan
    model: Model
    engine: Engine
    learner: Learner
    shaper: RewardShaper
    collector: Collector
    greedy_collector: Collector | None  # for algorithms that compare with a greedy attempt
    scorer: Scorer
    eval_collector: Collector
    display: Progress
    code: str  # digest of what decides what is played and paid, as it was when the run began or was continued
    last_evaluation: Evaluation | None = None
    streams: dict[str, Any] | None = None  # as they were before what is unfinished, which is made again after a save

    @classmethod
    def build(
        cls, config: RunConfig, *, run: RunDir, plan: Plan, model: Model, reference: Model | None, display: Progress
    ) -> Trainer:
        """`reference` is the policy as it was before the first step, for the KL penalty."""
        engine = build_engine(config, model)
        if engine.startup_seconds > 1:
            display.note(f"engine: ready after {engine.startup_seconds:.0f} s of compiling and capturing")
        return cls(
            config=config,
            run=run,
            plan=plan,
            model=model,
            engine=engine,
            learner=build_learner(config, model, plan.algorithm, reference),
            shaper=build_shaper(config, plan.algorithm),
            collector=train_collector(config, plan.task, model.renderer, engine),
            greedy_collector=(
                greedy_collector(config, plan.task, model.renderer, engine) if plan.algorithm.needs_greedy else None
            ),
            scorer=plan.task.scorer,
            eval_collector=eval_collector(config, plan.task, model.renderer, engine),
            display=display,
            code=code_digest(config),
        )

    async def collect(self, step: int) -> list[Group]:
        """Scored groups of this step's rows, a function of (seed, step): resuming repeats nothing.

        With several sampling rounds, rows whose attempts all had the same return are made up for by further rows. They
        stay in the result, so that what is reported is what the policy does and not what was picked.
        """
        self.streams = rng_state()
        groups: list[Group] = []
        for number in range(self.plan.algorithm.sampling_rounds):
            rows = self._rows(step, number, groups)
            if not rows:
                break
            # The first round of a step draws what it would draw if there were no others.
            groups += await self._play(
                rows, stable_seed(self.config.seed, "train", step, *([number] if number else []))
            )
        # Over the whole step, not per round: in a late round with a single row, all attempts may well fail.
        check_failures(groups, self.config.rollout.max_error_fraction)
        return groups

    def _rows(self, step: int, number: int, groups: list[Group]) -> list[TaskRow]:
        """Of this round: as many as are missing, and none that this step has played."""
        wanted = self.config.rollout.rows_per_step
        missing = wanted - sum(not is_uniform(group, self.shaper) for group in groups)
        seed = stable_seed(self.config.seed, "round", number) if number else self.config.seed
        rows = rows_for_step(self.plan.train_rows, step=step, count=wanted, seed=seed)
        played = {group.row.row_id for group in groups}
        return [row for row in rows if row.row_id not in played][: max(0, missing)]

    async def _play(self, rows: list[TaskRow], seed: int) -> list[Group]:
        counter = self._counter(len(rows) * self.collector.group_size)
        if self.greedy_collector is None:
            return await self.scorer(await self.collector(rows, seed=seed, on_episode=counter))
        gate = asyncio.Semaphore(self.collector.max_concurrent)
        both = [
            asyncio.create_task(self.collector(rows, seed=seed, on_episode=counter, gate=gate)),
            asyncio.create_task(self.greedy_collector(rows, seed=stable_seed(seed, "greedy"), gate=gate)),
        ]
        try:
            sampled, greedy = await asyncio.gather(*both)
        finally:
            for task in both:  # if one failed, nobody waits for the other
                task.cancel()
        scored = await self.scorer([*sampled, *greedy])
        pairs = zip(scored[: len(rows)], scored[len(rows) :], strict=True)
        return [replace(group, greedy=other.trajectories[0]) for group, other in pairs]

    def assign_credit(self, groups: list[Group]) -> list[CreditedTrajectory]:
        """The scales of rewards follow the batch; if anything goes wrong, they are as before."""
        algorithm, before = self.plan.algorithm, self.shaper.state_dict()
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
            more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
            self.display.note(
                f"{self.plan.algorithm.name}: the advantages of {len(broken)} of {len(credited)} trajectories are not "
                f"finite (rows {', '.join(names[:MAX_NAMED])}{more}). Optimizer steps with them are refused"
            )
        return credited

    def update(self, credited: Sequence[CreditedTrajectory]) -> Metrics:
        return self.learner.update(credited)

    async def sync_weights(self, version: int) -> None:
        await self.engine.load_weights(self.learner.weights().items(), version)

    async def evaluate(self, step: int) -> None:
        self.streams = rng_state()
        seed = stable_seed(self.config.seed, EVAL_SEED)
        counter = self._counter(len(self.plan.test_rows) * self.eval_collector.group_size)
        self.last_evaluation = await evaluate(
            self.plan.test_rows,
            collector=self.eval_collector,
            scorer=self.scorer,
            max_error_fraction=self.config.rollout.max_error_fraction,
            success_reward=self.plan.task.success_reward,
            seed=seed,
            on_episode=counter,
        )
        self.run.write_evaluation(step, self.last_evaluation)
        self.streams = None
        self.display.evaluation(step, self.last_evaluation.metrics)

    def save(self, step: int) -> None:
        save_checkpoint(
            self.run.checkpoints,
            step,
            model=self.learner.policy,
            tokenizer=self.model.tokenizer,
            state=self._state(step),
            keep=self.config.trainer.keep_checkpoints,
        )

    def report(self, step: int, groups: list[Group], credited: Sequence[CreditedTrajectory], metrics: Metrics) -> None:
        metrics |= rollout_metrics(groups, success_reward=self.plan.task.success_reward) | self.shaper.metrics
        metrics["nonfinite_advantages"] = float(len(nonfinite(credited)))
        metrics["tokens_per_second"] = count_tokens(groups) / metrics["time/collect"]
        if step % self.config.trainer.dump_every == 0:
            advantages = {item.trajectory.trajectory_id: item.advantages for item in credited}
            self.run.write_trajectories("train", step, groups, advantages)
        self.run.append_metrics("train", step, metrics)
        self.streams = None
        self.display.step(step, metrics)

    def rehearse(self) -> None:
        """Say what training will take, and find out before the first step if that is too much."""
        self.display.note(rehearse(self.config, self.learner))

    async def restore(self, state: dict[str, Any]) -> None:
        """Continue exactly where the checkpoint was taken."""
        if state.get("format") != STATE_FORMAT:
            raise ConfigError(
                f"{self.run} was written by another version of agent-r1 and cannot be continued exactly. Start a "
                f"new run from its weights with model.path={self.run}"
            )
        if state.get("code", self.code) != self.code:
            self.display.note(
                f"warning: the code of the recipe or of agent-r1 has changed since {self.run} was saved; it continues "
                "with the new code, so it will not match an uninterrupted run exactly"
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
            "rng": self.streams or rng_state(),
            "code": self.code,
        }

    def _counter(self, total: int) -> Any:
        finished = 0

        def count(trajectory: Trajectory) -> None:
            nonlocal finished
            finished += 1
            self.display.episodes(finished, total)

        return count
