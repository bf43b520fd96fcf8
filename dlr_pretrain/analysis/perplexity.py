"""A loss as people speak of it, and as the GaLore family's scripts print it."""

from __future__ import annotations

import math
from collections.abc import Mapping

PUBLISHED = 50  # batches from which on the convention's value is near those of the published tables, which had 101


def perplexity(loss: float) -> float:
    """The perplexity of a loss in nats per token; infinite where a float does not hold it."""
    return math.exp(loss) if loss < 700 else math.inf


def convention(evaluation: Mapping) -> tuple[int, float] | None:
    """(n, perplexity) of the GaLore family's convention, loss n / (n + 1), where it says something: of few batches,
    and of an evaluation that is not finite, it does not."""
    loss, value = evaluation["eval/loss"], evaluation["eval/perplexity_galore"]
    gap = loss - math.log(value) if loss and value else 0.0
    n = round(loss / gap) - 1 if gap > 0 else 0
    return (n, value) if n >= PUBLISHED else None
