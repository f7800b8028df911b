"""Findings of the tools about a series, as text for the policy, and errors of forecasts.

A history is a list of values in which None is a gap; gaps are filled by interpolation. If a series is too short or has
no values, a ToolError tells the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from agent_r1.recipes.forecast.models import BASELINE, Parts, TooShort, Values, decompose, forecast
from agent_r1.tools.base import ToolError

WORST = 10.0  # upper bound of relative and scaled errors
WEAK, STRONG = 0.3, 0.8  # strengths from which on these words are used
FADING = -0.25  # autocorrelation of changes below which shocks fade

History = Sequence[float | None]


def description(history: History) -> str:
    known = [value for value in history if value is not None]
    if not known:
        raise ToolError("the series has no values")
    zeros, gaps = 100 * known.count(0) / len(known), len(history) - len(known)
    size = f"mean {np.mean(known):.4g}, deviation {np.std(known):.4g}, last {known[-1]:.4g}"
    return f"{len(history)} values, {gaps} gaps, {zeros:.0f} % zeros, {size}"


def decomposition(history: History, season: int) -> str:
    parts = parts_of(history, season)
    if parts is None:
        return "the series is constant"
    direction = "" if parts.trend < WEAK else " up" if parts.rising else " down"
    shocks = "fade" if parts.persistence < FADING else "last"
    strengths = {f"trend {_word(parts.trend)}{direction}": parts.trend}
    strengths |= {f"season {_word(parts.season)}": parts.season, f"level shift {_word(parts.shift)}": parts.shift}
    strengths |= {f"shocks {shocks}": parts.persistence}
    return ", ".join(f"{words} ({strength:.2f})" for words, strength in strengths.items())


def parts_of(history: History, season: int) -> Parts | None:
    values = filled(history)
    if len(values) < (fewest := max(4, 2 * season)):
        raise ToolError(f"decompose needs at least {fewest} values, got {len(values)}")
    return decompose(values, season)


def evaluation(model: str, history: History, season: int, horizon: int) -> str:
    """The error of a model on the last values, fitted to those before them."""
    error, baseline = (holdout_error(name, history, season, horizon) for name in (model, BASELINE))
    if baseline == 0:
        return f"{model}: error {error:.4g} on the last {horizon} values; {BASELINE} has none"
    return f"{model}: {min(error / baseline, WORST):.2f} of the error of {BASELINE} on the last {horizon} values"


def holdout_error(model: str, history: History, season: int, horizon: int) -> float:
    start = len(history) - horizon
    if start < 1:
        raise ToolError(f"evaluate needs more than {horizon} values, got {len(history)}")
    error = mean_error(predict(model, history[:start], season, horizon), history[start:])
    if error is None:
        raise ToolError(f"the last {horizon} values are all gaps")
    return error


def predict(model: str, history: History, season: int, horizon: int) -> Values:
    """The forecast of a model that is fitted to the whole history."""
    try:
        return _predict(model, tuple(filled(history)), season, horizon)
    except TooShort as error:
        raise ToolError(str(error)) from error


@lru_cache(maxsize=8192)  # all attempts at a row ask for the same forecasts
def _predict(model: str, history: tuple[float, ...], season: int, horizon: int) -> Values:
    return forecast(model, np.array(history), season, horizon)


def filled(history: History) -> Values:
    """The history with its gaps filled by interpolation."""
    values = np.array([np.nan if value is None else value for value in history], dtype=np.float64)
    known, places = ~np.isnan(values), np.arange(len(values))
    if not known.any():
        raise ToolError("the series has no values")
    return np.interp(places, places[known], values[known])


def mean_error(predicted: Sequence[float] | Values, actual: History) -> float | None:
    """The mean absolute error over the values that are known; None if there are none."""
    errors = [abs(guess - value) for guess, value in zip(predicted, actual, strict=True) if value is not None]
    return float(np.mean(errors)) if errors else None


def seasonal_difference(history: History, season: int) -> float:
    """The mean absolute change from one year to the next; between neighbours, if there is less than a year."""
    values = filled(history)
    lag = season if len(values) > season else 1
    return float(np.abs(values[lag:] - values[:-lag]).mean()) if len(values) > lag else 0.0


def _word(strength: float) -> str:
    return "none" if strength < WEAK else "weak" if strength < STRONG else "strong"
