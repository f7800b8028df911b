"""Flows: how one row becomes one trajectory.

A flow decides what the policy sees and when; the `Episode` it is handed makes the model calls, keeps the exact ids and
enforces every limit, so no flow can train on something other than what was sampled, or forget why it stopped.

    AgentEnvLoop     reset, act, step, act, step ... : any `AgentEnv`, including `ToolEnv`
    SingleStepFlow   one prompt, one answer
    AgentFlowBase    anything else: several calls, branches, several agents
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from agent_r1.engines.base import Completion, Prompt, Sampler, Sampling, generate_all
from agent_r1.envs.base import AgentEnv, reset_env, step_env
from agent_r1.errors import DataError
from agent_r1.flows.attach import attach
from agent_r1.flows.context import Author, ContextPolicy, Shown, spoken
from agent_r1.guard import CANCEL_SECONDS, Signal, guarded, trace
from agent_r1.registry import Registry
from agent_r1.seeds import stable_seed
from agent_r1.text import sanitize
from agent_r1.tokens.conversations import Conversations
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import (
    Action,
    Message,
    Observation,
    Step,
    StopReason,
    SummaryQuality,
    TaskRow,
    Transition,
)

logger = logging.getLogger(__name__)

FlowClass = TypeVar("FlowClass", bound="type[AgentFlowBase]")

_FLOWS: Registry[type[AgentFlowBase]] = Registry("flow")
CLOSE_SECONDS = 5.0  # an env that cannot close is abandoned, not waited for
# No vocabulary has tokens this long, so longer text cannot fit the budget and is refused before it is tokenised.
MAX_CHARS_PER_TOKEN = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When an episode is stopped from outside."""

    max_steps: int  # actions
    max_response_tokens: int  # per step
    max_context_tokens: int  # prompt plus response of one step
    episode_seconds: float


class EpisodeLimit(Signal):
    """Raised by `Episode.act` when a budget is used up: the typed end of an episode, not a failure."""

    def __init__(self, stop: StopReason, reason: str) -> None:
        super().__init__(reason)
        self.stop = stop


