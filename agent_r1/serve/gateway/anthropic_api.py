"""Anthropic's messages API, as chat completions: blocks become messages and calls, and answers become blocks."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from agent_r1.serve.gateway.scribe import Said
from agent_r1.wire.api_error import ApiError, invalid, unsupported
from agent_r1.wire.chat_answer import to_json
from agent_r1.wire.chat_request import ChatRequest, parse_chat
from agent_r1.wire.request_body import Fields

# Claude Code writes this block, which differs in every request, before the system prompt. It is not for models.
BILLING = "x-anthropic-billing-header:"
IGNORED = ("metadata", "service_tier", "context_management", "betas", "cache_control", "output_config", "inference_geo")
STOPS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


class AnthropicMessages:
    """`/v1/messages`. Thinking is sent as blocks if the request asks for thinking, and dropped otherwise."""

    def __init__(self, *, counts_only: bool = False) -> None:
        self._counts_only = counts_only  # True for count_tokens, which takes fewer fields

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        fields = Fields(body)
        chat: dict[str, Any] = {"model": fields.text("model", required=True)}
        system = _system(fields.take("system"))
        chat["messages"] = ([{"role": "system", "content": system}] if system else []) + [
            message
            for index, value in enumerate(fields.list("messages"))
            for message in _messages(Fields(value, f"messages[{index}]"))
        ]
        chat["tools"] = [_tool(Fields(value, f"tools[{i}]")) for i, value in enumerate(fields.list("tools"))]
        chat |= _choice(fields.object("tool_choice"))
        chat["max_tokens"] = fields.integer("max_tokens", 1)
        if chat["max_tokens"] is None and not self._counts_only:
            raise fields.missing("max_tokens")
        chat |= {key: fields.take(key) for key in ("temperature", "top_p", "top_k", "stream")}
        chat["stop"] = fields.list("stop_sequences")
        thinking = fields.take("thinking")
        for key in IGNORED:
            fields.take(key)
        fields.finish("option")
        wants = isinstance(thinking, Mapping) and thinking.get("type") in ("enabled", "adaptive")
        return parse_chat(chat | {"thinks": wants}, extensions=("thinks",))

    def write(self, said: Said, request: ChatRequest) -> dict[str, Any]:
        return _head(said) | {
            "content": _blocks(said, request),
            "stop_reason": "stop_sequence" if said.stop_text else STOPS[said.choice.finish_reason],
            "stop_sequence": said.stop_text,
            "usage": _usage(said, said.answer.usage.completion_tokens),
        }

    def events(self, said: Said, request: ChatRequest) -> Iterator[bytes]:
        whole = self.write(said, request)
        start = _head(said) | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(said, 1)}
        yield _event("message_start", message=start)
        for index, block in enumerate(whole["content"]):
            empty, deltas = _as_deltas(block)
            yield _event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        ended = {key: whole[key] for key in ("stop_reason", "stop_sequence")}
        yield _event("message_delta", delta=ended, usage={"output_tokens": whole["usage"]["output_tokens"]})
        yield _event("message_stop")

    def error(self, error: ApiError) -> dict[str, Any]:
        kind = ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        message = error.message
        if error.code == "context_length_exceeded":  # clients recognise this error by its wording
            message = f"prompt is too long: {message}"
        return {"type": "error", "error": {"type": kind, "message": message}}


# request


def _system(value: Any) -> str:
    blocks = [{"type": "text", "text": value}] if isinstance(value, str) else value or []
    if not isinstance(blocks, list) or not all(isinstance(each, Mapping) for each in blocks):
        raise invalid("system must be a string or a list of text blocks", "system", code="invalid_type")
    texts = [str(block.get("text") or "") for block in blocks]
    return "\n\n".join(text for text in texts if text and not text.startswith(BILLING))


def _messages(fields: Fields) -> Iterator[dict[str, Any]]:
    """One message of Anthropic's: results of tools come first, each as a message of its own."""
    role, content = fields.text("role", required=True, choices=("user", "assistant")), fields.take("content")
    name = fields.name("content")
    fields.finish()
    if content is not None and not isinstance(content, str | list):
        raise invalid(f"{name} must be a string or a list of blocks", name, code="invalid_type")
    given = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    blocks = [Fields(block, f"{name}[{index}]") for index, block in enumerate(given)]
    if role == "assistant":
        yield _assistant(blocks)
        return
    rest = []
    for block in blocks:
        kind = block.text("type", required=True)
        if kind == "tool_result":
            call_id = block.text("tool_use_id", required=True)
            shown = block.take("content")
            parts = shown if isinstance(shown, list) else [{"type": "text", "text": shown or ""}]
            _ = (block.take("is_error"), block.take("cache_control"))
            block.finish()
            where = block.name("content")
            content = [_part(Fields(each, f"{where}[{i}]")) for i, each in enumerate(parts)]
            yield {"role": "tool", "tool_call_id": call_id, "content": content}
        else:
            rest.append(_part(block, kind))
    if rest or not blocks:
        yield {"role": "user", "content": rest}


