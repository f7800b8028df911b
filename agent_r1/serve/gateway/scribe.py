"""Between a client's messages and the text of the policy: entries of the history, and answers with parsed calls."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from agent_r1.flows.context import strip_reasoning
from agent_r1.flows.episode import Response
from agent_r1.serve.gateway.history import Entry, canonical_key, content_text
from agent_r1.serve.gateway.neutral import Answer, ApiError, Call, Request
from agent_r1.tokens.formats.base import Event, ParsedCall, ParseFailure, ToolCallFormat
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import Message

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A response of the policy, read."""

    answer: Answer
    entry: Entry  # as the client will repeat it
    events: list[Event]  # all calls in the text, also those that cannot be read


@dataclass(frozen=True, slots=True, kw_only=True)
class Scribe:
    renderer: Renderer
    tool_format: ToolCallFormat
    tool_role: str | None = None  # of messages with results; None: the format's own

    # client -> history

    def entries(self, messages: Sequence[Message]) -> list[Entry]:
        """The messages in the form that the chat template gets. Formats without a role for results join them."""
        entries: list[Entry] = []
        names: dict[str, tuple[str, str]] = {}  # the client's id of a call -> its name, and its id in the prompt
        for is_tool, group in groupby(map(_check_role, messages), key=lambda each: each["role"] == "tool"):
            if is_tool:
                entries += self._result_entries(list(group), names)
            else:
                entries += map(partial(self._entry, names=names), group)
        return entries

    def _entry(self, message: Message, names: dict[str, tuple[str, str]]) -> Entry:
        content, calls = content_text(message.get("content")), message.get("tool_calls") or []
        shown: Message = {"role": message["role"], "content": content}
        if calls:
            parsed = [_parsed(call) for call in calls]
            shown["tool_calls"] = [
                {
                    "id": _prompt_id(event, index),
                    "type": "function",
                    "function": {"name": event.name, "arguments": self.tool_format.message_arguments(event)},
                }
                for index, event in enumerate(parsed)
            ]
            for index, (call, event) in enumerate(zip(calls, parsed, strict=True)):
                names[str(call.get("id", ""))] = event.name, _prompt_id(event, index)
        reasoning = str(message.get("reasoning_content") or "")
        if reasoning:
            shown["reasoning_content"] = reasoning
        ids = tuple(str(call.get("id", "")) for call in calls)
        return Entry(key=canonical_key(message), message=shown, call_ids=ids, reasoning=reasoning)

    def _result_entries(self, messages: list[Message], names: Mapping[str, tuple[str, str]]) -> list[Entry]:
        role = self.tool_role or self.tool_format.roles[0]
        ids = [str(message.get("tool_call_id", "")) for message in messages]
        contents = [content_text(message.get("content")) for message in messages]
        if role != "tool":
            if not all(isinstance(content, str) for content in contents):
                raise ApiError(400, "the model's template takes results of tools as text only", param="messages")
            known = [ParsedCall(name=names.get(each, ("unknown", ""))[0], arguments={}, span=(0, 0)) for each in ids]
            [joined] = self.tool_format.result_messages(contents, known, role)
            key = "\n".join(map(canonical_key, messages))
            return [Entry(key=key, message=joined, call_ids=tuple(ids))]
        made = []
        for index, (message, content, given) in enumerate(zip(messages, contents, ids, strict=True)):
            name, prompt_id = names.get(given, (message.get("name") or "unknown", f"call{index:05d}"))
            call_id = {"tool_call_id": prompt_id} if self.tool_format.as_tool_calls else {}
            shown = {"role": "tool", "name": name, **call_id, "content": content}
            made.append(Entry(key=canonical_key(message), message=shown, call_ids=(given,)))
        return made

    # policy -> client

    def read(self, response: Response, request: Request) -> Read:
        """Parse what the policy said. A response cut in half calls nothing."""
        text, tools = response.text, {tool["function"]["name"]: tool["function"] for tool in request.tools}
        content, events = self.tool_format.parse(text) if tools else (strip_reasoning(text), [])
        parsed = [event for event in events if isinstance(event, ParsedCall)]
        if response.is_cut or not parsed:
            # Calls that cannot be read stay in the text, where client and model can see them.
            content, parsed = (strip_reasoning(text) if response.is_cut or events else content), []
        parsed = parsed[:1] if request.one_call else parsed
        calls = tuple(
            Call(
                call_id=f"call_{secrets.token_hex(12)}",
                name=call.name,
                arguments=self.tool_format.convert_arguments(call.arguments, _parameters(tools.get(call.name))),
            )
            for call in parsed
        )
        stopped = next((stop for stop in request.stop_texts if _ended_by(self.renderer, response, stop)), None)
        answer = Answer(
            answer_id=secrets.token_hex(12),
            created=int(time.time()),
            content=content,
            reasoning=_reasoning(text),
            calls=calls,
            finish="length" if response.is_cut else "tool_calls" if calls else "stop",
            stop_text=stopped,
            prompt_tokens=response.prompt_tokens,
            completion_tokens=len(response.token_ids),
            tokens=self._tokens(response) if request.wants_logprobs else (),
        )
        key = canonical_key({"role": "assistant", "content": content, "tool_calls": [_echo(call) for call in calls]})
        entry = Entry(
            key=key,
            message=self.tool_format.assistant_message(text) if tools else {"role": "assistant", "content": text},
            call_ids=tuple(call.call_id for call in calls),
            reasoning=answer.reasoning,
        )
        return Read(answer=answer, entry=entry, events=events)

    def _tokens(self, response: Response) -> tuple[tuple[str, float], ...]:
        pieces = (self.renderer.decode([token]) for token in response.token_ids)
        return tuple(zip(pieces, response.logprobs, strict=True))


def _check_role(message: Message) -> Message:
    role = ROLES.get(str(message.get("role")))
    if role is None:
        raise ApiError(400, f"messages: unknown role {message.get('role')!r}", param="messages")
    return {**message, "role": role}


def _parsed(call: Mapping[str, Any]) -> Event:
    function = call["function"]
    name, arguments = str(function.get("name") or ""), function.get("arguments")
    if isinstance(arguments, Mapping):
        return ParsedCall(name=name, arguments=dict(arguments), span=(0, 0))
    return ParseFailure(message="", span=(0, 0), name=name, source=str(arguments or ""))


def _prompt_id(event: Event, index: int) -> str:
    """As `ToolCallFormat.assistant_message` numbers calls."""
    return (event.call_id if isinstance(event, ParsedCall) else "") or f"call{index:05d}"


def _echo(call: Call) -> Message:
    return {"function": {"name": call.name, "arguments": call.arguments}}


def _parameters(function: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return {} if function is None else function.get("parameters") or {}


def _reasoning(text: str) -> str:
    thought, closed, _ = text.partition("</think>")
    return thought.rpartition("<think>")[2].strip() if closed else ""


def _ended_by(renderer: Renderer, response: Response, stop: str) -> bool:
    """Whether the sampled text goes on with this stop text where the text for the client ends."""
    return renderer.decode(response.token_ids)[len(response.text) :].startswith(stop)
