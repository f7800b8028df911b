"""OpenAI's responses API, as chat completions: items become messages and calls, and answers become items.

`previous_response_id` is known within a session. The session stores responses; this module does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agent_r1.serve.gateway.scribe import Said
from agent_r1.wire.api_error import ApiError, unsupported
from agent_r1.wire.chat_answer import new_id, to_json
from agent_r1.wire.chat_request import ChatRequest, parse_chat
from agent_r1.wire.request_body import Fields

IGNORED = (
    "metadata",
    "store",
    "include",
    "reasoning",
    "user",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "client_metadata",
    "stream_options",
)
# Options that we do not have, and the values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "truncation": ("disabled", "auto"),  # nothing is cut: a context that is too long is an error
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
    "top_logprobs": (0,),
}


class Responses:
    """`/v1/responses`."""

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        fields = Fields(body)
        chat: dict[str, Any] = {"model": fields.text("model", required=True)}
        chat["tools"] = [_tool(Fields(value, f"tools[{i}]")) for i, value in enumerate(fields.list("tools"))]
        instructions = fields.text("instructions")
        chat["messages"], chat["instructed"] = _messages(instructions, fields.take("input")), bool(instructions)
        chat["tool_choice"] = _choice(fields.take("tool_choice"), has_tools=bool(chat["tools"]))
        chat["max_tokens"] = fields.integer("max_output_tokens", 1)
        for key in ("parallel_tool_calls", "temperature", "top_p", "stream"):
            chat[key] = fields.take(key)
        text = fields.object("text")
        if text is not None:
            shape = text.take("format")
            chat["response_format"] = shape if isinstance(shape, Mapping) and shape.get("type") != "text" else None
            _ = text.take("verbosity")
            text.finish()
        chat["previous"] = fields.text("previous_response_id")
        for key in IGNORED:
            fields.take(key)
        for key, harmless in NEUTRAL.items():
            value = fields.take(key)
            if value is not None and value not in harmless:
                raise unsupported(key, f"{key} is not supported; leave it out")
        fields.finish("option")
        return parse_chat(chat, extensions=("previous", "instructed"))

    def write(self, said: Said, request: ChatRequest) -> dict[str, Any]:
        return self._write(said, request, output=_items(said), done=True)

    def _write(self, said: Said, request: ChatRequest, *, output: list[dict[str, Any]], done: bool) -> dict[str, Any]:
        usage, is_cut = said.answer.usage, said.choice.finish_reason == "length"
        return {
            "id": response_id(said),
            "object": "response",
            "created_at": said.answer.created,
            "status": "in_progress" if not done else "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if done and is_cut else None,
            "error": None,
            "instructions": None,
            "metadata": {},
            "model": said.answer.model,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": request.extensions.get("previous"),
            "temperature": request.sampling.temperature,
            "tool_choice": request.tool_choice,
            "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in request.tools],
            "top_p": request.sampling.top_p,
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            }
            if done
            else None,
        }

    def events(self, said: Said, request: ChatRequest) -> Iterator[bytes]:
        for number, (kind, fields) in enumerate(self._events(said, request)):
            data = to_json({"type": kind, "sequence_number": number, **fields})
            yield b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"

    def _events(self, said: Said, request: ChatRequest) -> Iterator[tuple[str, dict[str, Any]]]:
        output = _items(said)
        begun = self._write(said, request, output=[], done=False)
        yield "response.created", {"response": begun}
        yield "response.in_progress", {"response": begun}
        for index, item in enumerate(output):
            place = {"output_index": index, "item_id": item["id"]}
            yield "response.output_item.added", {"output_index": index, "item": _begun(item)}
            if item["type"] == "function_call":
                arguments = item["arguments"]
                yield "response.function_call_arguments.delta", {**place, "delta": arguments}
                yield "response.function_call_arguments.done", {**place, "name": item["name"], "arguments": arguments}
            elif item["type"] == "message":
                [part] = item["content"]
                inside = {**place, "content_index": 0}
                yield "response.content_part.added", {**inside, "part": {**part, "text": ""}}
                yield "response.output_text.delta", {**inside, "delta": part["text"], "logprobs": []}
                yield "response.output_text.done", {**inside, "text": part["text"], "logprobs": []}
                yield "response.content_part.done", {**inside, "part": part}
            yield "response.output_item.done", {"output_index": index, "item": item}
        whole = self._write(said, request, output=output, done=True)
        yield f"response.{whole['status']}", {"response": whole}

    def error(self, error: ApiError) -> dict[str, Any]:
        return error.as_json()


def response_id(said: Said) -> str:
    return f"resp_{said.answer.answer_id.rpartition('-')[2]}"


# request


def _messages(instructions: str | None, given: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list):
        raise Fields({"input": given}).wrong("input", "a string or a list of items", given)
    open_reply: dict[str, Any] | None = None  # an assistant message that further items may belong to
    for index, value in enumerate(items):
        fields = Fields(value, f"input[{index}]")
        kind = fields.text("type") or "message"
        role = fields.text("role") if kind == "message" else None
        is_reply = kind in ("reasoning", "function_call") or role == "assistant"
        if not is_reply:
            open_reply = None
            messages.append(_result(fields) if kind == "function_call_output" else _message(fields, kind, role))
            continue
        has_output = open_reply is not None and bool(open_reply["content"] or "tool_calls" in open_reply)
        if open_reply is None or (has_output and kind != "function_call"):
            open_reply = {"role": "assistant", "content": []}
            messages.append(open_reply)
        _add(open_reply, fields, kind)
    return messages


def _message(fields: Fields, kind: str, role: str | None) -> dict[str, Any]:
    if kind != "message":
        raise unsupported(fields.name("type"), f"{fields.name('type')}: an item {kind!r:.80} is not supported here")
    content = fields.take("content")
    for key in ("id", "status", "phase"):
        fields.take(key)
    where = fields.name("content")
    fields.finish()
    parts = content if isinstance(content, list) else [{"type": "input_text", "text": content or ""}]
    return {"role": role, "content": [_part(Fields(part, f"{where}[{i}]")) for i, part in enumerate(parts)]}


def _result(fields: Fields) -> dict[str, Any]:
    call_id, output = fields.text("call_id", required=True), fields.take("output")
    for key in ("id", "status"):
        fields.take(key)
    where = fields.name("output")
    fields.finish()
    parts = output if isinstance(output, list) else [{"type": "input_text", "text": output or ""}]
    content = [_part(Fields(part, f"{where}[{i}]")) for i, part in enumerate(parts)]
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _add(reply: dict[str, Any], fields: Fields, kind: str) -> None:
    """Add an item to the assistant message that it belongs to."""
    if kind == "function_call":
        function = {"name": fields.text("name", required=True), "arguments": fields.text("arguments") or "{}"}
        call = {"id": fields.text("call_id", required=True), "type": "function", "function": function}
        for key in ("id", "status", "namespace"):
            fields.take(key)
        fields.finish()
        reply.setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        texts = [part.get("text") for part in fields.list("content") if isinstance(part, Mapping)]
        reply["reasoning_content"] = "\n".join(filter(None, [reply.get("reasoning_content"), *texts]))
    else:
        reply["content"] = _message(fields, kind, "assistant")["content"]


def _part(fields: Fields) -> dict[str, Any]:
    kind = fields.text("type", required=True)
    if kind in ("input_text", "output_text", "text"):
        text = fields.text("text") or ""
        for key in ("annotations", "logprobs"):
            fields.take(key)
        fields.finish()
        return {"type": "text", "text": text}
    if kind == "input_image" and (url := fields.text("image_url")):
        return {"type": "image_url", "image_url": {"url": url}}
    raise unsupported(fields.name("type"), f"{fields.name('type')}: a part {kind!r:.80} is not supported here")


def _tool(fields: Fields) -> dict[str, Any]:
    if (kind := fields.text("type", required=True)) != "function":
        raise unsupported(fields.name("type"), f"{fields.name('type')}: only functions can be called, got {kind!r:.80}")
    function = {key: fields.take(key) for key in ("name", "description", "parameters")}
    for key in ("strict", "defer_loading"):
        fields.take(key)
    fields.finish()
    return {"type": "function", "function": function}


def _choice(value: Any, *, has_tools: bool) -> Any:
    if value == "auto" and not has_tools:
        return None
    if isinstance(value, Mapping) and value.get("type") == "function":
        return {"type": "function", "function": {"name": value.get("name")}}
    return value


# answer


def _items(said: Said) -> list[dict[str, Any]]:
    choice, tail = said.choice, said.answer.answer_id.rpartition("-")[2]
    items: list[dict[str, Any]] = []
    if choice.reasoning:
        thought = {"type": "reasoning_text", "text": choice.reasoning}
        items.append({"id": f"rs_{tail}", "type": "reasoning", "summary": [], "content": [thought]})
    status = "incomplete" if choice.finish_reason == "length" else "completed"
    if choice.text or not choice.calls:
        part = {"type": "output_text", "text": choice.text, "annotations": [], "logprobs": []}
        head = {"id": f"msg_{tail}", "type": "message", "role": "assistant", "status": status}
        items.append({**head, "content": [part]})
    for call in choice.calls:
        head = {"id": new_id("fc").replace("-", "_"), "type": "function_call", "status": "completed"}
        items.append({**head, "call_id": call.call_id, "name": call.name, "arguments": call.arguments})
    return items


def _begun(item: Mapping[str, Any]) -> dict[str, Any]:
    empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    return {**item, **empty, **({"status": "in_progress"} if "status" in item else {})}
