"""The perplexity of a loss, and the one that the GaLore family's scripts print."""

from __future__ import annotations

import math
from collections.abc import Mapping

PUBLISHED = 50  # with fewer batches, the convention's value is too far from the published tables', which had 101


def perplexity(loss: float) -> float:
    """The perplexity of a loss in nats per token; infinite if it exceeds the range of a float."""
    return math.exp(loss) if loss < 700 else math.inf


def convention(evaluation: Mapping) -> tuple[int, float] | None:
    """(n, perplexity) by the GaLore family's convention, loss n / (n + 1).

    None for fewer than ``PUBLISHED`` batches, and for an evaluation that is not finite.
    """
    loss, value = evaluation["eval/loss"], evaluation["eval/perplexity_galore"]
    gap = loss - math.log(value) if loss and value else 0.0
    n = round(loss / gap) - 1 if gap > 0 else 0
    return (n, value) if n >= PUBLISHED else None
