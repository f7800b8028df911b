"""A recipe whose tools are those of an MCP server, listed in YAML."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from agent_r1.build.plan import build_plan
from agent_r1.build.task import build_task
from agent_r1.cli.commands.train import run_training
from agent_r1.config import load_config
from agent_r1.errors import ConfigError
from agent_r1.runs.run_dir import RunDir
from agent_r1.runs.trajectories import read_trajectories

pytest.importorskip("mcp", reason="pip install 'agent-r1[mcp]'")

SERVER = Path(__file__).parents[1] / "tools" / "mcp_server.py"
TASK = '''
from pathlib import Path

from agent_r1 import MCPTools, tool
from agent_r1.types import TaskRow

def rows(split, count=20):
    return [TaskRow(prompt=[{"role": "user", "content": f"{split} {i}"}], row_id=f"{split}-{i}") for i in range(count)]

def demos(count, seed):
    call = '<tool_call>{"name": "inc", "arguments": {"a": 20}}</tool_call>'
    return [(row, [call, "ok"]) for row in rows("train", count)]

def reward(row, trajectory):
    return float(any(call.result == "21" for step in trajectory.steps for call in step.calls))

shelf = MCPTools(command=["python", str(Path(__file__).with_name("mcp_server.py"))], only=["add"])

@tool
def add(a: int) -> str:
    """Add one."""
    return str(a + 1)
'''
BASE = """
task:
  rows: task.rows
  reward: task.reward
  tools:
  - mcp: {command: [python, mcp_server.py], only: [inc]}
model: {make: tests.mini.task.make_model, device: cpu}
sft: {demos: task.demos, count: 8, epochs: 150, batch_size: 8, lr: 1.0e-2, target_loss: 0.01}
rollout: {rows_per_step: 4, group_size: 2, max_steps: 3, max_response_tokens: 80, max_context_tokens: 512,
  temperature: 0.05, max_error_fraction: 0, max_concurrent: 1}  # no other call is on its way when the server dies
trainer: {steps: 2, eval_every: 2, save_every: 2, threads: 1}
engine: {threads: 1, max_cached_tokens: 16384}
eval: {rows: 2}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "recipe"
    made.mkdir()
    for name, text in (("task.py", TASK), ("base.yaml", BASE), ("mcp_server.py", SERVER.read_text(encoding="utf-8"))):
        (made / name).write_text(text, encoding="utf-8")
    return made


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_a_run_trains_with_the_tools_of_a_server_that_dies_again_and_again(folder: Path, tmp_path: Path) -> None:
    settings = load_config(str(folder))
    run = RunDir.create(tmp_path / "run", settings)
    run_training(settings, build_plan(settings), run, Console(file=io.StringIO()), resume=False)

    played = list(read_trajectories(run.path / "trajectories", "train_*"))
    assert len(played) == 16
    assert {trajectory.error for trajectory in played} == {None}  # no episode failed
    calls = [call for trajectory in played for step in trajectory.steps for call in step.calls]
    results = [call.result for call in calls if call.arguments == {"a": 20}]
    died = sum("closed" in result for result in results)
    assert died >= 3
    assert results.count("21") >= 2 * died - 2  # every third call, also in the demonstrations before


def test_the_config_of_a_run_names_variables_and_not_their_values(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHELF_SECRET", "hunter2")
    entry = "task.tools=[{mcp: {command: [python, mcp_server.py], env: {SHELF_KEY: $SHELF_SECRET}, only: [secret]}}]"
    config = load_config(str(folder), [entry])
    assert build_task(config).calls_tools
    run = RunDir.create(tmp_path / "run", config)
    assert "hunter2" not in (run.path / "config.json").read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match="SHELF_SECRET"):
        load_config(str(folder), [entry.replace("$SHELF_SECRET", "'${oc.env:SHELF_SECRET}'")])


@pytest.mark.parametrize(
    ("tools", "named"),
    [
        ([{"mcp": {"comand": ["python"]}}], "'comand'"),
        ([{"mpc": {"command": ["python"]}}], "mpc"),
        ([{"mcp": {}}], "command"),
        (["task.add", "task.shelf"], "'add'"),
        ([{"mcp": {"command": ["python", "mcp_server.py", "fail"]}}], "no shelf at /mnt/shelf"),
    ],
)
def test_mistakes_in_a_list_of_tools_are_named(folder: Path, tools: object, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build_task(load_config(str(folder), [f"task.tools={json.dumps(tools)}"]))
