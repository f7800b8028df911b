"""The life of an agent: how it starts, what it is told, how it ends, and what is kept of it."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agent_r1 import guard
from agent_r1.errors import ConfigError
from agent_r1.runs.run_dir import RunDir
from agent_r1.runs.trajectories import write_groups
from agent_r1.serve.gateway.client import ClientSettings
from agent_r1.serve.gateway.command import CommandAgent, split_command
from agent_r1.serve.gateway.flow import agent_reward
from agent_r1.serve.view.detail import episode_page
from agent_r1.types import Group, StopReason, TaskRow, Trajectory
from tests.serve.gateway.agent_runs import ASK, chat, play, play_async
from tests.serve.small_runs import CONFIG

# A program with nothing but the standard library, as an agent in any language would be.
PROGRAM = """
import json, os, sys, urllib.request
def ask(text):
    body = {"model": os.environ["AGENT_R1_MODEL"], "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""


def program(body: str, *arguments: str, **settings: Any) -> CommandAgent:
    command = (sys.executable, "-c", PROGRAM + body, *arguments)
    escaped = tuple(part.replace("{", "{{").replace("}", "}}") if part is command[2] else part for part in command)
    return CommandAgent(command=escaped, recipe=Path.cwd(), **settings)


def result(trajectory: Trajectory) -> Any:
    return trajectory.steps[-1].info["agent_result"]


def test_a_program_plays_by_its_environment_variables() -> None:
    [trajectory] = play(program("print(ask('Who?'))"), ["one"])
    assert trajectory.stop is StopReason.ANSWERED, trajectory.error
    assert result(trajectory) == "one\n"
    assert trajectory.log == "one\n"


def test_a_program_gets_its_row_in_arguments_on_stdin_and_in_a_file() -> None:
    row = TaskRow(
        prompt=[{"role": "user", "content": "Who; rm -rf / $(x)?"}],
        row_id="r1",
        extra_info={"level": 3},
        reward_model={"ground_truth": "secret"},
    )
    body = (
        "row = json.load(open(os.environ['AGENT_R1_ROW'])); assert row == json.load(sys.stdin), row\n"
        "assert 'secret' not in repr(row) + repr(os.environ)\n"
        "ask(sys.argv[1]); print(sys.argv[1:], row['extra_info'], os.environ['MINE'])"
    )
    agent = program(
        body, "{prompt}", "{row_id}", "{extra_info.level}", "{{x}}", stdin="row", env={"MINE": "a {row_id}"}
    )
    [trajectory] = play(agent, ["one"], rows=[row])
    assert trajectory.stop is StopReason.ANSWERED, trajectory.error
    assert result(trajectory) == "['Who; rm -rf / $(x)?', 'r1', '3', '{x}'] {'level': 3} a r1\n"


def test_a_command_may_be_one_text_and_is_split_without_a_shell() -> None:
    assert split_command("python 'my agent.py' {prompt}; ls") == ("python", "my agent.py", "{prompt};", "ls")


@pytest.mark.parametrize("command", ["", "agent 'x", []], ids=["empty", "open quote", "no arguments"])
def test_a_command_that_is_none_is_refused(command: Any) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.command"):
        split_command(command)


def test_an_unknown_placeholder_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match="promt"):
        CommandAgent(command=("agent", "{promt}"), recipe=Path.cwd())


def test_a_row_without_a_named_field_fails_alone() -> None:
    agent = program("ask('?')", "{extra_info.level}")
    rows = [TaskRow(prompt=[ASK], row_id="a"), TaskRow(prompt=[ASK], row_id="b", extra_info={"level": 1})]
    without, with_it = play(agent, lambda call: "one", rows=rows)
    assert (without.stop, with_it.stop) == (StopReason.ERROR, StopReason.ANSWERED)
    assert without.failure is not None
    assert "extra_info.level" in without.failure.message


@pytest.mark.parametrize(
    ("file", "text", "wanted"),
    [
        ("reward.txt", "0.5\n", {"reward": 0.5}),
        ("reward.json", "0.25", {"reward": 0.25}),
        ("reward.json", '{"reward": 1, "style": 0.5}', {"reward": 1.0, "style": 0.5}),
    ],
)
def test_a_program_may_leave_its_reward_in_a_file(file: str, text: str, wanted: dict[str, float]) -> None:
    [trajectory] = play(program(f"ask('?'); open({file!r}, 'w').write({text!r})"), ["one"])
    assert agent_reward(TaskRow(prompt=[ASK]), trajectory) == wanted


@pytest.mark.parametrize("text", ["good", "nan", "[1]"])
def test_a_reward_file_that_cannot_be_read_is_a_failure_and_not_0(text: str) -> None:
    [trajectory] = play(program(f"ask('?'); open('reward.json', 'w').write({text!r})"), ["one"])
    assert trajectory.stop is StopReason.ERROR
    assert trajectory.failure is not None
    assert "reward.json" in trajectory.failure.message


def test_no_reward_at_all_is_an_error_and_not_0() -> None:
    [trajectory] = play(program("ask('?')"), ["one"])
    with pytest.raises(Exception, match="gave no reward"):
        agent_reward(TaskRow(prompt=[ASK]), trajectory)


@pytest.mark.parametrize(
    ("returned", "wanted"),
    [(0.5, {"reward": 0.5}), ({"reward": 1, "part": 2.0, "note": 0}, {"reward": 1.0, "part": 2.0, "note": 0.0})],
)
def test_a_function_may_return_its_reward(returned: Any, wanted: dict[str, float]) -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> Any:
        await chat(client, [ASK])
        return returned

    [trajectory] = play(agent, ["one"])
    assert agent_reward(TaskRow(prompt=[ASK]), trajectory) == wanted


