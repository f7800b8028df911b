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
from agent_r1.flows.episode import Episode, EpisodeLimit
from agent_r1.flows.recording import attach_transition
from agent_r1.serve.gateway.history import Entry, History, Kind, Known, Node, content_text
from agent_r1.serve.gateway.neutral import Answer, ApiError, Request
from agent_r1.serve.gateway.scribe import Read, Scribe
from agent_r1.tokens.formats.base import Event, ParsedCall
from agent_r1.types import Observation, StopReason, ToolCallRecord, Transition

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

    task: asyncio.Task[Answer]
    delivered: bool = False


@dataclass(slots=True, kw_only=True)
class Turn:
    """A step, and what its client did with it."""

    number: int  # of the call in the episode
    kind: Kind
    events: list[Event]
    answered: float  # when the client got the answer
    results: list[Entry] = field(default_factory=list)  # what the first call that continued it added
    seconds: float = 0.0  # until then


class Session:
    """The calls of one agent."""

    def __init__(self, episode: Episode, scribe: Scribe) -> None:
        self.is_sealed = False
        self._episode, self._scribe = episode, scribe
        self._history = History()
        self._replies: dict[str, Reply] = {}
        self._turns: dict[Node, Turn] = {}
        self._refused = 0
        episode.counts.update(dict.fromkeys(COUNTS, 0))

    @property
    def counts(self) -> Counter[str]:
        return self._episode.counts

    async def answer(self, request: Request, *, fingerprint: str, is_retry: bool) -> Answer:
        """Answer a call, or repeat the answer to it.

        Equal bodies have equal fingerprints. An equal body alone is no retry, since an agent may ask twice on purpose,
        unless its sender left before it had the answer.
        """
        self._check_open()
        reply = self._replies.get(fingerprint)
        if reply is not None and not _failed(reply) and (is_retry or (reply.task.done() and not reply.delivered)):
            self.counts["gateway/retries"] += 1
        else:
            # A task of its own: a client that leaves does not cancel it, since it may come back for the answer.
            reply = Reply(task=asyncio.create_task(self._sample(request)))
            self._replies[fingerprint] = reply
        return await asyncio.shield(reply.task)

    def count_tokens(self, request: Request) -> int:
        """The number of tokens of a prompt, rendered from scratch. Samples nothing."""
        self._check_open()
        messages = [entry.message for entry in self._scribe.entries(request.messages)]
        try:
            return len(self._scribe.renderer.render(Observation(messages=messages), request.tools))
        except (DataError, ValueError, TypeError) as error:
            raise ApiError(400, str(error), param="messages") from error

    def delivered(self, fingerprint: str) -> None:
        """Note that the client has the answer."""
        if (reply := self._replies.get(fingerprint)) is not None:
            reply.delivered = True

    def seal(self) -> None:
        """Refuse all further calls, and attach to the steps what became of them. May be called twice."""
        if self.is_sealed:
            return
        self.is_sealed = True
        for reply in self._replies.values():
            self.counts["gateway/undelivered"] += not reply.delivered and reply.task.done() and not _failed(reply)
            if not reply.task.done():
                reply.task.cancel()
            else:
                _failed(reply)  # its exception has been seen
        for turn in self._turns.values():
            self._attach(turn)

    def _check_open(self) -> None:
        if self.is_sealed:
            raise ApiError(410, "the episode of this session has ended", code="session_closed")

    async def _sample(self, request: Request) -> Answer:
        self.counts["gateway/calls"] += 1
        known = self._history.look_up(self._scribe.entries(request.messages))
        self._note_results(known)
        try:
            observation = Observation(messages=known.messages)
            after = [node.exchange for node in known.answers if node.exchange is not None]
            response = await self._episode.respond(
                observation,
                tools=request.tools,
                after=after,
                max_tokens=request.max_tokens,
                stop_texts=request.stop_texts,
            )
        except EpisodeLimit as limit:
            raise self._refusal(limit) from None
        except (DataError, ValueError, TypeError) as error:
            raise ApiError(400, str(error), code="invalid_messages", param="messages") from error
        kind = Kind.RERENDERED if known.answers and not response.extends else known.kind
        if kind in COUNTED:
            self.counts[COUNTED[kind]] += 1
        read = self._scribe.read(response, request)
        node = self._history.add_answer(known.end, read.entry, response.exchange, response.number)
        self._turns[node] = Turn(
            number=response.number, kind=kind, events=_told(read, request), answered=time.monotonic()
        )
        return read.answer

    def _refusal(self, limit: EpisodeLimit) -> ApiError:
        self.counts["gateway/refused"] += 1
        self._refused += 1
        if self._refused >= MAX_REFUSED:
            self.is_sealed = True
            for turn in self._turns.values():
                self._attach(turn)
        if limit.stop is StopReason.MAX_TOKENS:
            return ApiError(400, f"the context is too long: {limit}", code="context_length_exceeded", param="messages")
        return ApiError(400, f"the episode's budget is used up: {limit}", code="max_steps_exceeded")

    def _note_results(self, known: Known) -> None:
        """Keep what the client did with an answer, for its step."""
        turn = self._turns.get(known.answers[0]) if known.answers else None
        if turn is not None and not turn.results:
            turn.results, turn.seconds = known.added, time.monotonic() - turn.answered

    def _attach(self, turn: Turn) -> None:
        position = self._episode.position(turn.number)
        step = self._episode.steps[position]
        transition = Transition(
            terminated=True,
            calls=tuple(_records(turn)),
            feedback="\n".join(_text(entry) for entry in turn.results),
            info={"history": turn.kind.value},
        )

        def token_span(start: int, end: int) -> tuple[int, int]:
            return self._scribe.renderer.token_span(step.response_ids, start, end)

        self._episode.steps[position] = attach_transition(
            step, transition, source="the agent", seconds=turn.seconds, token_span=token_span
        )


def _failed(reply: Reply) -> bool:
    return reply.task.done() and (reply.task.cancelled() or reply.task.exception() is not None)


def _told(read: Read, request: Request) -> list[Event]:
    """The calls that the client was told of, and those that could not be read."""
    parsed = [event for event in read.events if isinstance(event, ParsedCall)]
    kept = parsed[: len(read.answer.calls)]
    return [event for event in read.events if event in kept or not isinstance(event, ParsedCall)]


def _records(turn: Turn) -> list[ToolCallRecord]:
    results = iter([entry for entry in turn.results if entry.message.get("role") == "tool"])
    records = []
    for event in turn.events:
        if isinstance(event, ParsedCall):
            entry = next(results, None)
            result, error, fault = "" if entry is None else _text(entry), None, None
            arguments = event.arguments
        else:
            result, error, arguments = event.message, event.message, {}
            fault = "malformed" if event.malformed else "misplaced"
        records.append(
            ToolCallRecord(
                name=event.name, arguments=arguments, result=result, error=error, fault=fault, text_span=event.span
            )
        )
    return records


def _text(entry: Entry) -> str:
    content = content_text(entry.message.get("content"))
    return content if isinstance(content, str) else "[pictures]"
