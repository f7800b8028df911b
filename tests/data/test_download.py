"""Files fetched from a real server: whole and right, or not there at all."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agent_r1.build.models.source import cache_root
from agent_r1.data.downloads import MIB, MIB_PER_LINE, data_dir, data_folder, fetch
from agent_r1.errors import DataError

CONTENT = b"one line\nanother\n" * 1000
RIGHT = hashlib.sha256(CONTENT).hexdigest()
LARGE = bytes((2 * MIB_PER_LINE + 1) * MIB)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        if self.path == "/missing":
            self.send_error(404)
        elif self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/good")
            self.end_headers()
        else:
            content = LARGE if self.path == "/large" else CONTENT
            self.send_response(200)
            if self.path != "/unmeasured":
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if self.path in ("/cut", "/unmeasured") else content)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    asked: list[str]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(("127.0.0.1", 0), Handler)
    made.asked = []
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def url(server: Server, path: str) -> str:
    return f"http://127.0.0.1:{server.server_port}{path}"


def silent(line: str) -> None:
    pass


@pytest.mark.parametrize("path", ["/good", "/moved"])
def test_a_file_arrives_whole_in_a_folder_that_is_made_for_it(server: Server, tmp_path: Path, path: str) -> None:
    to = tmp_path / "a" / "b" / "file.txt"
    said: list[str] = []
    assert fetch(url(server, path), to, sha256=RIGHT, report=said.append) == to
    assert to.read_bytes() == CONTENT
    assert [file.name for file in to.parent.iterdir()] == ["file.txt"]
    assert said == [f"fetching {url(server, path)}"]


def test_what_is_there_is_not_fetched_again(server: Server, tmp_path: Path) -> None:
    to = tmp_path / "file.txt"
    for _ in range(2):
        fetch(url(server, "/good"), to, sha256=RIGHT, report=silent)
    assert server.asked == ["/good"]


def test_a_file_that_is_there_must_have_the_hash_too(server: Server, tmp_path: Path) -> None:
    to = tmp_path / "file.txt"
    to.write_bytes(CONTENT[:-1])
    with pytest.raises(DataError, match=f"{to} has sha256 .* {RIGHT} "):
        fetch(url(server, "/good"), to, sha256=RIGHT, report=silent)
    assert (server.asked, to.read_bytes()) == ([], CONTENT[:-1])  # a user's file is neither used nor overwritten


def test_a_long_download_says_how_far_it_is(server: Server, tmp_path: Path) -> None:
    said: list[str] = []
    fetch(url(server, "/large"), tmp_path / "file", sha256=hashlib.sha256(LARGE).hexdigest(), report=said.append)
    assert len(said) == 3  # its beginning, 16 MiB and 32 MiB
    assert f"of {2 * MIB_PER_LINE + 1}.0 MiB" in said[-1]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/missing", "cannot fetch http.*/missing .*404"),
        ("/cut", "cannot fetch http.*/cut .*RemoteProtocolError"),
        ("/unmeasured", f"/unmeasured has sha256 [0-9a-f]{{64}}, .*{RIGHT}"),
    ],
)
def test_what_did_not_arrive_whole_leaves_nothing_behind(
    server: Server, tmp_path: Path, path: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        fetch(url(server, path), tmp_path / "file", sha256=RIGHT, report=silent)
    assert list(tmp_path.iterdir()) == []


def test_without_a_server_the_error_says_what_to_do(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        there = f"http://127.0.0.1:{listening.getsockname()[1]}/good"  # where soon nobody listens
    to = tmp_path / "file"
    with pytest.raises(DataError, match=f"cannot fetch {there} .*put that file at {to}, or set data.path"):
        fetch(there, to, sha256=RIGHT, report=silent)
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_leaves_nothing_behind(server: Server, tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(url(server, "/good"), tmp_path / "file", sha256=RIGHT, report=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_data_are_kept_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("AGENT_R1_DATA", raising=False)
    assert data_dir("mine") == tmp_path / ".cache" / "agent-r1" / "data" / "mine"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert data_dir("mine") == tmp_path / "elsewhere" / "agent-r1" / "data" / "mine"
    monkeypatch.setenv("AGENT_R1_DATA", "~/data")  # wins over both
    assert data_dir("mine") == data_folder("mine", None) == tmp_path / "data" / "mine"
    assert data_folder("mine", "~/copy") == tmp_path / "copy"


def test_data_and_made_models_lie_under_the_same_cache_however_it_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AGENT_R1_DATA", "AGENT_R1_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "~/elsewhere")
    assert cache_root() == tmp_path / "elsewhere" / "agent-r1"
    assert data_dir("mine") == cache_root() / "data" / "mine"
    monkeypatch.setenv("AGENT_R1_CACHE", "~/models")  # moves what is made, not what was fetched
    assert (cache_root(), data_dir("mine").parents[2]) == (tmp_path / "models", tmp_path / "elsewhere")
