"""What every room that computes agrees on."""

from __future__ import annotations

import torch

IGNORE = -100  # in the place of a target: the position has none


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are computed before they are rounded once: fp32, or fp64 for fp64."""
    return dtype if dtype == torch.float64 else torch.float32
