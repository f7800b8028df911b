"""Statistics of evaluations: the error of a mean, and whether one policy is better than another on the same rows.

Pure functions of one number per row. Attempts at one row are not independent, so pass their mean: the intervals express
the uncertainty from the choice of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean

LEVEL = 0.95  # confidence level of every interval
# If all n rows that differ favour one side, a fair coin does the same in 2 of 2**n cases. With five rows that is 6 %,
# more than the 5 % that a 95 % interval allows.
FEWEST_DIFFERING = 6
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """B minus A, row by row."""

    mean_a: float
    mean_b: float
    difference: float
    low: float  # lower end of the 95 % interval of the difference
    high: float
    won: int  # rows on which B did better
    lost: int
    tied: int

    @property
    def too_few_differ(self) -> bool:
        return self.won + self.lost < FEWEST_DIFFERING

    @property
    def is_shown(self) -> bool:
        """Return True if the rows show that A and B differ."""
        return not self.too_few_differ and not self.low <= 0 <= self.high


def paired_difference(a: Sequence[float], b: Sequence[float]) -> PairedDifference:
    """Return Student's interval of the mean difference; a[i] and b[i] belong to the same row."""
    if len(a) != len(b) or len(a) < 2:
        raise ValueError(f"a paired interval needs two or more rows, the same on both sides: got {len(a)} and {len(b)}")
    differences = [_difference(earlier, later) for earlier, later in zip(a, b, strict=True)]
    mean = fmean(differences)
    half = t_quantile(len(differences) - 1) * standard_error(differences)
    won, lost = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return PairedDifference(
        mean_a=fmean(a),
        mean_b=fmean(b),
        difference=mean,
        low=mean - half,
        high=mean + half,
        won=won,
        lost=lost,
        tied=len(differences) - won - lost,
    )


def _difference(a: float, b: float) -> float:
    """Return b - a, or 0 if they differ by rounding: the parts of a reward may be added in another order."""
    return 0.0 if math.isclose(a, b, rel_tol=ROUNDING, abs_tol=ROUNDING) else b - a


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    mean = fmean(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))


@cache
def t_quantile(degrees: int) -> float:
    """Return t such that a Student variable lies within -t .. t with probability `LEVEL`."""
    low, high = 0.0, math.pi / 2  # bounds of the angle whose tangent is t / sqrt(degrees)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _central_probability(middle, degrees) < LEVEL else (low, middle)
    return math.sqrt(degrees) * math.tan(high)


def _central_probability(angle: float, degrees: int) -> float:
    """P(-t < T < t), t = sqrt(degrees) tan(angle): the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    if degrees % 2:
        term, total = cosine, 0.0
        for k in range(3, degrees + 1, 2):
            total += term
            term *= (k - 1) / k * cosine**2
        return (angle + sine * total) * 2 / math.pi
    term, total = 1.0, 0.0
    for k in range(2, degrees + 1, 2):
        total += term
        term *= (k - 1) / k * cosine**2
    return sine * total
