"""The forecasting models: by hand, against a slow reference, and against statsmodels (if it is installed)."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from agent_r1.recipes.forecast import models
from agent_r1.recipes.forecast.models import MODELS, TooShort, Values, decompose, forecast
from agent_r1.recipes.forecast.series import Family, generated

QUARTERS = np.array(
    [3.0, 1.0, 4.0, 2.0, 5.0, 3.0, 6.0, 4.0]
)  # two years of the pattern 3 1 4 2, two higher in the second


def wave(season: int, years: int, slope: float = 0.0, noise: float = 0.0) -> Values:
    times = np.arange(season * years)
    values: Values = 50 + slope * times + 10 * np.sin(2 * np.pi * times / season)
    return values + noise * np.random.default_rng(0).normal(size=len(times))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("naive", [4.0, 4.0, 4.0]),
        ("seasonal_naive", [5.0, 3.0, 6.0]),
        ("drift", [4 + 1 / 7, 4 + 2 / 7, 4 + 3 / 7]),  # from 3 to 4 in seven steps
        ("mean", [3.5, 3.5, 3.5]),  # 28 / 8
        ("linear", [7.0, 5.0, 8.0]),  # half a unit per quarter, and the pattern
    ],
)
def test_forecasts_by_hand(name: str, expected: list[float]) -> None:
    assert forecast(name, QUARTERS, 4, 3) == pytest.approx(expected)


def test_theta_by_hand() -> None:
    # The largest weight, 0.9, has the smallest errors on a line: levels 1, 1.9, 2.89. Half of the slope 1 is added for
    # each step ahead, starting with (1 - 0.1**3) / 0.9 = 1.11.
    predicted = forecast("theta", np.array([1.0, 2.0, 3.0]), 1, 2)
    assert predicted == pytest.approx([2.89 + 0.5 * 1.11, 2.89 + 0.5 * 2.11])


def test_a_seasonal_forecast_continues_the_season_wherever_the_history_ends() -> None:
    for years, left in ((4, 0), (3, 5)):
        history, future = np.split(wave(12, 6), [12 * years + left])
        for name in ("seasonal_naive", "linear", "theta", "holt_winters"):
            assert forecast(name, history, 12, 12) == pytest.approx(future[:12], abs=0.6), name


def test_holt_winters_is_the_best_of_its_grid_by_a_slow_reference() -> None:
    history = wave(4, 6, slope=0.7, noise=2.0)
    runs = [slow_holt_winters(history, 4, 8, *weights) for weights in models.WINTERS_GRID]
    assert forecast("holt_winters", history, 4, 8) == pytest.approx(min(runs, key=lambda run: run[0])[1])


def start_of(history: Values, season: int) -> tuple[float, float, list[float]]:
    """Level before the first value, trend and offsets: from the means of two years."""
    trend = (history[season : 2 * season].mean() - history[:season].mean()) / season
    middle = history[:season].mean()
    offsets = [history[phase] - middle - trend * (phase - (season - 1) / 2) for phase in range(season)]
    return middle - trend * (season + 1) / 2, trend, offsets


def slow_holt_winters(
    history: Values, season: int, horizon: int, alpha: float, beta: float, gamma: float
) -> tuple[float, list[float]]:
    """Squared error and forecast; Hyndman and Athanasopoulos, Forecasting, section 8.3, additive and damped."""
    level, trend, offsets = start_of(history, season)
    phi, squares = models.DAMPING, 0.0
    for time, value in enumerate(history):
        expected = level + phi * trend
        squares += (value - expected - offsets[time]) ** 2
        new = alpha * (value - offsets[time]) + (1 - alpha) * expected
        offsets.append(gamma * (value - expected) + (1 - gamma) * offsets[time])
        level, trend = new, beta * (new - level) + (1 - beta) * phi * trend
    damped = [sum(phi**step for step in range(1, ahead + 1)) for ahead in range(1, horizon + 1)]
    last = offsets[-season:]
    return squares, [level + damped[ahead] * trend + last[ahead % season] for ahead in range(horizon)]


def test_smoothing_and_holt_winters_are_those_of_statsmodels(monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("statsmodels.tsa.holtwinters")
    history = wave(4, 6, slope=0.7, noise=2.0)
    for weight in models.LEVEL_GRID:
        monkeypatch.setattr(models, "LEVEL_GRID", (weight,))
        theirs = library.SimpleExpSmoothing(history, initialization_method="known", initial_level=history[0])
        expected = theirs.fit(smoothing_level=weight, optimized=False).forecast(3)
        assert forecast("smoothing", history, 4, 3) == pytest.approx(expected)
    level, trend, offsets = start_of(history, 4)
    for alpha, beta, gamma in models.WINTERS_GRID[::5]:
        monkeypatch.setattr(models, "WINTERS_GRID", ((alpha, beta, gamma),))
        theirs = library.ExponentialSmoothing(
            history,
            trend="add",
            damped_trend=True,
            seasonal="add",
            seasonal_periods=4,
            initialization_method="known",
            initial_level=level,
            initial_trend=trend,
            initial_seasonal=offsets,
        )
        weights = {"smoothing_level": alpha, "smoothing_trend": beta, "smoothing_seasonal": gamma}
        expected = theirs.fit(**weights, damping_trend=models.DAMPING, optimized=False).forecast(8)
        # Their forecast of the last value's season uses the offset from before that value.
        kept = [0, 1, 2, 4, 5, 6]
        assert forecast("holt_winters", history, 4, 8)[kept] == pytest.approx(expected[kept])


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("season", [1, 4, 12])
def test_the_shortest_history_is_enough_and_one_value_less_is_refused(name: str, season: int) -> None:
    fewest = MODELS[name].fewest(season)
    predicted = forecast(name, np.arange(1.0, fewest + 1), season, 6)
    assert predicted.shape == (6,)
    assert np.isfinite(predicted).all()
    with pytest.raises(TooShort, match=f"{name} needs at least {fewest} values, got {fewest - 1}"):
        forecast(name, np.arange(1.0, fewest), season, 6)


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("season", [1, 4, 12])
def test_a_constant_series_stays_constant(name: str, season: int) -> None:
    assert forecast(name, np.full(30, 7.5), season, 6) == pytest.approx([7.5] * 6)


def test_a_decomposition_finds_what_a_series_consists_of() -> None:
    assert decompose(np.full(24, 3.0), 12) is None
    seasonal = decompose(wave(12, 6, noise=1.0), 12)
    assert seasonal is not None
    assert seasonal.season > 0.9
    assert seasonal.trend < 0.3
    rising = decompose(wave(1, 60, slope=-0.5, noise=1.0), 1)
    assert rising is not None
    assert (rising.trend > 0.95, rising.rising, rising.season) == (True, False, 0.0)
    assert rising.persistence == pytest.approx(-0.5, abs=0.2)  # noise around a line: its changes alternate
    steps = np.random.default_rng(1).normal(size=200)
    walk = decompose(np.cumsum(steps), 1)
    assert walk is not None
    assert walk.persistence == pytest.approx(0, abs=0.15)


def test_a_change_of_level_explains_more_than_a_line() -> None:
    parts = decompose(np.repeat([10.0, 20.0], 20), 1)
    assert parts is not None
    assert parts.shift == pytest.approx(1.0)
    # A line through n / 2 zeros and n / 2 ones explains 3 n^2 / (4 (n^2 - 1)) of the variance; n = 40
    assert parts.trend == pytest.approx(0.75 * 1600 / 1599)


def test_the_best_model_depends_on_the_family() -> None:
    errors: dict[str, dict[str, list[float]]] = {family: {name: [] for name in MODELS} for family in Family}
    for series in islice(generated("train"), 200):
        if None not in series.history:
            history, future = np.array(series.history, dtype=float), np.array(series.future)
            size = np.abs(np.diff(history)).mean()
            for name in MODELS:
                predicted = forecast(name, history, series.calendar.season, series.calendar.horizon)
                errors[series.source][name].append(float(np.abs(predicted - future).mean() / size))
    best = {family: min(by_name, key=lambda name: np.mean(by_name[name])) for family, by_name in errors.items()}
    assert best[Family.TREND] == best[Family.TREND_SEASONAL] == "linear"
    assert best[Family.SEASONAL] in ("linear", "theta")
    assert best[Family.RANDOM_WALK] in ("naive", "smoothing", "theta")
    assert best[Family.LEVEL_SHIFT] in ("naive", "smoothing")
