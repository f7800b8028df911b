"""`task.workers`: a whole run whose environments crash, hang and misbehave in some episodes."""

from __future__ import annotations

import asyncio
import io
import logging
import os
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from agent_r1.build.plan import build_plan
from agent_r1.build.task import build_task
from agent_r1.cli.commands.train import run_training
from agent_r1.config import RunConfig, load_config
from agent_r1.envs.processes.pool import EnvPool
from agent_r1.errors import ConfigError
from agent_r1.runs.run_dir import RunDir
from agent_r1.runs.run_log import logging_to
from agent_r1.runs.trajectories import read_trajectories
from tests.envs.worker_envs import Counting
from tests.envs.worker_helpers import play

ENV = '''
"""Three turns of small talk, each of which needs 80 MiB; some rows go wrong at the second."""
import os, signal, sys, time
from agent_r1 import AgentEnv
from agent_r1.types import Observation, Transition

FAULTS = {
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(3600),
    "raise": lambda: {}["no such key"],
    "lie": lambda: "not a transition",
}
KEPT = []

class Talk(AgentEnv):
    deterministic = True

    def __init__(self, polite=True):
        self.polite = polite

    async def reset(self, row):
        self.fault, self.messages = row.extra_info["fault"], list(row.prompt)
        return Observation(messages=self.messages)

    async def step(self, action):
        said = {"role": "assistant", "content": action.text}
        self.messages = [*self.messages, said, {"role": "user", "content": "and?"}]
        turn = len(self.messages) // 2
        if self.fault == "leak":
            KEPT.append(bytearray(100 << 20))
        elif turn == 2 and self.fault:
            return FAULTS[self.fault]()
        assert bytearray(80 << 20)
        facts = {"torch": "torch" in sys.modules, "here": os.getpid()}
        return Transition(observation=Observation(messages=self.messages), terminated=turn == 3, info=facts)
'''
TASK = """
from agent_r1 import BaseTool
from agent_r1.types import TaskRow

WRONG = {"train": {1: "die", 4: "hang", 7: "raise", 9: "lie"}, "test": {2: "die"}}

def row(split, index, fault):
    prompt = [{"role": "user", "content": f"{split} {index}"}]
    return TaskRow(prompt=prompt, row_id=f"{split}-{index}", extra_info={"fault": fault})

def rows(split, count=12):
    return [row(split, index, WRONG[split].get(index)) for index in range(count)]

def leaky_rows(split, count=4):
    return [row(split, index, "leak" if (split, index) == ("train", 1) else None) for index in range(count)]

def demos(count, seed):
    return [(row("train", index, None), ["hm"] * 3) for index in range(count)]

def reward(row, trajectory):
    return 1.0

class Heavy(BaseTool):
    name = "heavy"
    description = "Heavy."
    parameters = {"type": "object", "properties": {}}

    async def execute(self, args, **context):
        return ""
"""
BASE = """
task: {rows: task.rows, env: env.Talk, reward: task.reward, workers: {processes: 2, step_seconds: 2.5}}
model: {make: tests.mini.task.make_model, device: cpu}
sft: {demos: task.demos, count: 8, epochs: 60, batch_size: 8, lr: 1.0e-2, target_loss: 0.01}
rollout: {rows_per_step: 4, group_size: 2, max_steps: 3, max_response_tokens: 40, max_context_tokens: 256,
  temperature: 0.2, max_error_fraction: 1.0}
trainer: {steps: 3, eval_every: 3, save_every: 3, threads: 1}
engine: {threads: 1, max_cached_tokens: 16384}
eval: {rows: 4}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe outside any package; worker processes must be able to import it."""
    made = tmp_path_factory.mktemp("recipe")
    for name, text in (("env.py", ENV), ("task.py", TASK), ("base.yaml", BASE)):
        (made / name).write_text(text, encoding="utf-8")
    return made


def config(folder: Path, *overrides: str) -> RunConfig:
    return load_config(str(folder), overrides)


