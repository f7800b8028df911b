"""Windows of public-domain series that statsmodels ships (the extra `forecast`): splits `real_train` and `real_test`.

Whole data sets belong to one split, because series of one data set move together: US output and US consumption of the
same years are nearly the same series. Windows of the test split do not overlap in the values to forecast.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from agent_r1.errors import ConfigError
from agent_r1.recipes.forecast.series import MONTHLY, QUARTERLY, YEARLY, Calendar, Series

SPLITS = ("real_train", "real_test")
YEARS = 6  # of history in a window, for monthly and quarterly series; yearly ones have ten times that


def windows(split: str) -> Iterator[Series]:
    """The windows of a split, by data set, from the first one to the last."""
    for name, calendar, values in (_training_series if split == "real_train" else _test_series)():
        length = YEARS * (10 if calendar is YEARLY else calendar.season)
        for start in range(0, len(values) - length - calendar.horizon + 1, calendar.horizon):
            middle = start + length
            window = values[start : middle + calendar.horizon]
            if all(value is None for value in window[length:]):
                continue
            yield Series(
                name=name,
                source=name.partition("/")[0],
                calendar=calendar,
                history=window[:length],
                future=window[length:],
            )


Loaded = Iterator[tuple[str, Calendar, list[float | None]]]


def _training_series() -> Loaded:
    us = _load("macrodata")
    for column in us.columns.drop(["year", "quarter"]):
        yield f"macrodata/{column}", QUARTERLY, _plain(us[column])
    yield "sunspots/activity", YEARLY, _plain(_load("sunspots")["SUNACTIVITY"])


def _test_series() -> Loaded:
    weekly = _load("co2")["co2"]
    yield "co2/monthly", MONTHLY, _plain(weekly.resample("MS").mean())  # with gaps, as measured
    ocean = _load("elnino")
    yield "elnino/temperature", MONTHLY, _plain(ocean.drop(columns="YEAR").to_numpy().ravel())
    yield "nile/volume", YEARLY, _plain(_load("nile")["volume"])
    danish = _load("danish_data")
    for column in ("lrm", "lry", "lpy", "ibo", "ide"):
        yield f"danish_data/{column}", QUARTERLY, _plain(danish[column])


def _load(name: str) -> Any:
    try:
        from statsmodels import datasets
    except ImportError as error:
        raise ConfigError(
            f"the splits {' and '.join(SPLITS)} need statsmodels: pip install 'agent-r1[forecast]'"
        ) from error
    return getattr(datasets, name).load_pandas().data


def _plain(values: Any) -> list[float | None]:
    return [None if np.isnan(value) else round(float(value), 4) for value in np.asarray(values)]
