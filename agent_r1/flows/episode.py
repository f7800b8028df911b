"""One attempt at one row: the model calls that a flow makes, recorded as exact steps.

The episode keeps the ids, enforces every limit and attaches what the environment answered. So a flow can neither train
on something that was not sampled nor lose the reason why it stopped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from agent_r1.engines.base import Completion, Prompt, Sampler, Sampling, generate_all
from agent_r1.envs.base import AgentEnv, step_env
from agent_r1.errors import DataError
from agent_r1.flows.budgets import EpisodeLimit, Limits, cut_limit
from agent_r1.flows.context import ContextPolicy, ContextView, strip_reasoning
from agent_r1.flows.recording import Response, attach_transition, sanitize_messages, text_size
from agent_r1.guard import CANCEL_SECONDS
from agent_r1.seeds import stable_seed
from agent_r1.tokens.conversations import Conversations, Exchange
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import Action, Message, Observation, Step, StopReason, SummaryQuality, Transition
from agent_r1.vision.pictures import Picture, check_all, pictures_of, without_repeats

logger = logging.getLogger(__name__)

# No vocabulary has tokens this long, so longer text cannot fit the budget and is refused before it is tokenised.
MAX_CHARS_PER_TOKEN = 256

ToolSchemas = list[dict[str, Any]]


class _Call:
    """A running call of an episode. A class, because generators take longer to enter and leave."""

    def __init__(self, episode: Episode) -> None:
        self._episode, self._task = episode, asyncio.current_task()

    def __enter__(self) -> None:
        episode = self._episode
        episode._acting.add(self._task)
        # A flow may catch a limit and continue with a shorter conversation.
        episode.limit, episode.limit_reason, episode.limit_setting = None, "", ""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, EpisodeLimit):
            self._episode.reach_limit(error)
        self._episode._acting.discard(self._task)


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
        self.next_prompt_ids: list[int] = []  # the prompt that max_steps left unanswered
        self.next_pictures: tuple[Picture, ...] = ()  # pictures shown in that prompt
        self.num_actions = 0  # steps that are not summaries
        self.messages: list[Message] = []  # the complete conversation of the last `act`
        self.opening: list[Message] = []  # the complete conversation of the first `act`
        self.limit: StopReason | None = None  # the budget that ended the episode, even before anything was sampled
        self.limit_reason = ""
        self.limit_setting = ""  # the field of `Limits`
        self.fault: str | None = None  # a failure that ended the episode without an exception
        self.counts: Counter[str] = Counter()  # the flow's own numbers, by the names of their metrics
        self.log = ""  # what the flow's programs wrote, for people
        self.roles: tuple[str, ...] = ()  # the roles that the flow may name
        self._sampler = sampler
        samplings = {**(role_sampling or {}), "": sampling}  # by role
        self._sampling = {
            role: {each.name: getattr(own, each.name) for each in fields(own)} for role, own in samplings.items()
        }
        self._began = time.perf_counter()
        self._seed = seed
        self._conversations = Conversations(renderer)
        self._measured: tuple[list[Message], int] = ([], 0)  # the last messages, and how many characters they have
        self._begun_policies: list[ContextPolicy] = []
        self._acting: set[asyncio.Task[Any] | None] = set()  # the tasks that wait for a response
        self._numbers: list[int] = []  # the number of the call behind each step
        self._calls = 0
        self.is_closed = False  # the steps now belong to a trajectory, which may already be scored

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
        if self.is_closed or self._acting:
            when = "after the episode had ended" if self.is_closed else "while another call runs; await that one first"
            raise RuntimeError(f"episode.act was called {when}")
        self._check_role(role)
        with _Call(self):
            if self.num_actions >= self.limits.max_steps:
                raise await self._steps_limit(observation, tools or [], context)
            return await self._act(observation, tools or [], context, role)

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
        if self.is_closed:
            raise RuntimeError("episode.respond was called after the episode had ended")
        self._check_role(role)
        with _Call(self):
            if self.num_actions + len(self._acting) > self.limits.max_steps:
                raise await self._steps_limit(observation, tools or [], None)
            self.opening = self.opening or sanitize_messages(observation.messages or [])
            await _check_pictures(observation)
            self._check_size(observation)
            pending = self._conversations.begin(observation, tools or (), among=after)
            prompt = Prompt(pending.ids, without_repeats(pictures_of(observation.messages or ())))
            number, own = self._calls, self._response_limit(role)
            wanted = own if max_tokens is None else min(own, max_tokens)
            completion, text = await self._sample(prompt, wanted, None, stop_texts, role=role)
            self.num_actions += 1
            exchange = self._conversations.finish(pending, completion.token_ids, text)
            is_cut, full = completion.stop == "length", len(prompt.ids) + len(completion.token_ids)
            if is_cut and (wanted == own or full >= self.limits.max_context_tokens):
                self.reach_limit(self._cut_limit(prompt, completion, role))
            return Response(
                text=text,
                token_ids=completion.token_ids,
                logprobs=completion.logprobs,
                prompt_tokens=len(prompt.ids),
                is_cut=is_cut,
                extends=pending.earlier is not None,
                exchange=exchange,
                number=number,
            )

    def position(self, number: int) -> int:
        """Where in `steps` the step of a call is now; steps of earlier calls may still come before it."""
        return self._numbers.index(number)

    def _check_role(self, role: str) -> None:
        if role and role not in self.roles:
            raise ValueError(f"role {role!r} is not one of the roles of this flow, {self.roles}: add it to the class")

    def _response_limit(self, role: str) -> int:
        own = self._sampling.get(role) if role else None
        return self.limits.max_response_tokens if own is None else int(own["max_tokens"])

    async def _steps_limit(
        self, observation: Observation, tools: ToolSchemas, context: ContextPolicy | None
    ) -> EpisodeLimit:
        unanswered = await self._unanswered_prompt(observation, tools, context)
        self.next_prompt_ids, self.next_pictures = unanswered.ids, unanswered.media
        return EpisodeLimit(StopReason.MAX_STEPS, f"max_steps is {self.limits.max_steps}", setting="max_steps")

    def reach_limit(self, limit: EpisodeLimit) -> None:
        self.limit, self.limit_reason, self.limit_setting = limit.stop, str(limit), limit.setting

    async def _act(
        self, observation: Observation, tools: ToolSchemas, context: ContextPolicy | None, role: str
    ) -> Action:
        hidden = None
        if observation.messages is not None:
            self.messages = observation.messages
            self.opening = self.opening or sanitize_messages(observation.messages)
        await _check_pictures(observation)
        if context is not None:
            view = await self._view(observation, context, _Writer(self, tools, role))
            observation, hidden = Observation(messages=view.messages), view.hidden
            await _check_pictures(observation)  # the policy may show other pictures
        prompt = self._render(observation, tools)
        completion, text = await self._sample(prompt, self._response_limit(role), hidden, role=role)
        self.num_actions += 1
        if completion.stop == "length":  # a response cut in half must not be executed
            raise self._cut_limit(prompt, completion, role)
        self._conversations.record(completion.token_ids, text)
        return Action(text=text, token_ids=completion.token_ids)

    def _cut_limit(self, prompt: Prompt, completion: Completion, role: str) -> EpisodeLimit:
        sizes = len(prompt.ids), len(completion.token_ids)
        return cut_limit(*sizes, allowed=self._response_limit(role), limits=self.limits, role=role)

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
            prompt = self._render(observation, tools)
        except _SummaryPrompt as summary:
            prompt = summary.prompt
        except (Exception, EpisodeLimit) as error:  # noqa: BLE001 (must not change the stop reason)
            logger.debug("the observation after the last step of %s cannot be rendered: %r", self.episode_id, error)
            return Prompt([])
        return prompt if len(prompt.ids) < self.limits.max_context_tokens else Prompt([])

    async def _sample(
        self, prompt: Prompt, max_tokens: int, hidden: int | None, stop_texts: Sequence[str] = (), *, role: str
    ) -> tuple[Completion, str]:
        """Sample a response of at most `max_tokens` and record it as a step. Aborted responses are continued.

        The returned text ends before a stop text.
        """
        limit = self.limits.max_context_tokens
        room = limit - len(prompt.ids)
        if room < 1:
            reason = f"the prompt has {len(prompt.ids)} tokens, max_context_tokens is {limit}"
            raise EpisodeLimit(StopReason.MAX_TOKENS, reason, setting="max_context_tokens")
        if self.is_closed:  # the episode ended while a context policy was running
            raise RuntimeError("the episode had ended before anything was sampled")
        started = time.perf_counter()
        # A function of (seed, step), so an episode draws the same noise whatever runs beside it.
        seed, number = stable_seed(self._seed, self._calls), self._calls
        self._calls += 1
        own = self._sampling.get(role, self._sampling[""])
        sampling = Sampling(**{**own, "max_tokens": min(room, max_tokens), "seed": seed})
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
        place = bisect(self._numbers, number)
        self.steps.insert(place, step)
        self._numbers.insert(place, number)
        return completion, said

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
        place = -1 if to is None else self.position(to.number)
        last = self.steps[place]

        def token_span(start: int, end: int) -> tuple[int, int]:
            return self.renderer.token_span(last.response_ids, start, end)

        self.steps[place] = attach_transition(last, transition, source=source, seconds=seconds, token_span=token_span)
        if transition.terminated and transition.stop.is_failure:
            self.fault = f"{source} ended the episode itself, with StopReason.{transition.stop.name}"

    def _check_size(self, observation: Observation) -> None:
        limit, size = self.limits.max_context_tokens, self._size(observation)
        if size > limit * MAX_CHARS_PER_TOKEN:
            reason = f"the observation has {size} characters, max_context_tokens is {limit}"
            raise EpisodeLimit(StopReason.MAX_TOKENS, reason, setting="max_context_tokens")

    def _render(self, observation: Observation, tools: ToolSchemas) -> Prompt:
        self._check_size(observation)
        ids = self._conversations.prompt(observation, tools)
        return Prompt(ids, without_repeats(pictures_of(observation.messages or ())))

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
        return len(self.episode._render(Observation(messages=messages), self.tools).ids)

    async def write(self, messages: list[Message], *, max_tokens: int) -> str:
        prompt = self.episode._render(Observation(messages=messages), self.tools)
        if not self.may_sample:
            raise _SummaryPrompt(prompt)
        completion, text = await self.episode._sample(prompt, max_tokens, None, role=self.role)
        # Half a summary is used as it is: unlike half an action, it does no harm.
        empty, is_cut = not strip_reasoning(text), completion.stop == "length"
        quality: SummaryQuality = "empty" if empty else "cut" if is_cut else "whole"
        self.episode.steps[-1] = replace(self.episode.steps[-1], summary=quality)
        return text


class _SummaryPrompt(Exception):
    """Raised instead of sampling a summary; carries the prompt it would have had."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__()
        self.prompt = prompt
