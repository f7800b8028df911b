"""`agent-r1 push` through huggingface_hub's own client, to a small server on this machine that speaks its protocol."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli
from tests.ranks_started import MINI

TOKEN = "hf_test"


@dataclass
class Hub:
    """What was created and committed."""

    repos: dict[str, bool] = field(default_factory=dict)  # name -> whether it is private
    files: dict[str, bytes] = field(default_factory=dict)
    titles: list[str] = field(default_factory=list)
    url: str = ""


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        body = self._body()
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            self._answer({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            self._create(json.loads(body))
        elif "/preupload/" in self.path:
            files = [{"path": each["path"], "uploadMode": "regular"} for each in json.loads(body)["files"]]
            self._answer({"files": [{**each, "shouldIgnore": False} for each in files]})
        elif "/commit/" in self.path:
            self._commit([json.loads(line) for line in body.splitlines()])
        else:
            self._answer({})

    def do_GET(self) -> None:
        is_ours = self.headers.get("authorization") == f"Bearer {TOKEN}"
        self._answer({"id": "me/agent", "siblings": [], "sha": "0"}, 200 if is_ours else 401)

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        self.hub.repos[name] = asked.get("private", asked.get("visibility") == "private")
        self._answer({"url": f"{self.hub.url}/{name}"})

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if line["key"] == "header":
                self.hub.titles.append(line["value"]["summary"])
            else:
                self.hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        url = f"{self.hub.url}/me/agent/commit/1"
        self._answer({"success": True, "commitOid": "1", "commitUrl": url, "hookOutput": ""})

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        parts = b""
        while size := int(self.rfile.readline(), 16):
            parts += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return parts

    def _answer(self, content: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    made = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OurHandler", (Handler,), {"hub": made}))
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", made.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield made
    server.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("push")


@pytest.fixture
def run(folder: Path, cli: Cli, cache: None) -> Path:
    if not (path := folder / "run").exists():
        words = ["trainer.steps=0", "eval.rows=1", "sft.demos=null"]
        assert cli("train", MINI, *words, "--run", path).code == 0
    return path


def test_a_push_uploads_what_an_export_writes(hub: Hub, run: Path, tmp_path: Path, cli: Cli) -> None:
    pushed = cli("push", run, "me/agent")
    assert pushed.code == 0, pushed.err
    assert f"{hub.url}/me/agent" in pushed.out
    assert hub.repos == {"me/agent": True}
    assert hub.titles == ["Add run"]
    assert cli("export", run, tmp_path / "model").code == 0
    exported = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    card, exported_card = (files.pop("README.md").decode() for files in (hub.files, exported))
    assert hub.files == exported
    assert 'from_pretrained("me/agent")' in card
    assert card.replace("me/agent", "model") == exported_card


def test_a_public_repository_must_be_asked_for(hub: Hub, run: Path, cli: Cli) -> None:
    assert cli("push", run, "me/agent", "--public").code == 0
    assert hub.repos == {"me/agent": False}


def test_failures_say_what_to_do(hub: Hub, run: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = cli("push", run, "not a hub id")
    assert ended.code == 2
    assert "me/my-agent" in ended.err
    monkeypatch.setenv("HF_TOKEN", "wrong")
    ended = cli("push", run, "me/agent")
    assert ended.code == 2
    assert "hf auth login" in ended.err
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert cli("push", run, "me/agent").code == 2
    assert hub.files == {}
