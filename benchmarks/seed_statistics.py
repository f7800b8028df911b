"""Intervals for several training seeds evaluated on the same rows.

A gain has two sources of chance: the training seed, and the choice of evaluation rows. `crossed_mean` counts both. It
takes a table with a line per seed and a column per row, whose entries are differences on that row: after training minus
before, or one algorithm minus another with the same seed.

With S seeds and R rows, the variance of the mean is seeds / S + rows / R + rest / (S R). The two-way analysis of
variance estimates it as (MS_seeds + MS_rows - MS_rest) / (S R), and Satterthwaite's formula gives the degrees of
freedom of such a sum of mean squares. With few seeds the interval is on the wide side. A single seed shows nothing
about seeds, so its interval covers the rows only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agent_r1.runs.statistics import t_quantile


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanInterval:
    mean: float
    low: float  # of the 95 % interval
    high: float
    seeds: int

    @property
    def excludes_zero(self) -> bool:
        return not self.low <= 0 <= self.high


def crossed_mean(differences_SR: Sequence[Sequence[float]]) -> MeanInterval:
    """The mean over seeds and rows, with a 95 % interval that covers the choice of both."""
    table: npt.NDArray[np.float64] = np.asarray(differences_SR, dtype=np.float64)
    if table.ndim != 2 or table.shape[0] < 1 or table.shape[1] < 2 or not np.isfinite(table).all():
        raise ValueError(f"need finite numbers for one or more seeds and two or more rows, got shape {table.shape}")
    seeds, rows = table.shape
    mean = float(table.mean())
    by_row, by_seed = table.mean(axis=0), table.mean(axis=1)
    ms_rows = seeds * float(((by_row - mean) ** 2).sum()) / (rows - 1)
    if seeds == 1:
        half = t_quantile(rows - 1) * math.sqrt(ms_rows / rows)
        return MeanInterval(mean=mean, low=mean - half, high=mean + half, seeds=1)
    ms_seeds = rows * float(((by_seed - mean) ** 2).sum()) / (seeds - 1)
    rest = table - by_row - by_seed[:, None] + mean
    ms_rest = float((rest**2).sum()) / ((seeds - 1) * (rows - 1))
    # Neither source can vary less than not at all; with few seeds, this keeps a lucky draw from looking certain.
    ms_seeds, ms_rows = max(ms_seeds, ms_rest), max(ms_rows, ms_rest)
    combined = ms_seeds + ms_rows - ms_rest
    spread = ms_seeds**2 / (seeds - 1) + ms_rows**2 / (rows - 1) + ms_rest**2 / ((seeds - 1) * (rows - 1))
    degrees = max(seeds - 1, int(combined**2 / spread)) if spread else seeds - 1
    half = t_quantile(degrees) * math.sqrt(combined / (seeds * rows))
    return MeanInterval(mean=mean, low=mean - half, high=mean + half, seeds=seeds)
