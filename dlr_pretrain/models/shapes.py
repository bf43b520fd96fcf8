"""Named tensors held against those that a model has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MOST = 10  # that a message lists


def misfits(found: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]) -> list[str]:
    """A line for each tensor that is missing, is not of the model, or has another shape than it has there."""
    wrong = [f"{name}: missing" for name in expected if name not in found]
    wrong += [f"{name}: not a tensor of this model" for name in found if name not in expected]
    return wrong + [
        f"{name}: has shape {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and list(found[name]) != list(shape)
    ]


def listed(wrong: Sequence[str]) -> list[str]:
    """As much of a long list as a message holds."""
    return [*wrong[:MOST], *([f"and {len(wrong) - MOST} more"] if len(wrong) > MOST else [])]
