"""A run described in Python: trained inside a running event loop, looked at, evaluated, talked to, continued."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import agent_r1 as ar
from agent_r1.api import given
from agent_r1.api.threads import apart
from agent_r1.runs.metrics import Metrics
from agent_r1.runs.reader import list_checkpoints
from tests.api.coins import COINS, ROWS, SETTINGS, SMALL, TASK, question
from tests.conftest import Cli

STEPS = 5


@dataclass
class Told:
    """What the callbacks were told."""

    steps: list[tuple[int, Metrics]] = field(default_factory=list)
    episodes: list[ar.Trajectory] = field(default_factory=list)
    evals: list[ar.EvalResult] = field(default_factory=list)


@pytest.fixture(scope="module")
def trained(cache: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[ar.Run, Told]:
    told = Told()

    async def in_a_notebook() -> ar.Run:
        assert asyncio.get_running_loop().is_running()
        return ar.train(
            **TASK,
            **SETTINGS,
            algorithm="grpo",
            steps=STEPS,
            out=tmp_path_factory.mktemp("runs") / "coins",
            quiet=True,
            on_step=lambda step, metrics: told.steps.append((step, metrics)),
            on_episode=told.episodes.append,
            on_eval=told.evals.append,
        )

    return asyncio.run(in_a_notebook()), told


@pytest.fixture
def run(trained: tuple[ar.Run, Told]) -> ar.Run:
    return trained[0]


def test_a_run_learns_and_calls_back(trained: tuple[ar.Run, Told]) -> None:
    run, told = trained
    before, after = told.evals[0], told.evals[-1]
    assert (before.step, after.step) == (0, STEPS)
    assert before.success <= 0.5 < after.success == 1.0
    assert [step for step, _ in told.steps] == list(range(1, STEPS + 1))
    assert len(told.episodes) == STEPS * 8 * 8
    first = told.episodes[: 8 * 8]
    assert sum(episode.outcome_reward for episode in first) / len(first) == told.steps[0][1]["reward/mean"]
    assert [record["kind"] for record in run.metrics].count("train") == STEPS
    assert not run.stopped


def test_what_was_told_is_what_the_run_directory_says(trained: tuple[ar.Run, Told]) -> None:
    run, told = trained
    written = [record for record in run.metrics if record["kind"] == "train"]
    assert [record["success"] for record in written] == [metrics["success"] for _, metrics in told.steps]
    assert len(told.evals[-1].episodes) == 4  # a fifth of 20 rows is held out
    assert json.loads((run.path / "config.json").read_text())["recipe"] == "(python)"


def test_held_out_rows_are_not_trained_on(trained: tuple[ar.Run, Told]) -> None:
    _, told = trained
    tested = {episode.row_id for result in told.evals for episode in result.episodes}
    assert len(tested) == 4
    assert tested.isdisjoint(episode.row_id for episode in told.episodes)


def test_episodes_and_curves_can_be_looked_at(run: ar.Run) -> None:
    transcript = run.transcript(0)
    speakers = [speaker for speaker, _ in transcript.lines]
    assert speakers == ["user", "agent", "tool", "agent"]
    assert transcript.lines[0][1] in str(transcript)
    assert transcript.lines[0][1] in transcript._repr_mimebundle_()["text/html"]
    assert run.transcript(3, kind="train", step=1).trajectory.steps
    assert run.plot()._repr_png_().startswith(b"\x89PNG")
    with urllib.request.urlopen(f"{run.view().url}api/runs", timeout=20) as answer:
        assert run.path.name in answer.read().decode()


def test_an_agent_answers_awaited_and_not(run: ar.Run) -> None:
    async def ask_all(agent: ar.Agent) -> list[ar.Answer]:
        return await asyncio.gather(*(agent(question(name)) for name in COINS))

    with run.agent() as agent:
        answers = asyncio.run(ask_all(agent))
        again = asyncio.run(ask_all(agent))  # another event loop
        assert agent.ask(question("Ada")) == answers[0]
    right = [str(coins) for coins in COINS.values()]
    assert sum(a == b for a, b in zip(answers, right, strict=True)) >= 18
    assert again == answers
    assert answers[0].stop is ar.StopReason.ANSWERED
    assert answers[0].steps[0].calls[0].name == "lookup"
    with pytest.raises(ar.ConfigError):
        agent.ask("hello?")


def test_closed_agents_leave_no_threads_and_no_open_files(run: ar.Run) -> None:
    def in_use() -> tuple[list[str], int]:
        return sorted(thread.name for thread in threading.enumerate()), len(os.listdir("/proc/self/fd"))

    def wait_for_loops() -> None:
        for thread in threading.enumerate():
            if thread.name == "agent-r1 loop":
                thread.join(20)

    wait_for_loops()  # of earlier tests
    before = in_use()
    for _ in range(2):
        with run.agent() as agent:
            agent.ask(question("Ada"))
        with pytest.raises(ar.ConfigError):
            ar.Agent(run.config, str(run.path / "missing"))
    wait_for_loops()
    assert in_use() == before


def test_only_one_run_works_in_a_process_at_a_time_except_in_its_own_callbacks() -> None:
    begun, end = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        assert end.wait(20)
        return apart(lambda: "in a callback")

    with ThreadPoolExecutor() as pool:
        first = pool.submit(apart, work)
        assert begun.wait(20)
        with pytest.raises(ar.ConfigError, match="process"):
            apart(lambda: "at the same time")
        end.set()
        assert first.result(20) == "in a callback"
    assert apart(lambda: "afterwards") == "afterwards"


def test_an_interrupt_that_comes_too_late_to_stop_anything_still_ends_the_script() -> None:
    ended: list[bool] = []

    def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)  # has nothing that could be stopped
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        apart(work)
    assert ended == [True]


def test_evaluations_of_a_run_are_kept(run: ar.Run) -> None:
    result = run.evaluate(rows=ROWS[:5], samples=2, temperature=1.0, name="five", quiet=True)
    assert [group.row.row_id for group in result.groups] == [row["row_id"] for row in ROWS[:5]]
    assert len(result.episodes) == 10
    kept = json.loads((run.path / "evals" / "five.json").read_text())
    assert kept["metrics"]["success"] == result.success
    with pytest.raises(ar.ConfigError, match=r"eval.*'sample'|sample"):
        run.evaluate(sample=2, quiet=True)


def test_a_model_is_evaluated_without_a_run(run: ar.Run) -> None:
    task = {name: TASK[name] for name in ("rows", "tools", "reward")}
    limits = {name: SETTINGS[name] for name in ("rollout", "engine")}
    result = ar.evaluate(**task, **limits, model=run.checkpoint, quiet=True)
    assert len(result.groups) == len(ROWS)  # all of the list
    assert result.success >= 0.9


def test_the_command_line_says_what_it_lacks_and_shows_the_rest(
    run: ar.Run, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("show", run.path).code == 0
    monkeypatch.setattr(given, "_objects", {})  # as in another process
    ended = cli("eval", run.path)
    assert ended.code == 2
    assert "'rows' was defined in Python" in ended.err
    assert "load_run" in ended.err


def test_a_run_is_opened_again_with_its_objects(run: ar.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given, "_objects", {})
    opened = ar.load_run(run.path)
    assert opened.metrics == run.metrics
    assert opened.transcript().lines
    with pytest.raises(ar.ConfigError, match="'rows' was defined in Python"):
        opened.evaluate(quiet=True)
    assert ar.load_run(run.path, **TASK).evaluate(quiet=True).success == 1.0


def test_a_run_continues_and_refuses_other_settings(run: ar.Run) -> None:
    with pytest.raises(ar.ConfigError, match=r"learner\.lr=0\.0003, not 0\.5"):
        ar.train(resume=run.path, learner={"lr": 0.5}, quiet=True)
    with pytest.raises(ar.ConfigError, match="has already done 5 steps"):
        ar.train(resume=run.path, steps=2, quiet=True)
    seen: list[int] = []
    longer = ar.train(resume=run.path, **TASK, steps=STEPS + 1, quiet=True, on_step=lambda step, _: seen.append(step))
    assert seen == [STEPS + 1]
    assert longer.path == run.path
    assert longer.checkpoint.name == f"step_{STEPS + 1:06d}"


class OurError(Exception):
    pass


def test_an_error_of_a_callback_ends_the_run_after_its_step_was_saved(cache: None, tmp_path: Path) -> None:
    def fail(step: int, metrics: Metrics) -> None:
        if step == 2:
            raise OurError(step)

    with pytest.raises(OurError):
        ar.train(**TASK, **SMALL, steps=4, out=tmp_path / "run", on_step=fail, quiet=True)
    assert [step for step, _ in list_checkpoints(tmp_path / "run" / "checkpoints")] == [2]
    assert not [thread.name for thread in threading.enumerate() if "engine" in thread.name]
    assert ar.train(resume=tmp_path / "run", steps=3, quiet=True).checkpoint.name == "step_000003"


SCRIPT = """
import os, signal, sys
import agent_r1 as ar
from tests.api.coins import SMALL, TASK

