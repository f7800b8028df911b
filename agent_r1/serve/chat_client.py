"""A conversation with an OpenAI-compatible server: questions over HTTP, answers as chunks. Knows no terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from agent_r1.errors import AgentR1Error, ConfigError
from agent_r1.types import Message

CONNECT_SECONDS, READ_SECONDS = 10.0, 600.0
MAX_ERROR_CHARS = 500


class ServerError(AgentR1Error):
    """The server refused a request or failed."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class RemoteChat:
    """A conversation with a server."""

    client: httpx.Client
    model: str
    messages: list[Message] = field(default_factory=list)

    def ask(self, text: str) -> Iterator[dict[str, Any]]:
        """Yield the chunks of the answer. A failed question is not remembered."""
        asked = [*self.messages, {"role": "user", "content": text}]
        body = {"model": self.model, "messages": asked, "stream": True}
        said = ""
        with self._errors_explained(), self.client.stream("POST", "chat/completions", json=body) as response:
            _check(response)
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                if data in ("", "[DONE]"):
                    continue
                chunk = _decode(data)
                said += delta_of(chunk).get("content") or ""
                yield chunk
        self.messages = [*asked, {"role": "assistant", "content": said}]

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            raise ServerError(f"{self.client.base_url}: {type(error).__name__}: {error}") from error


def open_remote_chat(url: str, *, model: str | None, key: str | None) -> RemoteChat:
    """Connect, and find the model if none is named."""
    base = url.rstrip("/")
    base = base if base.endswith("/v1") else f"{base}/v1"
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        client = httpx.Client(
            base_url=base, headers=headers, timeout=httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
        )
        if model is not None:
            return RemoteChat(client, model)
        response = client.get("models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"cannot reach {base}: {error}. Is the server running, and is --url right?") from error
    _check(response)
    try:
        return RemoteChat(client, str(response.json()["data"][0]["id"]))
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"{base}/models names no model: give one with --model") from None


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    text = response.read().decode(errors="replace")
    try:
        _decode(text)
    except ServerError as error:
        hint = " Set --api-key or AGENT_R1_API_KEY." if response.status_code == 401 else ""
        raise ServerError(f"{error}{hint}", error.code) from None
    raise ServerError(f"the server answered {response.status_code}: {text[:MAX_ERROR_CHARS]}")


def _decode(data: str) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        raise ServerError(f"the server sent something else than JSON: {data[:MAX_ERROR_CHARS]!r}")
    error = chunk.get("error")
    if error:
        told = error if isinstance(error, dict) else {"message": error}
        raise ServerError(str(told.get("message"))[:MAX_ERROR_CHARS], told.get("code"))
    return chunk


def delta_of(chunk: dict[str, Any]) -> dict[str, Any]:
    """What a chunk adds to the answer."""
    choices = chunk.get("choices") or [{}]
    return choices[0].get("delta") or {}
