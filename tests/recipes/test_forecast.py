"""The forecasting task: the future stays hidden, every awkward series gets an answer, the reward is right."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from agent_r1.envs.check import check_env, check_tool
from agent_r1.errors import ConfigError, DataError
from agent_r1.flows.replay import replay
from agent_r1.recipes.forecast import analysis, synthetic, task
from agent_r1.recipes.forecast.models import BASELINE, MODELS
from agent_r1.recipes.forecast.series import (
    CALENDARS,
    MONTHLY,
    QUARTERLY,
    YEARLY,
    Calendar,
    Family,
    Series,
    generated,
    is_for_test,
)
from agent_r1.recipes.forecast.task import Forecasting, Habit, call
from agent_r1.types import StopReason, TaskRow, Trajectory

EVERY_LOOK = [
    call("describe"),
    call("decompose"),
    *(call(name, model=model) for name in ("fit", "evaluate") for model in MODELS),
]


def row_of(
    history: list[float | None], future: list[float | None] | None = None, calendar: Calendar = QUARTERLY
) -> TaskRow:
    coming: list[float | None] = [1.0] * calendar.horizon if future is None else future
    return task.as_row(Series(name="s", source="mine", calendar=calendar, history=history, future=coming), "r")


def play(row: TaskRow, texts: list[str]) -> Trajectory:
    return asyncio.run(replay(Forecasting, row, texts, tools=task.TOOLS))


def results(trajectory: Trajectory) -> list[str]:
    return [record.result for step in trajectory.steps for record in step.calls]


def rising(count: int) -> list[float | None]:
    return [float(10 + 3 * time + (time % 4) ** 2) for time in range(count)]


# The future is hidden


def test_no_observation_depends_on_the_values_to_forecast() -> None:
    for series in islice(generated("test"), 12):
        marked = [float(70_310_529 + 1_000 * index) for index in range(series.calendar.horizon)]
        row = task.as_row(series, "r")
        canary = task.as_row(replace(series, future=list(marked)), "r")
        submitted = [*EVERY_LOOK, call("submit", model="theta")]
        assert row.prompt == canary.prompt
        assert row.env_kwargs == canary.env_kwargs
        seen, seen_with_canary = results(play(row, submitted)), results(play(canary, submitted))
        assert seen == seen_with_canary
        assert len(seen) == len(submitted)
        assert not any(f"{value:.0f}" in text for value in marked for text in seen)


def test_the_environment_keeps_its_contract() -> None:
    for series in islice(generated("test"), 4):
        row = task.as_row(series, "r")
        asyncio.run(check_env(Forecasting, tooled(row), [*EVERY_LOOK, call("submit", model="linear")]))
        asyncio.run(check_env(Forecasting, tooled(row), ["".join(EVERY_LOOK), "no forecast today"]))


def tooled(row: TaskRow) -> TaskRow:
    return replace(row, env_kwargs={**row.env_kwargs, "tools": task.TOOLS})


def test_the_tools_keep_their_contract() -> None:
    series = {"history": rising(24), "season": 4, "horizon": 8}
    for tool, arguments in (
        (task.describe, {}),
        (task.decompose, {}),
        (task.fit, {"model": "drift"}),
        (task.evaluate, {"model": "linear"}),
        (task.submit, {"model": "naive"}),
        (task.submit, {"values": [1.0] * 8}),
    ):
        asyncio.run(check_tool(tool, arguments, {"series": series}, deterministic=True))
    assert set(task.ModelName.__args__) == set(MODELS)  # type: ignore[attr-defined]


# What the tools say


def test_results_by_hand() -> None:
    row = row_of(rising(24))
    looks = [call("decompose"), call("fit", model="linear"), call("evaluate", model="linear")]
    decomposed, fitted, evaluated = results(play(row, [*looks, "done"]))
    assert decomposed.startswith("trend strong up (")
    assert fitted == "linear: 82 86 92 100 94 98 104 112"
    # A line with a season has no error here; a value from a year ago is 12 too low, and one from two years ago 24.
    assert evaluated == "linear: 0.00 of the error of seasonal_naive on the last 8 values"


def test_twice_the_error_of_the_baseline_is_shown_as_2() -> None:
    history = [1.0] * 4 + [5.0, 5.0, 5.0, 5.0] + [6.0] * 8
    # On the last 8 values seasonal_naive forecasts 5 (error 1); the mean of 1 and 5 is 3 (error 3).
    [evaluated] = results(play(row_of([*history]), [call("evaluate", model="mean"), "done"]))
    assert evaluated.startswith("mean: 3.00 of the error")


@pytest.mark.parametrize("calendar", CALENDARS, ids=lambda calendar: calendar.name)
@pytest.mark.parametrize(
    "history",
    [
        [5.0],
        [5.0, None, 7.0],
        [5.0] * 40,
        [0.0] * 40,
        [None] * 20 + rising(20),
        rising(20) + [None] * 20,
        [1e12, -1e12] * 20,
        [1e-300] * 39 + [0.0],
    ],
    ids=["one value", "short with a gap", "constant", "zeros", "late", "ended", "huge", "small"],
)
def test_awkward_series_get_an_answer_to_every_call_and_a_forecast(
    history: list[float | None], calendar: Calendar
) -> None:
    row = row_of(history, calendar=calendar)
    trajectory = play(row, [*EVERY_LOOK, call("submit", model="naive")])
    assert trajectory.stop is StopReason.ANSWERED
    records = [record for step in trajectory.steps for record in step.calls]
    assert len(records) == len(EVERY_LOOK) + 1
    assert {record.fault for record in records} <= {None, "failed"}
    assert all("nan" not in record.result and "inf" not in record.result for record in records)
    parts = task.reward(row, trajectory)
    assert parts["submitted"] == 1
    assert 0 <= parts["reward"] <= 1
    assert 0 <= parts["mase"] <= analysis.WORST


@pytest.mark.parametrize(
    ("history", "text", "said"),
    [
        ([5.0, 6.0], call("decompose"), "decompose needs at least 8 values, got 2"),
        ([5.0, 6.0], call("evaluate", model="naive"), "evaluate needs more than 8 values, got 2"),
        (rising(10), call("evaluate", model=BASELINE), "seasonal_naive needs at least 4 values, got 2"),
        ([5.0, 6.0], call("fit", model="linear"), "linear needs at least 6 values, got 2"),
        ([5.0] * 20, call("decompose"), "the series is constant"),
        ([5.0] * 20, call("evaluate", model="drift"), "drift: error 0 on the last 8 values; seasonal_naive has none"),
        (rising(12) + [None] * 8, call("evaluate", model="mean"), "the last 8 values are all gaps"),
        ([4.0, None, 0.0, 8.0], call("describe"), "4 values, 1 gaps, 33 % zeros, mean 4, deviation 3.266, last 8"),
    ],
)
def test_what_a_tool_cannot_do_it_says(history: list[float | None], text: str, said: str) -> None:
    [answer] = results(play(row_of(history), [text, "done"]))
    assert said in answer


def test_gaps_are_filled_by_interpolation() -> None:
    assert analysis.filled([None, 2.0, None, None, 8.0, None]).tolist() == [2, 2, 4, 6, 8, 8]


# Submissions and the reward


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "either a model or values"),
        ({"model": "naive", "values": [1.0] * 8}, "either a model or values"),
        ({"values": [1.0] * 7}, "needs 8 values, got 7"),
        ({"values": []}, "needs 8 values, got 0"),
        ({"values": [1.0] * 7 + [float("inf")]}, "finite"),
        ({"model": "arima"}, "seasonal_naive"),
    ],
)
def test_a_bad_submission_is_answered_and_the_episode_goes_on(arguments: dict[str, Any], said: str) -> None:
    bad = f'<tool_call>{{"name": "submit", "arguments": {json.dumps(arguments)}}}</tool_call>'
    trajectory = play(row_of(rising(24)), [bad, call("submit", model="naive")])
    assert said in results(trajectory)[0] or "Infinity" in bad
    assert [len(step.calls) for step in trajectory.steps] == [1, 1]
    assert task.reward(row_of(rising(24)), trajectory)["submitted"] == 1


def test_the_reward_by_hand() -> None:
    future: list[float | None] = [3.0, 7.0, 3.0, 7.0, 3.0, None, 3.0, 7.0]
    row = row_of([1.0, 5.0, 2.0, 6.0, 2.0, 6.0, 2.0, 6.0], future)
    # One year ahead, the history differs by 1, 1, 0, 0: the scale is 0.5. The seasonal naive forecast 2 6 2 6 is 1 off.
    assert task.reward(row, submitted(row, [3.0, 7.0] * 4)) == {
        "reward": 1.0, "mase": 0.0, "baseline_mase": 2.0, "submitted": 1.0, "looks": 0.0
    }  # fmt: skip
    assert task.reward(row, play(row, [call("describe"), call("submit", model=BASELINE)])) == {
        "reward": 0.5, "mase": 2.0, "baseline_mase": 2.0, "submitted": 1.0, "looks": 1.0
    }  # fmt: skip
    far = task.reward(row, submitted(row, [5.0, 9.0] * 4))  # 2 off: 1 / (1 + 2)
    assert far["reward"] == pytest.approx(1 / 3)
    assert far["mase"] == 4.0
    farther = task.reward(row, submitted(row, [1e9] * 8))
    assert 0 < farther["reward"] < 1e-6
    assert farther["mase"] == analysis.WORST


def submitted(row: TaskRow, values: list[float]) -> Trajectory:
    text = f'<tool_call>{{"name": "submit", "arguments": {{"values": {json.dumps(values)}}}}}</tool_call>'
    return play(row, [text])


def test_no_forecast_earns_nothing() -> None:
    row = row_of(rising(24))
    for texts in (["I do not know"], [call("fit", model="linear"), "linear"], [call("submit"), "sorry"]):
        parts = task.reward(row, play(row, texts))
        assert (parts["reward"], parts["mase"], parts["submitted"]) == (0.0, analysis.WORST, 0.0)


def test_a_perfect_baseline_cannot_be_beaten_and_is_worth_a_half() -> None:
    row = row_of([5.0] * 12, [5.0] * 8)
    assert task.reward(row, submitted(row, [5.0] * 8))["reward"] == 0.5
    worse = task.reward(row, submitted(row, [6.0] * 8))
    assert (worse["reward"], worse["mase"]) == (0.0, analysis.WORST)


def test_the_episode_ends_with_the_submission() -> None:
    row = row_of(rising(24))
    trajectory = play(row, [call("describe") + call("submit", model="drift")])
    assert trajectory.stop is StopReason.ANSWERED
    assert task.reward(row, trajectory)["looks"] == 1


# Rows and demonstrations


def test_rows_are_reproducible_plain_and_of_all_families() -> None:
    assert task.rows("test", 5) == task.rows("test", 8)[:5]
    assert task.rows("test", 5, seed=1) != task.rows("test", 5)
    rows = task.rows("train", 150)
    for row in rows[:5]:
        assert json.loads(json.dumps([row.env_kwargs, row.reward_model])) == [row.env_kwargs, row.reward_model]
    assert {row.data_source for row in rows} == {f"forecast/{family}" for family in Family}
    histories = [row.env_kwargs["tools_kwargs"]["series"]["history"] for row in rows]
    assert 0.05 < np.mean([None in history for history in histories]) < 0.3
    with pytest.raises(ConfigError, match=r"'tset'.*'test'"):
        task.rows("tset", 1)


def test_no_series_is_in_two_splits() -> None:
    names = {split: {row.extra_info["series"] for row in task.rows(split, 300)} for split in ("train", "test")}
    names["demos"] = {row.extra_info["series"] for row, _ in task.demos(300, seed=0)}
    assert [len(found) for found in names.values()] == [300, 300, 300]
    for split, found in names.items():
        numbers = [int(name.removeprefix("generated-")) for name in found]
        assert all(is_for_test(number) == (split == "test") for number in numbers)


def test_bundled_data_sets_belong_to_one_split() -> None:
    pytest.importorskip("statsmodels")
    train, test = (task.rows(split, 1000) for split in ("real_train", "real_test"))
    assert {row.data_source for row in train} == {"forecast/macrodata", "forecast/sunspots"}
    assert {row.data_source for row in test} == {
        "forecast/co2", "forecast/elnino", "forecast/nile", "forecast/danish_data"
    }  # fmt: skip
    assert any(None in row.env_kwargs["tools_kwargs"]["series"]["history"] for row in test)  # co2
    for row in test:
        known = row.env_kwargs["tools_kwargs"]["series"]
        years = 60 if known["season"] == 1 else 6
        assert len(known["history"]) == years * known["season"]
    nile = [row for row in test if row.data_source == "forecast/nile"]
    assert nile[0].env_kwargs["tools_kwargs"]["series"]["history"][:3] == [1120.0, 1160.0, 963.0]  # 1871 to 1873
    coming = nile[1].env_kwargs["tools_kwargs"]["series"]["history"][60 - YEARLY.horizon :]
    assert coming == nile[0].ground_truth  # the next window knows what the last one forecast


def test_bundled_series_without_statsmodels_are_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "statsmodels", None)
    with pytest.raises(ConfigError, match=r"pip install 'agent-r1\[forecast\]'"):
        task.rows("real_test", 1)


@pytest.mark.parametrize(
    ("history", "future", "said"),
    [
        ([None, None], [1.0] * 8, "history of series 's' has no values"),
        ([float("nan"), 1.0], [1.0] * 8, "history of series 's' has values beyond 1e"),
        ([1.0], [None] * 8, "future of series 's' has no values"),
        ([1.0], [1.0] * 7 + [-2e12], "future of series 's' has values beyond 1e"),
        ([1.0], [1.0] * 7, "8 future values, got 7"),
    ],
)
def test_series_that_cannot_be_scored_are_refused(history: list[Any], future: list[Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        row_of(history, future)


def test_demonstrations_play_as_written_and_most_ignore_what_they_see() -> None:
    rewards, models = [], []
    for row, texts in task.demos(120, seed=3):
        trajectory = play(row, texts)
        records = [record for step in trajectory.steps for record in step.calls]
        assert [record.error for record in records if record.error] == []
        assert trajectory.stop is StopReason.ANSWERED
        rewards.append(task.reward(row, trajectory)["reward"])
        models.append(records[-1].arguments["model"])
    assert 0.45 < models.count(BASELINE) / 120 < 0.75
    assert 0.4 < np.mean(rewards) < 0.55


def test_habits_by_hand() -> None:
    series = {"history": rising(48), "season": 4, "horizon": 8}
    assert task.demonstrate(series, Habit.STRUCTURE, random.Random(0)) == [
        call("decompose"),
        call("submit", model="linear"),
    ]
    for seed in range(8):
        *tried, last = task.demonstrate(series, Habit.TRIAL, random.Random(seed))
        assert len(tried) == 2
        assert last.replace("submit", "evaluate") in tried
        if call("evaluate", model="linear") in tried:
            assert last == call("submit", model="linear")  # without error
        assert task.demonstrate(series, Habit.FIXED, random.Random(seed))[-1] == call("submit", model=BASELINE)


def test_the_rule_of_thumb_beats_every_single_model() -> None:
    def earned(choose: Any) -> float:
        rows = task.rows("train", 150)
        chosen = [(row, row.env_kwargs["tools_kwargs"]["series"]) for row in rows]
        return float(np.mean([paid(row, choose(known), known) for row, known in chosen]))

    def paid(row: TaskRow, model: str, known: dict[str, Any]) -> float:
        errors = [analysis.mean_error(analysis.predict(name, **known), row.ground_truth) for name in (model, BASELINE)]
        assert errors[0] is not None
        assert errors[1] is not None
        return task.score(errors[0], errors[1])

    assert earned(task.rule_of_thumb) > max(earned(lambda _, name=name: name) for name in MODELS) + 0.02


def test_lines_without_noise_are_forecast_without_error() -> None:
    for row, texts in synthetic.demos(6, seed=0):
        assert task.reward(row, play(row, texts))["reward"] == 1.0
    assert synthetic.rows("test", 3) != synthetic.rows("train", 3)
    assert len(synthetic.rows("test", 1)[0].ground_truth) == MONTHLY.horizon
