"""Forecast a series with tools: look at it, try models on its last values, submit a forecast of the next ones.

    user  Forecast the next 12 values of a monthly series.
    agent <tool_call>{"name": "decompose", "arguments": {}}</tool_call>
    tool  trend strong up (0.97), season strong (0.88), level shift weak (0.74), shocks fade (-0.49)
    agent <tool_call>{"name": "evaluate", "arguments": {"model": "linear"}}</tool_call>
    tool  linear: 0.31 of the error of seasonal_naive on the last 12 values
    agent <tool_call>{"name": "submit", "arguments": {"model": "linear"}}</tool_call>

The values to forecast are the row's ground truth: only the reward sees them. The demonstrations are deliberately
imperfect: most submit one fixed model, and only one of four chooses by what the tools say. Reinforcement learning finds
out that it pays to inspect the series, and which model suits which series.
"""

from __future__ import annotations

import random
from dataclasses import replace
from enum import StrEnum
from itertools import islice
from typing import Any, Literal

import numpy as np

from agent_r1.data.rows import Demo
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.errors import ConfigError, DataError, did_you_mean
from agent_r1.recipes.forecast import analysis, bundled
from agent_r1.recipes.forecast.analysis import WORST
from agent_r1.recipes.forecast.models import BASELINE, MODELS
from agent_r1.recipes.forecast.series import SPLITS, Series, generated
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.tools.base import FromRow, ToolError, ToolResult, tool
from agent_r1.types import Action, TaskRow, Trajectory, Transition

DIGITS = 4  # of forecasts, after the point
LARGEST = 1e12  # value of a series; its square must not overflow

ModelName = Literal["naive", "seasonal_naive", "drift", "mean", "linear", "smoothing", "theta", "holt_winters"]


class Forecasting(ToolEnv):
    """An episode ends with the first response that submits a forecast."""

    async def step(self, action: Action) -> Transition:
        transition = await super().step(action)
        if any("forecast" in call.info for call in transition.calls):
            return replace(transition, observation=None, terminated=True)
        return transition


# The policy's tools. Async, because they take milliseconds: a sync tool would run in a thread per call.


@tool(parallel=True)
async def describe(series: FromRow[dict[str, Any]]) -> str:
    """Length, gaps, zeros and size of the series."""
    return analysis.description(series["history"])


@tool(parallel=True)
async def decompose(series: FromRow[dict[str, Any]]) -> str:
    """Trend, season, level shift, and whether shocks last or fade."""
    return analysis.decomposition(series["history"], series["season"])


@tool(parallel=True)
async def fit(model: ModelName, series: FromRow[dict[str, Any]]) -> str:
    """Forecast with a model."""
    return f"{model}: {' '.join(f'{value:.4g}' for value in analysis.predict(model, **series))}"


@tool(parallel=True)
async def evaluate(model: ModelName, series: FromRow[dict[str, Any]]) -> str:
    """Error of a model on the last known values, relative to seasonal_naive."""
    return analysis.evaluation(model, **series)


@tool
async def submit(
    series: FromRow[dict[str, Any]], model: ModelName | None = None, values: list[float] | None = None
) -> ToolResult:
    """Submit the forecast of a model, or your own values. Ends the task."""
    if (model is None) == (values is None):
        raise ToolError("submit takes either a model or values")
    predicted = list(analysis.predict(model, **series)) if model is not None else values or []
    if len(predicted) != series["horizon"]:
        raise ToolError(f"submit needs {series['horizon']} values, got {len(predicted)}")
    if not np.isfinite(predicted).all():
        raise ToolError("submit needs finite numbers")
    return ToolResult("submitted", info={"forecast": [round(float(value), DIGITS) for value in predicted]})


TOOLS = [describe, decompose, fit, evaluate, submit]


# The reward


def reward(row: TaskRow, trajectory: Trajectory) -> dict[str, float]:
    """Judge the last forecast that was submitted. looks: calls before the submission."""
    calls = [call for step in trajectory.steps for call in step.calls]
    submitted = [call.info["forecast"] for call in calls if "forecast" in call.info]
    parts = judge(row, submitted[-1] if submitted else None)
    return {**parts, "submitted": float(bool(submitted)), "looks": float(len(calls) - len(submitted))}


def judge(row: TaskRow, predicted: list[float] | None) -> dict[str, float]:
    """Pay 0.5 for a forecast as good as the seasonal naive one, 1 for a perfect one, and 0 for none.

    mase: mean absolute error over the horizon, divided by the mean absolute seasonal difference of the history (Hyndman
    and Koehler, 2006), at most `WORST`, and `WORST` without a forecast. baseline_mase: the same of the seasonal naive
    forecast.
    """
    known = row.env_kwargs["tools_kwargs"]["series"]
    history, season = known["history"], known["season"]
    baseline = analysis.mean_error(analysis.predict(_baseline(history, season), **known), row.ground_truth)
    error = None if predicted is None else analysis.mean_error(predicted, row.ground_truth)
    assert baseline is not None  # `as_row` checks it
    scale = analysis.seasonal_difference(history, season)
    return {
        "reward": 0.0 if error is None else score(error, baseline),
        "mase": WORST if error is None else scaled(error, scale),
        "baseline_mase": scaled(baseline, scale),
    }


