"""Which named parameters are matrices of a block, which are decayed, and how an optimizer's state is laid out."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from dlr_pretrain.util import sharded


def block_matrices(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The two-dimensional parameters of the transformer blocks: those that matrix optimizers treat as matrices."""
    return {name: p for name, p in parameters.items() if name.startswith("model.layers.") and p.dim() == 2}


def without(parameters: Mapping[str, Tensor], others: Collection[str]) -> dict[str, Tensor]:
    return {name: p for name, p in parameters.items() if name not in others}


def decay_groups(parameters: Mapping[str, Tensor], weight_decay: float) -> list[dict]:
    """The parameter groups, by weight decay, in the form of ``torch.optim``; no group is empty.

    Scalars (learned alphas) are not decayed: at zero the residual would be gone. Groups hold this rank's rows of
    sharded parameters.
    """
    groups: dict[float, list[Tensor]] = {}
    for p in parameters.values():
        groups.setdefault(0.0 if p.dim() == 0 else weight_decay, []).append(sharded.local_rows(p))
    return [{"params": params, "weight_decay": decay} for decay, params in groups.items()]


def empty_state(p: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """An uninitialised state tensor on the device of ``p``, with its memory layout if the shapes are equal.

    State is made and restored by this one rule, so that products see the same strides before and after a resume.
    """
    if shape == p.shape:
        return torch.empty_like(p, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=p.device)
