"""Supervised warm start: demonstrations or a run's own good trajectories, through the same rendering and masks as RL.

A demonstration is a row and the assistant texts an expert would write. It is played through the recipe's own flow and
env, with a sampler that replays the texts, so its steps are the very steps RL will sample and train on.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from textwrap import shorten
from typing import Any

from agent_r1.build.context import message_function
from agent_r1.build.plan import Model, Task, build_sft_learner, rehearse, train_collector
from agent_r1.build.task import recipe_function, told_in_a_line
from agent_r1.config import RunConfig, SummaryContext
from agent_r1.data.downloads import Report
from agent_r1.data.rows import Demo
from agent_r1.engines.base import Completion, Prompt, Sampling
from agent_r1.errors import DataError
from agent_r1.flows.context import ContextPolicy, ContextView, Writer
from agent_r1.flows.episode import Episode
from agent_r1.flows.flow import AgentFlowBase
from agent_r1.learn.credit import as_demonstrations
from agent_r1.learn.learner import Learner
from agent_r1.runs.metrics import Metrics
from agent_r1.runs.records import TRAINED, read_trajectories, trajectories_of
from agent_r1.tokens.formats import FORMATS, ParsedCall
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import Message, StopReason, TaskRow, ToolCallRecord, Trajectory

LOSS_WINDOW = 20  # updates over which a loss is averaged before it is believed
OnUpdate = Callable[[int, int, Metrics], None]  # update, updates in all, metrics


async def warm_start(config: RunConfig, task: Task, model: Model, on_update: OnUpdate, report: Report) -> Learner:
    """Train `model.network` in place on the recipe's demonstrations or on a run's good trajectories."""
    trajectories = await sft_trajectories(config, task, model.renderer, report)
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
            enough = _reached(settings.target_loss, recent)
            on_update(update, update if enough else total, metrics)
            if enough:
                if update < total:
                    report(
                        f"stopped after {update} of at most {total} updates: loss below "
                        f"sft.target_loss={settings.target_loss:g}"
                    )
                return learner
            await asyncio.sleep(0)  # lets Ctrl-C through
    return learner


def _reached(target: float | None, recent: deque[float]) -> bool:
    return target is not None and len(recent) == LOSS_WINDOW and fmean(recent) <= target


async def sft_trajectories(config: RunConfig, task: Task, renderer: Renderer, report: Report) -> list[Trajectory]:
    settings = config.sft
    if settings.trajectories is not None:
        return _own_trajectories(config, renderer, report)
    return await play_demos(config, task, renderer, load_demos(config), report)


async def play_demos(
    config: RunConfig, task: Task, renderer: Renderer, demos: Sequence[Demo], report: Report
) -> list[Trajectory]:
    """Play the demonstrations and return those that fit the limits. Raises DataError for one that cannot be played."""
    gate = asyncio.Semaphore(config.rollout.max_concurrent)
    try:
        async with asyncio.TaskGroup() as group:  # where one cannot be played, the others end and close their envs
            plays = [
                group.create_task(_play_demo(config, task, renderer, index, demo, gate))
                for index, demo in enumerate(demos)
            ]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    played = [play.result() for play in plays]
    fitting = [trajectory for trajectory in played if not isinstance(trajectory, _Unfit)]
    unfit = [each for each in played if isinstance(each, _Unfit)]
    if unfit:
        limits = ", ".join(f"{n} because rollout.{limit}" for limit, n in Counter(u.limit for u in unfit).items())
        what = f"{len(unfit)} of {len(demos)} demonstrations do not fit: {limits}"
        if 2 * len(fitting) < len(demos):
            raise DataError(f"{what}. The first is of row {unfit[0].row_id}. Raise the limit, or shorten them")
        report(f"{what}. They are left out; the first is of row {unfit[0].row_id}")
    _tell_failed_calls(fitting, report)
    return fitting


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unfit:
    """A demonstration that exceeds a limit of an episode."""

    row_id: str
    limit: str  # `max_steps is 8`


def load_demos(config: RunConfig) -> list[Demo]:
    name = config.sft.demos
    assert name is not None  # callers check
    with told_in_a_line(f"sft.demos={name!r}"):
        made = recipe_function(name, config)(count=config.sft.count, seed=config.seed)
        demos = list(made) if isinstance(made, Iterable) else None
    if demos is None:
        raise DataError(f"sft.demos={name!r} returned {made!r:.80}, not demonstrations")
    if not demos:
        raise DataError(f"sft.demos={name!r} gave no demonstrations")
    for index, demo in enumerate(demos):
        if (flaw := _flaw(demo)) is not None:
            raise DataError(
                f"demonstration {index} of sft.demos={name!r} {flaw}; wanted is a pair: a TaskRow, and a list of the "
                "expert's texts, one for each turn"
            )
    return demos


def _flaw(demo: Any) -> str | None:
    """Of its form: the functions that make demonstrations are other people's code."""
    if not isinstance(demo, tuple | list) or len(demo) != 2:
        return f"is {type(demo).__name__} {demo!r:.80}"
    row, texts = demo
    if not isinstance(row, TaskRow):
        return f"has {type(row).__name__} {row!r:.80} for a row"
    if not isinstance(texts, tuple | list):  # a text is a sequence too, of letters
        return f"({row.row_id}) has {type(texts).__name__} {texts!r:.80} for a list of texts"
    others = [text for text in texts if not isinstance(text, str)]
    return f"({row.row_id}) has {type(others[0]).__name__} {others[0]!r:.80} among its texts" if others else None


