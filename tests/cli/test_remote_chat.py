"""`agent-r1 chat --url` talks to servers: ours, and whatever else answers there."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from rich.console import Console

from agent_r1.cli.commands.remote_chat import run_remote_chat
from agent_r1.errors import ConfigError
from tests.conftest import Cli
from tests.serve.api_server import CALL, serving_agent, serving_script


def talk(url: str, typed: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    console = Console(file=io.StringIO(), width=200)
    run_remote_chat(url, console, model=None, key=None, ask=None)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()[1:] if line.strip()]


def test_a_conversation_is_remembered_until_new(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_script(["one [/b]", "two", "three"]) as (url, engine):
        printed = talk(url, "a\nb\n/new\nc\n/quit\n", monkeypatch)
    assert printed == [
        "you   a", "agent one [/b]", "you   b", "agent two", "you   /new", "you   c", "agent three", "you   /quit"
    ]  # fmt: skip
    first, second, third = (len(call.prompt_ids) for call in engine.calls)
    assert first == third < second


def test_what_an_agents_tools_do_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_agent([f"I ask.\n{CALL % 'a'}", "it is aaa"]) as (url, _):
        printed = talk(url, "go\n", monkeypatch)
    assert printed == [
        "you   go", "agent I ask.", 'call  echo({"text": "a"})', "tool  echo: aaa", "agent it is aaa", "you"
    ]  # fmt: skip


def test_an_error_is_shown_and_the_conversation_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_script(["one"]) as (url, engine):
        printed = talk(url, "x" * 2000 + "\na\n", monkeypatch)
    assert "maximum context length" in printed[1]
    assert printed[2:4] == ["you   a", "agent one"]
    assert len(engine.calls) == 1


def test_one_question_can_be_asked_from_the_command_line(cli: Cli) -> None:
    with serving_script(["it is 4"], key="secret-key") as (url, _):
        refused = cli("chat", "--url", url, "--ask", "?")
        answered = cli("chat", "--url", f"{url}/v1/", "--api-key", "secret-key", "--ask", "?")
    assert refused.code == 2
    assert "AGENT_R1_API_KEY" in refused.err
    assert (answered.code, answered.out) == (0, "agent it is 4\n")


@pytest.mark.parametrize("words", [["run"], ["--row", "1"]])
def test_options_of_a_run_have_no_effect_with_a_url(words: list[str], cli: Cli) -> None:
    ended = cli("chat", *words, "--url", "http://127.0.0.1:9")
    assert ended.code == 2
    assert "--url" in ended.err


def test_without_a_run_or_a_url_there_is_nothing_to_talk_to(cli: Cli) -> None:
    assert "--url" in cli("chat").err
    assert "--model" in cli("chat", "run", "--model", "m").err


def test_an_address_where_nothing_listens_is_named() -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9"):
        run_remote_chat("http://127.0.0.1:9", Console(file=io.StringIO()), model=None, key=None, ask="?")


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("status", "body"), [(200, b"<html>"), (200, b"[]"), (200, b'{"data": []}'), (500, b"oops")])
def test_servers_that_are_no_model_servers_are_told_apart(status: int, body: bytes, cli: Cli, tmp_path: Path) -> None:
    with answering(status, body) as url:
        ended = cli("chat", "--url", url, "--ask", "?")
    assert (ended.code, ended.out) == (2, "")
    assert "Traceback" not in ended.err
