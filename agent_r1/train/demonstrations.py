"""Play demonstrations: the texts an expert would write, through the flow and env that RL uses.

A sampler replays the texts, so the resulting steps are exactly what RL would sample and train on.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from textwrap import shorten

from agent_r1.data.downloads import Report
from agent_r1.data.rows import Demo
from agent_r1.engines.base import Completion, Prompt, Sampler, Sampling
from agent_r1.errors import DataError
from agent_r1.flows.context import ContextPolicy, ContextView, Writer
from agent_r1.flows.episode import Episode
from agent_r1.flows.flow import AgentFlowBase
from agent_r1.rollout.collect import Collector
from agent_r1.tokens.formats.base import ParsedCall
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import Message, StopReason, ToolCallRecord, Trajectory

WriteSummary = Callable[[list[Message]], str | Awaitable[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlayer:
    """Plays demonstrations. `write_summary` is needed if the context policy asks for summaries."""

    make_collector: Callable[[Sampler], Collector]
    renderer: Renderer
    max_concurrent: int
    write_summary: WriteSummary | None = None

    async def play(self, demos: Sequence[Demo], report: Report) -> list[Trajectory]:
        """Return the demonstrations that fit the limits. Raises DataError for one that cannot be played."""
        gate = asyncio.Semaphore(self.max_concurrent)
        try:
            async with asyncio.TaskGroup() as group:  # if one cannot be played, the others stop and close their envs
                plays = [group.create_task(self._play(index, demo, gate)) for index, demo in enumerate(demos)]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        played = [play.result() for play in plays]
        fitting = [each for each in played if isinstance(each, Trajectory)]
        limits = [each for each in played if isinstance(each, str)]
        if limits:
            what = f"{len(limits)} of {len(demos)} demonstrations exceed a limit"
            if 2 * len(fitting) < len(demos):
                raise DataError(f"{what}; the first is {limits[0]}. Raise the limit, or shorten them")
            report(f"{what} and are left out; the first is {limits[0]}")
        _report_failed_calls(fitting, report)
        return fitting

    async def _play(self, index: int, demo: Demo, gate: asyncio.Semaphore) -> Trajectory | str:
        """Return the trajectory, or the limit that it exceeds."""
        row, texts = demo
        replay = _Replay(self.renderer, texts)
        collector = self.make_collector(replay)
        make_flow = collector.make_flow
        collector = replace(collector, make_flow=lambda row: self._with_expert(make_flow(row), replay))
        episode = collector.episode(Episode, f"{row.row_id}#demo{index}", index)
        async with gate:
            trajectory = await collector.play(row, episode)
        name = f"demonstration {index} ({row.row_id})"
        _check_calls(name, trajectory)  # first: a bad call may have caused other errors
        # A first prompt that is too long counts as a limit, not as a failure.
        stop = trajectory.stop if episode.limit is None else episode.limit.stop
        if stop.is_failure:
            raise DataError(f"{name} failed when played: {trajectory.error}")
        actions = sum(not step.is_summary for step in trajectory.steps)
        reached = episode.limit is not None  # otherwise the env's own budget ended it
        if reached and (stop is StopReason.MAX_TOKENS or (stop is StopReason.MAX_STEPS and actions < len(texts))):
            return f"of row {row.row_id}: {_reached(episode, collector)}"
        if actions != len(texts):
            raise DataError(
                f"{name} has {len(texts)} texts but its episode ended after {actions} steps with "
                f"{trajectory.stop.value!r}; last text: {trajectory.final_text!r}"
            )
        return trajectory

    def _with_expert(self, flow: AgentFlowBase, replay: _Replay) -> AgentFlowBase:
        """Let the expert write the summaries that the model would be asked for."""
        if self.write_summary is not None:
            assert flow.context is not None
            flow.context = _ExpertContext(flow.context, self.write_summary, replay)
        return flow


def _reached(episode: Episode, collector: Collector) -> str:
    """Name the setting that an episode has reached: a role may have a limit of its own."""
    assert episode.limit is not None
    name = episode.limit.setting
    own = collector.role_sampling.get(episode.steps[-1].role) if episode.steps else None
    if own is None or name != "max_response_tokens" or own.max_tokens == collector.sampling.max_tokens:
        return f"rollout.{name} is {getattr(episode.limits, name)}"
    return f"rollout.roles.{episode.steps[-1].role}.{name} is {own.max_tokens}"


def _failed_calls(trajectory: Trajectory) -> list[ToolCallRecord]:
    return [call for step in trajectory.steps for call in step.calls if call.error is not None]


def _check_calls(name: str, trajectory: Trajectory) -> None:
    """Refuse calls of tools that do not exist and calls in another format; other calls may fail on purpose."""
    for call in _failed_calls(trajectory):
        if call.fault == "unknown_tool":
            raise DataError(f"{name} calls a tool that does not exist: {call.error}")
    if (written := _foreign_format(trajectory)) is not None:
        raise DataError(
            f"{name} writes its calls in the format {written!r}, which the env does not read: set "
            f"task.env_kwargs.tool_format={written}, or write the calls in the env's format"
        )


def _foreign_format(trajectory: Trajectory) -> str | None:
    """Return the format of a call that the env could not read, if another format can."""
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


def _report_failed_calls(played: Sequence[Trajectory], report: Report) -> None:
    """Failed calls are not an error: some recipes show on purpose how to recover from them."""
    failed = [(trajectory.row_id, calls[0]) for trajectory in played if (calls := _failed_calls(trajectory))]
    if failed:
        row_id, call = failed[0]
        why = shorten(call.error or "", 200, placeholder=" ...")
        report(
            f"{len(failed)} of {len(played)} demonstrations contain calls that failed, the first (row {row_id}): "
            f"{call.name or 'unreadable call'}: {why}"
        )


class _Replay:
    """A sampler that returns the expert's texts."""

    def __init__(self, renderer: Renderer, texts: Sequence[str]) -> None:
        self._renderer = renderer
        self._texts = iter(texts)
        self._summary: str | None = None

    def say_next(self, summary: str) -> None:
        """Return this summary next, before the remaining texts."""
        self._summary = summary

    async def generate(self, prompt: Prompt, sampling: Sampling, *, session: str) -> Completion:
        is_summary = self._summary is not None
        text, self._summary = self._summary if is_summary else next(self._texts, None), None
        if text is None:
            raise DataError("the expert's texts end before the episode does: the last one must end it")
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


class _ExpertContext(ContextPolicy):
    """A context policy whose summaries a function writes, from the whole conversation."""

    def __init__(self, policy: ContextPolicy, write_summary: WriteSummary, replay: _Replay) -> None:
        self._policy, self._write_summary, self._replay = policy, write_summary, replay

    def begin(self, messages: list[Message]) -> None:
        self._policy.begin(messages)

    async def prepare(self, messages: list[Message], writer: Writer) -> None:
        self._conversation, self._writer = messages, writer
        await self._policy.prepare(messages, self)

    async def show(self, messages: list[Message]) -> ContextView:
        return await self._policy.show(messages)

    def count_tokens(self, messages: list[Message]) -> int:
        return self._writer.count_tokens(messages)

    async def write(self, messages: list[Message], *, max_tokens: int) -> str:
        made = self._write_summary(deepcopy(self._conversation))
        text = await made if inspect.isawaitable(made) else made
        if not isinstance(text, str):
            raise DataError(f"context.demo_summary returned {text!r:.80}; it must return a string")
        self._replay.say_next(text)
        return await self._writer.write(messages, max_tokens=max_tokens)
