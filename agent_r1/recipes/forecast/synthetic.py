"""Straight lines with a season and without noise, for the tiny preset: `linear` forecasts them without error."""

from __future__ import annotations

import random

from agent_r1.data.rows import Demo
from agent_r1.recipes.forecast.series import MONTHLY, Series
from agent_r1.recipes.forecast.task import as_row, call
from agent_r1.types import TaskRow

YEARS = 4  # of history
RIGHT = [call("describe"), call("decompose"), call("evaluate", model="linear"), call("submit", model="linear")]


def rows(split: str, count: int = 200) -> list[TaskRow]:
    rng = random.Random(f"lines:{split}")
    return [as_row(line(rng, f"{split}-{index}"), f"{split}-{index}") for index in range(count)]


def demos(count: int, seed: int) -> list[Demo]:
    rng = random.Random(f"demos:{seed}")
    return [(as_row(line(rng, f"demo-{seed}-{index}"), f"demo-{seed}-{index}"), RIGHT) for index in range(count)]


def line(rng: random.Random, name: str) -> Series:
    slope, season = rng.randint(1, 9), MONTHLY.season
    year = [float(rng.randint(0, 50)) for _ in range(season)]
    values = [100 + slope * time + year[time % season] for time in range(YEARS * season + MONTHLY.horizon)]
    return Series(
        name=name,
        source="line",
        calendar=MONTHLY,
        history=list(values[: -MONTHLY.horizon]),
        future=list(values[-MONTHLY.horizon :]),
    )
