"""A server and a tool's connection to it are open from before the first episode until the end of the run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_r1 import Resource
from agent_r1.build.task import build_task
from agent_r1.config import load_config
from agent_r1.errors import ConfigError, RolloutError
from agent_r1.resources import opened
from agent_r1.runs.run_dir import RunDir
from tests.conftest import Cli
from tests.forked import start_program
from tests.ranks_started import ends

RECIPE = """\
task: {rows: task.rows, tools: [task.Double], resources: [task.server], reward: task.reward, train_count: 4}
model: {make: task.make_model, device: cpu}
sft: {demos: task.demos, count: 4, epochs: 1, batch_size: 4, lr: 3.0e-3}
rollout: {rows_per_step: 2, group_size: 2, max_steps: 2, max_response_tokens: 80, max_context_tokens: 512}
trainer: {steps: 2, eval_every: 2, save_every: 2, threads: 1}
engine: {threads: 1, max_cached_tokens: 16384}
eval: {rows: 2}
"""
TASK = '''\
import asyncio
import os
import signal
from pathlib import Path

from agent_r1 import BaseTool, Resource
from tests.mini.task import demos, make_model, rows

LOG = Path(__file__).with_name("log")


def log(line):
    with LOG.open("a") as file:
        print(line, file=file)


class Server(Resource):
    """Doubles the numbers that it is sent, one per line."""

    running = None

    async def open(self):
        self.running = await asyncio.start_server(self.answer, "127.0.0.1", 0)
        self.port = self.running.sockets[0].getsockname()[1]
        log("server open")

    async def answer(self, reader, writer):
        while line := await reader.readline():
            writer.write(f"{2 * int(line)}\\n".encode())
        writer.close()

    async def close(self):
        self.running.close()
        log("server closed")


server = Server()


class Double(BaseTool):
    name, description = "double", "Twice a number."
    parameters = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}

    async def open(self):
        self.turn = asyncio.Lock()
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", server.port)
        log("tool open")

    async def execute(self, args):
        async with self.turn:
            self.writer.write(f"{args['number']}\\n".encode())
            doubled = (await self.reader.readline()).decode().strip()
        log(doubled)
        return doubled

    async def close(self):
        self.writer.close()
        await self.writer.wait_closed()
        log("tool closed")


def reward(row, trajectory):
    assert server.running.is_serving()
    if os.environ.get("INTERRUPT"):
        os.kill(os.getpid(), signal.SIGINT)
    return float(len(trajectory.final_text) % 3)
'''

OPENED, CLOSED = ["server open", "tool open"], ["tool closed", "server closed"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    folder = tmp_path / "recipe"
    folder.mkdir()
    (folder / "base.yaml").write_text(RECIPE, encoding="utf-8")
    (folder / "task.py").write_text(TASK, encoding="utf-8")
    return folder


def take_log(recipe: Path) -> list[str]:
    log = recipe / "log"
    lines = log.read_text(encoding="utf-8").splitlines()
    log.unlink()
    return lines


@pytest.mark.usefixtures("cache")
def test_every_command_that_plays_opens_once_and_closes(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert cli("train", recipe, "--run", run).code == 0
    lines = take_log(recipe)
    assert lines[:2] == OPENED
    assert lines[-2:] == CLOSED
    assert sorted(lines[2:-2]) == ["0", "2", "4", "6"]  # the tool calls of the demonstrations
    for words in (["eval", run], ["chat", run, "--ask", "double 4"], ["collect", recipe, "--model", run]):
        assert cli(*words).code == 0
        lines = take_log(recipe)
        assert (lines[:2], lines[-2:]) == (OPENED, CLOSED)
        assert len(set(lines[2:-2]) & {*OPENED, *CLOSED}) == 0


@pytest.mark.usefixtures("cache")
def test_an_interrupted_run_closes(recipe: Path, tmp_path: Path) -> None:
    log, words = tmp_path / "log", ["train", str(recipe), "--run", str(tmp_path / "run")]
    program = start_program(words, {**os.environ, "INTERRUPT": "1"}, log)
    assert ends([program]) == [128 + signal.SIGINT], log.read_text(encoding="utf-8")
    assert take_log(recipe)[-2:] == CLOSED


@pytest.mark.usefixtures("cache")
def test_a_failing_open_stops_the_run_and_closes_what_was_opened(cli: Cli, recipe: Path, tmp_path: Path) -> None:
    code = (recipe / "task.py").read_text(encoding="utf-8")
    broken = code.replace('"127.0.0.1", server.port', '"127.0.0.1", 0')  # nothing listens there
    (recipe / "task.py").write_text(broken, encoding="utf-8")
    ended = cli("train", recipe, "--run", tmp_path / "run")
    assert ended.code != 0
    assert "Double" in ended.err
    assert take_log(recipe) == ["server open", "server closed"]
    assert RunDir.open(tmp_path / "run").read_metrics() == []


class Noted(Resource):
    def __init__(self, notes: list[str], name: str, *, in_close: Callable[[], object] = lambda: None) -> None:
        self.notes, self.name, self.in_close = notes, name, in_close

    async def open(self) -> None:
        self.notes.append(f"+{self.name}")

    async def close(self) -> None:
        self.notes.append(f"-{self.name}")
        result = self.in_close()
        if isinstance(result, float):
            await asyncio.sleep(result)


def test_a_resource_that_fails_or_hangs_in_close_does_not_keep_the_others_open(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agent_r1.resources.CLOSE_SECONDS", 0.05)
    notes: list[str] = []

    async def play() -> str:
        fails, hangs = Noted(notes, "fails", in_close=lambda: 1 / 0), Noted(notes, "hangs", in_close=lambda: 60.0)
        async with opened([Noted(notes, "a"), fails, hangs]):
            return "result"

    assert asyncio.run(play()) == "result"
    assert notes == ["+a", "+fails", "+hangs", "-hangs", "-fails", "-a"]
    assert len(caplog.records) == 2


def test_what_open_raised_is_named() -> None:
    class Broken(Resource):
        async def open(self) -> None:
            raise OSError("no such server")

    async def play() -> None:
        async with opened([Broken()]):
            raise AssertionError("not reached")

    with pytest.raises(RolloutError, match=r"Broken.*no such server"):
        asyncio.run(play())


def test_only_resources_can_be_named(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.resources: 'task\.reward'"):
        build_task(load_config(str(recipe), ["task.resources=[task.reward]"]))
