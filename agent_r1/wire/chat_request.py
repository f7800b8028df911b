"""A client's request: the body of `/v1/chat/completions` as one neutral, checked record.

Options that would change the answer but are not supported are refused, unless their value changes nothing. Options that
only inform the provider (`user`, `metadata`) are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agent_r1.types import Message
from agent_r1.wire.api_error import invalid, unsupported
from agent_r1.wire.chat_messages import read_messages, read_tools
from agent_r1.wire.request_body import Fields

ToolChoice = Literal["auto", "none", "required"]

MAX_STOPS, MAX_STOP_CHARS = 16, 256
MAX_N = 128
MAX_TOP_LOGPROBS = 20
MAX_SEED = 2**63
IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
)
# Options that we do not have, and the values that change nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "functions": ([],),
    "function_call": (),
}
OWN = ("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "temperature", "top_p", "top_k",
       "max_tokens", "max_completion_tokens", "stop", "seed", "n", "logprobs", "top_logprobs", "response_format",
       "stream", "stream_options")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How to sample. None: the server's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0: no limit
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()  # texts that end the answer, which does not include them
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One call of a chat API."""

    model: str
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)  # OpenAI function schemas
    tool_choice: ToolChoice = "auto"
    forced_tool: str | None = None  # the tool that must be called; tool_choice is "required" then
    parallel_tool_calls: bool = True  # False: only the first call of a response counts
    sampling: SamplingOptions = SamplingOptions()
    n: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    response_format: Mapping[str, Any] | None = None  # None: text
    stream: bool = False
    include_usage: bool = False  # end the stream with a chunk that holds the usage
    extensions: Mapping[str, Any] = field(default_factory=dict)  # fields that only this server knows


def parse_chat(body: Mapping[str, Any], *, extensions: tuple[str, ...] = ()) -> ChatRequest:
    """Read a body. Raises ApiError. `extensions` are further fields that the server reads itself."""
    fields = Fields(body)
    extra = {key: value for key in extensions if (value := fields.take(key)) is not None}
    model = fields.text("model", required=True) or ""
    tools = read_tools(fields.list("tools"))
    tool_choice, forced = _read_tool_choice(fields, tools)
    logprobs, top_logprobs = fields.flag("logprobs", False), fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
    if top_logprobs and not logprobs:
        raise invalid("top_logprobs needs logprobs to be true", "top_logprobs")
    stream = fields.flag("stream", False)
    request = ChatRequest(
        model=model,
        messages=read_messages(fields.list("messages")),
        tools=tools,
        tool_choice=tool_choice,
        forced_tool=forced,
        parallel_tool_calls=fields.flag("parallel_tool_calls", True),
        sampling=read_sampling(fields),
        n=fields.integer("n", 1, MAX_N) or 1,
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        response_format=_read_format(fields),
        stream=stream,
        include_usage=read_stream_options(fields, stream=stream),
        extensions=extra,
    )
    finish(fields, known=(*OWN, *extensions))
    return request


def read_sampling(fields: Fields) -> SamplingOptions:
    """Take the sampling options, which chat and text completions share."""
    limits = {key: fields.integer(key, 1) for key in ("max_completion_tokens", "max_tokens")}
    given = {value for value in limits.values() if value is not None}
    if len(given) > 1:
        raise invalid("max_tokens and max_completion_tokens contradict each other: give one of them", "max_tokens")
    top_p = fields.number("top_p", 0.0, 1.0)
    if top_p == 0:
        raise fields.refuse("top_p", "must be greater than 0; for greedy sampling set temperature to 0")
    top_k = fields.integer("top_k", -1)  # -1 and 0 mean no limit
    return SamplingOptions(
        temperature=fields.number("temperature", 0.0, 2.0),
        top_p=top_p,
        top_k=None if top_k is None else max(top_k, 0),
        max_tokens=next(iter(given), None),
        stop=_read_stop(fields),
        seed=fields.integer("seed", -MAX_SEED, MAX_SEED - 1),
    )


def read_stream_options(fields: Fields, *, stream: bool) -> bool:
    options = fields.object("stream_options")
    if options is None:
        return False
    if not stream:
        raise invalid("stream_options needs stream to be true", "stream_options")
    include_usage = options.flag("include_usage", False)
    _ = options.take("include_obfuscation")
    options.finish()
    return include_usage


def finish(fields: Fields, known: tuple[str, ...]) -> None:
    """Ignore fields that only inform, accept values that change nothing, and refuse everything else."""
    for key in IGNORED:
        fields.take(key)
    for key in [key for key in fields.keys() if key in NEUTRAL]:  # noqa: SIM118 (not a dict)
        value = fields.take(key)
        if value not in NEUTRAL[key] or isinstance(value, bool):
            raise unsupported(key, f"{key} is not supported; leave it out")
    fields.finish("option", known)


def _read_stop(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    stops = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise fields.wrong("stop", "a string or a list of strings", value)
    if len(stops) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise fields.refuse("stop", f"must be at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters")
    return tuple(dict.fromkeys(stops))


def _read_tool_choice(fields: Fields, tools: list[dict[str, Any]]) -> tuple[ToolChoice, str | None]:
    value = fields.take("tool_choice")
    if value is None:
        return "auto", None
    if not tools and value != "none":
        raise invalid("tool_choice needs tools", "tool_choice")
    for choice in ("auto", "none", "required"):
        if value == choice:
            return choice, None
    choice_fields = Fields(value, "tool_choice") if isinstance(value, dict) else None
    if choice_fields is None or choice_fields.take("type") != "function":
        raise fields.refuse("tool_choice", "must be auto, none, required or {type: function, function: {name: ...}}")
    function = choice_fields.object("function")
    if function is None:
        raise choice_fields.missing("function")
    name = function.text("name", required=True)
    if name not in [tool["function"]["name"] for tool in tools]:
        raise invalid(f"tool_choice names {name!r:.80}, which is not among tools", "tool_choice")
    return "required", name


def _read_format(fields: Fields) -> Mapping[str, Any] | None:
    value = fields.take("response_format")
    if value is None:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise fields.refuse("response_format", "must be an object with a type")
    return None if value == {"type": "text"} else value