def env_processes() -> list[int]:
    """Children of ours that host envs. Not from /proc/PID/task/*/children, which not every kernel has."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"agent_r1.envs.processes" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except (OSError, ValueError, IndexError):
            continue
    return found


@pytest.mark.usefixtures("cache")
def test_a_run_survives_environments_that_crash_and_hang(folder: Path, tmp_path: Path) -> None:
    settings = config(folder)
    run = RunDir.create(tmp_path / "run", settings)
    console = Console(file=io.StringIO())
    run_training(settings, build_plan(settings), run, console, resume=False)

    played = list(read_trajectories(run.path / "trajectories", "train_*"))
    assert Counter(trajectory.row_id for trajectory in played) == {f"train-{index}": 2 for index in range(12)}
    expected = {
        "train-1": "EnvCrashed: the process of the env was ended by signal 9 (Killed) during step",
        "train-4": "EnvHung: step took longer than 2.5 s (task.workers.step_seconds), and its process was killed",
        "train-7": "KeyError: 'no such key' (env.py:10)",  # of the file above; the line came from the env's process
        "train-9": "TypeError: Talk.step returned str 'not a transition' instead of Transition",
    }
    for trajectory in played:
        assert trajectory.error == expected.get(trajectory.row_id)
        # Two answers sampled, one of them answered; or all three. Neighbours of what died were played again.
        assert [len(step.info) for step in trajectory.steps] == ([2, 0] if trajectory.error else [2, 2, 2])
    facts = [step.info for trajectory in played for step in trajectory.steps if step.info]
    assert not any(fact["torch"] for fact in facts)
    assert os.getpid() not in {fact["here"] for fact in facts}

    records = run.read_metrics()
    train = [record for record in records if record["kind"] == "train"]
    # 8 episodes a step; 4 of 12 rows go wrong, twice each
    assert [8 * record["stop/error"] for record in train] == [
        sum(t.stop.is_failure for t in read_trajectories(run.path / "trajectories", f"train_{record['step']:06d}*"))
        for record in train
    ]
    assert sum(8 * record["stop/error"] for record in train) == 8
    assert sum(8 * record["stop/answered"] for record in train) == 16
    evaluated = [record for record in records if record["kind"] == "eval"]
    assert [record["stop/error"] for record in evaluated] == [0.25, 0.25]
    assert [record["success"] for record in evaluated] == [0.75, 0.75]
    assert env_processes() == []


@pytest.mark.usefixtures("cache")
def test_a_leak_fails_only_the_episodes_that_leak(folder: Path, tmp_path: Path) -> None:
    settings = config(folder, "task.rows=task.leaky_rows", "task.workers.memory_mb=128", "trainer.steps=1")
    run = RunDir.create(tmp_path / "run", settings)
    run_training(settings, build_plan(settings), run, Console(file=io.StringIO()), resume=False)

    played = list(read_trajectories(run.path / "trajectories", "train_*"))
    assert Counter(trajectory.row_id for trajectory in played) == {f"train-{index}": 2 for index in range(4)}
    for trajectory in played:
        if trajectory.row_id == "train-1":  # 3 times 100 MiB are more than 256
            assert trajectory.error is not None
            assert trajectory.error.startswith("EnvOutOfMemory")
            assert "256 MiB, twice task.workers.memory_mb=128" in trajectory.error
        else:
            assert (trajectory.error, len(trajectory.steps)) == (None, 3)
    [train] = [record for record in run.read_metrics() if record["kind"] == "train"]
    assert (train["stop/error"], train["stop/answered"]) == (0.25, 0.75)  # 2 and 6 of 8
    assert env_processes() == []


def test_what_env_processes_print_is_in_the_log_of_the_run(tmp_path: Path) -> None:
    pool = EnvPool(processes=1, step_seconds=60)
    try:
        with logging_to(tmp_path / "log"):
            asyncio.run(play(pool.env(Counting, "counting", {}), ["print", "1"]))
    finally:
        pool.close()
    assert "a line from an env" in (tmp_path / "log").read_text(encoding="utf-8")


# What is wrong is found before the run


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.workers.processes=0"], "task.workers.processes=0: input should be greater than or equal to 1"),
        (["task.workers.seconds=3"], "task.workers has no field 'seconds'. Did you mean 'step_seconds'"),
        (["task.workers={step_seconds: 3}", "task.workers.processes=null"], "task.workers.processes"),
        (["task.flow=single_step"], "task.workers has no effect with task.flow=single_step"),
    ],
)
def test_invalid_worker_settings_are_refused(folder: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build_task(config(folder, *overrides))
    assert message in str(refused.value)


def test_envs_are_checked_before_there_is_a_process(folder: Path) -> None:
    with pytest.raises(ConfigError, match="does not accept these env_kwargs.*rude"):  # noqa: RUF043
        build_plan(config(folder, "task.env_kwargs={rude: true}"))
    with pytest.raises(ConfigError, match="tool 'heavy' is an object that all episodes share"):
        build_plan(config(folder, "task.env=tool", "task.tools=[task.Heavy]"))
    build_plan(config(folder))
    assert env_processes() == []


def test_the_log_bounds_output_of_env_processes_but_keeps_all_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_r1.runs.run_log.MAX_CHARS", 200)
    with logging_to(tmp_path / "log"):
        logger = logging.getLogger("agent_r1.envs.processes.process")
        for number in range(20):
            logger.info("printed by env process %d: %s", 1, f"line {number} of very many")
        logger.warning("an env process died")
        logging.getLogger("agent_r1.run").warning("more")
    lines = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == [
        "line 0 of very many",
        "line 1 of very many",
        "it has 200 characters.",
        "an env process died",
        "more",
    ]
