"""Flows: how one row becomes one trajectory.

A flow decides what the policy sees and when; the `Episode` it is handed makes the model calls, keeps the exact ids and
enforces every limit, so no flow can train on something other than what was sampled, or forget why it stopped.

    AgentEnvLoop     reset, act, step, act, step ... : any `AgentEnv`, including `ToolEnv`
    SingleStepFlow   one prompt, one answer
    AgentFlowBase    anything else: several calls, branches, several agents
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from agent_r1.agent.env import AgentEnv
from agent_r1.agent.rendering import Conversation, Renderer
from agent_r1.agent.sampler import Completion, Sampler, Sampling
from agent_r1.errors import ConfigError, did_you_mean
from agent_r1.types import Action, Message, Observation, Step, StopReason, TaskRow, ToolCallRecord, Transition

FlowClass = TypeVar("FlowClass", bound="type[AgentFlowBase]")

_FLOWS: dict[str, type[AgentFlowBase]] = {}
CLOSE_SECONDS = 5.0  # an env that cannot close is abandoned, not waited for
# No vocabulary has tokens this long, so longer text cannot fit the budget and is refused before it is tokenised.
MAX_CHARS_PER_TOKEN = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When an episode is stopped from outside."""

    max_steps: int
    max_response_tokens: int  # per step
    max_context_tokens: int  # prompt plus response of one step
    episode_seconds: float


class EpisodeLimit(Exception):
    """Not a failure but the typed end of an episode: `Episode.act` raises it when a budget is used up."""

    def __init__(self, stop: StopReason) -> None:
        super().__init__(stop.value)
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
        self.messages: list[Message] = []  # the conversation as last shown to the policy
        self._sampler = sampler
        self._sampling = sampling
        self._seed = seed
        self._conversation: Conversation | None = None
        self._tools: list[dict[str, Any]] | None = None

    async def act(self, observation: Observation, *, tools: list[dict[str, Any]] | None = None) -> Action:
        """Let the policy respond to a complete observation. Raises `EpisodeLimit` when a budget is used up."""
        if len(self.steps) >= self.limits.max_steps:
            raise EpisodeLimit(StopReason.MAX_STEPS)
        prompt_ids = self._render(observation, tools or [])
        room = self.limits.max_context_tokens - len(prompt_ids)
        if room < 1:
            raise EpisodeLimit(StopReason.MAX_TOKENS)
        started = time.perf_counter()
        completion = await self._sampler.generate(
            prompt_ids, self._next_sampling(min(room, self.limits.max_response_tokens)), session=self.episode_id
        )
        text = self.renderer.decode(completion.token_ids)
        self._record(prompt_ids, completion, text, time.perf_counter() - started)
        if completion.stop == "length":  # a response cut in half must not be executed
            raise EpisodeLimit(StopReason.MAX_TOKENS)
        assert self._conversation is not None
        self._conversation.sampled(completion.token_ids, text)
        return Action(text=text, token_ids=completion.token_ids)

    def observe(self, transition: Transition, *, seconds: float = 0.0) -> None:
        """Attach what the env answered to the step just taken."""
        if not math.isfinite(transition.reward):
            raise ValueError(f"the env returned reward {transition.reward!r}; rewards must be finite numbers")
        last = self.steps[-1]
        self.steps[-1] = replace(
            last,
            reward=last.reward + transition.reward,
            calls=last.calls + tuple(self._with_tokens(call, last) for call in transition.calls),
            feedback=transition.feedback,
            env_seconds=seconds,
            info=transition.info,
        )

    def _render(self, observation: Observation, tools: list[dict[str, Any]]) -> list[int]:
        size = _text_size(observation)
        if size > self.limits.max_context_tokens * MAX_CHARS_PER_TOKEN:
            raise EpisodeLimit(StopReason.MAX_TOKENS)
        if self._conversation is None or tools != self._tools:
            self._conversation, self._tools = Conversation(self.renderer, tools), tools
        if observation.messages is not None:
            self.messages = observation.messages
        return self._conversation.prompt(observation)

    def _next_sampling(self, max_tokens: int) -> Sampling:
        # A function of (seed, step), so an episode draws the same noise whatever else runs beside it.
        seed = stable_seed(self._seed, len(self.steps))
        return replace(self._sampling, max_tokens=max_tokens, seed=seed)

    def _record(self, prompt_ids: list[int], completion: Completion, text: str, seconds: float) -> None:
        self.steps.append(
            Step(
                prompt_ids=prompt_ids,
                response_ids=completion.token_ids,
                response_logprobs=completion.logprobs,
                action_text=text,
                policy_version=completion.policy_version,
                generate_seconds=seconds,
            )
        )

    def _with_tokens(self, call: ToolCallRecord, step: Step) -> ToolCallRecord:
        return replace(call, token_span=self.renderer.token_span(step.response_ids, *call.text_span))


class AgentFlowBase(ABC):
    """Everything between a row and its trajectory. A new flow object is made for every episode."""

    def __init__(self, make_env: Callable[[TaskRow], AgentEnv]) -> None:
        self.make_env = make_env  # the recipe's env with this row's settings, for flows that want one

    @abstractmethod
    async def run(self, row: TaskRow, episode: Episode) -> StopReason:
        """Play one row with `await episode.act(observation)` and say why it ended."""

    @staticmethod
    def register(*names: str) -> Callable[[FlowClass], FlowClass]:
        """Class decorator: make the flow available to recipes (`task.flow`) and rows (`agent_name`)."""

        def add(cls: FlowClass) -> FlowClass:
            _FLOWS.update(dict.fromkeys(names, cls))
            return cls

        return add


def flow_class(name: str) -> type[AgentFlowBase]:
    if name not in _FLOWS:
        raise ConfigError(f"unknown flow {name!r}.{did_you_mean(name, _FLOWS)}")
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

    async def run(self, row: TaskRow, episode: Episode) -> StopReason:
        env = self.make_env(row)
        try:
            observation = await env.reset(row if env.sees_ground_truth else row.without_ground_truth())
            while True:
                if not isinstance(observation, Observation):
                    raise TypeError(f"{type(env).__name__} returned {_brief(observation)} where an Observation belongs")
                action = await episode.act(observation, tools=env.tool_schemas)
                started = time.perf_counter()
                transition = await env.step(action)
                if not isinstance(transition, Transition):
                    raise TypeError(f"{type(env).__name__}.step returned {_brief(transition)} instead of a Transition")
                episode.observe(transition, seconds=time.perf_counter() - started)
                if transition.terminated:
                    return transition.stop
                assert transition.observation is not None  # Transition checks it
                observation = transition.observation
        finally:
            with suppress(TimeoutError):
                await asyncio.wait_for(env.close(), CLOSE_SECONDS)


def stable_seed(*parts: object) -> int:
    """A 63-bit seed from any parts, the same on every machine and Python (unlike `hash`)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _text_size(observation: Observation) -> int:
    if observation.messages is not None:
        return sum(len(content) for m in observation.messages if isinstance(content := m.get("content"), str))
    return len(observation.text or "") + len(observation.token_ids or [])


def _brief(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text[:80] + '...' if len(text) > 80 else text}"
