"""The gridworld: pictures show where everything is, text does not; walkers, captions and the reward are right."""

from __future__ import annotations

import asyncio
import json
import random
from functools import cache
from typing import Any

import numpy as np
import pytest

from agent_r1.engines.base import Sampling
from agent_r1.engines.scripted import ScriptedEngine
from agent_r1.envs.base import make_env, merge_env_kwargs
from agent_r1.envs.check import check_env
from agent_r1.errors import ConfigError
from agent_r1.flows.budgets import Limits
from agent_r1.flows.flow import AgentEnvLoop
from agent_r1.recipes.gridworld import lake as lakes
from agent_r1.recipes.gridworld import task, tiny
from agent_r1.recipes.gridworld.lake import CELLS, MOVES, Lake, draw_lake, moved
from agent_r1.recipes.gridworld.task import FrozenLake
from agent_r1.recipes.vision_quickstart.tiny import make_network
from agent_r1.rollout.collect import Collector
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import Action, Message, StopReason, TaskRow, Trajectory
from agent_r1.vision.picture_format import read_format
from agent_r1.vision.pictures import Picture, pictures_of

# start a1, flag c2, holes b1 and d2:   S H . .
#                                       . . F H
LAKE = Lake(start=0, goal=6, holes=[1, 7])
SAFE = ["down", "right", "right"]


@cache
def tokenizer() -> Any:
    return tiny.make_tokenizer()


@cache
def renderer() -> Renderer:
    config = make_network(tokenizer(), seed=0).config
    return Renderer(tokenizer(), pictures=read_format(config, None, tokenizer().get_vocab()))


def play(row: TaskRow, texts: list[str], **settings: Any) -> Trajectory:
    """The texts as an episode, through the real env and tokenizer."""

    def env(row: TaskRow) -> Any:
        return make_env(FrozenLake, "lake", merge_env_kwargs(settings, row))

    collect = Collector(
        make_flow=lambda _: AgentEnvLoop(env),
        sampler=ScriptedEngine(texts, tokenizer=tokenizer()),
        renderer=renderer(),
        sampling=Sampling(max_tokens=32, stop_ids=renderer().stop_ids),
        limits=Limits(max_steps=8, max_response_tokens=32, max_context_tokens=384, episode_seconds=20),
        group_size=1,
    )
    [group] = asyncio.run(collect([row], seed=0))
    return group.trajectories[0]


def observed(texts: list[str], **settings: Any) -> list[Message]:
    """The last messages that the texts lead to."""

    async def walk() -> list[Message]:
        row = task.as_row(LAKE, "r")
        env = make_env(FrozenLake, "lake", merge_env_kwargs(settings, row))
        observation = await env.reset(row)
        for text in texts:
            transition = await env.step(Action(text=text, token_ids=[]))
            assert transition.observation is not None
            observation = transition.observation
        assert observation.messages is not None
        return observation.messages

    return asyncio.run(walk())


# The lake


def test_moves_stop_at_the_edge() -> None:
    assert [CELLS[moved(CELLS.index("a1"), move)] for move in MOVES] == ["a1", "b1", "a1", "a2"]
    assert [CELLS[moved(CELLS.index("d4"), move)] for move in MOVES] == ["c4", "d4", "d3", "d4"]


def test_safe_moves_by_hand() -> None:
    assert LAKE.nearer(LAKE.start) == ["right", "down"]
    assert LAKE.safe(LAKE.start) == "down"  # b1 is a hole
    assert LAKE.safe_moves() == 3
    assert LAKE.nearer(CELLS.index("d2")) == ["left"]
    assert LAKE.nearer(LAKE.goal) == []
    walled = Lake(start=0, goal=15, holes=[1, 4])
    assert walled.safe(walled.start) is None
    assert walled.safe_moves() is None


def test_drawn_lakes_can_be_crossed_by_looking_ahead_and_are_not_trivial() -> None:
    rng = random.Random(0)
    for _ in range(100):
        lake = draw_lake(rng)
        assert (lake.safe_moves() or 0) >= lakes.FEWEST_MOVES
        assert len({lake.start, lake.goal, *lake.holes}) == 2 + lakes.NUM_HOLES


