"""Student's t: how far a mean over few seeds may lie from the mean over all of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache


@dataclass(frozen=True)
class Estimate:
    """A mean over ``n`` values, their standard deviation (divisor n - 1) and the interval of the mean at ``level``.

    For one value, ``std``, ``low`` and ``high`` are None.
    """

    n: int
    mean: float
    level: float
    std: float | None = None
    low: float | None = None
    high: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        return asdict(self)


def estimate(values: Sequence[float], level: float = 0.95) -> Estimate:
    """The estimate of a mean from at least one value; assumes independent values of a normal distribution."""
    n, mean = len(values), statistics.fmean(values)
    if n == 1:
        return Estimate(n, mean, level)
    std = statistics.stdev(values)
    reach = quantile((1 + level) / 2, n - 1) * std / math.sqrt(n)
    return Estimate(n, mean, level, std, mean - reach, mean + reach)


def central(angle: float, freedom: int) -> float:
    """P(|t| < tan(angle) sqrt(freedom)) for a whole number of degrees of freedom (Abramowitz and Stegun 26.7.3-4)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cosine * cosine * (k - 1) / k
    return (angle + sine * total) * 2 / math.pi if odd else sine * total


@cache
def quantile(p: float, freedom: int) -> float:
    """The t with P(T < t) = p, for p in (0.5, 1) and at least one degree of freedom."""
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if central(middle, freedom) < 2 * p - 1 else (low, middle)
    return math.tan(low) * math.sqrt(freedom)
