"""Generated series of known structure, and series with their horizon cut off.

Every generated series is a function of its number, and a hash of the number decides whether it belongs to `train` or
`test`. Nothing here knows about episodes or models.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from agent_r1.errors import ConfigError, did_you_mean

SPLITS = ("train", "test")
TEST_SHARE = 0.2  # of all generated series
GAP_SHARE = 0.15  # of them have gaps
YEARS = (4, 9)  # of history, for monthly and quarterly series; yearly ones have ten times that

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Calendar:
    """How often there is a value, and how far to forecast."""

    name: str
    season: int  # values per year
    horizon: int


MONTHLY, QUARTERLY, YEARLY = Calendar("monthly", 12, 12), Calendar("quarterly", 4, 8), Calendar("yearly", 1, 6)
CALENDARS = (MONTHLY, QUARTERLY, YEARLY)


class Family(StrEnum):
    """The parts of a generated series, besides noise."""

    TREND = "trend"
    SEASONAL = "seasonal"
    TREND_SEASONAL = "trend_seasonal"
    LEVEL_SHIFT = "level_shift"
    RANDOM_WALK = "random_walk"
    INTERMITTENT = "intermittent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The known values, and those to forecast. Gaps are None; plain values, so that a row can hold them."""

    name: str  # of the series, the same for all windows of it
    source: str  # the family, or the data set
    calendar: Calendar
    history: list[float | None]
    future: list[float | None]


def generated(split: str, seed: int = 0) -> Iterator[Series]:
    """All generated series of a split, always in the same order."""
    if split not in SPLITS:
        raise ConfigError(f"unknown split {split!r}.{did_you_mean(split, SPLITS)}")
    rng = random.Random(f"series:{seed}:{split}")
    while True:
        number = rng.randrange(2**40)
        if is_for_test(number) == (split == "test"):
            yield draw(number)


def is_for_test(number: int) -> bool:
    return sha256(str(number).encode()).digest()[0] < 256 * TEST_SHARE


def draw(number: int) -> Series:
    """The series with this number."""
    rng = np.random.default_rng(number)
    family = list(Family)[rng.integers(len(Family))]
    seasonal = family in (Family.SEASONAL, Family.TREND_SEASONAL)
    calendar = CALENDARS[rng.integers(2 if seasonal else 3)]
    length = int(rng.integers(*YEARS) * max(calendar.season, 10 if calendar is YEARLY else 1)) + calendar.horizon
    shape = SHAPES[family](rng, length, calendar)
    scale = 10 ** rng.uniform(0.5, 2)
    values = [round(float(value), 1) for value in scale * shape]
    history: list[float | None] = list(values[: -calendar.horizon])
    if rng.random() < GAP_SHARE:
        for gap in rng.choice(np.arange(1, len(history) - 1), size=max(1, len(history) // 20), replace=False):
            history[gap] = None
    return Series(
        name=f"generated-{number}",
        source=family.value,
        calendar=calendar,
        history=history,
        future=list(values[-calendar.horizon :]),
    )


# Shapes have noise of size 1, so all other sizes are relative to the noise.


def _trend(rng: np.random.Generator, length: int, calendar: Calendar) -> Values:
    slope = rng.choice([-1, 1]) * rng.uniform(20, 60) / length
    values: Values = _level(rng) + slope * np.arange(length) + rng.normal(size=length)
    return values


def _seasonal(rng: np.random.Generator, length: int, calendar: Calendar) -> Values:
    return _level(rng) + _pattern(rng, length, calendar.season) + rng.normal(size=length)


def _trend_seasonal(rng: np.random.Generator, length: int, calendar: Calendar) -> Values:
    return _trend(rng, length, calendar) + _pattern(rng, length, calendar.season)


def _level_shift(rng: np.random.Generator, length: int, calendar: Calendar) -> Values:
    """One jump, in the second half of the history and at least half a horizon before its end."""
    at = rng.integers((length - calendar.horizon) // 2, length - calendar.horizon * 3 // 2)
    jump = rng.choice([-1, 1]) * rng.uniform(10, 25)
    values: Values = _level(rng) + jump * (np.arange(length) >= at) + rng.normal(size=length)
    return values


def _random_walk(rng: np.random.Generator, length: int, calendar: Calendar) -> Values:
    steps: Values = rng.normal(size=length)
    return 2 * _level(rng) + np.cumsum(steps)


def _intermittent(rng: np.random.Generator, length: int, calendar: Calendar) -> Values:
    """Mostly zeros, and whole numbers in between."""
    sold = rng.random(length) < rng.uniform(0.25, 0.45)
    sizes: Values = np.round(rng.gamma(4, 1, length) + 1)
    return sold * sizes


def _level(rng: np.random.Generator) -> float:
    return float(rng.uniform(20, 60))


def _pattern(rng: np.random.Generator, length: int, season: int) -> Values:
    """A smooth wave with some corners, repeated every year."""
    wave = np.sin(2 * np.pi * (np.arange(season) / season + rng.random()))
    year = rng.uniform(4, 10) * (wave + 0.4 * rng.normal(size=season))
    return np.resize(year - year.mean(), length)


SHAPES: dict[Family, Callable[[np.random.Generator, int, Calendar], Values]] = {
    Family.TREND: _trend,
    Family.SEASONAL: _seasonal,
    Family.TREND_SEASONAL: _trend_seasonal,
    Family.LEVEL_SHIFT: _level_shift,
    Family.RANDOM_WALK: _random_walk,
    Family.INTERMITTENT: _intermittent,
}