def interrupt(step, metrics):
    if step % 2 == 0:
        os.kill(os.getpid(), signal.SIGINT)

try:
    ar.train(**TASK, **SMALL, steps=500, out=sys.argv[1], on_step=interrupt)
except KeyboardInterrupt:
    print("raised", ar.load_run(sys.argv[1]).checkpoint.name)
sys.ps1 = ">>> "  # as at a prompt
run = ar.train(resume=sys.argv[1], on_step=interrupt)
print("returned", run.stopped, run.checkpoint.name)
"""


def test_an_interrupt_saves_and_then_raises_in_a_script_and_returns_at_a_prompt(cache: None, tmp_path: Path) -> None:
    words = [sys.executable, "-c", SCRIPT, str(tmp_path / "run")]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "raised step_" in ended.stdout
    assert "returned True step_" in ended.stdout
    assert ended.stdout.count("ar.train(resume=") == 2


def test_importing_the_package_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, agent_r1 as ar; ar.tool; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_random_streams_of_the_caller_are_left_alone(run: ar.Run) -> None:
    import random

    random.seed(7)
    expected = random.Random(7).random()
    run.evaluate(name="again", quiet=True)
    assert random.random() == expected


def test_errors_are_those_of_the_command_line(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"reward": lambda row: 1.0}, "must accept"),
        ({"algorithm": "grop"}, "grpo"),
        ({"model": "/no/such/model"}, "/no/such/model"),
        ({"tools": [42]}, "tool"),
        ({"rows": [{"question": "no prompt"}, {"question": "no prompt"}]}, "prompt"),
        ({"demos": None}, "demos"),
        ({"backend": "verl"}, "verl"),
        ({"on_steps": print}, "'on_step'"),
    ]
    for wrong, word in cases:
        with pytest.raises((ar.ConfigError, ar.DataError), match=word):
            ar.train(**{**TASK, **SETTINGS, **wrong}, out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
