"""A task for vision-language models: find two cards, read their numbers and add them. Cards and numbers are shown only
in pictures.

Nine cards lie on a board of 3 x 3 cells, one of them red and one blue. A picture of the board shows where these two
are; `peek` returns a picture of one card, with its number. No text says anything about them.

    user  [board] red plus blue?
    agent red a2 <tool_call>{"name": "peek", "arguments": {"cell": "a2"}}</tool_call>
    tool  [card]
    agent 4 blue c1 <tool_call>{"name": "peek", "arguments": {"cell": "c1"}}</tool_call>
    tool  [card]
    agent 4 plus 7 #### 11

The warm start mixes two kinds of examples. Captions say what pictures show, which a pretrained model would know.
Demonstrations of the task are deliberately imperfect: every call is well formed, but most take a shortcut
(`SLOPPINESS`), and a greedy imitator adopts it. Reinforcement learning finds out that looking at both cards pays.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from agent_r1.data.rows import Demo
from agent_r1.errors import ConfigError, did_you_mean
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.tools.base import FromRow, ToolError, ToolResult, tool
from agent_r1.types import TaskRow, Trajectory
from agent_r1.vision.pictures import Picture

SPLITS = ("train", "test")
BLANK = "blank_"  # prefix of a split's name: the same rows with black pictures
SIDE = 3  # side of the board, in cells
CELLS = tuple(f"{column}{row}" for row in "123" for column in "abc")  # row by row, from the top
CELL_PIXELS, CARD_PIXELS = 16, 32
HIGHEST = 9  # number on a card; the lowest is 1

WHITE, RED, BLUE = (235, 235, 235), (220, 40, 40), (50, 80, 220)
DARK = 20  # brightness of the table and of digits, in all three colours
NOISE = 8  # standard deviation of every pixel
GLYPHS = {  # 3 x 5 dots, row by row
    1: "010110010010111", 2: "111001111100111", 3: "111001111001111", 4: "101101111001001", 5: "111100111001111",
    6: "111100111101111", 7: "111001001001001", 8: "111101111101111", 9: "111101111001111",
}  # fmt: skip
DOT_PIXELS = 4

ANSWER = re.compile(r"#### (\d+)$")
CAPTION_SHARE = 0.6  # share of captions among the warm start's examples

Pixels = npt.NDArray[np.uint8]


class Shortcut(StrEnum):
    """Shortcuts of the imperfect demonstrations. They give the right answer only by luck."""

    GUESS = "guess"  # looks at no card
    STOP_EARLY = "stop_early"  # looks at the red card and guesses the other number
    WRONG_CARD = "wrong_card"  # looks at any other card instead of the blue one


# Frequency of each shortcut; the remaining demonstrations are right. After the red card, seven of ten demonstrations
# stop, and so does a greedy imitator. With sampling, one attempt of five still does all the work.
SLOPPINESS = {Shortcut.GUESS: 0.10, Shortcut.STOP_EARLY: 0.64, Shortcut.WRONG_CARD: 0.06}


class Caption(StrEnum):
    """Skills practised by examples that are not demonstrations of the task."""

    BOARD = "board"  # where the coloured cards are
    CARDS = "cards"  # the numbers of some cards
    SUMS = "sums"  # sums, without pictures


CAPTION_WEIGHTS = {Caption.BOARD: 12, Caption.CARDS: 4, Caption.SUMS: 4}
CARDS_PER_CAPTION = 3
SUMS_PER_CAPTION = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Nine cards; plain values, so that a row can hold them."""

    numbers: Sequence[int]  # number of each card, by index of its cell
    red: int  # index of the red card's cell
    blue: int
    seed: int  # seed of the noise and of the exact places in its pictures
    blank: bool = False  # show nothing: the ablation

    @property
    def answer(self) -> int:
        return self.numbers[self.red] + self.numbers[self.blue]

    def colour(self, cell: int) -> tuple[int, int, int]:
        return {self.red: RED, self.blue: BLUE}.get(cell, WHITE)

    def picture(self) -> Picture:
        """The board, with all cards face down."""
        if self.blank:
            return _black(CELL_PIXELS * SIDE)
        rng = np.random.default_rng((self.seed, len(CELLS)))
        pixels = np.full((CELL_PIXELS * SIDE, CELL_PIXELS * SIDE, 3), float(DARK))
        for cell in range(len(CELLS)):
            y, x = divmod(cell, SIDE)
            top, left = CELL_PIXELS * y + rng.integers(1, 4), CELL_PIXELS * x + rng.integers(1, 4)
            pixels[top : top + 11, left : left + 11] = self.colour(cell)
        return Picture.from_pixels(_with_noise(pixels, rng))

    def card(self, cell: int) -> Picture:
        """One card, face up: its number between two bars of its colour."""
        if self.blank:
            return _black(CARD_PIXELS)
        rng = np.random.default_rng((self.seed, cell))
        dots = np.array([dot == "1" for dot in GLYPHS[self.numbers[cell]]]).reshape(5, 3)
        glyph = dots.repeat(DOT_PIXELS, axis=0).repeat(DOT_PIXELS, axis=1)
        pixels = np.full((CARD_PIXELS, CARD_PIXELS, 3), float(WHITE[0]))
        pixels[:3] = pixels[-3:] = self.colour(cell)
        top, left = rng.integers(5, 8), rng.integers(8, 13)
        pixels[top : top + glyph.shape[0], left : left + glyph.shape[1]][glyph] = DARK
        return Picture.from_pixels(_with_noise(pixels, rng))


