"""The older API of `/v1/completions`: prompts as raw text or token ids, without messages and tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from agent_r1.text import sanitize
from agent_r1.wire.api_error import invalid, unsupported
from agent_r1.wire.chat_answer import Choice, TokenLogprob, Usage
from agent_r1.wire.chat_request import MAX_N, SamplingOptions, finish, read_sampling, read_stream_options
from agent_r1.wire.request_body import Fields

MAX_PROMPTS = 256
DEFAULT_MAX_TOKENS = 16  # the API's own default
OWN = ("model", "prompt", "temperature", "top_p", "top_k", "max_tokens", "stop", "seed", "n", "best_of", "logprobs",
       "echo", "suffix", "stream", "stream_options")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """One call of `/v1/completions`."""

    model: str
    prompts: list[str | list[int]]
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    n: int = 1
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False


def parse_text_completion(body: Mapping[str, Any]) -> TextRequest:
    """Read a body. Raises ApiError."""
    fields = Fields(body)
    model = fields.text("model", required=True) or ""
    n = fields.integer("n", 1, MAX_N) or 1
    if (fields.integer("best_of", 1) or n) != n:
        raise unsupported("best_of", "best_of is not supported; ask for n answers and choose among them")
    for name in ("echo", "suffix"):
        if fields.take(name):
            raise unsupported(name, f"{name} is not supported; leave it out")
    logprobs = fields.integer("logprobs", 0, 5)
    if logprobs:
        raise unsupported("logprobs", "logprobs must be 0: the engine returns the log-prob of the sampled token only")
    if fields.keys() and "max_tokens" not in fields.keys():  # noqa: SIM118 (not a dict)
        fields = Fields({**{key: fields.take(key) for key in fields.keys()}, "max_tokens": DEFAULT_MAX_TOKENS})  # noqa: SIM118
    stream = fields.flag("stream", False)
    request = TextRequest(
        model=model,
        prompts=_read_prompts(fields),
        sampling=read_sampling(fields),
        n=n,
        logprobs=logprobs is not None,
        stream=stream,
        include_usage=read_stream_options(fields, stream=stream),
    )
    finish(fields, known=OWN)
    return request


def _read_prompts(fields: Fields) -> list[str | list[int]]:
    value = fields.take("prompt")
    if value is None:
        raise fields.missing("prompt")
    if isinstance(value, str) or (isinstance(value, list) and value and all(type(each) is int for each in value)):
        value = [value]
    if not isinstance(value, list) or not 0 < len(value) <= MAX_PROMPTS:
        raise fields.refuse(
            "prompt", f"must be a string, a list of token ids, or a list of up to {MAX_PROMPTS} of these"
        )
    prompts: list[str | list[int]] = []
    for each in value:
        if isinstance(each, str):
            prompts.append(sanitize(each))
        elif isinstance(each, list) and each and all(type(token) is int and token >= 0 for token in each):
            prompts.append(each)
        else:
            raise invalid("every prompt must be a string or a list of token ids", "prompt", code="invalid_type")
    return prompts


class TextWriter:
    """Writes answers and chunks, which have the same form."""

    def __init__(self, *, model: str, answer_id: str, created: int, include_usage: bool) -> None:
        self._head = {"id": answer_id, "object": "text_completion", "created": created, "model": model}
        self._tail: dict[str, Any] = {"usage": None} if include_usage else {}

    def answer(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        written = [
            self._choice(index, choice.text, choice.finish_reason, choice.logprobs)
            for index, choice in enumerate(choices)
        ]
        return {**self._head, "choices": written, "usage": usage.as_json()}

    def text(self, text: str, index: int, logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any]:
        return {**self._head, "choices": [self._choice(index, text, None, logprobs)], **self._tail}

    def finish(self, reason: str, index: int) -> dict[str, Any]:
        return {**self._head, "choices": [self._choice(index, "", reason, None)], **self._tail}

    def usage(self, usage: Usage) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": usage.as_json()}

    def _choice(
        self, index: int, text: str, reason: str | None, logprobs: Sequence[TokenLogprob] | None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": _write_logprobs(logprobs), "finish_reason": reason}


def _write_logprobs(logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    if logprobs is None:
        return None
    tokens = [each.token for each in logprobs]
    return {
        "tokens": tokens,
        "token_logprobs": [each.logprob for each in logprobs],
        "top_logprobs": None,
        "text_offset": [0, *accumulate(map(len, tokens))][: len(tokens)],
    }
