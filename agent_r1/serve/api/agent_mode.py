"""The agent: the flow of the run answers, with its environment and tools, and the client sees what they do.

The content of the answer is the text of all of the agent's steps, without calls and thinking. Calls, their results
and an environment's answers are events in the field `agent_r1`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent_r1.engines.base import Completion, Prompt, Sampling
from agent_r1.flows.context import ContextPolicy, ContextView
from agent_r1.flows.episode import Episode
from agent_r1.flows.recording import Response as Responded
from agent_r1.rollout.collect import Collector
from agent_r1.serve.api.events import Delta, Ended, Event, Events, Finished, Happened, follow
from agent_r1.serve.api.served_model import Reading, Response, ServedModel
from agent_r1.types import Action, Message, Observation, StopReason, TaskRow, Transition
from agent_r1.wire.api_error import SERVER, ApiError, context_length_exceeded, invalid, unsupported
from agent_r1.wire.chat_answer import Choice, FinishReason, Usage, new_id
from agent_r1.wire.chat_request import ChatRequest

MAX_EVENT_CHARS = 20_000  # characters of a result or feedback in an event
FINISH: dict[StopReason, FinishReason] = {StopReason.MAX_TOKENS: "length", StopReason.MAX_STEPS: "length"}

Tell = Callable[[Event], None]


class AgentMode:
    """Answers with the flow of a recipe. `rows`: each request is played in the environment of one of these."""

    extensions: tuple[str, ...] = ("row",)

    def __init__(self, model: ServedModel, collector: Collector, rows: Sequence[TaskRow]) -> None:
        self.model, self._collector, self._rows = model, collector, rows

    async def start(self, request: ChatRequest) -> Events:
        _check_supported(request)
        return self._answer(self._row(request), request)

    async def _answer(self, row: TaskRow, request: ChatRequest) -> Events:
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        name, seed = new_id("agent"), request.sampling.seed
        watched = WatchedSampler(self.model, events.put_nowait)
        collector = replace(self._collector, sampler=watched, **self._samplings(request))
        episode = collector.episode(WatchedEpisode, name, secrets.randbits(32) if seed is None else seed)
        episode.tell = events.put_nowait
        watched.episode = episode
        work = asyncio.ensure_future(collector.play(row, episode))
        async for event in follow(work, events):
            yield event
        trajectory = work.result()
        limit = None if episode.steps else episode.limit
        if trajectory.stop.is_failure and limit is not None and limit.stop is StopReason.MAX_TOKENS:
            raise context_length_exceeded(f"The conversation is too long: {limit}")
        if trajectory.stop.is_failure:
            message = f"the agent failed: {trajectory.error}"
            raise ApiError(500, message[:1000], kind=SERVER, code=f"agent_{trajectory.stop.value}")
        steps = trajectory.steps
        choice = Choice(text=watched.said, finish_reason=FINISH.get(trajectory.stop, "stop"))
        end = {"type": "end", "stop": trajectory.stop.value, "steps": len(steps), "answer": watched.last}
        usage = Usage(
            prompt_tokens=sum(len(step.prompt_ids) for step in steps),
            completion_tokens=sum(len(step.response_ids) for step in steps),
        )
        yield Finished(index=0, choice=choice)
        yield Ended(usage=usage, extra=end)

    def _samplings(self, request: ChatRequest) -> dict[str, Any]:
        """Apply the request's sampling options to every role. The token limits of roles stay."""
        options, collector = request.sampling, self._collector
        asked = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k")}
        given = {name: value for name, value in asked.items() if value is not None}
        return {
            "sampling": replace(collector.sampling, **given),
            "role_sampling": {role: replace(own, **given) for role, own in collector.role_sampling.items()},
        }

    def _row(self, request: ChatRequest) -> TaskRow:
        """The row whose environment is played, with the client's conversation."""
        index = request.extensions.get("row", 0)
        if type(index) is not int or not 0 <= index < len(self._rows):
            raise invalid(f"row must be an integer from 0 to {len(self._rows) - 1}, got {index!r:.40}", "row")
        own: list[Message] = []
        if all(message["role"] != "system" for message in request.messages):
            own = [message for message in self._rows[index].prompt if message["role"] != "user"]
        return replace(self._rows[index], prompt=[*own, *request.messages])


