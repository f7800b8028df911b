"""The recipe `alfworld`: the engine against recorded plays of the official one, the environment, the reward.

`alfworld_golden.json` has plays of the official engine: of a room full of oddities, and of smaller ones for what wins
and what does not. `test_alfworld_official.py` plays them there again where that engine is installed.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.config import load_config
from agent_r1.envs.base import make_env
from agent_r1.envs.check import check_env
from agent_r1.errors import ConfigError, DataError
from agent_r1.recipes.alfworld import data, synthetic, task
from agent_r1.recipes.alfworld.engine import NOTHING_HAPPENS, World
from agent_r1.recipes.alfworld.env import AlfWorld
from agent_r1.recipes.alfworld.game import read_game
from agent_r1.types import Action, Observation, Step, StopReason, Trajectory

GOLDEN = json.loads(Path(__file__).with_name("alfworld_golden.json").read_text(encoding="utf-8"))
ENTRIES = synthetic.entries("train")


# The engine


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden["task"].removeprefix("Your task is to: "))
def test_the_engine_matches_plays_of_the_official_engine(golden: dict[str, Any]) -> None:
    world = World(read_game(golden["problem"], golden["task"]))
    assert [world.intro, world.admissible(), world.won] == golden["said"][0]
    for command, said in zip(golden["commands"], golden["said"][1:], strict=True):
        assert [world.step(command), world.admissible(), world.won] == said, command


@given(st.sampled_from(ENTRIES), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_exactly_the_admissible_commands_have_an_effect(entry: data.Entry, seed: int) -> None:
    rng, world = random.Random(seed), World(synthetic.synthetic_game(entry.name))
    known = {"", "look", "go to desk 1", "take mug 1 from desk 1", "open fridge 1", "heat cup 1 with microwave 1"}
    for _ in range(20):
        commands = world.admissible()
        assert commands == sorted(set(commands))
        before = (world.scene(), world.won)
        for refused in known - set(commands):
            assert world.step(refused) == NOTHING_HAPPENS
        assert (world.scene(), world.won) == before
        assert world.admissible() == commands
        command = rng.choice(commands)
        known.add(command)
        assert world.step(command) != NOTHING_HAPPENS
        if command.split()[0] in ("look", "inventory", "help", "examine"):
            assert (world.scene(), world.admissible()) == (before[0], commands)


@pytest.mark.parametrize("entry", ENTRIES[:60], ids=lambda entry: entry.name)
def test_a_walkthrough_wins_with_its_last_step(entry: data.Entry) -> None:
    world = World(synthetic.synthetic_game(entry.name))
    won = [(world.step(command) != NOTHING_HAPPENS, world.won) for command in entry.walkthrough]
    assert won == [(True, False)] * (len(won) - 1) + [(True, True)]


def kitchen_world(kind: str, places: dict[str, str], *facts: synthetic.Fact) -> World:
    """To bring mugs to the desk; `facts` come on top of the room's."""
    goal = synthetic.GOALS[kind].format(thing="Mug", place="Desk")
    return World(read_game(synthetic.write_problem([*synthetic.kitchen(places), *facts], goal), ""))


def say(world: World, *commands: str) -> World:
    for command in commands:
        assert world.step(command) != NOTHING_HAPPENS, command
    return world


MUG_IN_HAND = ("go to countertop 1", "take mug 1 from countertop 1")
HEATED = ("go to microwave 1", "heat mug 1 with microwave 1")
COOLED = ("go to fridge 1", "cool mug 1 with fridge 1")
CLEANED = ("go to sinkbasin 1", "clean mug 1 with sinkbasin 1")
DELIVERED = ("go to desk 1", "move mug 1 to desk 1")


@pytest.mark.parametrize(
    ("kind", "treated", "won"),
    [
        ("pick_heat_then_place_in_recep", (), False),
        ("pick_heat_then_place_in_recep", COOLED + HEATED, True),
        ("pick_heat_then_place_in_recep", HEATED + COOLED, False),
        ("pick_cool_then_place_in_recep", HEATED + COOLED, True),
        ("pick_cool_then_place_in_recep", COOLED + HEATED, False),
        ("pick_clean_then_place_in_recep", CLEANED + HEATED, True),
    ],
)
def test_the_final_state_of_an_object_decides(kind: str, treated: tuple[str, ...], won: bool) -> None:
    world = kitchen_world(kind, {"Mug_bar_1": "CounterTop"})
    assert say(world, *MUG_IN_HAND, *treated, *DELIVERED).won == won