def _assistant(blocks: list[Fields]) -> dict[str, Any]:
    texts, calls, thoughts = [], [], []
    for block in blocks:
        kind = block.text("type", required=True)
        _ = block.take("cache_control")
        if kind == "text":
            texts.append(_part(block, kind))
        elif kind == "tool_use":
            function = {"name": block.text("name", required=True), "arguments": block.take("input") or {}}
            calls.append({"id": block.text("id", required=True), "type": "function", "function": function})
            _ = block.take("caller")
            block.finish()
        elif kind == "thinking":
            thoughts.append(block.text("thinking") or "")
        elif kind != "redacted_thinking":
            raise unsupported(block.name("type"), f"{block.name('type')}: a block {kind!r:.80} is not supported here")
    message: dict[str, Any] = {"role": "assistant", "content": texts}
    if calls:
        message["tool_calls"] = calls
    if any(thoughts):
        message["reasoning_content"] = "\n".join(filter(None, thoughts))
    return message


def _part(block: Fields, kind: str | None = None) -> dict[str, Any]:
    """A text or a picture as a part of a content."""
    kind = kind or block.text("type", required=True)
    _ = (block.take("cache_control"), block.take("citations"))
    if kind == "text":
        text = block.text("text") or ""
        block.finish()
        return {"type": "text", "text": text}
    source = block.object("source") if kind == "image" else None
    if source is None or source.text("type") != "base64":
        raise unsupported(block.name("type"), f"{block.name('type')}: a block {kind!r:.80} is not supported here")
    url = f"data:{source.text('media_type')};base64,{source.text('data')}"
    block.finish()
    return {"type": "image_url", "image_url": {"url": url}}


def _tool(fields: Fields) -> dict[str, Any]:
    if (kind := fields.text("type") or "custom") != "custom":
        raise unsupported(
            fields.name("type"), f"{fields.name('type')}: Anthropic's own tools ({kind!r:.80}) cannot run here"
        )
    function = {
        "name": fields.text("name", required=True),
        "description": fields.text("description") or "",
        "parameters": fields.take("input_schema") or {},
    }
    for key in ("cache_control", "strict", "defer_loading", "eager_input_streaming", "input_examples"):
        fields.take(key)
    fields.finish()
    return {"type": "function", "function": function}


def _choice(fields: Fields | None) -> dict[str, Any]:
    if fields is None:
        return {}
    kind = fields.text("type", required=True, choices=("auto", "any", "tool", "none"))
    parallel = not fields.flag("disable_parallel_tool_use", False)
    name = fields.text("name")
    fields.finish()
    named = {"type": "function", "function": {"name": name}}
    return {
        "tool_choice": {"any": "required", "tool": named}.get(str(kind), None if kind == "auto" else kind),
        "parallel_tool_calls": parallel,
    }


# answer


def _head(said: Said) -> dict[str, Any]:
    answer_id = f"msg_{said.answer.answer_id.rpartition('-')[2]}"
    return {"id": answer_id, "type": "message", "role": "assistant", "model": said.answer.model}


def _usage(said: Said, output: int) -> dict[str, int]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": said.answer.usage.prompt_tokens, **cached, "output_tokens": output}


def _blocks(said: Said, request: ChatRequest) -> list[dict[str, Any]]:
    choice, blocks = said.choice, []
    if choice.reasoning and request.extensions.get("thinks"):
        signature = secrets.token_hex(8)  # clients want one, and send it back
        blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": signature})
    if choice.text or not choice.calls:
        blocks.append({"type": "text", "text": choice.text})
    for call in choice.calls:
        called = {"id": call.call_id, "name": call.name, "input": json.loads(call.arguments)}
        blocks.append({"type": "tool_use", **called})
    return blocks


def _as_deltas(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it starts, and what is added to it."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        signed = {"type": "signature_delta", "signature": block["signature"]}
        return {**block, "thinking": "", "signature": ""}, [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            signed,
        ]
    written = json.dumps(block["input"], ensure_ascii=False)
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": written}]


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + to_json({"type": kind, **fields}) + b"\n\n"
