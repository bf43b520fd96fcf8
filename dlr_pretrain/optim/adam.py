"""What the optimizers of this folder share: groups by weight decay, and memory layouts."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor


def decay_groups(parameters: Mapping[str, Tensor], weight_decay: float, undecayed: Collection[str]) -> list[dict]:
    """The parameter groups, decayed and not, in the form of ``torch.optim``; none is empty."""
    decayed = [p for name, p in parameters.items() if name not in undecayed]
    others = [p for name, p in parameters.items() if name in undecayed]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def empty_state(p: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """An uninitialised state tensor on the device of ``p``, in its memory layout where the shapes are equal."""
    if shape == p.shape:
        return torch.empty_like(p, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=p.device)


def nbytes(numel: int, dtype: torch.dtype) -> int:
    return numel * dtype.itemsize