def _check_supported(request: ChatRequest) -> None:
    reason = "the agent runs the tools of its own recipe; serve without --agent to have calls returned"
    if request.tools or request.tool_choice != "auto":
        raise unsupported("tools", f"tools are not accepted: {reason}")
    for index, message in enumerate(request.messages):
        if message["role"] == "tool" or message.get("tool_calls"):
            raise unsupported(f"messages[{index}]", f"messages[{index}] belongs to a tool call: {reason}")
    if request.messages[-1]["role"] != "user":
        raise invalid("the last message must be from the user", f"messages[{len(request.messages) - 1}].role")
    options = {
        "n": request.n > 1,
        "logprobs": request.logprobs,
        "stop": bool(request.sampling.stop),
        "max_tokens": request.sampling.max_tokens is not None,
        "response_format": request.response_format is not None,
    }
    for name, given in options.items():
        if given:
            hint = ": set rollout.max_response_tokens when the server starts" if name == "max_tokens" else ""
            raise unsupported(name, f"{name} is not supported for an agent, whose answer takes several responses{hint}")


class WatchedEpisode(Episode):
    """Reports the environment's answers. Set `tell` before playing the episode."""

    tell: Tell
    offered: Sequence[Mapping[str, Any]] = ()  # the tools of the last call
    is_noting = False  # while a context policy writes a summary

    async def act(
        self,
        observation: Observation,
        *,
        tools: list[dict[str, Any]] | None = None,
        context: ContextPolicy | None = None,
        role: str = "",
    ) -> Action:
        self.offered = tools or ()
        return await super().act(observation, tools=tools, context=context, role=role)

    async def _view(self, observation: Observation, context: ContextPolicy, writer: Any) -> ContextView:
        self.is_noting = True
        try:
            return await super()._view(observation, context, writer)
        finally:
            self.is_noting = False

    def observe(
        self, transition: Transition, *, to: Responded | None = None, seconds: float = 0.0, source: str = "the env"
    ) -> None:
        super().observe(transition, to=to, seconds=seconds, source=source)
        step = len(self.steps) - 1 if to is None else self.steps.index(to.step)
        for call in transition.calls:
            result = {"name": call.name, "result": call.result[:MAX_EVENT_CHARS], "failed": call.fault is not None}
            self.tell(Happened(event={"type": "tool_result", "step": step, **result, "seconds": call.seconds}))
        if transition.feedback and not transition.calls:
            text = transition.feedback[:MAX_EVENT_CHARS]
            self.tell(Happened(event={"type": "feedback", "step": step, "text": text}))


class WatchedSampler:
    """The engine of one episode; reports the agent's text and calls."""

    episode: WatchedEpisode

    def __init__(self, model: ServedModel, tell: Tell) -> None:
        self.said = ""  # text of all steps
        self.last = ""  # text of the last step
        self._model, self._tell = model, tell

    async def generate(self, prompt: Prompt, sampling: Sampling, *, session: str) -> Completion:
        if self.episode.is_noting:
            return await self._model.engine.generate(prompt, sampling, session=session)
        self.last = ""
        response = Response(self._model, self._say, Reading(tools=self.episode.offered))
        finished, completion = await response.sample(prompt, sampling, session=session)
        step = len(self.episode.steps)
        for call in finished.choice.calls:
            event = {"type": "tool_call", "step": step, "name": call.name, "arguments": call.arguments}
            self._tell(Happened(event=event))
        return completion

    def _say(self, delta: Delta) -> None:
        """Separate the texts of different steps by an empty line."""
        text = delta.text
        if text and self.said and not self.last:
            text = f"\n\n{text}"
        self.said += text
        self.last += delta.text
        if text or delta.reasoning:
            self._tell(Delta(text=text, reasoning=delta.reasoning))

    def release(self, session: str) -> None:
        self._model.engine.release(session)
