"""Triangles drawn with Pillow, for the tiny preset and for trying the recipe without data.

A demonstration looks closer at a corner and answers. A hash of the problem decides its split, so splits cannot overlap.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

from agent_r1.data.rows import Demo
from agent_r1.errors import ConfigError, did_you_mean
from agent_r1.recipes.geometry3k.data import row_of
from agent_r1.recipes.geometry3k.task import SCALE, with_tools
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.types import TaskRow
from agent_r1.vision.pictures import Picture, as_picture

SPLITS = ("train", "test")
TEST_SHARE = 0.2
PIXELS = 96  # side of a figure
MARGIN = 14
LETTER = (6, 11)  # width and height in pixels, about
LOOK = 300  # side of the part that a demonstration looks at, in thousandths
LEGS = ((3, 4, 5), (5, 12, 13), (6, 8, 10), (8, 15, 17), (9, 12, 15), (7, 24, 25), (12, 16, 20), (20, 21, 29))

Point = tuple[float, float]


@dataclass(frozen=True)
class Figure:
    """A triangle with a text at three places. Points in any unit; y goes down, as in pictures."""

    question: str
    corners: tuple[Point, Point, Point]
    labels: tuple[tuple[str, Point], ...]
    thought: str
    answer: int

    @cached_property
    def picture(self) -> Picture:
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (PIXELS, PIXELS), "white")
        draw = ImageDraw.Draw(image)
        draw.polygon([self.place(corner) for corner in self.corners], outline="black")
        for text, point in self.labels:
            x, y = self.place(point)
            draw.text((x - LETTER[0] / 2 * len(text), y - LETTER[1] / 2), text, fill="black")
        return as_picture(image)

    def place(self, point: Point) -> Point:
        """Where a point is, in pixels: the triangle fills the picture."""
        xs, ys = zip(*self.corners, strict=True)
        scale = (PIXELS - 2 * MARGIN) / max(max(xs) - min(xs), max(ys) - min(ys))
        return MARGIN + (point[0] - min(xs)) * scale, MARGIN + (point[1] - min(ys)) * scale


def third_angle(rng: random.Random) -> Figure:
    first, second = rng.randint(40, 80), rng.randint(40, 80)
    third = 180 - first - second
    left, right = math.tan(math.radians(first)), math.tan(math.radians(second))
    top = right / (left + right)  # where the third corner is along the base, which has length 1
    corners = ((0.0, 0.0), (1.0, 0.0), (top, -top * left))
    centre = ((1 + top) / 3, -top * left / 3)
    texts = (str(first), str(second), "x")
    return Figure(
        question="<image>The numbers are angles in degrees. Find $x$.",
        corners=corners,
        labels=tuple((text, _between(corner, centre, 0.5)) for text, corner in zip(texts, corners, strict=True)),
        thought=f"The angles add up to 180, and 180 - {first} - {second} = {third}.",
        answer=third,
    )


def hypotenuse(rng: random.Random) -> Figure:
    times = rng.randint(1, 3)
    short, long, longest = (times * side for side in rng.choice(LEGS))
    foot, right, top = (0.0, 0.0), (1.0, 0.0), (0.0, -0.8)  # not to scale
    outside = ((-0.13, -0.4), (0.5, 0.12), (0.6, -0.48))
    return Figure(
        question="<image>The angle at the bottom left is a right angle. Find $x$.",
        corners=(foot, right, top),
        labels=tuple(zip((str(short), str(long), "x"), outside, strict=True)),
        thought=f"{short}^2 + {long}^2 = {longest}^2.",
        answer=longest,
    )


def _between(one: Point, other: Point, share: float) -> Point:
    return one[0] + share * (other[0] - one[0]), one[1] + share * (other[1] - one[1])


KINDS = (third_angle, hypotenuse)


def rows(split: str, count: int = 500, seed: int = 0) -> list[TaskRow]:
    """Return `count` rows; a smaller count gives the first of the same rows."""
    rng = random.Random(f"rows:{split}:{seed}")
    found: dict[str, Figure] = {}
    while len(found) < count:
        figure = draw(split, rng)
        found.setdefault(repr(figure), figure)
    return [_row(figure, split, index) for index, figure in enumerate(found.values())]


def demos(count: int, seed: int) -> list[Demo]:
    """Return rows of the training split, each with an expert's responses."""
    rng = random.Random(f"demos:{seed}")
    drawn = [draw("train", rng) for _ in range(count)]
    return [(_row(figure, "train", index), demonstrate(figure)) for index, figure in enumerate(drawn)]


def demonstrate(figure: Figure) -> list[str]:
    """Look closer at the first label, and answer."""
    x, y = (round(at / PIXELS * SCALE) for at in figure.place(figure.labels[0][1]))
    x0, y0 = (min(max(at - LOOK // 2, 0), SCALE - LOOK) for at in (x, y))
    call = FORMATS["hermes"].write_call("zoom", {"picture": 1, "x0": x0, "y0": y0, "x1": x0 + LOOK, "y1": y0 + LOOK})
    return [f"I look closer.\n{call}", f"{figure.thought}\n\\boxed{{{figure.answer}}}"]


def draw(split: str, rng: random.Random) -> Figure:
    if split not in SPLITS:
        raise ConfigError(f"unknown split {split!r}.{did_you_mean(split, SPLITS)}")
    while True:
        figure = rng.choice(KINDS)(rng)
        for_test = sha256(repr(figure).encode()).digest()[0] < 256 * TEST_SHARE
        if for_test == (split == "test"):
            return figure


def _row(figure: Figure, split: str, index: int) -> TaskRow:
    record = {"images": [figure.picture], "problem": figure.question, "answer": str(figure.answer)}
    return with_tools(row_of(record, split=split, index=index, place=f"synthetic {split} row {index}"))