@pytest.mark.parametrize("cell_pixels", [8, 16, 64])
def test_a_picture_shows_every_cell(cell_pixels: int) -> None:
    picture = LAKE.picture(LAKE.start, cell_pixels)
    pixels = picture.pixels
    assert pixels.shape == (4 * cell_pixels, 4 * cell_pixels, 3)

    def colours(cell: int) -> set[tuple[int, ...]]:
        y, x = (place * cell_pixels for place in divmod(cell, 4))
        square = pixels[y : y + cell_pixels, x : x + cell_pixels].reshape(-1, 3)
        return set(map(tuple, square.tolist()))

    shown = {cell: colours(cell) for cell in range(16)}
    assert [cell for cell in shown if lakes.PLAYER in shown[cell]] == [LAKE.start]
    assert [cell for cell in shown if lakes.GOAL in shown[cell]] == [LAKE.goal]
    assert [cell for cell in shown if lakes.HOLE in shown[cell]] == list(LAKE.holes)
    assert shown[15] == {lakes.ICE, lakes.EDGE}


# The environment


def test_every_move_shows_a_new_picture_and_no_words() -> None:
    first, _, second = observed(["go down"])
    assert pictures_of([first]) == [LAKE.picture(CELLS.index("a1"), 16)]
    assert pictures_of([second]) == [LAKE.picture(CELLS.index("a2"), 16)]
    assert [part.get("text") for part in first["content"]] == [None, task.TASK]
    assert len(second["content"]) == 1


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("down", "a2"),
        ("at a1 goal c2 go down", "a2"),
        ("right is a hole, so down.", "a2"),
        ("up", "a1"),  # the edge
    ],
)
def test_the_last_word_is_the_move(text: str, cell: str) -> None:
    *_, last = observed([text])
    assert last["content"] == [{"type": "image", "image": LAKE.picture(CELLS.index(cell), 16)}]


@pytest.mark.parametrize("text", ["DOWN", "down we go", "lockdown", ""])
def test_other_words_are_answered_with_the_moves_there_are(text: str) -> None:
    *_, last = observed([text])
    assert last["content"][0] == {"type": "image", "image": LAKE.picture(LAKE.start, 16)}
    assert all(move in last["content"][1]["text"] for move in MOVES)


def test_reaching_the_flag_earns_1_and_a_hole_ends_the_episode() -> None:
    row = task.as_row(LAKE, "r")
    won = play(row, SAFE)
    assert (won.stop, len(won.steps)) == (StopReason.ANSWERED, 3)
    assert task.reward(row, won) == {"reward": 1.0, "fell": 0.0, "unclear": 0.0}
    fell = play(row, ["down", "huh?", "up", "right", "left"])
    assert (fell.stop, len(fell.steps)) == (StopReason.ANSWERED, 4)
    assert task.reward(row, fell) == {"reward": 0.0, "fell": 1.0, "unclear": 1.0}
    lost = play(row, ["up"] * 8)
    assert lost.stop is StopReason.MAX_STEPS
    assert task.reward(row, lost)["reward"] == 0.0


def test_the_env_keeps_its_contract() -> None:
    for actions in (["down", "hm", "up", "left", "down", "right", "right"], ["right"]):
        asyncio.run(check_env(FrozenLake, task.as_row(LAKE, "r"), actions))


def test_prompts_differ_only_in_pictures() -> None:
    shown = [play(row, ["up"]).steps[0].prompt_ids for row in task.rows("test", 10)]
    words = {tuple(token for token in ids if token >= 0) for ids in shown}
    assert len(words) == 1
    assert len({tuple(ids) for ids in shown}) == 10
    assert {sum(token < 0 for token in ids) for ids in shown} == {16}  # one token for each cell


def test_blank_pictures_are_black_and_all_the_same() -> None:
    first, _, second = observed(["down"], blank=True)
    [one], [other] = pictures_of([first]), pictures_of([second])
    assert one == other == Picture.from_pixels(np.zeros((64, 64, 3), np.uint8))


