"""Whole runs in a hostile setting: the display disappears, envs attack the process, the disk fails.

Each runs in its own process; exit code, output and files are checked.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent_r1.cli.app import main
from agent_r1.runs.run_dir import RunDir
from agent_r1.runs.trajectories import read_trajectories
from tests.forked import start

RECIPE = Path(__file__).parents[1] / "hostile"
ROOT = Path(__file__).parents[2]
ESC, CSI = "\x1b", "\x9b"


@dataclass(frozen=True)
class Ended:
    code: int | None
    said: str


@dataclass(frozen=True)
class Shell:
    """Runs `agent-r1 WORDS` in `place`; everything is given and kept there by relative paths."""

    place: Path

    def __call__(self, *words: str, trick: str = "none", out: str = "said", fault: str = "", **more: str) -> Ended:
        (self.place / "elsewhere").mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "TRICK": trick,
            "ELSEWHERE": str(self.place / "elsewhere"),
            "RUN": str(self.place / "run"),
            "AGENT_R1_CACHE": "cache",
            **more,
        }
        (self.place / "said").unlink(missing_ok=True)
        process = start(_program, list(words), environment, str(self.place), out, fault)
        process.join(300)
        if process.exitcode is None:
            process.kill()
        said = self.place / "said"
        return Ended(process.exitcode, said.read_text(encoding="utf-8") if said.exists() else "")

    def train(self, *words: str, **more: str) -> Ended:
        return self("train", str(RECIPE), "--run", "run", *words, **more)

    @property
    def run(self) -> RunDir:
        return RunDir.open(self.place / "run")

    def assert_complete(self, steps: int = 2) -> None:
        """Every step and evaluation is there once, with its episodes, and in the right place."""
        for kind, first in (("train", 1), ("eval", 0)):
            assert [record["step"] for record in self.run.read_metrics(kind)] == list(range(first, steps + 1))
            for step in range(first, steps + 1):
                assert list(read_trajectories(self.run.trajectories_file(kind, step)))
        assert (self.run.checkpoints / f"step_{steps:06d}").is_dir()
        assert {path.name for path in self.place.iterdir()} <= {"run", "cache", "elsewhere", "said"}
        assert not list((self.place / "elsewhere").iterdir())


def _program(words: list[str], environment: Mapping[str, str], place: str, out: str, fault: str) -> None:
    """Run the program with both streams sent to the file `out`."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(place)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if "NOHUP" in environment else signal.SIG_DFL)
    output = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    if fault:
        _break(fault)
    sys.argv = ["agent-r1", *words]
    main()


def _break(fault: str) -> None:
    """Fail between the two writes of an evaluation, whichever comes first: that of a step that can be resumed from."""
    last = 0 if fault == "kill" else 1  # an error, unlike a kill, lets step 1 be saved
    begun: list[str] = []

    def failing(write: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: RunDir, kind: str, step: int, *args: Any, **more: Any) -> Any:
            if (kind, step) == ("eval", last):
                begun.append(write.__name__)
                if len(begun) == 2 and fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if len(begun) == 2:
                    number = getattr(errno, fault)
                    raise OSError(number, os.strerror(number), str(self.path))
            return write(self, kind, step, *args, **more)

        return wrapped

    for write in (RunDir.append_metrics, RunDir.write_trajectories):
        setattr(RunDir, write.__name__, failing(write))


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


# The display


@pytest.mark.parametrize("trick", ["none", "chat"])
def test_a_full_stdout_stops_nothing(shell: Shell, trick: str) -> None:
    assert shell.train(out="/dev/full", trick=trick).code == 0
    shell.assert_complete()


@pytest.mark.parametrize("trick", ["close descriptors", "close streams"])
def test_a_tool_that_closes_stdout_stops_nothing(shell: Shell, trick: str) -> None:
    ended = shell.train(trick=trick)
    assert ended.code == 0
    assert "held-out success" in ended.said  # the display goes on, and into no file but its own
    shell.assert_complete()


def test_a_reader_that_leaves_stops_nothing(shell: Shell) -> None:
    """As with `agent-r1 train ... | head -n 1`."""
    os.mkfifo(shell.place / "pipe")

    def read_one_line() -> None:
        with (shell.place / "pipe").open("rb") as pipe:
            pipe.readline()

    reader = threading.Thread(target=read_one_line)
    reader.start()
    assert shell.train(out="pipe", trick="chat").code == 0
    reader.join()
    (shell.place / "pipe").unlink()
    shell.assert_complete()


def test_a_program_started_without_stdout_and_stderr_runs(shell: Shell) -> None:
    words = f"{sys.executable} -m agent_r1.cli train {RECIPE} --run run >&- 2>&-"
    environment = {**os.environ, "TRICK": "chat", "AGENT_R1_CACHE": "cache", "PYTHONPATH": str(ROOT)}
    subprocess.run(["bash", "-c", words], cwd=shell.place, env=environment, check=True)
    (shell.place / "elsewhere").mkdir()
    shell.assert_complete()


