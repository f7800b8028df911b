"""Forecasting models by name: small, deterministic, and fitted in milliseconds.

Each takes the history without gaps, the season (values per year, 1 if there is none) and the horizon, and returns the
next values. Smoothing parameters are chosen from a grid by the squared error of one-step forecasts. Nothing here knows
about tools or rewards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from agent_r1.errors import DataError

Values = npt.NDArray[np.float64]

LEVEL_GRID = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
WINTERS_GRID = tuple(product((0.1, 0.3, 0.6), (0.02, 0.1, 0.3), (0.05, 0.2, 0.5)))  # of level, trend and season
DAMPING = 0.98  # of the Holt-Winters trend, per step
SEASONAL_STRENGTH = 0.3  # Theta removes a season that is stronger


class TooShort(DataError):
    """The history is too short for the model."""


@dataclass(frozen=True, slots=True)
class Model:
    """One way to forecast."""

    predict: Callable[[Values, int, int], Values]  # (history, season, horizon)
    fewest: Callable[[int], int]  # values that it needs, by season


def forecast(name: str, history: Values, season: int, horizon: int) -> Values:
    """The next `horizon` values by the model with this name. Raises TooShort."""
    model = MODELS[name]
    if len(history) < (fewest := model.fewest(season)):
        raise TooShort(f"{name} needs at least {fewest} values, got {len(history)}")
    return model.predict(history, season, horizon)


def naive(history: Values, season: int, horizon: int) -> Values:
    """The last value."""
    return np.full(horizon, history[-1])


def seasonal_naive(history: Values, season: int, horizon: int) -> Values:
    """The value of the same season a year before."""
    return np.resize(history[-season:], horizon)


def drift(history: Values, season: int, horizon: int) -> Values:
    """The last value and the mean change so far."""
    slope: float = (history[-1] - history[0]) / (len(history) - 1)
    predicted: Values = history[-1] + slope * _ahead(horizon)
    return predicted


def mean(history: Values, season: int, horizon: int) -> Values:
    """The mean of all values."""
    return np.full(horizon, history.mean())


def linear(history: Values, season: int, horizon: int) -> Values:
    """A straight line and one offset per season, by least squares."""
    seen, coming = np.arange(len(history)), len(history) + np.arange(horizon)
    weights = np.linalg.lstsq(_line_and_season(seen, season), history, rcond=None)[0]
    predicted: Values = _line_and_season(coming, season) @ weights
    return predicted


def smoothing(history: Values, season: int, horizon: int) -> Values:
    """Simple exponential smoothing: a level that follows the series."""
    return np.full(horizon, _smooth(history)[0])


def theta(history: Values, season: int, horizon: int) -> Values:
    """The Theta method (Assimakopoulos and Nikolopoulos, 2000): smoothing plus half of the linear trend."""
    seasonal = np.zeros(season)
    if season > 1 and len(history) >= 2 * season:
        pattern, strength = _season(history, season)
        if strength > SEASONAL_STRENGTH:
            seasonal = pattern
    adjusted = history - np.resize(seasonal, len(history))
    level, weight = _smooth(adjusted)
    slope = np.polyfit(np.arange(len(adjusted)), adjusted, 1)[0]
    # Hyndman and Billah (2003), equation 7: the level lags behind the line, by less the longer the series.
    lead = _ahead(horizon) - 1 + (1 - (1 - weight) ** len(adjusted)) / weight
    coming = len(history) + np.arange(horizon)
    predicted: Values = level + slope / 2 * lead + seasonal[coming % season]
    return predicted


def holt_winters(history: Values, season: int, horizon: int) -> Values:
    """Additive Holt-Winters with a damped trend; without a season, Holt's method."""
    level_weight, trend_weight, season_weight = np.array(WINTERS_GRID).T
    if season == 1:
        season_weight = np.zeros_like(season_weight)
    size = len(level_weight)
    start = history[:season].mean()
    trend = np.full(size, (history[season : 2 * season].mean() - start) / season)
    level = np.full(size, start) - trend * (season + 1) / 2  # one step before the first value
    offsets = np.tile((history[:season] - start)[:, None], (1, size))
    offsets -= trend * (np.arange(season) - (season - 1) / 2)[:, None]
    if season == 1:
        offsets[:] = 0
    squares = np.zeros(size)
    for time, value in enumerate(history):
        offset, rising = offsets[time % season], DAMPING * trend
        squares += (value - level - rising - offset) ** 2
        before = level
        level = level_weight * (value - offset) + (1 - level_weight) * (level + rising)
        trend = trend_weight * (level - before) + (1 - trend_weight) * rising
        offsets[time % season] = season_weight * (value - before - rising) + (1 - season_weight) * offset
    best = int(squares.argmin())
    coming = (len(history) + np.arange(horizon)) % season
    predicted: Values = level[best] + trend[best] * np.cumsum(DAMPING ** _ahead(horizon)) + offsets[coming, best]
    return predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a series; strengths are shares of variance, from 0 to 1."""

    pattern: Values  # offset of each season, with mean 0
    season: float  # share of the variance around the moving average that the pattern explains
    trend: float  # share of the seasonally adjusted variance that a line explains
    rising: bool
    shift: float  # share that one change of level explains
    persistence: float  # autocorrelation of changes: about -0.5 for noise around a line, 0 for a random walk


def decompose(history: Values, season: int) -> Parts | None:
    """Classical additive decomposition; None for a constant series. Needs two seasons and four values."""
    if np.ptp(history) == 0:
        return None
    pattern, strength = _season(history, season)
    adjusted = history - np.resize(pattern, len(history))
    times = np.arange(len(history))
    slope, start = np.polyfit(times, adjusted, 1)
    return Parts(
        pattern=pattern,
        season=strength,
        trend=_explained(adjusted, start + slope * times),
        rising=bool(slope > 0),
        shift=max(_explained(adjusted, _two_levels(adjusted, at)) for at in range(2, len(adjusted) - 1)),
        persistence=_autocorrelation(np.diff(adjusted)),
    )


def _season(history: Values, season: int) -> tuple[Values, float]:
    """The pattern and its strength."""
    if season == 1:
        return np.zeros(1), 0.0
    detrended = history - _moving_average(history, season)
    pattern = np.array([np.nanmean(detrended[phase::season]) for phase in range(season)])
    pattern -= pattern.mean()
    inside = ~np.isnan(detrended)
    return pattern, _explained(detrended[inside], np.resize(pattern, len(history))[inside])


def _two_levels(values: Values, at: int) -> Values:
    levels: Values = np.where(np.arange(len(values)) < at, values[:at].mean(), values[at:].mean())
    return levels


def _explained(values: Values, by: Values) -> float:
    """Return the share of the variance of `values` that `by` explains."""
    variance = values.var()
    return float(max(0.0, 1 - (values - by).var() / variance)) if variance > 0 else 0.0


def _autocorrelation(values: Values) -> float:
    """Return the autocorrelation at a lag of one."""
    centred = values - values.mean()
    total = float((centred**2).sum())
    return float((centred[1:] * centred[:-1]).sum()) / total if total > 0 else 0.0


def _moving_average(history: Values, season: int) -> Values:
    """The centred average over a year; NaN where the year is not complete."""
    weights = np.ones(season) if season % 2 else np.concatenate([[0.5], np.ones(season - 1), [0.5]])
    average = np.full(len(history), np.nan)
    half = len(weights) // 2
    average[half : len(history) - half] = np.convolve(history, weights / season, mode="valid")
    return average


def _smooth(history: Values) -> tuple[float, float]:
    """The last level, and its weight."""
    weights = np.array(LEVEL_GRID)
    level, squares = np.full(len(weights), history[0]), np.zeros(len(weights))
    for value in history[1:]:
        squares += (value - level) ** 2
        level = level + weights * (value - level)
    best = int(squares.argmin())
    return float(level[best]), float(weights[best])


def _line_and_season(times: npt.NDArray[np.int_], season: int) -> Values:
    """The columns of a regression: time, and an indicator per season. Without seasons, that is a column of ones."""
    columns: Values = np.column_stack([times, times[:, None] % season == np.arange(season)]).astype(np.float64)
    return columns


def _ahead(horizon: int) -> Values:
    return np.arange(1, horizon + 1, dtype=np.float64)


MODELS = {
    "naive": Model(naive, lambda season: 1),
    "seasonal_naive": Model(seasonal_naive, lambda season: season),
    "drift": Model(drift, lambda season: 2),
    "mean": Model(mean, lambda season: 1),
    "linear": Model(linear, lambda season: season + 2),
    "smoothing": Model(smoothing, lambda season: 2),
    "theta": Model(theta, lambda season: 3),
    "holt_winters": Model(holt_winters, lambda season: 2 * season),
}
BASELINE = "seasonal_naive"
