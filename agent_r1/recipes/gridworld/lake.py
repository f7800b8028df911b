"""Frozen lakes: maps with a start, a goal and holes; their pictures; and what a walker knows about them.

Drawn with numpy: every cell is ice, a hole, the goal or the player. Nothing here knows about episodes or models.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from agent_r1.vision.pictures import Picture

SIDE = 4  # side of the lake, in cells
CELLS = tuple(f"{column}{row}" for row in range(1, SIDE + 1) for column in "abcd")  # row by row, from the top
MOVES = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
NUM_HOLES = 6
FEWEST_MOVES = 4

ICE, EDGE, HOLE, PLAYER = (214, 234, 248), (170, 200, 225), (25, 40, 70), (205, 55, 45)
GOAL, FLAG = (40, 160, 70), (255, 255, 255)

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lake:
    """A map; plain values, so that a row can hold it. Cells are indices into `CELLS`."""

    start: int
    goal: int
    holes: Sequence[int]

    def picture(self, player: int, cell_pixels: int) -> Picture:
        """The lake with the player in a cell."""
        return _picture(self.goal, tuple(self.holes), player, cell_pixels)

    def kind(self, cell: int) -> str:
        return "Flag" if cell == self.goal else "Hole" if cell in self.holes else "Ice"

    def nearer(self, cell: int) -> list[str]:
        """The moves that bring the goal nearer, holes or not: along the row first, then along the column."""
        (y, x), (goal_y, goal_x) = divmod(cell, SIDE), divmod(self.goal, SIDE)
        along_row = ["right" if goal_x > x else "left"] if goal_x != x else []
        return along_row + (["down" if goal_y > y else "up"] if goal_y != y else [])

    def safe(self, cell: int) -> str | None:
        """The first of these moves that does not lead into a hole; None if both do."""
        return next((move for move in self.nearer(cell) if moved(cell, move) not in self.holes), None)

    def safe_moves(self) -> int | None:
        """How many safe moves lead to the goal; None if they end before it."""
        cell, count = self.start, 0
        while cell != self.goal:
            move = self.safe(cell)
            if move is None:
                return None
            cell, count = moved(cell, move), count + 1
        return count


def moved(cell: int, move: str) -> int:
    """The cell after a move; the edge of the lake stops the player."""
    (y, x), (right, down) = divmod(cell, SIDE), MOVES[move]
    y, x = (min(max(place, 0), SIDE - 1) for place in (y + down, x + right))
    return y * SIDE + x


def draw_lake(rng: random.Random) -> Lake:
    """A lake that can be crossed by looking one cell ahead, in at least `FEWEST_MOVES` moves."""
    while True:
        start, goal, *holes = rng.sample(range(len(CELLS)), 2 + NUM_HOLES)
        lake = Lake(start=start, goal=goal, holes=sorted(holes))
        if (lake.safe_moves() or 0) >= FEWEST_MOVES:
            return lake


@lru_cache(maxsize=4096)
def _picture(goal: int, holes: tuple[int, ...], player: int, cell_pixels: int) -> Picture:
    pixels = np.full((SIDE * cell_pixels, SIDE * cell_pixels, 3), ICE, dtype=np.uint8)
    for cell in range(len(CELLS)):
        y, x = divmod(cell, SIDE)
        square = pixels[y * cell_pixels : (y + 1) * cell_pixels, x * cell_pixels : (x + 1) * cell_pixels]
        square[-1], square[:, -1] = EDGE, EDGE
        if cell in holes:
            square[_disc(cell_pixels, 0.45)] = HOLE
        if cell == goal:
            square[:] = GOAL
            square[_flag(cell_pixels)] = FLAG
        if cell == player:
            square[_disc(cell_pixels, 0.4)] = PLAYER
    return Picture.from_pixels(pixels)


def _disc(size: int, radius: float) -> npt.NDArray[np.bool_]:
    """`radius` as a share of the size."""
    y, x = np.mgrid[:size, :size] + 0.5 - size / 2
    inside: npt.NDArray[np.bool_] = x**2 + y**2 <= (radius * size) ** 2
    return inside


def _flag(size: int) -> npt.NDArray[np.bool_]:
    """A pole, and a triangle at its top."""
    y, x = (np.mgrid[:size, :size] + 0.5) / size
    pole = (abs(x - 0.25) < 0.08) & (y > 0.12) & (y < 0.9)
    cloth = (x > 0.25) & (x < 0.85) & (abs(y - 0.34) < 0.22 * (0.85 - x) / 0.6)
    flag: npt.NDArray[np.bool_] = pole | cloth
    return flag
