"""One attempt at one row: the model calls that a flow makes, recorded as exact steps.

The episode keeps the ids, enforces every limit and attaches what the environment answered. So a flow can neither train
on something that was not sampled nor lose the reason why it stopped.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from agent_r1.data.files import is_nested_deeper
from agent_r1.engines.base import Completion, Prompt, Sampler, Sampling, generate_all
from agent_r1.envs.base import AgentEnv, step_env
from agent_r1.errors import DataError
from agent_r1.flows.context import ContextPolicy, ContextView, strip_reasoning
from agent_r1.guard import CANCEL_SECONDS, Signal
from agent_r1.seeds import stable_seed
from agent_r1.text import sanitize
from agent_r1.tokens.conversations import Conversations
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import Action, Message, Observation, Step, StopReason, SummaryQuality, ToolCallRecord, Transition
from agent_r1.vision.pictures import Picture, check_all, pictures_of, without_repeats

logger = logging.getLogger(__name__)

# No vocabulary has tokens this long, so longer text cannot fit the budget and is refused before it is tokenised.
MAX_CHARS_PER_TOKEN = 256
MAX_INFO_CHARS = 100_000
MAX_INFO_NESTING = 80  # deeper than the arguments of a call may be

ToolSchemas = list[dict[str, Any]]
TokenSpan = Callable[[int, int], tuple[int, int]]  # characters [start, end) of the response -> its tokens [start, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The budgets of an episode."""

    max_steps: int  # actions
    max_response_tokens: int  # per step
    max_context_tokens: int  # prompt plus response of one step
    episode_seconds: float


class EpisodeLimit(Signal):
    """Raised by `Episode.act` when a budget is used up. It ends the episode, but is not a failure."""

    def __init__(self, stop: StopReason, reason: str, *, setting: str = "") -> None:
        super().__init__(reason)
        self.stop = stop
        self.setting = setting  # the field of `Limits` that was reached


