"""A loss as people speak of it."""

from __future__ import annotations

import math


def perplexity(loss: float) -> float:
    """Of a loss in nats a token; infinite where a float does not hold it."""
    return math.exp(loss) if loss < 700 else math.inf