def test_cells_that_are_too_small_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"env_kwargs.cell_pixels .*7"):
        observed([], cell_pixels=7)
    assert pictures_of(observed([], cell_pixels=32))[0].width == 128


# Rows and demonstrations


def test_rows_are_reproducible_plain_and_disjoint() -> None:
    assert task.rows("test", 5) == task.rows("test", 8)[:5]
    assert task.rows("test", 5, seed=1) != task.rows("test", 5)
    train, test = ({repr(row.env_kwargs) for row in task.rows(split, 400)} for split in task.SPLITS)
    assert len(train) == len(test) == 400
    assert not train & test
    for row in task.rows("test", 3):
        assert json.loads(json.dumps(row.env_kwargs)) == row.env_kwargs
    with pytest.raises(ConfigError, match=r"'tset'.*'test'"):
        task.rows("tset", 1)


def test_blank_splits_are_the_same_lakes_in_black() -> None:
    shown, blank = task.rows("test", 3), task.rows("blank_test", 3)
    assert [row.env_kwargs for row in blank] == [{**row.env_kwargs, "blank": True} for row in shown]
    steps = [play(row, ["up"]).steps[0] for row in blank]
    assert len({tuple(step.prompt_ids) for step in steps}) == 1


def test_a_cell_and_what_is_in_it_are_one_token_each_in_captions_and_walks() -> None:
    def tokens(text: str) -> list[str]:
        return [tokenizer().decode([token]) for token in tokenizer().encode(text, add_special_tokens=False)]

    walk = tokens("at b2 goal d4 right c2 Hole down b3 Ice go down")
    assert walk == ["at", " b2", " goal", " d4", " right", " c2", " Hole", " down", " b3", " Ice", " go down"]
    caption = tokens("at b2 goal d4 holes c2 up b1 Ice right c2 Hole")
    assert caption == ["at", " b2", " goal", " d4", " holes", " c2", " up", " b1", " Ice", " right", " c2", " Hole"]


def test_careful_walkers_reach_the_flag() -> None:
    for row, texts in task.right_demos(40, seed=1):
        lake = Lake(**row.env_kwargs["lake"])
        assert len(texts) == lake.safe_moves()
        trajectory = play(row, texts)
        assert task.reward(row, trajectory)["reward"] == 1.0
        assert [step.action_text for step in trajectory.steps] == texts


def test_a_careless_walker_goes_along_the_row_first_and_falls_in() -> None:
    assert task.walk(LAKE, random.Random(0), careless=1.0) == ["at a1 goal c2 go right"]
    assert play(task.as_row(LAKE, "r"), ["at a1 goal c2 go right"]).steps[-1].info["end"] == "hole"


def test_a_careful_walker_looks_where_it_goes() -> None:
    assert task.walk(LAKE, random.Random(0), careless=0.0) == [
        "at a1 goal c2 holes b1 d2 right b1 Hole down a2 Ice go down",
        "at a2 goal c2 holes b1 d2 right b2 Ice go right",
        "at b2 goal c2 holes b1 d2 right c2 Flag go right",
    ]


def test_demonstrations_play_as_written_and_are_sloppy() -> None:
    won, total = 0.0, 0
    for row, texts in task.demos(150, seed=2):
        trajectory = play(row, texts)
        assert [step.action_text for step in trajectory.steps] == texts
        last = trajectory.steps[-1]
        assert len(last.prompt_ids) + len(last.response_ids) <= 384
        if not row.env_kwargs["quiz"]:
            total, won = total + 1, won + task.reward(row, trajectory)["reward"]
    assert total / 150 == pytest.approx(1 - task.CAPTION_SHARE, abs=0.12)
    assert 0.4 < won / total < 0.8


def test_captions_are_right_and_end_the_episode() -> None:
    answer = task.caption(LAKE)
    assert answer == "at a1 goal c2 holes b1 d2 right b1 Hole down a2 Ice"
    trajectory = play(task.as_row(LAKE, "r", task.WHERE), [answer])
    assert (trajectory.stop, len(trajectory.steps)) == (StopReason.ANSWERED, 1)
