"""Learning rates as pure functions of the update's index: nothing to save, nothing to restore."""

from __future__ import annotations

import math


def cosine(update: int, steps: int, warmup: int, peak: float, min_ratio: float) -> float:
    """The rate of update ``update`` (counted from 0): linear from 0 to ``peak`` over ``warmup`` updates, then a cosine
    to ``min_ratio * peak`` at ``steps``. As in the GaLore family of scripts, the first update has rate 0 where there is
    a warm-up.
    """
    if update < warmup:
        return peak * update / warmup
    progress = (update - warmup) / (steps - warmup)
    return peak * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))
