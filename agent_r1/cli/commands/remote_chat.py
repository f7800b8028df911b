"""`agent-r1 chat --url`: talk to any OpenAI-compatible server; answers appear as they are written.

Servers of ours also tell what an agent's tools did.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.text import Text

from agent_r1.cli.terminal import read_line
from agent_r1.errors import AgentR1Error, ConfigError
from agent_r1.text import visible
from agent_r1.types import Message

HELP = "/new forgets the conversation, /quit exits."
CONNECT_SECONDS, READ_SECONDS = 10.0, 600.0
MAX_ERROR_CHARS = 500


class ServerError(AgentR1Error):
    """The server refused a request or failed."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


def check_options(*, run: Path | None, overrides: Sequence[str], row: int | None) -> None:
    """Refuse what belongs to a run of this machine."""
    if run is not None:
        raise ConfigError(f"--url asks a server, so the run {run} has no effect: leave one of them out")
    if overrides or row is not None:
        given = overrides[0] if overrides else f"--row {row}"
        raise ConfigError(f"{given} has no effect with --url: the server has its own settings")


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
                said += _delta(chunk).get("content") or ""
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


def _delta(chunk: dict[str, Any]) -> dict[str, Any]:
    choices = chunk.get("choices") or [{}]
    return choices[0].get("delta") or {}


def run_remote_chat(url: str, console: Console, *, model: str | None, key: str | None, ask: str | None) -> None:
    """Until /quit, Ctrl-D or Ctrl-C; with `ask`, one question."""
    chat = open_remote_chat(url, model=model, key=key)
    with closing(chat.client):
        if ask is not None:
            if not ask:
                raise ConfigError("--ask '' asks a row's own question, which a server does not have: write a question")
            show_answer(chat, ask, console)
            return
        console.print(Text(f"{chat.model} at {chat.client.base_url}. {HELP}"), style="dim", highlight=False)
        try:
            while (text := read_line(console)) not in ("/quit", "/exit"):
                _turn(chat, text, console)
        except (EOFError, KeyboardInterrupt):
            console.print()  # the shell's prompt starts on its own line


def _turn(chat: RemoteChat, text: str, console: Console) -> None:
    if text == "/new":
        chat.messages = []
    elif not text or text.startswith("/"):
        console.print(HELP, style="dim", highlight=False)
    else:
        try:
            show_answer(chat, text, console)
        except ServerError as error:
            console.print(Text(visible(f"(failed: {error})"), style="red"), soft_wrap=True)
            if error.code == "context_length_exceeded" and chat.messages:
                chat.messages = []
                console.print("(the conversation was too long; the next message starts a new one)", style="dim")


def show_answer(chat: RemoteChat, text: str, console: Console) -> None:
    """Print an answer while it arrives, with the tool calls in it."""
    inside = False  # a line of the agent's text is open
    for chunk in chat.ask(text):
        lines = _other_lines(chunk)
        words = _delta(chunk).get("content") or ""
        if lines and inside:
            console.print()
            inside = False
        for speaker, line in lines:
            console.print(Text.assemble((f"{speaker:6s}", "bold yellow"), visible(line)), soft_wrap=True)
        words = words if inside else words.lstrip("\n")
        if words and not inside:
            console.print(Text("agent ", style="bold green"), end="")
            inside = True
        if words:
            console.print(Text(visible(words)), end="", soft_wrap=True)
    if inside:
        console.print()


def _other_lines(chunk: dict[str, Any]) -> list[tuple[str, str]]:
    """What happened beside the text: calls for the client, and what an agent's tools did."""
    calls = _delta(chunk).get("tool_calls") or []
    lines = [("call", f"{one['function'].get('name')}({one['function'].get('arguments')})") for one in calls]
    event = chunk.get("agent_r1") or {}
    if event.get("type") == "tool_call":
        lines.append(("call", f"{event['name']}({event['arguments']})"))
    elif event.get("type") == "tool_result":
        lines.append(("tool", f"{event['name']}: {event['result']}"))
    elif event.get("type") == "feedback":
        lines.append(("env", str(event["text"])))
    elif event.get("type") == "end" and event.get("stop") != "answered":
        lines.append(("end", f"stopped: {event['stop']}"))
    return lines
