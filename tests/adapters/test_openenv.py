"""A real OpenEnv server. The package is large and has pins of its own, so `.ci/adapters` runs these tests."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_r1 import replay
from agent_r1.adapters.openenv_env import OpenEnvEnv, reward, rows
from agent_r1.errors import ConfigError
from agent_r1.types import StopReason, Trajectory
from tests.adapters.training import train_two_steps
from tests.tools.small_search import free_port

pytest.importorskip("openenv.core", reason="pip install openenv-core, in an environment of its own")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen([sys.executable, Path(__file__).with_name("openenv_server.py"), str(port)])
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                httpx.get(f"{address}/health", timeout=1)
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield address
    finally:
        process.kill()
        process.wait()


def play(url: str, texts: list[str], **settings: Any) -> Trajectory:
    given = {"action": "text", "observation": "hint", **settings}
    return asyncio.run(replay(OpenEnvEnv, rows("train", 1)[0], texts, url=url, **given))


def test_an_episode_is_a_session_with_the_server(url: str) -> None:
    numbers = [str(number) for number in range(1, 10)]
    played = play(url, ["no idea"])
    assert (played.opening[-1]["content"], played.steps[0].feedback) == ("Guess my number.", "No.")
    right = [number for number in numbers if play(url, [number]).stop is StopReason.ANSWERED]
    assert len(right) == 1  # the seed of the row decides
    assert reward(rows("train", 1)[0], play(url, ["0", *right]))["reward"] == 1.0
    assert [step.reward for step in play(url, ["0", *right], step_rewards=True).steps] == [0.0, 1.0]


def test_settings_say_how_texts_become_actions_and_observations_texts(url: str) -> None:
    shown = play(url, ["0"], observation=None, rules="Play.")
    assert shown.opening[-1]["content"].startswith('Play.\n\n{"hint": "Guess my number."')
    assert play(url, ["1"], reset={"highest": 1}).stop is StopReason.ANSWERED
    made = play(url, ["anything"], reset={"highest": 1}, action=f"{__name__}:always_one")
    assert made.stop is StopReason.ANSWERED
    with pytest.raises(KeyError, match="hint"):
        play(url, ["0"], observation="hnt")
    with pytest.raises(ConfigError, match="nowhere:fn"):
        play(url, ["0"], action="nowhere:fn")


def always_one(said: str) -> dict[str, str]:
    return {"text": "1"}


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1"):
        play(f"http://127.0.0.1:{free_port()}", ["1"])


def test_two_steps_of_training(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = f"""
task:
  rows: openenv
  env: openenv
  reward: openenv
  env_kwargs: {{url: "{url}", action: text, observation: hint}}
"""
    assert len(train_two_steps(task, tmp_path, monkeypatch)) == 8