def score(error: float, baseline: float) -> float:
    """1 for no error, 0.5 for the baseline's error; with twice that, a third."""
    return 0.5 if error == baseline else baseline / (error + baseline)


def scaled(error: float, scale: float) -> float:
    if scale == 0:  # the history repeats exactly
        return 0.0 if error == 0 else WORST
    return min(error / scale, WORST)


def _baseline(history: list[float | None], season: int) -> str:
    return BASELINE if len(history) >= season else "naive"


# Rows and demonstrations


def rows(split: str, count: int = 2000, seed: int = 0) -> list[TaskRow]:
    """Return at most `count` rows of a split; a smaller count gives the first of the same rows.

    `train` and `test` have generated series, `real_train` and `real_test` windows of bundled data sets.
    """
    splits = (*SPLITS, *bundled.SPLITS)
    if split not in splits:
        raise ConfigError(f"unknown split {split!r}.{did_you_mean(split, splits)}")
    found = bundled.windows(split) if split in bundled.SPLITS else generated(split, seed)
    return [as_row(series, f"{split}-{seed}-{index}") for index, series in enumerate(islice(found, count))]


def as_row(series: Series, row_id: str) -> TaskRow:
    calendar = series.calendar
    known: dict[str, Any] = {
        "history": list(series.history), "season": calendar.season, "horizon": calendar.horizon
    }  # fmt: skip
    for name, values in (("history", series.history), ("future", series.future)):
        sizes = [abs(value) for value in values if value is not None]
        if not sizes:
            raise DataError(f"the {name} of series {series.name!r} has no values")
        if not max(sizes) <= LARGEST or not np.isfinite(sizes).all():
            raise DataError(f"the {name} of series {series.name!r} has values beyond {LARGEST:g}; rescale it")
    if len(series.future) != calendar.horizon:
        raise DataError(f"series {series.name!r} needs {calendar.horizon} future values, got {len(series.future)}")
    return TaskRow(
        prompt=[
            {"role": "user", "content": f"Forecast the next {calendar.horizon} values of a {calendar.name} series."}
        ],
        row_id=row_id,
        reward_model={"style": "rule", "ground_truth": list(series.future)},
        env_kwargs={"tools_kwargs": {"series": known}},
        data_source=f"forecast/{series.source}",
        extra_info={"series": series.name},
    )


class Habit(StrEnum):
    """How a demonstration chooses its model."""

    FIXED = "fixed"  # always the same one
    RANDOM = "random"
    STRUCTURE = "structure"  # by a rule of thumb, from the decomposition
    TRIAL = "trial"  # evaluates two models and submits the better one


# Three of four demonstrations choose without regard to what they have seen, so a greedy imitator does too.
HABITS = {Habit.FIXED: 0.55, Habit.RANDOM: 0.2, Habit.STRUCTURE: 0.15, Habit.TRIAL: 0.1}
LOOKS: dict[tuple[str, ...], float] = {  # tools that the first two habits call before the submission, and how often
    (): 0.6,
    ("describe",): 0.04,
    ("decompose",): 0.16,
    ("describe", "decompose"): 0.1,
    ("evaluate",): 0.06,
    ("fit",): 0.04,
}


def demos(count: int, seed: int) -> list[Demo]:
    """Return rows of the training split, each with the responses of an imperfect demonstration."""
    rng = random.Random(f"demos:{seed}")
    shown = []
    for index, series in enumerate(islice(generated("train", seed + 1), count)):  # other series than those of the rows
        [habit] = rng.choices(list(HABITS), weights=list(HABITS.values()))
        row = as_row(series, f"demo-{seed}-{index}")
        shown.append((row, demonstrate(row.env_kwargs["tools_kwargs"]["series"], habit, rng)))
    return shown


def demonstrate(series: dict[str, Any], habit: Habit, rng: random.Random) -> list[str]:
    """Return the responses of a demonstration."""
    if habit is Habit.STRUCTURE:
        return [call("decompose"), call("submit", model=rule_of_thumb(series))]
    if habit is Habit.TRIAL:
        tried = rng.sample(list(MODELS), 2)
        best = min(tried, key=lambda name: analysis.holdout_error(name, **series))
        return [*(call("evaluate", model=name) for name in tried), call("submit", model=best)]
    model = BASELINE if habit is Habit.FIXED else rng.choice(list(MODELS))
    [looks] = rng.choices(list(LOOKS), weights=list(LOOKS.values()))
    tried_by = {"evaluate": rng.choice(list(MODELS)), "fit": model}
    called = [call(name, **({"model": tried_by[name]} if name in tried_by else {})) for name in looks]
    return [*called, call("submit", model=model)]


def rule_of_thumb(series: dict[str, Any]) -> str:
    """The model that the decomposition suggests."""
    parts = analysis.parts_of(series["history"], series["season"])
    if parts is None:
        return "naive"
    if parts.shift > max(parts.trend, analysis.STRONG):
        return "smoothing"
    if parts.season > analysis.STRONG:
        return "linear"
    if parts.persistence > analysis.FADING:
        return "naive"
    return "linear" if parts.trend > analysis.STRONG else "mean"


def call(tool_name: str, **arguments: str) -> str:
    return FORMATS["hermes"].write_call(tool_name, arguments)