def _black(side: int) -> Picture:
    return Picture.from_pixels(np.zeros((side, side, 3), dtype=np.uint8))


def _with_noise(pixels: npt.NDArray[np.float64], rng: np.random.Generator) -> Pixels:
    return np.clip(pixels + rng.normal(0, NOISE, pixels.shape), 0, 255).astype(np.uint8)


# The policy's tool. Async, because it does not block: a sync tool would run in a thread per call.


@tool
async def peek(cell: str, board: FromRow[dict[str, Any]]) -> ToolResult:
    """The card in a cell."""
    if cell not in CELLS:
        raise ToolError(f"there is no cell {cell[:20]!r}; cells are {CELLS[0]} to {CELLS[-1]}")
    return ToolResult("", images=[Board(**board).card(CELLS.index(cell))])


def reward(row: TaskRow, trajectory: Trajectory) -> float:
    """Pay 1 if the last response ends with the right number, else 0."""
    found = ANSWER.search(trajectory.final_text.strip())
    return float(found is not None and found[1] == row.ground_truth)


def rows(split: str, count: int = 2000, seed: int = 0) -> list[TaskRow]:
    """Return `count` rows of a split; a smaller count gives the first of the same rows.

    Splits are `train` and `test`, and with black pictures `blank_train` and `blank_test`.
    """
    rng = random.Random(f"rows:{split.removeprefix(BLANK)}:{seed}")
    return [as_row(draw_board(split, rng), f"{split}-{seed}-{index}") for index in range(count)]


def blank_demos(count: int, seed: int) -> list[Demo]:
    """Return the examples of the warm start with black pictures."""
    return demos(count, seed, split=f"{BLANK}train")


def demos(count: int, seed: int, split: str = "train") -> list[Demo]:
    """Return examples of the warm start: captions, and imperfect demonstrations of the task."""
    rng = random.Random(f"demos:{seed}")
    shown: list[Demo] = []
    for index in range(count):
        board, row_id = draw_board(split, rng), f"demo-{seed}-{index}"
        if rng.random() < CAPTION_SHARE:
            [kind] = rng.choices(list(CAPTION_WEIGHTS), weights=list(CAPTION_WEIGHTS.values()))
            shown.append(caption(kind, board, row_id, rng))
        else:
            shown.append((as_row(board, row_id), demonstrate(board, _draw_shortcut(rng), rng)))
    return shown


