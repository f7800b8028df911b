"""Between a client's messages and the text of the policy: entries of the history, and answers with parsed calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

from agent_r1.flows.recording import Response
from agent_r1.serve.gateway.history import Entry, canonical_key, content_text
from agent_r1.tokens.formats.base import Event, ParsedCall, ParseFailure, ToolCallFormat
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import Message
from agent_r1.wire.api_error import invalid
from agent_r1.wire.chat_answer import CallOut, ChatAnswer, Choice, FinishReason, TokenLogprob, Usage, new_id, now
from agent_r1.wire.chat_request import ChatRequest
from agent_r1.wire.reply import read_reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """An answer for a client."""

    answer: ChatAnswer
    stop_text: str | None = None  # the client's own stop text, if it ended the response

    @property
    def choice(self) -> Choice:
        return self.answer.choices[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A parsed policy response."""

    said: Said
    entry: Entry  # as the client will repeat it
    events: list[Event]  # the calls that the client gets, and those that cannot be read


@dataclass(frozen=True, slots=True, kw_only=True)
class Scribe:
    """Reads and writes for one session."""

    renderer: Renderer
    tool_format: ToolCallFormat
    tool_role: str | None = None  # role of messages with results; None: the format's own
    known_calls: dict[str, tuple[str, str]] = field(default_factory=dict)  # our id -> name, and id in the prompt

    # client -> history

    def entries(self, messages: Sequence[Message]) -> list[Entry]:
        """The messages in the form that the chat template gets. Formats without a role for results join them."""
        entries: list[Entry] = []
        names = dict(self.known_calls)  # as well as calls that only the client knows
        for is_tool, group in groupby(messages, key=lambda each: each["role"] == "tool"):
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
                names.setdefault(str(call.get("id", "")), (event.name, _prompt_id(event, index)))
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
                raise invalid("the model's chat template takes results of tools as text only", "messages")
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

    def read(self, response: Response, request: ChatRequest) -> Read:
        """Parse the policy's response. A response that was cut off makes no calls."""
        text, tools = response.text, [] if response.step.is_cut else shown_tools(request)
        reply = read_reply(text, self.tool_format, tools, parallel=request.parallel_tool_calls)
        # Ids of models repeat from answer to answer, and clients keep calls by their ids.
        calls = tuple(replace(call, call_id=new_id("call")) for call in reply.calls)
        finish: FinishReason = "length" if response.step.is_cut else "tool_calls" if calls else "stop"
        choice = Choice(
            text=reply.text,
            calls=calls,
            finish_reason=finish,
            reasoning=reply.reasoning,
            logprobs=self._logprobs(response) if request.logprobs else None,
        )
        answer = ChatAnswer(
            model=request.model,
            choices=(choice,),
            usage=Usage(prompt_tokens=len(response.step.prompt_ids), completion_tokens=len(response.token_ids)),
            answer_id=new_id("chatcmpl"),
            created=now(),
        )
        entry = Entry(
            key=canonical_key({"role": "assistant", "content": reply.text, "tool_calls": [_echo(c) for c in calls]}),
            message=self.tool_format.assistant_message(text) if tools else {"role": "assistant", "content": text},
            call_ids=tuple(call.call_id for call in calls),
            reasoning=reply.reasoning,
        )
        found = self.tool_format.parse(text)[1] if tools else []
        places = [index for index, event in enumerate(found) if isinstance(event, ParsedCall)][: len(calls)]
        for call, index in zip(calls, places, strict=True):
            self.known_calls[call.call_id] = call.name, _prompt_id(found[index], index)
        events = [each for i, each in enumerate(found) if i in places or not isinstance(each, ParsedCall)]
        stops = [stop for stop in request.sampling.stop if _ended_by(self.renderer, response, stop)]
        return Read(said=Said(answer=answer, stop_text=stops[0] if stops else None), entry=entry, events=events)

    def _logprobs(self, response: Response) -> tuple[TokenLogprob, ...]:
        pieces = [self.renderer.decode([token]) for token in response.token_ids]
        return tuple(
            TokenLogprob(token=piece, logprob=logprob, text_bytes=tuple(piece.encode("utf-8", "replace")))
            for piece, logprob in zip(pieces, response.step.response_logprobs, strict=True)
        )


def said_message(said: Said) -> Message:
    """An answer as a client sends it back."""
    calls = [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in said.choice.calls
    ]
    return {"role": "assistant", "content": said.choice.text, **({"tool_calls": calls} if calls else {})}


def shown_tools(request: ChatRequest) -> list[dict[str, Any]]:
    return [] if request.tool_choice == "none" else request.tools


def _parsed(call: Mapping[str, Any]) -> Event:
    function = call["function"]
    name, arguments = str(function.get("name") or ""), function.get("arguments")
    if isinstance(arguments, Mapping):
        return ParsedCall(name=name, arguments=dict(arguments), span=(0, 0))
    return ParseFailure(message="", span=(0, 0), name=name, source=str(arguments or ""))


def _prompt_id(event: Event, index: int) -> str:
    """As `ToolCallFormat.assistant_message` numbers calls."""
    return (event.call_id if isinstance(event, ParsedCall) else "") or f"call{index:05d}"


def _echo(call: CallOut) -> Message:
    return {"function": {"name": call.name, "arguments": call.arguments}}


def _ended_by(renderer: Renderer, response: Response, stop: str) -> bool:
    """Whether this stop text follows the client's text in the sampled text."""
    return renderer.decode(response.token_ids)[len(response.text) :].startswith(stop)