def test_nothing_from_outside_reaches_the_terminal_raw(shell: Shell) -> None:
    """Row ids and questions with escape sequences, markup and halves of surrogate pairs."""
    trained = shell.train(trick="words")
    evaluated = shell("eval", "run", trick="words")
    compared = shell("compare", "run", "--step", "first,last", trick="words")
    asked = shell("chat", "run", "--ask", "", trick="words")
    for ended in (trained, evaluated, compared, asked):
        assert ended.code == 0, ended.said
        assert ESC not in ended.said
        assert CSI not in ended.said
    assert r"\x1b[31m" in trained.said
    assert "[link=http://x]here[/link]" in trained.said
    shell.assert_complete()
    [file] = shell.run.evals.glob("*.json")
    played = {each.row_id for each in read_trajectories(shell.run.trajectories_file("eval", 2))}
    assert played == set(json.loads(file.read_text(encoding="utf-8"))["outcomes"])  # ids survive as they are
    lines = shell.run.trajectories_file("eval", 2).read_text(encoding="utf-8").splitlines()  # strict UTF-8
    assert all(json.loads(line) for line in lines)


# The process


@pytest.mark.parametrize("trick", ["go elsewhere", "go nowhere"])
def test_a_tool_that_changes_the_working_directory_stops_nothing(shell: Shell, trick: str) -> None:
    ended = shell.train(trick=trick)
    assert ended.code == 0, ended.said
    assert "chat run\n" in ended.said  # paths are shown as they were typed
    assert shell("train", "--resume", "run", "trainer.steps=3", trick=trick).code == 0
    shell.assert_complete(steps=3)


@pytest.mark.parametrize(
    ("trick", "cause"), [("interrupt", "KeyboardInterrupt"), ("leave", "SystemExit: 7"), ("leave later", "")]
)
def test_a_tool_that_would_end_the_program_fails_its_episode(shell: Shell, trick: str, cause: str) -> None:
    ended = shell.train(trick=trick)
    assert ended.code == 0, ended.said
    shell.assert_complete()
    errors = [each.error or "" for each in read_trajectories(shell.run.trajectories_file("train", 1))]
    assert all(cause in error for error in errors)


def test_a_tool_that_stops_the_event_loop_stops_nothing(shell: Shell) -> None:
    assert shell.train(trick="stop loop").code == 0
    shell.assert_complete()


def test_threads_of_tools_do_not_keep_the_program_alive(shell: Shell) -> None:
    ended = shell.train(trick="stay")
    assert ended.code == 0, ended.said
    assert "exiting while threads of tools are still running: a tool's" in ended.said
    shell.assert_complete()
    asked = shell("chat", "run", "--ask", "hello", trick="stay in the pool")
    assert asked.code == 0, asked.said
    assert "exiting while threads of tools are still running: asyncio_0" in asked.said


def test_a_terminal_that_hangs_up_lets_the_run_save(shell: Shell) -> None:
    ended = shell.train(trick="hang up")
    assert ended.code == 128 + signal.SIGHUP
    assert "stopped by SIGHUP; saved after step 1; continue with: agent-r1 train --resume run" in ended.said
    assert shell("train", "--resume", "run").code == 0
    shell.assert_complete()


def test_a_run_under_nohup_ignores_sighup(shell: Shell) -> None:
    assert shell.train(trick="hang up", NOHUP="1").code == 0
    shell.assert_complete()


# The disk


@pytest.mark.parametrize("fault", ["kill", "ENOSPC"])
def test_an_incomplete_evaluation_is_repeated(shell: Shell, fault: str) -> None:
    """The process dies between the two files that an evaluation writes."""
    ended = shell.train(fault=fault)
    assert ended.code == (-signal.SIGKILL if fault == "kill" else 2)
    if fault != "kill":
        assert "saved after step 1; continue with: agent-r1 train --resume run" in ended.said
    assert shell("train", "--resume", "run").code == 0
    shell.assert_complete()
    assert shell("compare", "run", "--step", "first,last").code == 0


def test_only_an_evaluation_without_its_episodes_is_repeated(shell: Shell) -> None:
    """As versions left it that wrote the metrics first."""
    assert shell.train().code == 0
    before = (shell.run.path / "metrics.jsonl").read_bytes()
    assert shell("train", "--resume", "run").code == 0
    assert (shell.run.path / "metrics.jsonl").read_bytes() == before
    shell.run.trajectories_file("eval", 2).unlink()
    assert shell("compare", "run", "--step", "first,last").code == 2
    assert shell("train", "--resume", "run").code == 0
    shell.assert_complete()
    assert shell("compare", "run", "--step", "first,last").code == 0