class Episode:
    """One attempt at one row: the model calls a flow makes, recorded as exact steps."""

    def __init__(
        self, *, episode_id: str, sampler: Sampler, sampling: Sampling, renderer: Renderer, limits: Limits, seed: int
    ) -> None:
        self.episode_id = episode_id
        self.renderer = renderer
        self.limits = limits
        self.steps: list[Step] = []
        self.next_prompt_ids: list[int] = []  # the prompt that max_steps left unanswered
        self.num_actions = 0  # the steps that are not summaries
        self.messages: list[Message] = []  # the conversation that was last responded to, all of it
        self.opening: list[Message] = []  # the first one
        self.limit: StopReason | None = None  # the budget that ended it, even before anything was sampled
        self.limit_reason = ""  # which setting set the limit, and its value
        self.fault: str | None = None  # who ended it as failed, where nothing was raised
        self._sampler = sampler
        self._sampling = sampling
        self._seed = seed
        self._conversations = Conversations(renderer)
        self._begun: list[ContextPolicy] = []  # those that know their first observation
        self._acting: asyncio.Task[Any] | None = None  # the one in which `act` runs
        self._closed = False

    async def close(self) -> None:
        """Nothing is sampled for this episode any more. A call that its flow has left behind is cancelled, and over."""
        self._closed = True
        if self._acting is not None:
            self._acting.cancel()
            await asyncio.wait({self._acting}, timeout=CANCEL_SECONDS)

    async def act(
        self,
        observation: Observation,
        *,
        tools: list[dict[str, Any]] | None = None,
        context: ContextPolicy | None = None,  # decides what of the observation is shown; None: all of it
    ) -> Action:
        """Let the policy respond to a complete observation. Raises `EpisodeLimit` when a budget is used up.

        One call at a time: the steps of a trajectory have an order.
        """
        if self._closed or self._acting is not None:
            when = "after the episode had ended" if self._closed else "while another call runs; await that one first"
            raise RuntimeError(f"episode.act was called {when}")
        self._acting = asyncio.current_task()
        self.limit, self.limit_reason = None, ""  # a flow may catch a limit and continue with a shorter conversation
        try:
            if self.num_actions >= self.limits.max_steps:
                self.next_prompt_ids = await self._unanswered(observation, tools or [], context)
                raise EpisodeLimit(StopReason.MAX_STEPS, f"max_steps is {self.limits.max_steps}")
            return await self._act(observation, tools or [], context)
        except EpisodeLimit as limit:
            self.limit, self.limit_reason = limit.stop, str(limit)
            raise
        finally:
            self._acting = None

    async def _act(
        self, observation: Observation, tools: list[dict[str, Any]], context: ContextPolicy | None
    ) -> Action:
        hidden = None
        if observation.messages is not None:
            self.messages = observation.messages
            self.opening = self.opening or _kept(observation.messages)
        if context is not None:
            shown = await self._shown(observation, context, _Author(self, tools))
            observation, hidden = Observation(messages=shown.messages), shown.hidden
        prompt_ids = self._render(observation, tools)
        completion, text = await self._sample(prompt_ids, self.limits.max_response_tokens, hidden)
        self.num_actions += 1
        if completion.stop == "length":  # a response cut in half must not be executed
            raise EpisodeLimit(StopReason.MAX_TOKENS, self._why_cut(len(prompt_ids), len(completion.token_ids)))
        self._conversations.sampled(completion.token_ids, text)
        return Action(text=text, token_ids=completion.token_ids)

    def _why_cut(self, prompt: int, response: int) -> str:
        if response >= self.limits.max_response_tokens:
            return f"a response was cut at {response} tokens, max_response_tokens is {self.limits.max_response_tokens}"
        room = f"max_context_tokens is {self.limits.max_context_tokens}"
        return f"a response was cut at {response} tokens after a prompt of {prompt}, {room}"

    async def _shown(self, observation: Observation, context: ContextPolicy, author: Author) -> Shown:
        conversation = _messages_of(observation)
        if not any(context is each for each in self._begun):
            context.begin(conversation)
            self._begun.append(context)
        await context.prepare(conversation, author)
        return await context.show(conversation)

    async def _unanswered(
        self, observation: Observation, tools: list[dict[str, Any]], context: ContextPolicy | None
    ) -> list[int]:
        """The prompt that would have come next, for a critic: an action's, or that of a summary before it. Empty if it
        cannot be had: the episode is over anyway."""
        try:
            if context is not None:
                shown = await self._shown(observation, context, _Asked(self, tools))
                observation = Observation(messages=shown.messages)
            prompt_ids = self._render(observation, tools)
        except _Unwritten as asked:
            prompt_ids = asked.prompt_ids
        except (Exception, EpisodeLimit) as error:  # noqa: BLE001 (nobody answers this prompt: it must not change the stop reason)
            logger.debug("the observation after the last step of %s cannot be rendered: %r", self.episode_id, error)
            return []
        return prompt_ids if len(prompt_ids) < self.limits.max_context_tokens else []

    async def _sample(self, prompt_ids: list[int], max_tokens: int, hidden: int | None) -> tuple[Completion, str]:
        """A response of at most `max_tokens`, recorded as a step. If the engine aborts it, it is continued."""
        room = self.limits.max_context_tokens - len(prompt_ids)
        if room < 1:
            reason = f"the prompt has {len(prompt_ids)} tokens, max_context_tokens is {self.limits.max_context_tokens}"
            raise EpisodeLimit(StopReason.MAX_TOKENS, reason)
        if self._closed:  # while a context policy was thinking
            raise RuntimeError("the episode had ended before anything was sampled")
        started, sampling = time.perf_counter(), self._next_sampling(min(room, max_tokens))
        completion = await generate_all(self._sampler, Prompt(prompt_ids), sampling, session=self.episode_id)
        text = self.renderer.decode(completion.token_ids)
        step = Step(
            prompt_ids=prompt_ids,
            response_ids=completion.token_ids,
            response_logprobs=completion.logprobs,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            support=completion.support,
            action_text=text,
            versions=completion.versions,
            is_cut=completion.stop == "length",
            generate_seconds=time.perf_counter() - started,
            hidden_messages=hidden,
        )
        self.steps.append(step)
        return completion, text

    async def step(self, env: AgentEnv, action: Action) -> Transition:
        """What the env answers to the action, checked, timed and attached to the step just taken."""
        started = time.perf_counter()
        transition = await step_env(env, action)
        seconds = time.perf_counter() - started
        self.observe(transition, seconds=seconds, source=f"{type(env).__name__}.step")
        return transition

    def observe(self, transition: Transition, *, seconds: float = 0.0, source: str = "the env") -> None:
        """Attach what an env answered to the step just taken; `step` has done so already.

        More for the same step adds up: rewards and seconds are summed, calls and feedback follow the earlier ones, and
        of equal keys of `info` the later counts.

        Values that cannot be recorded raise here, so that they fail this episode and not the file of all of them.
        """
        last = self.steps[-1]
        self.steps[-1] = attach(
            last,
            transition,
            seconds=seconds,
            source=source,
            token_span=lambda start, end: self.renderer.token_span(last.response_ids, start, end),
        )
        if transition.terminated and transition.stop.is_failure:
            self.fault = f"{source} ended the episode itself, with StopReason.{transition.stop.name}"

    def _render(self, observation: Observation, tools: list[dict[str, Any]]) -> list[int]:
        size = _text_size([observation.messages, observation.text]) + len(observation.token_ids or [])
        if size > self.limits.max_context_tokens * MAX_CHARS_PER_TOKEN:
            reason = f"the observation has {size} characters, max_context_tokens is {self.limits.max_context_tokens}"
            raise EpisodeLimit(StopReason.MAX_TOKENS, reason)
        return self._conversations.prompt(observation, tools)

    def _next_sampling(self, max_tokens: int) -> Sampling:
        # A function of (seed, step), so an episode draws the same noise whatever else runs beside it.
        seed = stable_seed(self._seed, len(self.steps))
        return replace(self._sampling, max_tokens=max_tokens, seed=seed)