def _tell_failed_calls(played: Sequence[Trajectory], report: Report) -> None:
    """No error: some recipes show on purpose how to go on after a call that failed."""
    failed = [(trajectory.row_id, calls[0]) for trajectory in played if (calls := _failed_calls(trajectory))]
    if failed:
        row_id, call = failed[0]
        why = shorten(call.error or "", 200, placeholder=" ...")
        report(
            f"{len(failed)} of {len(played)} demonstrations contain calls that failed, the first (row {row_id}): "
            f"{call.name or 'unreadable call'}: {why}"
        )


def _failed_calls(trajectory: Trajectory) -> list[ToolCallRecord]:
    return [call for step in trajectory.steps for call in step.calls if call.error is not None]


def _foreign_format(trajectory: Trajectory) -> str | None:
    """The format of a call that the env could not read, if another format can."""
    for step in trajectory.steps:
        for call in step.calls:
            if call.fault != "malformed":
                continue
            text = step.action_text[slice(*call.text_span)]
            for name, each in FORMATS.items():
                events = each.parse(text)[1]
                if events and all(isinstance(event, ParsedCall) for event in events):
                    return name
    return None


async def _play_demo(
    config: RunConfig, task: Task, renderer: Renderer, index: int, demo: Demo, gate: asyncio.Semaphore
) -> Trajectory | _Unfit:
    row, texts = demo
    player = _Replay(renderer, texts)
    collector = train_collector(config, task, renderer, player)
    collector = replace(collector, make_flow=_expert_flow(config, collector.make_flow, player))
    episode = collector.episode(Episode, f"{row.row_id}#demo{index}", index)
    async with gate:
        trajectory = await collector.play(row, episode)
    for call in _failed_calls(trajectory):  # checked first, because it may have caused other errors
        if call.fault == "unknown_tool":
            raise DataError(f"demonstration {index} ({row.row_id}) calls a tool that does not exist: {call.error}")
    if (written := _foreign_format(trajectory)) is not None:
        raise DataError(
            f"demonstration {index} ({row.row_id}) writes its calls in the format {written!r}, which the env does not "
            f"read: set task.env_kwargs.tool_format={written}, or write the calls in the env's format"
        )
    stop = episode.limit or trajectory.stop  # a first prompt that is too long fails an episode, and is a limit here
    if stop.is_failure:
        raise DataError(f"demonstration {index} ({row.row_id}) failed when played: {trajectory.error}")
    actions = sum(not step.is_summary for step in trajectory.steps)
    if stop is StopReason.MAX_TOKENS or (stop is StopReason.MAX_STEPS and actions < len(texts)):
        return _Unfit(
            row_id=row.row_id, limit=f"{episode.limit_setting} is {getattr(episode.limits, episode.limit_setting)}"
        )
    if actions != len(texts):
        raise DataError(
            f"demonstration {index} ({row.row_id}) has {len(texts)} texts but its episode ended after "
            f"{actions} steps with {trajectory.stop.value!r}; last text: {trajectory.final_text!r}"
        )
    return trajectory


class _Replay:
    """A sampler that says what the expert said."""

    def __init__(self, renderer: Renderer, texts: Sequence[str]) -> None:
        self._renderer = renderer
        self._texts = iter(texts)
        self._summary: str | None = None

    def summarise(self, text: str) -> None:
        """What to say next, in place of a text for the env."""
        self._summary = text

    async def generate(self, prompt: Prompt, sampling: Sampling, *, session: str) -> Completion:
        is_summary = self._summary is not None
        text, self._summary = self._summary if is_summary else next(self._texts, None), None
        if text is None:
            raise DataError(
                "the expert's texts end before the episode does: the last one must end it, with an answer or with what "
                "ends the world"
            )
        ids = self._renderer.encode_response(text)
        fits = len(ids) <= sampling.max_tokens
        if is_summary and not fits:
            raise DataError(
                f"context.demo_summary wrote {len(ids)} tokens, and {sampling.max_tokens} are allowed: {text[:80]!r}"
            )
        ids = ids[: sampling.max_tokens]
        return Completion(token_ids=ids, logprobs=[0.0] * len(ids), stop="stop" if fits else "length")

    def release(self, session: str) -> None:
        pass


