"""`agent-r1 check`: what it says about sound tasks and about broken ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_cli import recipe
from tests.conftest import Cli

RIGHT = """
def right(row, trajectory):
    return float(trajectory.final_text == f"it is {row.ground_truth}")

def never(row, trajectory):
    return 0.0

def always(row, trajectory):
    return 1.0

def talk(row, trajectory):
    return float(trajectory.final_text != "")

def breaks(row, trajectory):
    raise KeyError("gold")

def unknown_tool(count, seed):
    row, texts = demos(1, 0)[0]
    return [(row, [texts[0].replace("double", "triple"), texts[1]])]

def endless(count, seed):
    return [(row, texts[:1]) for row, texts in demos(count, seed)]
"""

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return recipe(tmp_path / "task", RIGHT)


def line_of(out: str, label: str) -> list[str]:
    return next(line.split() for line in out.splitlines() if line.strip().startswith(label))


@pytest.mark.parametrize("name", ["gsm8k_tool/tiny", "alfworld/tiny"])
def test_a_sound_task_has_no_problems(cli: Cli, name: str) -> None:
    ended = cli("check", name, "--rows", "6")
    assert (ended.code, ended.err) == (0, "")
    assert line_of(ended.out, "success") == ["success", "100%", "0%", "0%"]
    assert "no problems found" in ended.out
    assert "rollout.max_context_tokens" in ended.out


def test_the_random_agent_writes_calls_that_the_tools_accept(cli: Cli, task: Path) -> None:
    ended = cli("check", task, "task.reward=task.right", "--rows", "8")
    assert (ended.code, ended.err) == (0, "")
    demonstrated, silent, random = map(int, line_of(ended.out, "tool calls")[2:])
    assert (demonstrated, silent) == (8, 0)
    assert random > 0
    assert line_of(ended.out, "failed") == ["failed", "0", "0", "0"]
    assert line_of(ended.out, "malformed") == ["malformed", "0", "0", "0"]
    assert "tools are not shown" in ended.out  # by this model's chat template


@pytest.mark.parametrize(
    ("setting", "code", "said"),
    [
        ("task.reward=task.never", 1, "no demonstration earns task.success_reward=1"),
        ("task.reward=task.always", 1, "nothing to learn"),
        ("task.reward=task.talk", 0, "chance earns"),
        ("task.reward=task.breaks", 1, "gold"),
        ("sft.demos=task.unknown_tool", 1, "'triple'"),
        ("sft.demos=task.endless", 1, "demonstration 0"),
        ("rollout.max_response_tokens=20", 1, "max_response_tokens is 20"),
    ],
)
def test_what_is_wrong_is_named(cli: Cli, task: Path, setting: str, code: int, said: str) -> None:
    ended = cli("check", task, setting, "--rows", "6")
    assert (ended.code, ended.err) == (code, "")
    assert said in ended.out
