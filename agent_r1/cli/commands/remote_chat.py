"""`agent-r1 chat --url`: talk to any OpenAI-compatible server; answers appear as they are written.

Servers of agent-r1 also report what an agent's tools did.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

from rich.console import Console
from rich.text import Text

from agent_r1.cli.terminal import converse
from agent_r1.errors import ConfigError
from agent_r1.serve.chat_client import RemoteChat, ServerError, delta_of, open_remote_chat
from agent_r1.text import visible

HELP = "/new forgets the conversation, /quit exits."


def run_remote_chat(url: str, console: Console, *, model: str | None, key: str | None, ask: str | None) -> None:
    """Ask one question, or chat until the user ends it."""
    if ask == "":
        raise ConfigError("--ask '' asks a row's own question, which a server does not have: write a question")
    chat = open_remote_chat(url, model=model, key=key)
    with closing(chat.client):
        if ask is not None:
            show_answer(chat, ask, console)
            return
        console.print(Text(f"{chat.model} at {chat.client.base_url}. {HELP}"), style="dim", highlight=False)
        converse(console, lambda text: _turn(chat, text, console))


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
        if lines and inside:
            console.print()
            inside = False
        for speaker, line in lines:
            console.print(Text.assemble((f"{speaker:6s}", "bold yellow"), visible(line)), soft_wrap=True)
        words = delta_of(chunk).get("content") or ""
        words = words if inside else words.lstrip("\n")
        if words:
            speaker = "" if inside else "agent "
            console.print(Text.assemble((speaker, "bold green"), visible(words)), end="", soft_wrap=True)
            inside = True
    if inside:
        console.print()


def _other_lines(chunk: dict[str, Any]) -> list[tuple[str, str]]:
    """Print events beside the text: calls for the client, and what an agent's tools did."""
    calls = delta_of(chunk).get("tool_calls") or []
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
