"""A handful of released games, and the golden play, in the official ALFWorld engine and in ours.

Runs where $AGENT_R1_ALFWORLD names a folder or an archive of the released games and $AGENT_R1_ALFWORLD_PYTHON a Python
that has textworld and fast-downward-textworld (by default this one). For all games: `benchmarks/alfworld.py`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_r1.recipes.alfworld import data
from benchmarks.alfworld import Official, Releases, compared

GOLDEN = json.loads(Path(__file__).with_name("alfworld_golden.json").read_text(encoding="utf-8"))
SOURCE = os.environ.get("AGENT_R1_ALFWORLD")
PYTHON = os.environ.get("AGENT_R1_ALFWORLD_PYTHON")
CAN_PLAY = SOURCE is not None and (PYTHON is not None or importlib.util.find_spec("textworld") is not None)
pytestmark = pytest.mark.skipif(not CAN_PLAY, reason="needs $AGENT_R1_ALFWORLD and the official engine")


@pytest.fixture(scope="module")
def releases() -> Releases:
    return Releases(Path(str(SOURCE)))


@pytest.fixture(scope="module")
def official() -> Iterator[Official]:
    engine = Official(PYTHON or sys.executable)
    yield engine
    engine.close()


@pytest.mark.parametrize("number", range(6))  # one of each kind of task
def test_a_released_game_is_the_same_in_both(number: int, releases: Releases, official: Official) -> None:
    result = compared(releases.order()[number], releases, official, seed=1)
    assert result["mismatches"] == []
    assert result["walkthrough_won"]


def test_the_golden_play_is_the_official_one(releases: Releases, official: Official) -> None:
    game = releases.read(releases.order()[0])
    game["grammar"] = game["grammar"].replace(data.check_rules(game, "golden"), GOLDEN["task"])
    game["pddl_problem"] = GOLDEN["problem"]
    [said] = official.play(game, [GOLDEN["commands"]])
    assert said == GOLDEN["said"]


def test_the_released_games_are_those_that_the_recipe_knows() -> None:
    file = data.games_file(SOURCE)
    assert data._counts(file) == data.SPLITS
    assert data.content_hash(file) == data.CONTENT