class Episode:
    """The model calls of one attempt, in order."""

    def __init__(
        self, *, episode_id: str, sampler: Sampler, sampling: Sampling, renderer: Renderer, limits: Limits, seed: int
    ) -> None:
        self.episode_id = episode_id
        self.renderer = renderer
        self.limits = limits
        self.steps: list[Step] = []
        self.next_prompt_ids: list[int] = []  # the prompt that max_steps left unanswered
        self.next_pictures: tuple[Picture, ...] = ()  # that this prompt shows
        self.num_actions = 0  # steps that are not summaries
        self.messages: list[Message] = []  # the complete conversation of the last `act`
        self.opening: list[Message] = []  # that of the first one
        self.limit: StopReason | None = None  # the budget that ended the episode, even before anything was sampled
        self.limit_reason = ""
        self.limit_setting = ""  # the field of `Limits`
        self.fault: str | None = None  # what ended the episode as failed without raising
        self._sampler = sampler
        self._sampling = sampling
        self._seed = seed
        self._conversations = Conversations(renderer)
        self._measured: tuple[list[Message], int] = ([], 0)  # the last messages, and their characters
        self._begun_policies: list[ContextPolicy] = []
        self._acting: asyncio.Task[Any] | None = None  # the task that runs `act`
        self._closed = False

    async def close(self) -> None:
        """Sample nothing more for this episode, and cancel a call that its flow has left behind."""
        self._closed = True
        if self._acting is not None:
            self._acting.cancel()
            await asyncio.wait({self._acting}, timeout=CANCEL_SECONDS)

    async def act(
        self,
        observation: Observation,
        *,
        tools: ToolSchemas | None = None,
        context: ContextPolicy | None = None,  # chooses what to show of the observation; None: all of it
    ) -> Action:
        """Let the policy respond to a complete observation. Raises `EpisodeLimit` when a budget is used up.

        One call at a time, because the steps of a trajectory are ordered.
        """
        if self._closed or self._acting is not None:
            when = "after the episode had ended" if self._closed else "while another call runs; await that one first"
            raise RuntimeError(f"episode.act was called {when}")
        self._acting = asyncio.current_task()
        # A flow may catch a limit and continue with a shorter conversation.
        self.limit, self.limit_reason, self.limit_setting = None, "", ""
        try:
            if self.num_actions >= self.limits.max_steps:
                unanswered = await self._unanswered_prompt(observation, tools or [], context)
                self.next_prompt_ids, self.next_pictures = unanswered.ids, unanswered.media
                reason = f"max_steps is {self.limits.max_steps}"
                raise EpisodeLimit(StopReason.MAX_STEPS, reason, setting="max_steps")
            return await self._act(observation, tools or [], context)
        except EpisodeLimit as limit:
            self.reach_limit(limit)
            raise
        finally:
            self._acting = None

    def reach_limit(self, limit: EpisodeLimit) -> None:
        self.limit, self.limit_reason, self.limit_setting = limit.stop, str(limit), limit.setting

    async def _act(self, observation: Observation, tools: ToolSchemas, context: ContextPolicy | None) -> Action:
        hidden = None
        if observation.messages is not None:
            self.messages = observation.messages
            self.opening = self.opening or _sanitize_messages(observation.messages)
        await _check_pictures(observation)
        if context is not None:
            view = await self._view(observation, context, _Writer(self, tools))
            observation, hidden = Observation(messages=view.messages), view.hidden
            await _check_pictures(observation)  # the policy may show others
        prompt = self._render(observation, tools)
        completion, text = await self._sample(prompt, self.limits.max_response_tokens, hidden)
        self.num_actions += 1
        if completion.stop == "length":  # a response cut in half must not be executed
            raise self._cut_limit(len(prompt.ids), len(completion.token_ids))
        self._conversations.record(completion.token_ids, text)
        return Action(text=text, token_ids=completion.token_ids)

    def _cut_limit(self, prompt: int, response: int) -> EpisodeLimit:
        by_response = response >= self.limits.max_response_tokens
        setting = "max_response_tokens" if by_response else "max_context_tokens"
        after = "" if by_response else f" after a prompt of {prompt}"
        reason = f"a response was cut at {response} tokens{after}, {setting} is {getattr(self.limits, setting)}"
        return EpisodeLimit(StopReason.MAX_TOKENS, reason, setting=setting)

    async def _view(self, observation: Observation, context: ContextPolicy, writer: _Writer) -> ContextView:
        if observation.messages is None:
            raise DataError(
                "a context policy chooses among messages, but the observation is text or ids. Return "
                "Observation(messages=...), or remove the section context"
            )
        if not any(context is each for each in self._begun_policies):
            context.begin(observation.messages)
            self._begun_policies.append(context)
        await context.prepare(observation.messages, writer)
        return await context.show(observation.messages)

    async def _unanswered_prompt(
        self, observation: Observation, tools: ToolSchemas, context: ContextPolicy | None
    ) -> Prompt:
        """The prompt that would have come next, for a critic: of an action, or of the summary before it. Empty if it
        cannot be built, because the episode has ended anyway."""
        try:
            if context is not None:
                view = await self._view(observation, context, _Writer(self, tools, may_sample=False))
                observation = Observation(messages=view.messages)
            prompt = self._render(observation, tools)
        except _SummaryPrompt as summary:
            prompt = summary.prompt
        except (Exception, EpisodeLimit) as error:  # noqa: BLE001 (must not change the stop reason)
            logger.debug("the observation after the last step of %s cannot be rendered: %r", self.episode_id, error)
            return Prompt([])
        return prompt if len(prompt.ids) < self.limits.max_context_tokens else Prompt([])

    async def _sample(self, prompt: Prompt, max_tokens: int, hidden: int | None) -> tuple[Completion, str]:
        """Sample a response of at most `max_tokens` and record it as a step. Aborted responses are continued."""
        limit = self.limits.max_context_tokens
        room = limit - len(prompt.ids)
        if room < 1:
            reason = f"the prompt has {len(prompt.ids)} tokens, max_context_tokens is {limit}"
            raise EpisodeLimit(StopReason.MAX_TOKENS, reason, setting="max_context_tokens")
        if self._closed:  # while a context policy was running
            raise RuntimeError("the episode had ended before anything was sampled")
        started = time.perf_counter()
        # A function of (seed, step), so an episode draws the same noise whatever runs beside it.
        seed = stable_seed(self._seed, len(self.steps))
        sampling = replace(self._sampling, max_tokens=min(room, max_tokens), seed=seed)
        completion = await generate_all(self._sampler, prompt, sampling, session=self.episode_id)
        text = self.renderer.decode(completion.token_ids)
        step = Step(
            prompt_ids=prompt.ids,
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
            pictures=prompt.media,
        )
        self.steps.append(step)
        return completion, text

    async def step(self, env: AgentEnv, action: Action) -> Transition:
        """Apply the action to the environment. The answer is checked, timed and attached to the last step."""
        started = time.perf_counter()
        transition = await step_env(env, action)
        seconds = time.perf_counter() - started
        self.observe(transition, seconds=seconds, source=f"{type(env).__name__}.step")
        return transition

    def observe(self, transition: Transition, *, seconds: float = 0.0, source: str = "the env") -> None:
        """Attach an environment's answer to the last step; `step` does this itself.

        Several answers to one step add up: rewards and seconds are summed, calls and feedback are appended, and later
        keys of `info` win. Values that cannot be recorded raise here, so that they fail only this episode.
        """
        last = self.steps[-1]

        def token_span(start: int, end: int) -> tuple[int, int]:
            return self.renderer.token_span(last.response_ids, start, end)

        self.steps[-1] = attach_transition(last, transition, source=source, seconds=seconds, token_span=token_span)
        if transition.terminated and transition.stop.is_failure:
            self.fault = f"{source} ended the episode itself, with StopReason.{transition.stop.name}"

    def _render(self, observation: Observation, tools: ToolSchemas) -> Prompt:
        limit = self.limits.max_context_tokens
        size = self._size(observation)
        if size > limit * MAX_CHARS_PER_TOKEN:
            reason = f"the observation has {size} characters, max_context_tokens is {limit}"
            raise EpisodeLimit(StopReason.MAX_TOKENS, reason, setting="max_context_tokens")
        ids = self._conversations.prompt(observation, tools)
        return Prompt(ids, without_repeats(pictures_of(observation.messages or ())))

    def _size(self, observation: Observation) -> int:
        """Characters, or ids. Of a conversation that has grown, only the new messages are read."""
        if observation.messages is None:
            return len(observation.text or observation.token_ids or ())
        (known, size), messages = self._measured, observation.messages
        if messages[: len(known)] != known:
            known, size = [], 0
        self._measured = list(messages), size + _text_size(messages[len(known) :])
        return self._measured[1]


