"""Conventions shared by all code that computes with tensors."""

from __future__ import annotations

import torch

IGNORE = -100  # as a target: the position has no target


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which to compute with values of ``dtype`` before a single rounding: fp32, or fp64 for fp64."""
    return dtype if dtype == torch.float64 else torch.float32
