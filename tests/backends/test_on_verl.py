"""Runs on a real Ray cluster with two CPU workers. Needs an environment with verl, which .ci/verl makes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from agent_r1.runs.reader import RunReader, list_checkpoints
from benchmarks.verl_drills import processes

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("AGENT_R1_VERL_PYTHON", "")
pytestmark = [
    pytest.mark.verl,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="AGENT_R1_VERL_PYTHON names no environment with verl"),
]
# One algorithm of each kind: a ratio per token, a critic with ratios per step, a greedy attempt, sampling rounds; and
# contexts that are rewritten, with two mini-batches.
CASES = ["grpo", "steppo", "remax", "dapo", "grpo, KL in the loss, 2 epochs"]
LONG = ["trainer.steps=4", "trainer.save_every=2", "trainer.eval_every=4", "eval.rows=20"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verl")


def start(home: Path, *words: str) -> subprocess.Popen[str]:
    own = {"PYTHONPATH": str(ROOT), "AGENT_R1_CACHE": str(home / "cache"), "OMP_NUM_THREADS": "1"}
    environment = os.environ | own | {"AGENT_R1_DRILL": str(os.getpid()), "HF_HUB_OFFLINE": "1"}
    environment.pop("RAY_ADDRESS", None)
    return subprocess.Popen(
        [PYTHON, *words],
        cwd=home,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def run(home: Path, *words: str) -> str:
    program = start(home, *words)
    output = program.communicate(timeout=580)[0]
    assert program.returncode == 0, output
    return output


def test_verl_still_has_what_we_use(home: Path) -> None:
    code = "from agent_r1.backends.verl.contract import broken_promises as b; found = b(); assert not found, found"
    run(home, "-c", code)


def test_steps_equal_those_of_a_local_run(home: Path) -> None:
    output = run(home, "-m", "benchmarks.verl_parity", "run", *CASES, "--out", str(home / "parity"))
    assert output.count("\nparity Difference") == len(CASES), output


def test_a_run_survives_the_death_of_an_agent_loop_and_a_signal(home: Path) -> None:
    """One run, ended twice: the cause is named, what is finished is saved, nothing is left behind, nothing is lost."""
    path = home / "run"
    train = ["-m", "agent_r1.cli", "train"]
    program = start(home, *train, "quickstart", "backend=verl", "verl.cpu=true", *LONG, "--run", str(path))
    _wait_for_steps(path, 1, program)
    started = processes(os.getpid())
    daemons = {pid: line for pid, line in started.items() if "/raylet" in line or "/gcs_server" in line}
    assert len(daemons) >= 2
    grouped = [line for pid, line in daemons.items() if os.getpgid(pid) == program.pid]
    assert not grouped, "a signal to the process group would end Ray, and with it the workers that have to save"
    victim = next(pid for pid, line in started.items() if line.startswith("ray::AgentLoop"))
    os.kill(victim, signal.SIGKILL)
    output = program.communicate(timeout=60)[0]
    assert program.returncode != 0
    assert "agent loop 0 died: pid: " in output
    assert "continue with:" in output
    assert "Task exception was never retrieved" not in output
    _assert_nothing_left()
    done = len(RunReader.open(path).read_metrics("train"))
    assert list_checkpoints(path / "checkpoints")[-1][0] == done, "the finished step was saved"

    program = start(home, *train, "--resume", str(path))
    _wait_for_steps(path, max(done, 2), program)
    os.killpg(program.pid, signal.SIGTERM)
    output = program.communicate(timeout=120)[0]
    assert "continue with:" in output
    _assert_nothing_left()
    reader = RunReader.open(path)
    steps = [record["step"] for record in reader.read_metrics("train")]
    assert steps == list(range(1, len(steps) + 1))
    assert list_checkpoints(path / "checkpoints")[-1][0] == steps[-1]
    # The first two steps are those of the uninterrupted run that was compared with a local one.
    whole = RunReader.open(home / "parity" / "grpo_verl")
    for ours, theirs in zip(reader.read_metrics("train")[:2], whole.read_metrics("train"), strict=True):
        assert ours["success"] == theirs["success"]
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], abs=1e-5)
    # The commands that read local runs read this one too.
    assert "success" in run(home, *train[:2], "eval", str(path), "eval.rows=5")


def _wait_for_steps(path: Path, count: int, program: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end:
        assert program.poll() is None, program.communicate()[0]
        if (path / "metrics.jsonl").exists() and len(RunReader(path).read_metrics("train")) >= count:
            return
        time.sleep(0.2)
    raise AssertionError(f"no step {count}")


def _assert_nothing_left() -> None:
    end = time.monotonic() + 60
    while left := processes(os.getpid()):
        assert time.monotonic() < end, left
        time.sleep(0.5)
