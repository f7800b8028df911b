"""Supervised warm start: demonstrations or a run's own good trajectories, through the same rendering and masks as RL.

A demonstration is a row and the assistant texts an expert would write. It is played through the recipe's own flow and
env, with a sampler that replays the texts, so its steps are the very steps RL will sample and train on.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from agent_r1.agent.rendering import Renderer
from agent_r1.agent.sampler import Completion, Sampling
from agent_r1.config import RunConfig
from agent_r1.errors import DataError
from agent_r1.learn.algorithms import as_demonstrations
from agent_r1.learn.learner import Learner
from agent_r1.run.build import Model, Task, build_sft_learner, build_task, rehearse, train_collector
from agent_r1.run.metrics import Metrics
from agent_r1.run.records import read_trajectories
from agent_r1.run.resolve import resolve
from agent_r1.types import TaskRow, Trajectory

Demo = tuple[TaskRow, Sequence[str]]
LOSS_WINDOW = 20  # updates over which a loss is averaged before it is believed
OnUpdate = Callable[[int, int, Metrics], None]  # update, updates in all, metrics


async def warm_start(config: RunConfig, model: Model, on_update: OnUpdate) -> Learner:
    """Train `model.network` in place on the recipe's demonstrations."""
    trajectories = await sft_trajectories(config, build_task(config), model.renderer)
    examples, settings = as_demonstrations(trajectories), config.sft
    per_epoch = math.ceil(len(examples) / settings.batch_size)
    total, update = per_epoch * settings.epochs, 0
    learner = build_sft_learner(config, model, total)
    rehearse(config, learner)
    recent: deque[float] = deque(maxlen=LOSS_WINDOW)
    for epoch in range(settings.epochs):
        order = list(examples)
        random.Random(f"sft:{config.seed}:{epoch}").shuffle(order)
        for start in range(0, len(order), settings.batch_size):
            metrics = learner.update(order[start : start + settings.batch_size])
            update += 1
            recent.append(metrics["loss"])
            enough = len(recent) == LOSS_WINDOW and fmean(recent) <= (settings.target_loss or 0.0)
            on_update(update, update if enough else total, metrics)
            if enough:
                return learner
            await asyncio.sleep(0)  # lets Ctrl-C through
    return learner


async def sft_trajectories(config: RunConfig, task: Task, renderer: Renderer) -> list[Trajectory]:
    settings = config.sft
    if settings.trajectories is not None:
        return _filtered(config, renderer)
    assert settings.demos is not None  # callers check
    demos: list[Demo] = list(resolve(settings.demos, recipe=config.recipe)(count=settings.count, seed=config.seed))
    if not demos:
        raise DataError(f"sft.demos={settings.demos!r} gave no demonstrations")
    gate = asyncio.Semaphore(config.rollout.max_concurrent)
    played = [_play_demo(config, task, renderer, index, demo, gate) for index, demo in enumerate(demos)]
    return list(await asyncio.gather(*played))


async def _play_demo(
    config: RunConfig, task: Task, renderer: Renderer, index: int, demo: Demo, gate: asyncio.Semaphore
) -> Trajectory:
    row, texts = demo
    player = _Replay(renderer, texts)
    collector = replace(train_collector(config, task, renderer, player), group_size=1, max_error_fraction=1.0)
    async with gate:
        [group] = await collector([row], seed=index)
    trajectory = group.trajectories[0]
    if trajectory.stop.is_failure:
        raise DataError(f"demonstration {index} ({row.row_id}) failed when played: {trajectory.error}")
    if len(trajectory.steps) != len(texts):
        raise DataError(
            f"demonstration {index} ({row.row_id}) has {len(texts)} texts but its episode ended after "
            f"{len(trajectory.steps)} steps with {trajectory.stop.value!r}; last text: {trajectory.final_text!r}"
        )
    return trajectory


class _Replay:
    """A sampler that says what the expert said."""

    def __init__(self, renderer: Renderer, texts: Sequence[str]) -> None:
        self._renderer = renderer
        self._texts = iter(texts)

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, session: str) -> Completion:
        text = next(self._texts, None)
        if text is None:
            raise DataError("the expert's texts end before the episode does; the last one must be a final answer")
        ids = self._renderer.encode_response(text)
        if len(ids) > sampling.max_tokens:
            raise DataError(
                f"an expert text has {len(ids)} tokens, the step allows {sampling.max_tokens}: {text[:80]!r}"
            )
        return Completion(token_ids=ids, logprobs=[0.0] * len(ids), stop="stop")

    def release(self, session: str) -> None:
        pass


def trajectory_source(config: RunConfig) -> Path:
    """The folder or file of `sft.trajectories`; of a run, its trajectories."""
    assert config.sft.trajectories is not None
    source = Path(config.sft.trajectories).expanduser()
    return source / "trajectories" if (source / "trajectories").is_dir() else source


def _filtered(config: RunConfig, renderer: Renderer) -> list[Trajectory]:
    """A run's own trajectories that earned enough: rejection sampling."""
    source, least = trajectory_source(config), config.sft.min_reward
    stem = "train_*" if source.is_dir() else "*"  # never its evaluations
    good = [t for t in read_trajectories(source, stem) if not t.stop.is_failure and t.total_reward >= least]
    if not good:
        raise DataError(f"no trajectory under {source} has a reward of at least {least:g} (sft.min_reward)")
    for trajectory in good:
        for step in trajectory.steps:
            if renderer.decode(step.response_ids) != step.action_text:
                raise DataError(
                    f"trajectory {trajectory.trajectory_id!r} of {source} was sampled with another tokenizer: its ids "
                    f"read {renderer.decode(step.response_ids)[:60]!r}, its text is {step.action_text[:60]!r}"
                )
    return good
