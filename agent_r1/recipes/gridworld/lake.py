"""Frozen lakes: maps with a start, a goal and holes; their pictures; and the way to the goal.

Drawn with numpy: every cell is ice, a hole, the goal or the player. Nothing here knows about episodes or models.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from agent_r1.vision.pictures import Picture

SIDE = 4  # of the lake, in cells
CELLS = tuple(f"{column}{row}" for row in range(1, SIDE + 1) for column in "abcd")  # row by row, from the top
MOVES = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
NUM_HOLES = 4
FEWEST_MOVES = 3

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

    def moves_to_goal(self) -> dict[int, int]:
        """The number of moves from each cell from which the goal can be reached without falling into a hole."""
        found, reached = {self.goal: 0}, [self.goal]
        for cell in reached:  # grows while it is read
            for near in map(partial(moved, cell), MOVES):  # a move that leads here has an opposite one that leads back
                if near not in self.holes and near not in found:
                    found[near] = found[cell] + 1
                    reached.append(near)
        return found


def moved(cell: int, move: str) -> int:
    """The cell after a move; the edge of the lake stops the player."""
    (y, x), (right, down) = divmod(cell, SIDE), MOVES[move]
    y, x = (min(max(place, 0), SIDE - 1) for place in (y + down, x + right))
    return y * SIDE + x


def draw_lake(rng: random.Random) -> Lake:
    """A lake whose goal can be reached, in at least `FEWEST_MOVES` moves."""
    while True:
        start, goal, *holes = rng.sample(range(len(CELLS)), 2 + NUM_HOLES)
        lake = Lake(start=start, goal=goal, holes=sorted(holes))
        if lake.moves_to_goal().get(start, 0) >= FEWEST_MOVES:
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