def test_two_things_must_be_in_one_receptacle() -> None:
    world = kitchen_world("pick_two_obj_and_place", {"Mug_bar_1": "Desk", "Mug_bar_2": "CounterTop"})
    assert not world.won
    assert say(world, *MUG_IN_HAND, *DELIVERED).won


@pytest.mark.parametrize("treated", [HEATED, COOLED, CLEANED])
@pytest.mark.parametrize("dish", [False, True])
def test_the_scene_includes_the_state_of_the_held_object(treated: tuple[str, ...], dish: bool) -> None:
    facts = [("isReceptacleObject", "Mug_bar_1")] if dish else []
    world = kitchen_world("pick_heat_then_place_in_recep", {"Mug_bar_1": "CounterTop"}, *facts)
    say(world, *MUG_IN_HAND, treated[0])
    before = world.scene()
    assert say(world, treated[1]).scene() != before
    assert say(world, treated[1]).scene() == world.scene()  # once more is nothing more


def test_the_scene_includes_progress_made_elsewhere() -> None:
    one, other = (
        kitchen_world("pick_two_obj_and_place", {"Mug_bar_1": "CounterTop", "Mug_bar_2": "Fridge"}) for _ in "12"
    )
    say(one, "go to countertop 1", "take mug 2 from countertop 1", "go to desk 1", "move mug 2 to desk 1")
    say(other, "go to countertop 1", "take mug 2 from countertop 1", "go to sinkbasin 1", "move mug 2 to sinkbasin 1")
    scenes = [say(world, "go to cabinet 1").scene() for world in (one, other)]
    assert scenes == [f"The cabinet 1 is closed. Reached: {reached}." for reached in (1, 0)]


def test_two_episodes_of_a_game_share_no_state() -> None:
    game = synthetic.synthetic_game(ENTRIES[0].name)
    one, other = World(game), World(game)
    for command in ENTRIES[0].walkthrough:
        one.step(command)
    assert one.won
    assert (other.won, other.intro, other.scene()) == (False, World(game).intro, World(game).scene())


def test_unknown_problems_are_refused() -> None:
    facts = synthetic.kitchen({"Mug_bar_1": "Desk"})
    with pytest.raises(DataError, match="six kinds"):
        read_game(synthetic.write_problem(facts, "(:goal (and (holds agent1 Mug_bar_1)))"), "")
    with pytest.raises(DataError, match="not a PDDL problem"):
        read_game("hello", "")
    goal = synthetic.GOALS["pick_and_place_simple"].format(thing="Mug", place="Desk")
    with pytest.raises(DataError, match="empty hands and closed doors"):
        read_game(synthetic.write_problem([*facts, ("opened", "Fridge_bar_1")], goal), "")


# The env


def play(env: AlfWorld, row: Any, commands: list[str]) -> list[Any]:
    async def run() -> list[Any]:
        first = await env.reset(row)
        return [first, *[await env.step(Action(text=command, token_ids=[])) for command in commands]]

    return asyncio.run(run())


def shown(observation: Observation | None) -> list[str]:
    assert observation is not None
    assert observation.messages is not None
    return [message["content"] for message in observation.messages]


def test_an_episode_is_a_conversation_that_ends_when_the_task_is_done() -> None:
    row, texts = synthetic.demos(1, seed=3)[0]
    first, *steps = play(synthetic.SyntheticAlfWorld(**row.env_kwargs), row, texts)
    assert shown(first)[0].startswith("You are in the middle of a room.")
    assert shown(first)[0].endswith(row.prompt[0]["content"])
    assert [step.terminated for step in steps] == [False] * (len(texts) - 1) + [True]
    assert [step.info["won"] for step in steps] == [step.terminated for step in steps]
    assert all(step.reward == 0 for step in steps)
    assert shown(steps[-2].observation)[1::2] == texts[:-1]
    json.dumps([dict(step.info) for step in steps])


