"""A handful of released games, and the golden plays, in the official ALFWorld engine and in ours.

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
from typing import Any

import pytest

from agent_r1.data.panels import panel_hash
from agent_r1.recipes.alfworld import data, task
from benchmarks.alfworld import Official, Releases, compared

GOLDEN = json.loads(Path(__file__).with_name("alfworld_golden.json").read_text(encoding="utf-8"))
PANELS = {
    "train": "5c24f18546c3",
    "valid_train": "318e2b77cf6f",
    "valid_seen": "fbedcd52130d",
    "valid_unseen": "136767cb1ac2",
}
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


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: golden["task"].removeprefix("Your task is to: "))
def test_a_golden_play_is_the_official_one(golden: dict[str, Any], releases: Releases, official: Official) -> None:
    game = releases.read(releases.order()[0])
    game["grammar"] = game["grammar"].replace(data.check_rules(game, "golden"), golden["task"])
    game["pddl_problem"] = golden["problem"]
    [said] = official.play(game, [golden["commands"]])
    assert said == golden["said"]


def test_the_released_games_have_the_recorded_hashes() -> None:
    file = data.games_file(SOURCE)
    assert data.count_games(file) == data.SPLITS
    assert data.content_hash(file) == data.CONTENT
    assert {split: panel_hash(task.rows(split, path=SOURCE)) for split in data.SPLITS} == PANELS
