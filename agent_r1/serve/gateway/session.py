"""One episode as its agent sees it: an API that answers while the episode lasts.

Every answer is a step of the episode. A client that repeats a request gets the answer it was given, or the one that is
still being sampled; it is sampled and trained once. Calls may overlap (parallel sub-agents). After `seal`, all are
refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass, field

from agent_r1.errors import DataError
from agent_r1.flows.budgets import EpisodeLimit
from agent_r1.flows.episode import Episode
from agent_r1.flows.recording import Response
from agent_r1.serve.gateway.history import Entry, History, Kind, Known, Node, content_text
from agent_r1.serve.gateway.responses_api import response_id
from agent_r1.serve.gateway.scribe import Said, Scribe, said_message, shown_tools
from agent_r1.tokens.formats.base import Event, ParsedCall
from agent_r1.types import CallFault, Message, Observation, StopReason, ToolCallRecord, Transition
from agent_r1.wire.api_error import ApiError, context_length_exceeded, invalid, unsupported
from agent_r1.wire.chat_request import ChatRequest

logger = logging.getLogger(__name__)

MAX_REFUSED = 50  # calls beyond a budget, before the session is sealed: an agent may retry for ever

COUNTED = {
    Kind.NEW: "gateway/conversations",
    Kind.BRANCHED: "gateway/branches",
    Kind.REWRITTEN_ANSWER: "gateway/rewritten_answers",
    Kind.REWRITTEN_CONTEXT: "gateway/rewritten_context",
    Kind.FOREIGN: "gateway/foreign_answers",
    Kind.RERENDERED: "gateway/rerendered",
}
COUNTS = ("gateway/calls", *COUNTED.values(), "gateway/retries", "gateway/undelivered", "gateway/refused")


@dataclass(slots=True, kw_only=True)
class Reply:
    """An answer that is being made or was made, for clients that ask again."""

    task: asyncio.Task[Said]
    delivered: bool = False


@dataclass(slots=True, kw_only=True)
class Turn:
    """A step, and what its client did with the answer."""

    response: Response
    kind: Kind
    events: list[Event]
    call_ids: tuple[str, ...]  # ids of the calls among them, as the client knows them
    answered: float  # when the client got the answer
    results: list[Entry] = field(default_factory=list)  # messages that the first continuing call added
    seconds: float = 0.0  # time from `answered` to that call


class Session:
    """The calls of one agent."""

    def __init__(self, episode: Episode, scribe: Scribe) -> None:
        self.is_sealed = False
        self.fault: Exception | None = None  # a fault of ours, which fails the episode
        self._episode, self._scribe = episode, scribe
        self._history = History()
        self._replies: dict[str, Reply] = {}
        self._turns: dict[Node, Turn] = {}
        self._refused = 0
        self._told: dict[str, list[Message]] = {}  # the conversation up to an answer, by the answer's id
        episode.counts.update(dict.fromkeys(COUNTS, 0))

    @property
    def counts(self) -> Counter[str]:
        return self._episode.counts

    async def answer(self, request: ChatRequest, *, fingerprint: str, is_retry: bool) -> Said:
        """Answer a call, or repeat the answer to it.

        Equal bodies have equal fingerprints. An equal body alone is no retry, since an agent may ask twice on purpose,
        unless its sender left before it had the answer.
        """
        self._check_open()
        check_supported(request)
        reply = self._replies.get(fingerprint)
        if reply is not None and not _failed(reply) and (is_retry or (reply.task.done() and not reply.delivered)):
            self.counts["gateway/retries"] += 1
        else:
            # A separate task: a client that leaves does not cancel it, because it may come back for the answer.
            reply = Reply(task=asyncio.create_task(self._sample(request)))
            self._replies[fingerprint] = reply
        try:
            return await asyncio.shield(reply.task)
        except asyncio.CancelledError:
            self._check_open()  # `seal` may have cancelled it while it was being sampled
            raise

    def count_tokens(self, request: ChatRequest) -> int:
        """The number of tokens of a prompt, rendered from scratch. Samples nothing."""
        self._check_open()
        messages = [entry.message for entry in self._scribe.entries(request.messages)]
        try:
            return len(self._scribe.renderer.render(Observation(messages=messages), shown_tools(request)))
        except (DataError, ValueError, TypeError) as error:
            raise invalid(str(error), "messages") from error

    def delivered(self, fingerprint: str) -> None:
        """Note that the client has the answer."""
        if (reply := self._replies.get(fingerprint)) is not None:
            reply.delivered = True

    def seal(self) -> None:
        """Refuse all further calls, and record with each step what became of its answer. May be called twice."""
        if self.is_sealed:
            return
        self.is_sealed = True
        for reply in self._replies.values():
            self.counts["gateway/undelivered"] += reply.task.done() and not _failed(reply) and not reply.delivered
            if not reply.task.done() and reply.task is not asyncio.current_task():
                reply.task.cancel()
        if not self._episode.is_closed:  # otherwise an agent has outlived its episode
            for turn in self._turns.values():
                self._attach(turn)

    def _check_open(self) -> None:
        if self.is_sealed:
            raise ApiError(410, "the episode of this session has ended", code="session_closed")

    async def _sample(self, request: ChatRequest) -> Said:
        self.counts["gateway/calls"] += 1
        try:
            return await self._respond(request)
        except ApiError:
            raise
        except Exception as error:
            self.fault = self.fault or error
            raise

    async def _respond(self, request: ChatRequest) -> Said:
        messages, asked = self._conversation(request), request.extensions
        known = self._history.look_up(self._scribe.entries(messages))
        self._note_results(known)
        try:
            observation = Observation(messages=known.messages)
            after = [node.exchange for node in known.answers if node.exchange is not None]
            response = await self._episode.respond(
                observation,
                tools=shown_tools(request),
                after=after,
                max_tokens=request.sampling.max_tokens,
                stop_texts=request.sampling.stop,
            )
        except EpisodeLimit as limit:
            raise self._refusal(limit) from None
        except (DataError, ValueError, TypeError) as error:
            raise invalid(str(error), "messages") from error
        kind = known.kind if known.kind.starts_segment or response.extends else Kind.RERENDERED
        if kind in COUNTED:
            self.counts[COUNTED[kind]] += 1
        read = self._scribe.read(response, request)
        node = self._history.add_answer(known.end, read.entry, response.exchange)
        self._turns[node] = Turn(
            response=response,
            kind=kind,
            events=read.events,
            call_ids=read.entry.call_ids,
            answered=time.monotonic(),
        )
        kept = messages[1:] if asked.get("instructed") else messages  # instructions apply to one request only
        self._told[response_id(read.said)] = [*kept, said_message(read.said)]
        return read.said

    def _conversation(self, request: ChatRequest) -> list[Message]:
        """The messages of a request, after those of the response that it continues, if it names one."""
        previous = request.extensions.get("previous")
        if previous is None:
            return request.messages
        if previous not in self._told:
            message = f"previous_response_id: this session has given no response {previous[:80]!r}"
            raise ApiError(404, message, code="previous_response_not_found", param="previous_response_id")
        first = 1 if request.extensions.get("instructed") else 0
        return [*request.messages[:first], *self._told[previous], *request.messages[first:]]

    def _refusal(self, limit: EpisodeLimit) -> ApiError:
        self.counts["gateway/refused"] += 1
        self._refused += 1
        if self._refused >= MAX_REFUSED:
            self.seal()
        if limit.stop is StopReason.MAX_TOKENS:
            return context_length_exceeded(f"the context is too long: {limit}")
        return ApiError(400, f"the episode's budget is used up: {limit}", code="max_steps_exceeded")

    def _note_results(self, known: Known) -> None:
        """Keep what the client did with an answer, for its step."""
        turn = self._turns.get(known.answers[0]) if known.answers else None
        if turn is not None and not turn.results:
            turn.results, turn.seconds = known.added, time.monotonic() - turn.answered

    def _attach(self, turn: Turn) -> None:
        transition = Transition(
            terminated=True,
            calls=tuple(_records(turn)),
            feedback="\n".join(_text(entry) for entry in turn.results),
            info={"history": turn.kind.value},
        )
        self._episode.observe(transition, to=turn.response, seconds=turn.seconds, source="the agent")


def check_supported(request: ChatRequest) -> None:
    """Refuse options that training could not honour. The run decides how to sample, including the `seed`."""
    if request.n > 1:
        raise unsupported("n", "n > 1 is not supported: every answer is a step of the episode. Call several times")
    if request.response_format is not None:
        raise unsupported("response_format", "response_format is not supported: the policy samples freely")
    if request.tool_choice == "required":
        raise unsupported("tool_choice", "tool_choice can be auto or none: the policy samples freely")
    if request.top_logprobs:
        raise unsupported("top_logprobs", "top_logprobs is not supported: only sampled tokens have log-probs here")


def _failed(reply: Reply) -> bool:
    return reply.task.done() and (reply.task.cancelled() or reply.task.exception() is not None)


def _records(turn: Turn) -> list[ToolCallRecord]:
    """The calls of a step. Clients may answer them in any order; clients that use ids of their own keep the order."""
    results = [entry for entry in turn.results if entry.message.get("role") == "tool"]
    named = {entry.call_ids: entry for entry in results}
    ids = [(each,) for each in turn.call_ids]
    left = iter([named.get(each) for each in ids] if any(each in named for each in ids) else results)
    records = []
    for event in turn.events:
        if isinstance(event, ParsedCall):
            entry = next(left, None)
            result = "" if entry is None else _text(entry)
            record = ToolCallRecord(name=event.name, arguments=event.arguments, result=result, text_span=event.span)
        else:
            fault: CallFault = "malformed" if event.malformed else "misplaced"
            said = event.message
            record = ToolCallRecord(
                name=event.name, arguments={}, result=said, error=said, fault=fault, text_span=event.span
            )
        records.append(record)
    return records


def _text(entry: Entry) -> str:
    content = content_text(entry.message.get("content"))
    return content if isinstance(content, str) else "[pictures]"