def _expert_flow(
    config: RunConfig, played: Callable[[TaskRow], AgentFlowBase], player: _Replay
) -> Callable[[TaskRow], AgentFlowBase]:
    """The recipe's flow; where the model would be asked for a summary, the expert's is said."""
    context = config.context
    if not isinstance(context, SummaryContext):
        return played
    assert context.demo_summary is not None  # the config checks it
    write = message_function(config, "context.demo_summary", context.demo_summary)

    def make_flow(row: TaskRow) -> AgentFlowBase:
        flow = played(row)
        assert flow.context is not None
        flow.context = _ExpertContext(flow.context, write, player)
        return flow

    return make_flow


@dataclass(frozen=True, slots=True)
class _ExpertContext(ContextPolicy):
    """A policy whose summaries are written by a function, from the whole conversation."""

    policy: ContextPolicy
    function: Callable[[list[Message]], str | Awaitable[str]]
    player: _Replay

    def begin(self, messages: list[Message]) -> None:
        self.policy.begin(messages)

    async def prepare(self, messages: list[Message], writer: Writer) -> None:
        await self.policy.prepare(messages, _Expert(self, messages, writer))

    async def show(self, messages: list[Message]) -> ContextView:
        return await self.policy.show(messages)


@dataclass(frozen=True, slots=True)
class _Expert:
    context: _ExpertContext
    conversation: list[Message]
    writer: Writer

    def count_tokens(self, messages: list[Message]) -> int:
        return self.writer.count_tokens(messages)

    async def write(self, messages: list[Message], *, max_tokens: int) -> str:
        made = self.context.function(deepcopy(self.conversation))
        text = await made if inspect.isawaitable(made) else made
        if not isinstance(text, str):
            raise DataError(f"context.demo_summary returned {text!r:.80}; it must return a text")
        self.context.player.summarise(text)
        return await self.writer.write(messages, max_tokens=max_tokens)


def trajectory_source(config: RunConfig) -> Path:
    """The folder or file of `sft.trajectories`; of a run, its trajectories."""
    assert config.sft.trajectories is not None
    return trajectories_of(config.sft.trajectories)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What rejection sampling left of a run's trajectories, and why the others went."""

    trajectories: list[Trajectory]
    read: int
    good: int  # earned enough
    distinct: int  # of the good ones, those that are no copy of another


def select(trajectories: Iterable[Trajectory], *, min_reward: float, max_per_row: int | None) -> Selection:
    """Those that earned enough, each once, and of each row the best `max_per_row`; among equals the latest, which are
    nearest to what the policy has become. In the order in which they came."""
    read, good, seen = 0, 0, set()
    rows: dict[str, list[tuple[float, int, Trajectory]]] = {}
    for position, trajectory in enumerate(trajectories):
        read += 1
        if trajectory.stop.is_failure or trajectory.total_reward < min_reward:
            continue
        good += 1
        said = tuple((tuple(step.prompt_ids), tuple(step.response_ids)) for step in trajectory.steps)
        if said not in seen:
            seen.add(said)
            rows.setdefault(trajectory.row_id, []).append((trajectory.total_reward, position, trajectory))
    best = [item for row in rows.values() for item in sorted(row, key=_quality)[-(max_per_row or len(row)) :]]
    kept = [trajectory for _, _, trajectory in sorted(best, key=lambda item: item[1])]
    return Selection(trajectories=kept, read=read, good=good, distinct=len(seen))


def _quality(item: tuple[float, int, Trajectory]) -> tuple[float, int]:
    reward, position, _ = item
    return reward, position


def _own_trajectories(config: RunConfig, renderer: Renderer, report: Report) -> list[Trajectory]:
    """A run's own trajectories that earned enough: rejection sampling."""
    source, settings = trajectory_source(config), config.sft
    read = read_trajectories(source, TRAINED)
    chosen = select(read, min_reward=settings.min_reward, max_per_row=settings.max_per_row)
    if not chosen.trajectories:
        raise DataError(
            f"no trajectory under {source} has a reward of at least {settings.min_reward:g} (sft.min_reward)"
        )
    limit = "" if settings.max_per_row is None else f", at most {settings.max_per_row} of one row"
    report(
        f"imitating {len(chosen.trajectories)} of {chosen.read} trajectories: {chosen.good} earned at least "
        f"{settings.min_reward:g}, {chosen.distinct} of them different{limit}"
    )
    for trajectory in chosen.trajectories:
        for step in trajectory.steps:
            if renderer.decode(step.response_ids) != step.action_text:
                raise DataError(
                    f"trajectory {trajectory.trajectory_id!r} of {source} was sampled with another tokenizer: its ids "
                    f"read {renderer.decode(step.response_ids)[:60]!r}, its text is {step.action_text[:60]!r}"
                )
    return chosen.trajectories