def test_only_the_first_line_is_read_and_case_is_ignored() -> None:
    row = synthetic.rows("train", 1)[0]
    _, first, second = play(synthetic.SyntheticAlfWorld(**row.env_kwargs), row, [" Go to DESK 1 \nopen it", "dance"])
    assert first.feedback.startswith("You arrive at desk 1.")
    assert (second.feedback, second.info["refused"]) == (NOTHING_HAPPENS, True)


def test_hints_are_the_admissible_commands() -> None:
    row = synthetic.rows("train", 1)[0]
    first, step = play(synthetic.SyntheticAlfWorld(**row.env_kwargs, hints=True), row, ["go to fridge 1"])
    world = World(synthetic.synthetic_game(row.row_id))
    assert shown(first)[0].endswith("\nCommands: " + ", ".join(world.admissible()))
    world.step("go to fridge 1")
    assert shown(step.observation)[-1].endswith("\nCommands: " + ", ".join(world.admissible()))


def test_hints_must_be_a_boolean() -> None:
    with pytest.raises(ConfigError, match=r"hints of AlfWorld .*'maybe'"):
        make_env(AlfWorld, "task.AlfWorld", {"game": "g", "world": "w", "hints": "maybe"})


def test_a_won_game_shows_no_hints() -> None:
    row, texts = synthetic.demos(1, seed=3)[0]
    *_, before, last = play(synthetic.SyntheticAlfWorld(**row.env_kwargs, hints=True), row, texts)
    assert "Commands: " in before.feedback
    assert last.info["won"]
    assert "Commands: " not in last.feedback


def test_the_anchor_is_the_scene_and_not_the_path_to_it() -> None:
    row = synthetic.rows("train", 1)[0]
    env = lambda: synthetic.SyntheticAlfWorld(**row.env_kwargs)  # noqa: E731
    _, *one = play(env(), row, ["go to fridge 1", "go to desk 1", "look"])
    _, *other = play(env(), row, ["dance", "go to cabinet 1", "open cabinet 1", "go to desk 1", "inventory", "look"])
    assert one[0].info["anchor"] == other[0].info["anchor"] == other[1].info["anchor"]
    assert one[2].info["anchor"] == other[4].info["anchor"] == other[5].info["anchor"]
    assert one[1].info["anchor"] != one[2].info["anchor"]


def test_the_env_keeps_the_contract() -> None:
    row, texts = synthetic.demos(1, seed=0)[0]
    row = replace(row, reward_model={"ground_truth": "secret"})
    asyncio.run(check_env(lambda: synthetic.SyntheticAlfWorld(**row.env_kwargs), row, ["dance", *texts]))
    with pytest.raises(DataError, match="does not say where its game is"):
        AlfWorld(game="x", world="").game(replace(row, extra_info={}))


# Reward and demonstrations


def test_the_reward_is_1_for_a_won_game() -> None:
    def episode(*infos: dict[str, Any]) -> Trajectory:
        steps = [Step(prompt_ids=[1], response_ids=[2], response_logprobs=[0.0], info=info) for info in infos]
        return Trajectory(row_id="r", trajectory_id="t", steps=steps, stop=StopReason.MAX_STEPS)

    row = synthetic.rows("train", 1)[0]
    lost, refused, won = ({"won": w, "refused": r} for w, r in ((False, False), (False, True), (True, False)))
    played = [episode(refused, won), episode(lost, refused, {}), episode()]
    scored = [asyncio.run(task.reward(row, one)) for one in played]
    # one of two commands refused; of three one never reached the game, and one of the other two was refused
    assert scored == [{"reward": 1, "refused": 0.5}, {"reward": 0, "refused": 0.5}, {"reward": 0, "refused": 0}]


def test_every_preset_can_be_read() -> None:
    assert load_config("alfworld/explorer", []).sft.demos == "task.explorer_demos"
    assert load_config("alfworld/hints", []).task.env_kwargs == {"hints": True}
    assert load_config("alfworld", []).rollout.max_steps == task.MAX_STEPS
