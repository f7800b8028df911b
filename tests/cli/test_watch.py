"""An env that blocks the event loop is named; nothing else that takes long is."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from agent_r1.cli.signals import warn_of_blocking
from agent_r1.envs.base import AgentEnv, reset_env, step_env
from agent_r1.envs.text_env import Reply, TextEnv
from agent_r1.guard import guarded
from agent_r1.types import Action, Observation, TaskRow, Transition
from tests.envs.worker_envs import row

SECONDS = 0.2
ACTION = Action(text="wait", token_ids=[1])


class Blocks(AgentEnv):
    async def reset(self, row: TaskRow) -> Observation:
        await asyncio.sleep(3 * SECONDS)  # which holds up nobody
        return Observation(text="go")

    async def step(self, action: Action) -> Transition:
        rest()
        return Transition(terminated=True)


class BlocksInReply(TextEnv):
    def begin(self, row: TaskRow) -> str:
        return "go"

    def reply(self, said: str) -> Reply:
        rest()
        return Reply(text="done", done=True)


def rest() -> None:
    time.sleep(5 * SECONDS)


def told(work: Coroutine[Any, Any, Any]) -> list[str]:
    lines: list[str] = []
    asyncio.run(warn_of_blocking(guarded(work, seconds=60.0), lines.append, SECONDS))
    return lines


async def one_episode(env: AgentEnv) -> None:
    await reset_env(env, row())
    await step_env(env, ACTION)


@pytest.mark.parametrize("env", [Blocks(), BlocksInReply()])
def test_an_env_that_blocks_is_named_once_with_its_line(env: AgentEnv) -> None:
    (line,) = told(one_episode(env))
    assert re.match(r"test_watch\.py:\d+ \(rest\) ", line)
    assert "task.workers.processes=4" in line


def test_what_waits_without_blocking_and_what_blocks_without_an_episode_is_not_told() -> None:
    async def learns() -> None:
        rest()

    lines: list[str] = []
    asyncio.run(warn_of_blocking(learns(), lines.append, SECONDS))
    assert told(reset_env(Blocks(), row())) == lines == []