def test_a_sync_function_runs_in_a_thread() -> None:
    def agent(row: TaskRow, client: ClientSettings) -> str:
        from openai import OpenAI

        with OpenAI(base_url=client.base_url, api_key=client.api_key) as api:
            asked: Any = [ASK]
            made = api.chat.completions.create(model="m", messages=asked)
        return str(made.choices[0].message.content)

    [trajectory] = play(agent, ["one"])
    assert result(trajectory) == "one"


def test_a_program_that_dies_is_a_typed_failure_with_what_it_wrote() -> None:
    [trajectory] = play(program("ask('?'); sys.exit('out of luck')"), ["one"])
    assert trajectory.stop is StopReason.ERROR
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "AgentFailed"
    assert "exit code 1" in trajectory.failure.message
    assert "out of luck" in trajectory.failure.message
    assert "out of luck" in trajectory.log
    assert len(trajectory.steps) == 1  # kept for people


def test_what_a_program_wrote_is_shown_with_its_episode(tmp_path: Path) -> None:
    [trajectory] = play(program("ask('?'); print('on my way')"), ["one"])
    run = RunDir.create(tmp_path / "run", CONFIG)
    group = Group(row=TaskRow(prompt=[ASK]), trajectories=[trajectory])
    write_groups(run.path / "trajectories" / "train_000001.jsonl", [group])
    page = episode_page(run, "train_000001", 0)
    assert page["log"]["text"] == "on my way\n"


def test_an_agent_that_never_calls_is_a_typed_failure() -> None:
    [trajectory] = play(program("print('no model needed')"), [])
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "AgentFailed"
    assert "OPENAI_BASE_URL" in trajectory.failure.message
    assert "no model needed" in trajectory.failure.message


def test_a_function_that_raises_is_blamed_with_its_line() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> None:
        await chat(client, [ASK])
        raise KeyError("oops")

    [trajectory] = play(agent, ["one"])
    assert trajectory.failure is not None
    assert (trajectory.failure.kind, trajectory.failure.source) == ("KeyError", "agent 'task.agent'")
    assert trajectory.failure.place.startswith("test_gateway_agents.py:")


def test_the_failure_of_an_agent_may_be_scored_instead() -> None:
    async def agent(row: TaskRow, client: ClientSettings) -> None:
        await chat(client, [ASK])
        raise KeyError("the model called a tool that is not there")

    [trajectory] = play(agent, ["one"], on_failure="score")
    assert trajectory.stop is StopReason.ANSWERED
    assert "KeyError" in trajectory.steps[-1].info["agent_failure"]


def test_a_program_that_does_not_exist_says_so() -> None:
    [trajectory] = play(CommandAgent(command=("/no/such/agent",), recipe=Path.cwd()), [])
    assert trajectory.failure is not None
    assert "/no/such/agent" in trajectory.failure.message


def test_a_program_and_its_children_are_killed_at_the_deadline(tmp_path: Path) -> None:
    child = "import time; time.sleep(60)"
    body = (
        f"import subprocess; child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "print('before', flush=True); ask('?'); child.wait()"
    )
    [trajectory] = play(program(body), ["one"], episode_seconds=1.5)
    assert trajectory.stop is StopReason.TIMEOUT
    assert trajectory.log == "before\n"
    for pid in (tmp_path / "pids").read_text().split():
        assert is_gone(int(pid))


def test_children_that_outlive_a_program_are_killed_and_do_not_delay_its_end(tmp_path: Path) -> None:
    child = "import time; time.sleep(60)"
    body = (
        f"import subprocess; child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); ask('?')"
    )
    [trajectory] = play(program(body), ["one"])
    assert trajectory.stop is StopReason.ANSWERED
    assert is_gone(int((tmp_path / "pid").read_text()))


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie that nobody reaps has, too."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_long_output_keeps_its_beginning_and_its_end() -> None:
    body = "ask('?'); print('first'); print('x' * 300_000); print('last', end='')"
    [trajectory] = play(program(body, output_chars=1000), ["one"])
    assert trajectory.log.startswith("first\nxxx")
    assert trajectory.log.endswith("xxx\nlast")
    assert len(trajectory.log) < 1100


def test_an_agent_works_in_a_folder_of_its_own_that_is_removed() -> None:
    [first, second] = play(program("ask('?'); print(os.getcwd(), end='')"), lambda call: "one", group_size=2)
    assert result(first) != result(second)
    assert not Path(result(first)).exists()


def test_keys_of_the_users_own_account_are_not_sent_along(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "OPENAI_ORG_ID"):
        monkeypatch.setenv(name, "private")
    monkeypatch.setenv("NO_PROXY", "intranet")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    [trajectory] = play(program("ask('?'); print([v for v in os.environ.values() if v == 'private'])"), ["one"])
    assert result(trajectory) == "[]\n"
    assert os.environ["OPENAI_API_KEY"] == "private"


def test_an_agent_that_outlives_its_episode_does_not_change_its_trajectory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "CANCEL_SECONDS", 0.05)
    is_over = asyncio.Event()

    async def stubborn(row: TaskRow, client: ClientSettings) -> str:
        await chat(client, [ASK])
        while not is_over.is_set():
            with suppress(asyncio.CancelledError):
                await is_over.wait()
        return "late"

    async def main() -> Trajectory:
        [trajectory] = await play_async(stubborn, ["a"], episode_seconds=1.0)  # its session is sealed at the end
        is_over.set()
        return trajectory

    trajectory = asyncio.run(main())
    assert trajectory.stop is StopReason.TIMEOUT
    assert [(step.action_text, step.info) for step in trajectory.steps] == [("a", {})]
