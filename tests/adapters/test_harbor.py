"""Harbor task folders, written as its documentation says. Its own package needs Python 3.12 and is not used."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent_r1 import replay
from agent_r1.adapters.harbor import HarborEnv, reward, rows
from agent_r1.adapters.harbor_box import Box, require_namespaces
from agent_r1.errors import ConfigError, DataError
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.types import Trajectory
from tests.adapters.training import train_two_steps

try:
    require_namespaces()
except ConfigError as error:
    pytest.skip(str(error), allow_module_level=True)

TOML = """
schema_version = "1.1"
[task]
name = "tests/hello"
[verifier]
timeout_sec = 20.0
env = { WANTED = "Hello, ${GREETED:-world}!" }
[environment]
allow_internet = false
"""
TEST = """#!/bin/bash
if [ "$(cat hello.txt)" = "$WANTED" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def write_task(folder: Path, *, toml: str = TOML, test: str = TEST, **files: str) -> Path:
    contents = {
        "task.toml": toml,
        "instruction.md": "<!-- canary 123 -->\nWrite `Hello, world!` to hello.txt.\n",
        "tests/test.sh": test,
        "environment/given.txt": "from the task",
        **{name.replace("__", "/"): text for name, text in files.items()},
    }
    for name, text in contents.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder


def play(tasks: Path, *commands: str, **settings: Any) -> Trajectory:
    calls = [FORMATS["hermes"].write_call("bash", {"command": command}) for command in commands]
    (row,) = rows("train", 1, path=str(tasks), held_out=0)
    return asyncio.run(replay(HarborEnv, row, [*calls, "done"], **settings))


def scored(tasks: Path, *commands: str, **settings: Any) -> dict[str, float]:
    (row,) = rows("train", 1, path=str(tasks), held_out=0)
    return reward(row, play(tasks, *commands, **settings))


def test_the_tests_of_a_task_decide_about_the_reward(tmp_path: Path) -> None:
    write_task(tmp_path / "hello")
    (row,) = rows("train", path=str(tmp_path), held_out=0)
    assert (row.row_id, row.prompt[0]["content"]) == ("hello", "Write `Hello, world!` to hello.txt.")
    assert scored(tmp_path, "echo 'Hello, world!' > hello.txt") == {"reward": 1.0}
    assert scored(tmp_path, "echo bye > hello.txt") == {"reward": 0.0}


def test_commands_keep_files_and_show_output_and_exit_code(tmp_path: Path) -> None:
    write_task(tmp_path / "hello")
    played = play(tmp_path, "pwd; cat given.txt", "echo x > a; (exit 3)", "cat a", "sleep 30", command_seconds=1.0)
    results = [call.result for step in played.steps for call in step.calls]
    assert results == ["/app\nfrom the task", "[exit code 3]", "x\n", "[killed after 1 s]"]


def test_several_scores_come_from_a_json_file(tmp_path: Path) -> None:
    write_task(tmp_path / "hello", test='echo \'{"reward": 0.5, "style": 1}\' > /logs/verifier/reward.json\nexit 1\n')
    assert scored(tmp_path) == {"reward": 0.5, "style": 1.0}


def test_the_model_can_neither_write_its_reward_nor_the_tests(tmp_path: Path) -> None:
    write_task(tmp_path / "hello")
    commands = [
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; ls /tests",
        "rm -rf /logs/verifier; ln -s /app /logs/verifier; echo 1 > /app/reward.txt",
    ]
    assert scored(tmp_path, *commands) == {"reward": 0.0}
    assert "test.sh" not in str([step.calls for step in play(tmp_path, *commands).steps])


def test_commands_reach_neither_files_of_the_user_nor_the_network(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret", encoding="utf-8")
    box = Box(workdir="/app", network=False, memory_mb=1000)
    try:
        attempts = f"cat {secret}; ls /.host; touch /usr/x /etc/x; cat /proc/net/route; ls {Path.home()}"
        outcome = asyncio.run(box.run("bash", "-c", attempts, seconds=20))
    finally:
        box.close()
    assert "secret\n" not in outcome.output
    assert outcome.output.count("Read-only file system") == 2
    assert "eth0" not in outcome.output


def test_tests_that_write_no_reward_fail_the_episode(tmp_path: Path) -> None:
    write_task(tmp_path / "hello", test="echo broken; exit 2\n")
    with pytest.raises(RuntimeError, match=r"'hello'(.|\n)*code 2(.|\n)*broken"):
        play(tmp_path)


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"environment__Dockerfile": "FROM python"}, "Dockerfile"),
        ({"toml": '[environment]\ndocker_image = "python:3"\n'}, "python:3"),
        ({"toml": '[verifier]\nenvironment_mode = "separate"\n'}, "environment_mode"),
        ({"environment__docker-compose.yaml": "services: {}"}, "docker-compose"),
        ({"steps__one__instruction.md": "x"}, "steps"),
        ({"toml": '[environment.env]\nKEY = "${NO_SUCH_VARIABLE}"\n'}, "NO_SUCH_VARIABLE"),
    ],
)
def test_what_a_task_needs_and_we_do_not_have_is_refused(tmp_path: Path, files: dict[str, str], named: str) -> None:
    write_task(tmp_path / "hello", **files)
    with pytest.raises(ConfigError, match=named):
        play(tmp_path)


@pytest.mark.parametrize("workdir", ["/app/../../../../../outside", "/usr/share/outside", "outside", "/", "/proc/x"])
def test_a_working_directory_outside_of_the_task_is_refused(tmp_path: Path, workdir: str) -> None:
    write_task(tmp_path / "hello", toml=f'[environment]\nworkdir = "{workdir}"\n')
    with pytest.raises(ConfigError, match="workdir"):
        play(tmp_path)


def test_a_working_directory_of_the_task_may_have_any_other_name(tmp_path: Path) -> None:
    write_task(tmp_path / "hello", toml='[environment]\nworkdir = "/testbed/src"\n')
    assert play(tmp_path, "pwd; ls").steps[0].calls[0].result == "/testbed/src\ngiven.txt\n"


def test_links_in_a_task_lead_to_no_files_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("hunter2", encoding="utf-8")
    write_task(tmp_path / "hello")
    (tmp_path / "hello" / "environment" / "link.txt").symlink_to(tmp_path / "secret.txt")
    call = play(tmp_path / "hello", "cat link.txt; cat given.txt").steps[0].calls[0]
    assert "hunter2" not in call.result
    assert "No such file" in call.result


def test_an_image_can_be_ignored(tmp_path: Path) -> None:
    write_task(tmp_path / "hello", environment__Dockerfile="FROM python")
    played = play(tmp_path, "ls", ignore_image=True)
    assert played.steps[0].calls[0].result == "given.txt\n"


def test_a_folder_without_tasks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"task\.toml"):
        rows("train", path=str(tmp_path))


def test_two_steps_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        write_task(tmp_path / "tasks" / ("train" if number < 2 else "test") / f"hello-{number}")
    task = f"""
task: {{rows: harbor, env: harbor, reward: harbor}}
data: {{path: "{tmp_path / "tasks"}"}}
"""
    assert len(train_two_steps(task, tmp_path, monkeypatch)) == 8
