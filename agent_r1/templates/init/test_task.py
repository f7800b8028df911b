"""Tests of the task: run them with `pytest {task}` after every change."""

from __future__ import annotations

import asyncio

import pytest
from task import demonstrate, price, reward, rows, total

from agent_r1 import TaskRow, ToolEnv, check_env, check_tool, replay


def play(row: TaskRow, texts: list[str]) -> float:
    trajectory = asyncio.run(replay(ToolEnv, row, texts, tools=[price, total]))
    return reward(row, trajectory)


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_complete_demonstration_earns_the_reward(split: str) -> None:
    for row in rows(split, 50):
        assert play(row, demonstrate(row)) == 1


def test_a_hasty_demonstration_earns_nothing_if_two_items_were_ordered() -> None:
    two_items = [row for row in rows("train", 50) if " and " in row.prompt[0]["content"]]
    assert all(play(row, demonstrate(row, hurry=True)) == 0 for row in two_items)


def test_neither_silence_nor_text_around_the_number_earns_the_reward() -> None:
    row = rows("test", 1)[0]
    assert play(row, [""]) == 0
    assert play(row, [f"about {row.ground_truth}"]) == 0


def test_the_tools_keep_their_contract() -> None:
    asyncio.run(check_tool(price, {"item": "Red Mug"}, {"prices": {"Red Mug": 12}}, deterministic=True))
    asyncio.run(check_tool(total, {"prices": [12, 30]}, deterministic=True))


def test_an_episode_is_deterministic_and_never_shows_the_answer() -> None:
    row = rows("train", 1)[0]
    asyncio.run(check_env(lambda: ToolEnv(tools=[price, total], **row.env_kwargs), row, demonstrate(row)))