@dataclass(frozen=True, slots=True)
class _Author:
    """The model of an episode, for its context policy."""

    episode: Episode
    tools: list[dict[str, Any]]

    def count_tokens(self, messages: list[Message]) -> int:
        return len(self.episode._render(Observation(messages=messages), self.tools))

    async def write(self, messages: list[Message], *, max_tokens: int) -> str:
        """A summary that is cut is used as far as it goes: unlike half an action, half a summary does no harm."""
        prompt_ids = self.episode._render(Observation(messages=messages), self.tools)
        completion, text = await self.episode._sample(prompt_ids, max_tokens, None)
        quality: SummaryQuality = "empty" if not spoken(text) else "cut" if completion.stop == "length" else "whole"
        self.episode.steps[-1] = replace(self.episode.steps[-1], summary=quality)
        return text


class _Unwritten(Exception):
    """What was to be written after these ids was asked of a model that says nothing more."""

    def __init__(self, prompt_ids: list[int]) -> None:
        super().__init__("nothing more is sampled in this episode")
        self.prompt_ids = prompt_ids


class _Asked(_Author):
    """The model of an episode that is over: what it would have been asked is all there is."""

    async def write(self, messages: list[Message], *, max_tokens: int) -> str:
        raise _Unwritten(self.episode._render(Observation(messages=messages), self.tools))


class AgentFlowBase(ABC):
    """Everything between a row and its trajectory. A new flow object is made for every episode."""

    # Whether `run` passes `context=self.context` to `episode.act`. A class that defines another `run` says so again.
    uses_context: ClassVar[bool] = False
    context: ContextPolicy | None = None  # the configured one, of this episode; None: everything is shown

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        first = next(each for each in cls.__mro__ if {"run", "uses_context"} & vars(each).keys())
        if "uses_context" not in vars(first):  # its own `run`, or that of a class that is mixed in
            cls.uses_context = False

    def __init__(self, make_env: Callable[[TaskRow], AgentEnv]) -> None:
        self.make_env = make_env  # the recipe's env with this row's settings; what `playing` plays in

    @abstractmethod
    async def run(self, row: TaskRow, episode: Episode) -> StopReason:
        """Play one row with `await episode.act(observation)` and say why it ended."""

    @asynccontextmanager
    async def playing(self, row: TaskRow) -> AsyncIterator[tuple[AgentEnv, Observation]]:
        """`async with self.playing(row) as (env, observation)`: the row's env and what it begins with.

        The env sees no ground truth unless it says so, and is closed at the end, however that comes.
        """
        env = self.make_env(row)
        try:
            observation = await reset_env(env, row if env.sees_ground_truth else row.without_ground_truth())
            yield env, observation
        finally:
            try:
                await guarded(env.close(), seconds=CLOSE_SECONDS)
            except Exception as error:  # noqa: BLE001 (the episode is over, and its outcome stands)
                logger.error("closing %s failed\n%s", type(env).__name__, trace(error))

    @staticmethod
    def register(*names: str) -> Callable[[FlowClass], FlowClass]:
        """Class decorator: make the flow available to recipes (`task.flow`) and rows (`agent_name`)."""

        def add(cls: FlowClass) -> FlowClass:
            for name in names:
                _FLOWS.add(name, cls)
            return cls

        return add


def flow_class(name: str) -> type[AgentFlowBase]:
    return _FLOWS[name]


@AgentFlowBase.register("single_step", "single_step_agent")
class SingleStepFlow(AgentFlowBase):
    """One prompt, one answer, no environment."""

    async def run(self, row: TaskRow, episode: Episode) -> StopReason:
        await episode.act(Observation(messages=[dict(message) for message in row.prompt]))
        return StopReason.ANSWERED


@AgentFlowBase.register("agent_env_loop")
class AgentEnvLoop(AgentFlowBase):
    """The generic loop between the policy and an environment."""

    uses_context = True

    async def run(self, row: TaskRow, episode: Episode) -> StopReason:
        async with self.playing(row) as (env, observation):
            while True:
                action = await episode.act(observation, tools=env.tool_schemas, context=self.context)
                transition = await episode.step(env, action)
                if transition.terminated:
                    return transition.stop
                assert transition.observation is not None  # Transition checks it
                observation = transition.observation


def _messages_of(observation: Observation) -> list[Message]:
    if observation.messages is None:
        raise DataError(
            "a context policy chooses among messages, and the env gave text or ids: return Observation(messages=...), "
            "or leave the section context out"
        )
    return observation.messages


def _text_size(value: object) -> int:
    """The characters in all strings of a nested value: contents in parts and tool calls count too."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict | Mapping):  # nearly always a dict, which is told much faster
        return sum(map(_text_size, value.values()))
    return sum(map(_text_size, value)) if isinstance(value, list | tuple) else 0


def _kept(value: Any) -> Any:
    """A copy of messages for people, with all text fit to be printed."""
    if isinstance(value, str):
        return sanitize(value)
    if isinstance(value, Mapping):
        return {key: _kept(item) for key, item in value.items()}
    return [_kept(item) for item in value] if isinstance(value, list | tuple) else deepcopy(value)
