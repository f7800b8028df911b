"""Cross a frozen lake that only pictures show, with a new picture after every move. See README.md; `lake.py` has maps.

    user  [picture] Cross the ice to the flag. Say left, right, up or down.
    agent at b2 goal d4 holes b1 d1 c2 a3 a4 b4 right c2 Hole down b3 Ice go down
    user  [picture]
    agent at b3 goal d4 holes b1 d1 c2 a3 a4 b4 right c3 Ice go right
    ...

The warm start mixes two kinds of examples. Captions say what pictures show, which a pretrained model would know.
Demonstrations are deliberately imperfect: most moves are careless (`CARELESS`), along the row first and then along the
column without looking, so a greedy imitator falls in. Reinforcement learning finds out that looking pays.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from hashlib import sha256
from typing import Any, ClassVar

from agent_r1.data.rows import Demo
from agent_r1.envs.base import AgentEnv
from agent_r1.errors import ConfigError, did_you_mean
from agent_r1.recipes.gridworld.lake import CELLS, MOVES, Lake, draw_lake, moved
from agent_r1.types import Action, Message, Observation, TaskRow, Trajectory, Transition
from agent_r1.vision.pictures import Picture

SPLITS = ("train", "test")
BLANK = "blank_"  # prefix of a split's name: the same rows with black pictures
TEST_SHARE = 0.2  # share of all lakes
CELL_PIXELS = 16  # one token of the tiny model

TASK = "Cross the ice to the flag. Say left, right, up or down."
HELP = "Say left, right, up or down."
WHERE = "where?"  # asks for all that a picture shows
MOVE = re.compile(rf"\b({'|'.join(MOVES)})\W*$")

CARELESS = 0.6  # share of careless moves
CAPTION_SHARE = 0.6  # share of captions among the warm start's examples


class FrozenLake(AgentEnv):
    """Every observation shows the lake anew; the text never says what is in the picture.

    lake: the fields of a `Lake`. quiz: the row's question is about the picture, and any response ends the episode.
    cell_pixels: side of a cell. blank: show black pictures, to measure what can be done without looking.
    """

    deterministic: ClassVar[bool] = True

    def __init__(
        self, *, lake: dict[str, Any], quiz: bool = False, cell_pixels: int = CELL_PIXELS, blank: bool = False
    ) -> None:
        if cell_pixels < 8:
            raise ConfigError(f"env_kwargs.cell_pixels must be at least 8, so that cells differ; got {cell_pixels}")
        self._lake, self._quiz = Lake(**lake), quiz
        self._cell_pixels, self._blank = cell_pixels, blank
        self._cell = self._lake.start

    async def reset(self, row: TaskRow) -> Observation:
        self._messages: list[Message] = [self._show(str(row.prompt[-1]["content"]))]
        return Observation(messages=self._messages)

    async def step(self, action: Action) -> Transition:
        if self._quiz:
            return Transition(terminated=True)
        found = MOVE.search(action.text.strip())
        info: dict[str, Any] = {"anchor": CELLS[self._cell], "move": found and found[1]}
        if found is None:
            return self._go_on(action, HELP, info)
        self._cell = moved(self._cell, found[1])
        for end, cells in (("hole", self._lake.holes), ("flag", [self._lake.goal])):
            if self._cell in cells:
                return Transition(terminated=True, feedback=f"{CELLS[self._cell]}: {end}", info={**info, "end": end})
        return self._go_on(action, "", info)

    def _go_on(self, action: Action, text: str, info: Mapping[str, Any]) -> Transition:
        said = {"role": "assistant", "content": action.text}
        self._messages = [*self._messages, said, self._show(text)]
        return Transition(observation=Observation.grown(self._messages, by=2), feedback=text, info=info)

    def _show(self, text: str) -> Message:
        picture = self._lake.picture(self._cell, self._cell_pixels)
        if self._blank:
            picture = Picture.from_pixels(0 * picture.pixels)
        words = [{"type": "text", "text": text}] if text else []
        return {"role": "user", "content": [{"type": "image", "image": picture}, *words]}


def reward(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    """Pay 1 for reaching the flag, else 0."""
    end = trajectory.steps[-1].info.get("end") if trajectory.steps else None
    unclear = sum(step.info.get("move", "") is None for step in trajectory.steps)
    return {"reward": float(end == "flag"), "fell": float(end == "hole"), "unclear": float(unclear)}


def rows(split: str, count: int = 4000, seed: int = 0) -> list[TaskRow]:
    """Return `count` rows of a split; a smaller count gives the first of the same rows.

    Splits are `train` and `test`, and with black pictures `blank_train` and `blank_test`.
    """
    drawn_from = split.removeprefix(BLANK)
    rng = random.Random(f"rows:{drawn_from}:{seed}")
    found: dict[str, Lake] = {}
    while len(found) < count:
        lake = draw(drawn_from, rng)
        found.setdefault(repr(lake), lake)
    shown = [as_row(lake, f"{split}-{seed}-{index}") for index, lake in enumerate(found.values())]
    return shown if split == drawn_from else [_blank(row) for row in shown]


def _blank(row: TaskRow) -> TaskRow:
    return replace(row, env_kwargs={**row.env_kwargs, "blank": True})


def demos(count: int, seed: int) -> list[Demo]:
    """Return examples of the warm start: captions, and imperfect demonstrations."""
    rng = random.Random(f"demos:{seed}")
    shown: list[Demo] = []
    for index in range(count):
        lake, row_id = draw("train", rng), f"demo-{seed}-{index}"
        if rng.random() < CAPTION_SHARE:
            shown.append((as_row(lake, row_id, WHERE), [caption(lake)]))
        else:
            shown.append((as_row(lake, row_id), walk(lake, rng, CARELESS)))
    return shown


def right_demos(count: int, seed: int) -> list[Demo]:
    """Return demonstrations that all reach the flag."""
    rng = random.Random(f"right:{seed}")
    lakes = [draw("train", rng) for _ in range(count)]
    return [(as_row(lake, f"demo-{seed}-{index}"), walk(lake, rng, 0)) for index, lake in enumerate(lakes)]


def caption(lake: Lake) -> str:
    """Return what the first picture of a lake shows, and what is in the cells around the player."""
    around = [move for move in MOVES if moved(lake.start, move) != lake.start]
    return " ".join([_where(lake, lake.start), _holes(lake), *(_look(lake, lake.start, move) for move in around)])


def walk(lake: Lake, rng: random.Random, careless: float) -> list[str]:
    """Return the responses of a walker until it reaches the flag or falls in."""
    cell = lake.start
    said: list[str] = []
    while cell != lake.goal and cell not in lake.holes:
        move, *others = lake.nearer(cell)
        looks = []
        if rng.random() >= careless and (safe := lake.safe(cell)) is not None:
            looked = [move] if safe == move else [move, *others]
            looks = [_holes(lake), *(_look(lake, cell, each) for each in looked)]
            move = safe
        said.append(" ".join([_where(lake, cell), *looks, f"go {move}"]))
        cell = moved(cell, move)
    return said


def _where(lake: Lake, cell: int) -> str:
    return f"at {CELLS[cell]} goal {CELLS[lake.goal]}"


def _holes(lake: Lake) -> str:
    return " ".join(["holes", *(CELLS[hole] for hole in lake.holes)])


def _look(lake: Lake, cell: int, move: str) -> str:
    """The content of the cell that a move leads to."""
    there = moved(cell, move)
    return f"{move} {CELLS[there]} {lake.kind(there)}"


def draw(split: str, rng: random.Random) -> Lake:
    """A hash of the lake decides its split, so no lake is in both."""
    if split not in SPLITS:
        raise ConfigError(f"unknown split {split!r}.{did_you_mean(split, SPLITS)}")
    while True:
        lake = draw_lake(rng)
        for_test = sha256(repr(lake).encode()).digest()[0] < 256 * TEST_SHARE
        if for_test == (split == "test"):
            return lake


def as_row(lake: Lake, row_id: str, question: str = TASK) -> TaskRow:
    return TaskRow(
        prompt=[{"role": "user", "content": question}],
        row_id=row_id,
        env_kwargs={"lake": asdict(lake), "quiz": question != TASK},
        data_source="gridworld",
    )
