"""Compares the names and shapes of tensors with those of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MOST = 10  # lines of a list in a message


def misfits(found: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]) -> list[str]:
    """One line for each tensor that is missing, unknown to the model, or of another shape than in the model."""
    wrong = [f"{name}: missing" for name in expected if name not in found]
    wrong += [f"{name}: not a tensor of this model" for name in found if name not in expected]
    return wrong + [
        f"{name}: has shape {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and list(found[name]) != list(shape)
    ]


def listed(wrong: Sequence[str]) -> list[str]:
    """The first ``MOST`` lines, and a line that counts the rest."""
    return [*wrong[:MOST], *([f"and {len(wrong) - MOST} more"] if len(wrong) > MOST else [])]