def demonstrate(board: Board, shortcut: Shortcut | None, rng: random.Random) -> list[str]:
    """Return the responses of one demonstration, step by step; without a shortcut, the right ones."""
    first, guess = board.numbers[board.red], _draw_number(rng)
    if shortcut is Shortcut.GUESS:
        return [_sum(_draw_number(rng), guess)]
    if shortcut is Shortcut.STOP_EARLY:
        return [_find("red", board.red), _sum(first, guess)]
    second = board.blue
    if shortcut is Shortcut.WRONG_CARD:
        second = rng.choice([cell for cell in range(len(CELLS)) if cell not in (board.red, board.blue)])
    return [_find("red", board.red), f"{first} {_find('blue', second)}", _sum(first, board.numbers[second])]


def caption(kind: Caption, board: Board, row_id: str, rng: random.Random) -> Demo:
    """Return a row that asks about its pictures, or for sums, and the right answer."""
    if kind is Caption.BOARD:
        places = [f"red {CELLS[board.red]}", f"blue {CELLS[board.blue]}"]
        answer = " ".join(rng.sample(places, 2))  # in any order, so that neither is found with the other's help
        return _row([board.picture()], "where?", answer, row_id), [answer]
    if kind is Caption.CARDS:
        cells = rng.sample(range(len(CELLS)), CARDS_PER_CAPTION)
        calls, numbers = [_call(cell) for cell in cells], [str(board.numbers[cell]) for cell in cells]
        row = _row([], f"{' '.join(CELLS[cell] for cell in cells)}?", numbers[-1], row_id, asdict(board))
        return row, [calls[0], *(f"{seen} {call}" for seen, call in zip(numbers, calls[1:], strict=False)), numbers[-1]]
    sums = [(_draw_number(rng), _draw_number(rng)) for _ in range(SUMS_PER_CAPTION)]
    question, answer = " ".join(f"{x} plus {y}?" for x, y in sums), " ".join(_sum(x, y) for x, y in sums)
    return _row([], question, answer, row_id), [answer]


def _sum(left: int, right: int) -> str:
    return f"{left} plus {right} #### {left + right}"


def _find(colour: str, cell: int) -> str:
    return f"{colour} {CELLS[cell]} {_call(cell)}"


def _call(cell: int) -> str:
    return FORMATS["hermes"].write_call("peek", {"cell": CELLS[cell]})


def _draw_shortcut(rng: random.Random) -> Shortcut | None:
    [drawn] = rng.choices([*SLOPPINESS, None], weights=[*SLOPPINESS.values(), 1 - sum(SLOPPINESS.values())])
    return drawn


def _draw_number(rng: random.Random) -> int:
    return rng.randint(1, HIGHEST)


def draw_board(split: str, rng: random.Random) -> Board:
    drawn_from, splits = split.removeprefix(BLANK), (*SPLITS, *(BLANK + name for name in SPLITS))
    if split not in splits:
        raise ConfigError(f"unknown split {split!r}.{did_you_mean(split, splits)}")
    red, blue = rng.sample(range(len(CELLS)), 2)
    return Board(
        numbers=[_draw_number(rng) for _ in CELLS],
        red=red,
        blue=blue,
        seed=2 * rng.randrange(2**30) + (drawn_from == "test"),  # so no picture is in both splits
        blank=split != drawn_from,
    )


def as_row(board: Board, row_id: str) -> TaskRow:
    return _row([board.picture()], "red plus blue?", str(board.answer), row_id, asdict(board))


def _row(
    pictures: Sequence[Picture], question: str, answer: str, row_id: str, board: Mapping[str, Any] | None = None
) -> TaskRow:
    """`board`: what `peek` reads; a row without one has no use for the tool."""
    shown = [{"type": "image", "image": picture} for picture in pictures]
    return TaskRow(
        prompt=[{"role": "user", "content": [*shown, {"type": "text", "text": question}]}],
        row_id=row_id,
        reward_model={"style": "rule", "ground_truth": answer},
        env_kwargs={"tools_kwargs": {"peek": {"board": dict(board or {})}}},
        data_source="vision_quickstart",
    )