async def _check_pictures(observation: Observation) -> None:
    """Fail this episode for a damaged picture. Inside the engine or the learner, it would fail the run."""
    new = [picture for picture in pictures_of(observation.messages or ()) if not picture.is_sound]
    if new:
        await asyncio.to_thread(check_all, new)


@dataclass(frozen=True, slots=True)
class _Writer:
    """The episode's model, as its context policy may use it."""

    episode: Episode
    tools: ToolSchemas
    may_sample: bool = True  # False: the episode has ended, and only the prompt is of interest

    def count_tokens(self, messages: list[Message]) -> int:
        return len(self.episode._render(Observation(messages=messages), self.tools).ids)

    async def write(self, messages: list[Message], *, max_tokens: int) -> str:
        prompt = self.episode._render(Observation(messages=messages), self.tools)
        if not self.may_sample:
            raise _SummaryPrompt(prompt)
        completion, text = await self.episode._sample(prompt, max_tokens, None)
        # Half a summary is used as it is: unlike half an action, it does no harm.
        empty, is_cut = not strip_reasoning(text), completion.stop == "length"
        quality: SummaryQuality = "empty" if empty else "cut" if is_cut else "whole"
        self.episode.steps[-1] = replace(self.episode.steps[-1], summary=quality)
        return text


class _SummaryPrompt(Exception):
    """Carries the prompt of a summary that is not sampled."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__()
        self.prompt = prompt


def attach_transition(
    step: Step, transition: Transition, *, source: str, seconds: float = 0.0, token_span: TokenSpan | None = None
) -> Step:
    """Add the transition to the step, in a form that a trajectory file can hold. Errors name `source`."""
    return replace(
        step,
        reward=step.reward + float(transition.reward),
        calls=step.calls + tuple(_recordable_call(call, source, token_span) for call in transition.calls),
        feedback="\n".join(filter(None, (step.feedback, sanitize(transition.feedback)))),
        env_seconds=step.env_seconds + seconds,
        info={**step.info, **_recordable(transition.info, source)},
    )


def _recordable_call(call: ToolCallRecord, source: str, token_span: TokenSpan | None) -> ToolCallRecord:
    return replace(
        call,
        token_span=None if token_span is None else token_span(*call.text_span),
        reward=float(call.reward),
        result=sanitize(call.result),
        arguments=_recordable(call.arguments, source),
        info=_recordable(call.info, f"tool {call.name!r}" if call.name else source),
    )


def _recordable(info: Mapping[str, Any], source: str) -> dict[str, Any]:
    if len(info) <= 16 and all(type(key) is str and _is_short(key) and _is_short(info[key]) for key in info):
        return dict(info)  # as it would come back from JSON, which is below the limit
    try:
        text = json.dumps(info, ensure_ascii=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{source}: info and arguments must be JSON: {error}") from error
    if len(text) > MAX_INFO_CHARS:
        raise ValueError(f"{source} returned info of {len(text)} characters; at most {MAX_INFO_CHARS} can be recorded")
    plain: dict[str, Any] = json.loads(sanitize(text))
    if is_nested_deeper(plain, MAX_INFO_NESTING, text=text):
        raise ValueError(f"{source} returned info that is nested more than {MAX_INFO_NESTING} levels deep")
    return plain


def _is_short(value: object) -> bool:
    """Whether JSON reads the value back as it is, and writes at most 3,000 characters."""
    if type(value) is str:
        return len(value) <= 500 and value.isascii()
    return value is None or type(value) in (bool, float) or (type(value) is int and value.bit_length() < 64)


def _text_size(value: object) -> int:
    """The characters of all strings in a nested value, including contents in parts and tool calls."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict | Mapping):  # dict first: nearly every mapping is one, and this check is much faster
        return sum(map(_text_size, value.values()))
    return sum(map(_text_size, value)) if isinstance(value, list | tuple) else 0


def _sanitize_messages(value: Any) -> Any:
    """A copy of messages for people, whose text can be printed and stored."""
    if isinstance(value, str):
        return sanitize(value)
    if isinstance(value, Mapping):
        return {key: _sanitize_messages(item) for key, item in value.items()}
    return [_sanitize_messages(item) for item in value] if isinstance(value, list | tuple) else deepcopy(value)
