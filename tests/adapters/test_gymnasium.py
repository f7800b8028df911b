"""Gymnasium's own environments, played and trained as text."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent_r1 import check_env, replay
from agent_r1.adapters.gymnasium_env import GymnasiumEnv, reward, rows
from agent_r1.adapters.gymnasium_text import WORDS, read_action
from agent_r1.errors import ConfigError
from agent_r1.types import StopReason, Trajectory
from tests.adapters.training import train_two_steps

gymnasium: Any = pytest.importorskip("gymnasium", reason="pip install 'agent-r1[gym]'")

LAKE: dict[str, Any] = {"id": "FrozenLake-v1", "make": {"is_slippery": False}}
TO_THE_GOAL = ["down", "down", "right", "right", "down", "right"]


class Echo(gymnasium.Env):  # type: ignore[misc]
    """Pays for the word that it shows."""

    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Text(100)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.word = int(self.np_random.integers(2))
        return self.word, {}

    def step(self, action: str) -> tuple[int, float, bool, bool, dict[str, Any]]:
        return self.word, float(action == show(self, self.word, {})), True, False, {}


def show(env: Any, observation: int, info: dict[str, Any]) -> str:
    return ["salt", "pepper"][observation]


gymnasium.register("Echo-v0", entry_point=Echo)


def play(texts: list[str], *, seed: int = 0, **settings: Any) -> Trajectory:
    row = rows("train", 1, first_seed=seed)[0]
    return asyncio.run(replay(GymnasiumEnv, row, texts, **settings))


def test_a_walk_to_the_goal_of_the_frozen_lake_earns_its_reward() -> None:
    played = play(TO_THE_GOAL, **LAKE)
    opening = played.opening[-1]["content"]
    assert opening.endswith("PFFF\nFHFH\nFFFH\nHFFG")
    assert "left, down, right, up" in opening
    assert played.steps[0].feedback == "SFFF\nPHFH\nFFFH\nHFFG"
    assert (played.stop, reward(rows("train", 1)[0], played)["reward"]) == (StopReason.ANSWERED, 1.0)


def test_rewards_can_be_paid_where_they_are_earned() -> None:
    played = play(TO_THE_GOAL, step_rewards=True, **LAKE)
    assert [step.reward for step in played.steps] == [0, 0, 0, 0, 0, 1]
    assert reward(rows("train", 1)[0], played) == {"reward": 0.0, "return": 1.0, "invalid_actions": 0.0}


def test_an_action_that_cannot_be_understood_gets_feedback_and_does_not_move() -> None:
    played = play(["fly", "left or right", "I go DOWN!", "up"], **LAKE)
    assert ["left, down, right, up" in step.feedback for step in played.steps] == [True, True, False, False]
    assert [step.info["invalid"] for step in played.steps] == [True, True, False, False]
    given_up = play(["fly"] * 3, **LAKE)
    assert given_up.stop is StopReason.PARSE_LIMIT


def test_a_time_limit_of_the_environment_truncates_the_episode() -> None:
    played = play(["left", "left"], id="FrozenLake-v1", make={"is_slippery": False, "max_episode_steps": 2})
    assert played.stop is StopReason.MAX_STEPS


def test_the_seed_of_a_row_fixes_its_start() -> None:
    starts = [play(["north"], seed=seed, id="Taxi-v4").opening[-1]["content"] for seed in (1, 1, 2)]
    assert starts[0] == starts[1] != starts[2]
    assert "The passenger is at" in starts[0]
    train, test = rows("train", 3), rows("test", 3)
    assert not {row.env_kwargs["seed"] for row in train} & {row.env_kwargs["seed"] for row in test}


def test_blackjack_is_told_in_words() -> None:
    played = play(["stick"], id="Blackjack-v1")
    assert "The dealer shows" in played.opening[-1]["content"]
    assert played.steps[0].info["reward"] in (-1, 0, 1)


def test_an_environment_of_ones_own_has_text_actions_and_a_renderer() -> None:
    played = [
        play([word], seed=7, id="Echo-v0", render=f"{__name__}:show", rules="Repeat it.") for word in ("salt", "pepper")
    ]
    assert sorted(reward(rows("train", 1)[0], each)["reward"] for each in played) == [0.0, 1.0]
    assert played[0].opening[-1]["content"] in ("Repeat it.\n\nsalt", "Repeat it.\n\npepper")


@pytest.mark.parametrize("name", list(WORDS))
def test_the_environments_obey_the_contract(name: str) -> None:
    latest = max(key for key in gymnasium.registry if key.startswith(f"{name}-v"))
    actions = [*WORDS[name].actions, "what?", WORDS[name].actions[0]]
    asyncio.run(check_env(lambda: GymnasiumEnv(id=latest, seed=3), rows("train", 1)[0], actions))


@pytest.mark.parametrize(
    ("said", "action"),
    [
        ("left", 0),
        ("I think.\n**Right**", 1),
        ("<action>left</action>", 0),
        ("leftover", None),
        ("", None),
        ("left, no: right", None),
    ],
)
def test_an_action_is_read_from_the_last_line(said: str, action: int | None) -> None:
    assert read_action(said, ["left", "right"]) == action


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"id": "FrozenLak-v1"}, "FrozenLak"),
        ({"id": "Pendulum-v1"}, "discrete"),
        ({**LAKE, "actions": ["a", "b"]}, "actions"),
        ({**LAKE, "render": "nowhere:fn"}, "nowhere:fn"),
        ({**LAKE, "make": {"size": 3}}, "size"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        GymnasiumEnv(seed=0, **settings)


def test_two_steps_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = """
task:
  rows: gymnasium
  env: gymnasium
  reward: gymnasium
  env_kwargs: {id: FrozenLake-v1, make: {is_slippery: false}, max_invalid: 2}
"""
    played = train_two_steps(task, tmp_path, monkeypatch)
    assert {trajectory.stop for trajectory in played} <= {StopReason.PARSE_LIMIT, StopReason.MAX_TOKENS}
