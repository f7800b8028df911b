"""One attempt at one row: the model calls that a flow makes, recorded as exact steps.

The episode keeps the ids, enforces every limit and attaches what the environment answered. So a flow can neither train
on something that was not sampled nor lose the reason why it stopped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

from agent_r1.engines.base import Completion, Prompt, Sampler, Sampling, generate_all
from agent_r1.envs.base import AgentEnv, step_env
from agent_r1.errors import DataError
from agent_r1.flows.budgets import EpisodeLimit, Limits
from agent_r1.flows.context import ContextPolicy, ContextView, strip_reasoning
from agent_r1.flows.recording import Response, attach_transition, sanitize_messages, text_size
from agent_r1.guard import CANCEL_SECONDS
from agent_r1.seeds import stable_seed
from agent_r1.tokens.conversations import Conversations, Exchange, Pending
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import Action, Message, Observation, Step, StopReason, SummaryQuality, Transition
from agent_r1.vision.pictures import check_all, pictures_of, without_repeats

logger = logging.getLogger(__name__)

# No vocabulary has tokens this long, so longer text cannot fit the budget and is refused before it is tokenised.
MAX_CHARS_PER_TOKEN = 256

ToolSchemas = list[dict[str, Any]]


class Episode:
    """The model calls of one attempt, in order."""

    def __init__(
        self,
        *,
        episode_id: str,
        sampler: Sampler,
        sampling: Sampling,
        renderer: Renderer,
        limits: Limits,
        seed: int,
        role_sampling: Mapping[str, Sampling] | None = None,  # for roles that have their own settings
    ) -> None:
        self.episode_id = episode_id
        self.renderer = renderer
        self.limits = limits
        self.steps: list[Step] = []
        self.unanswered = Prompt([])  # the prompt that max_steps left unanswered
        self.opening: list[Message] = []  # the complete conversation of the first `act`
        self.limit: EpisodeLimit | None = None  # the budget that ended the episode, even before anything was sampled
        self.fault: str | None = None  # a failure that ended the episode without an exception
        self.counts: Counter[str] = Counter()  # the flow's own numbers, by the names of their metrics
        self.log = ""  # what the flow's programs wrote, for people
        self.roles: tuple[str, ...] = ()  # the roles that the flow may name
        self._sampler = sampler
        self._sampling = {**(role_sampling or {}), "": sampling}  # by role
        self._began = time.perf_counter()
        self._seed = seed
        self._conversations = Conversations(renderer)
        self._measured: tuple[list[Message], int] = ([], 0)  # the last messages, and how many characters they have
        self._begun_policies: list[ContextPolicy] = []
        self._acting: set[asyncio.Task[Any] | None] = set()  # the tasks that wait for a response
        self._calls = self._num_summaries = 0
        self.is_closed = False  # the steps now belong to a trajectory, which may already be scored

    @property
    def num_actions(self) -> int:
        """The steps that are not summaries."""
        return len(self.steps) - self._num_summaries

    async def close(self) -> None:
        """Sample nothing more for this episode, and cancel calls that its flow has left behind."""
        self.is_closed = True
        left = {task for task in self._acting if task is not None}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=CANCEL_SECONDS)

    async def act(
        self,
        observation: Observation,
        *,
        tools: ToolSchemas | None = None,
        context: ContextPolicy | None = None,  # chooses what to show of the observation; None: all of it
        role: str = "",  # one of the flow's `roles`
    ) -> Action:
        """Let the policy respond to a complete observation. Raises `EpisodeLimit` when a budget is used up.

        One call at a time, because the steps of a trajectory are ordered.
        """
        if self._acting:
            raise RuntimeError("episode.act was called while another call runs; await that one first")
        response = await self._call(observation, tools or [], role, context=context)
        if response.step.is_cut:  # a response cut in half must not be executed
            raise self._cut_limit(response.step)
        return Action(text=response.text, token_ids=response.token_ids)

    async def respond(
        self,
        observation: Observation,
        *,
        tools: ToolSchemas | None = None,
        after: Sequence[Exchange] = (),  # exchanges that the observation follows, the longest first
        max_tokens: int | None = None,  # a lower limit for this response
        stop_texts: Sequence[str] = (),  # the response ends with the token that completes one of them
        role: str = "",  # one of the flow's `roles`
    ) -> Response:
        """Like `act`, for callers whose calls may overlap: a cut response is returned, not raised.

        Steps are in the order in which their calls began, whichever response comes first.
        """
        return await self._call(
            observation, tools or [], role, after=after, max_tokens=max_tokens, stop_texts=stop_texts
        )

    async def _call(
        self,
        observation: Observation,
        tools: ToolSchemas,
        role: str,
        *,
        context: ContextPolicy | None = None,
        after: Sequence[Exchange] | None = None,  # None: whichever exchange the observation follows
        max_tokens: int | None = None,
        stop_texts: Sequence[str] = (),
    ) -> Response:
        """Sample and record a response, and note the limit that it reaches."""
        if self.is_closed:
            raise RuntimeError("the model was called after the episode had ended")
        if role and role not in self.roles:
            raise ValueError(f"role {role!r} is not one of the roles of this flow, {self.roles}: add it to the class")
        task, hidden = asyncio.current_task(), None
        self._acting.add(task)
        self.limit = None  # a flow may catch a limit and continue with a shorter conversation
        try:
            await self._check_steps(observation, tools, context)
            self.opening = self.opening or sanitize_messages(observation.messages or [])
            await _check_pictures(observation)
            if context is not None:
                view = await self._view(observation, context, _Writer(self, tools, role))
                observation, hidden = Observation(messages=view.messages), view.hidden
                await _check_pictures(observation)  # the policy may show other pictures
            pending, prompt = self._begin(observation, tools, after)
            own = self._response_limit(role)
            wanted = own if max_tokens is None else min(own, max_tokens)
            step, text = await self._sample(prompt, wanted, hidden, stop_texts, role=role)
            exchange = self._conversations.finish(pending, step.response_ids, text)
            full = len(step.prompt_ids) + len(step.response_ids) >= self.limits.max_context_tokens
            if step.is_cut and (wanted == own or full):
                self.limit = self._cut_limit(step)
            return Response(text=text, step=step, extends=pending.earlier is not None, exchange=exchange)
        except EpisodeLimit as limit:
            self.limit = limit
            raise
        finally:
            self._acting.discard(task)

    def _response_limit(self, role: str) -> int:
        own = self._sampling.get(role) if role else None
        return self.limits.max_response_tokens if own is None else own.max_tokens

    async def _check_steps(self, observation: Observation, tools: ToolSchemas, context: ContextPolicy | None) -> None:
        """Raise EpisodeLimit if this call, which is already among those that run, is one too many."""
        if self.num_actions + len(self._acting) > self.limits.max_steps:
            self.unanswered = await self._unanswered_prompt(observation, tools, context)
            raise EpisodeLimit(StopReason.MAX_STEPS, f"max_steps is {self.limits.max_steps}", setting="max_steps")

    def _cut_limit(self, step: Step) -> EpisodeLimit:
        """The limit that cut this response."""
        cut, allowed = f"a response was cut at {len(step.response_ids)} tokens", self._response_limit(step.role)
        if len(step.response_ids) < allowed:
            return self._context_limit(f"{cut} after a prompt of {len(step.prompt_ids)}")
        setting, whose = "max_response_tokens", f" of {step.role!r}" if step.role else ""
        return EpisodeLimit(StopReason.MAX_TOKENS, f"{cut}, {setting}{whose} is {allowed}", setting=setting)

    def _context_limit(self, what: str) -> EpisodeLimit:
        setting = "max_context_tokens"
        reason = f"{what}, {setting} is {self.limits.max_context_tokens}"
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
        """Return the prompt that would have come next, for a critic: the prompt of an action, or of the summary before
        it. Empty if it cannot be built: the episode has ended, so this is not an error."""
        try:
            if context is not None:
                view = await self._view(observation, context, _Writer(self, tools, "", may_sample=False))
                observation = Observation(messages=view.messages)
            _, prompt = self._begin(observation, tools)
        except _SummaryPrompt as summary:
            prompt = summary.prompt
        except (Exception, EpisodeLimit) as error:  # noqa: BLE001 (must not change the stop reason)
            logger.debug("the observation after the last step of %s cannot be rendered: %r", self.episode_id, error)
            return Prompt([])
        return prompt if len(prompt.ids) < self.limits.max_context_tokens else Prompt([])

    async def _sample(
        self, prompt: Prompt, max_tokens: int, hidden: int | None, stop_texts: Sequence[str] = (), *, role: str
    ) -> tuple[Step, str]:
        """Sample a response of at most `max_tokens` and record it as a step. Aborted responses are continued.

        The returned text ends before a stop text.
        """
        room = self.limits.max_context_tokens - len(prompt.ids)
        if room < 1:
            raise self._context_limit(f"the prompt has {len(prompt.ids)} tokens")
        if self.is_closed:  # the episode ended while a context policy was running
            raise RuntimeError("the episode had ended before anything was sampled")
        started = time.perf_counter()
        # A function of (seed, step), so an episode draws the same noise whatever runs beside it.
        seed = stable_seed(self._seed, self._calls)
        self._calls += 1
        own = self._sampling.get(role, self._sampling[""])
        sampling = replace(own, max_tokens=min(room, max_tokens), seed=seed)
        completion = await generate_all(self._sampler, prompt, sampling, session=self.episode_id)
        text = said = self.renderer.decode(completion.token_ids)
        if stop_texts:
            completion, text, said = self._cut_at(completion, text, stop_texts)
        step = Step(
            prompt_ids=prompt.ids,
            response_ids=completion.token_ids,
            response_logprobs=completion.logprobs,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            support=completion.support,
            action_text=text,
            role=role,
            versions=completion.versions,
            is_cut=completion.stop == "length",
            start_seconds=started - self._began,
            generate_seconds=time.perf_counter() - started,
            hidden_messages=hidden,
            pictures=prompt.media,
        )
        insort(self.steps, step, key=attrgetter("start_seconds"))
        return step, said

    def _cut_at(self, completion: Completion, text: str, stop_texts: Sequence[str]) -> tuple[Completion, str, str]:
        """End a response with the token that completes a stop text, as if sampling had ended there. Returns it, its
        text, and the text before the stop text."""
        found = [(start, stop) for stop in stop_texts if (start := text.find(stop)) >= 0]
        if not found:
            return completion, text, text
        start, stop = min(found)
        cut = completion.first(self.renderer.token_span(completion.token_ids, start, start + len(stop))[1])
        return cut, self.renderer.decode(cut.token_ids), text[:start]

    async def step(self, env: AgentEnv, action: Action) -> Transition:
        """Apply the action to the environment. The answer is checked, timed and attached to the last step."""
        started = time.perf_counter()
        transition = await step_env(env, action)
        seconds = time.perf_counter() - started
        self.observe(transition, seconds=seconds, source=f"{type(env).__name__}.step")
        return transition

    def observe(
        self, transition: Transition, *, to: Response | None = None, seconds: float = 0.0, source: str = "the env"
    ) -> None:
        """Attach an answer to the last step, or to the step of a response; `step` does this itself.

        Several answers to one step add up: rewards and seconds are summed, calls and feedback are appended, and later
        keys of `info` win. Values that cannot be recorded raise here, so that they fail only this episode.
        """
        if self.is_closed:
            raise RuntimeError("episode.observe was called after the episode had ended")
        step = self.steps[-1] if to is None else to.step
        token_span = partial(self.renderer.token_span, step.response_ids)
        attach_transition(step, transition, source=source, seconds=seconds, token_span=token_span)
        if transition.terminated and transition.stop.is_failure:
            self.fault = f"{source} ended the episode itself, with StopReason.{transition.stop.name}"

    def _begin(
        self, observation: Observation, tools: ToolSchemas, among: Sequence[Exchange] | None = None
    ) -> tuple[Pending, Prompt]:
        size = self._size(observation)
        if size > self.limits.max_context_tokens * MAX_CHARS_PER_TOKEN:
            raise self._context_limit(f"the observation has {size} characters")
        pending = self._conversations.begin(observation, tools, among=among)
        return pending, Prompt(pending.ids, without_repeats(pictures_of(observation.messages or ())))

    def _size(self, observation: Observation) -> int:
        """Characters, or ids. If a conversation has grown, only its new messages are read."""
        if observation.messages is None:
            return len(observation.text or observation.token_ids or ())
        (known, size), messages = self._measured, observation.messages
        if messages[: len(known)] != known:
            known, size = [], 0
        self._measured = list(messages), size + text_size(messages[len(known) :])
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
    role: str
    may_sample: bool = True  # False: the episode has ended, and only the prompt is needed

    def count_tokens(self, messages: list[Message]) -> int:
        return len(self._prompt(messages).ids)

    async def write(self, messages: list[Message], *, max_tokens: int) -> str:
        prompt = self._prompt(messages)
        if not self.may_sample:
            raise _SummaryPrompt(prompt)
        step, text = await self.episode._sample(prompt, max_tokens, None, role=self.role)
        # Half a summary is used as it is: unlike half an action, it does no harm.
        quality: SummaryQuality = "cut" if step.is_cut else "whole"
        self.episode._num_summaries += 1
        self.episode.steps[-1] = replace(step, summary=quality if strip_reasoning(text) else "empty")
        return text

    def _prompt(self, messages: list[Message]) -> Prompt:
        return self.episode._begin(Observation(messages=messages), self.tools)[1]


class _SummaryPrompt(Exception):
    """Raised instead of sampling a summary; carries the prompt it would have had."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__()
        self.prompt = prompt
