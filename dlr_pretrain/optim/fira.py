"""Fira (Chen et al., 2024): GaLore plus the rest of the gradient, scaled as Adam scales the projected part."""

from __future__ import annotations

import torch
from torch import Tensor

from dlr_pretrain.optim import galore


def build(parameters: dict[str, Tensor], knobs: dict) -> list[torch.optim.Optimizer]:
    """Fira on the matrices of the blocks, plain Adam at the same rate on all others."""
    return [Fira(galore.groups(parameters, knobs), knobs)]


class Fira(galore.GaLore):
    """Moves a matrix by a back(N) + S, where S = (G - a back(R)) phi and a is ``update_scale``.

    phi = |N| / |R|, with norms along the reduced dimension. S contains a because the authors' code does so. The
    Frobenius norm of S grows by at most the factor ``limiter`` from one update to the next.
    """

    def __init__(self, groups: list[dict], knobs: dict):
        super().__init__(groups, knobs)
        self.limiter = knobs["limiter"]

    def full(self, p: Tensor, gradient: Tensor, reduced: Tensor, direction: Tensor) -> Tensor:
        state, along = self.state[p], 1 if p.shape[0] >= p.shape[1] else 0
        size = reduced.to(direction.dtype).norm(dim=along, keepdim=True)
        phi = direction.norm(dim=along, keepdim=True) / (size + 1e-8)
        rest = (gradient - self.scale * galore.back(reduced, state["projector"], p)) * phi
        norm = rest.norm()
        if "residual_norm" in state:
            excess = (norm / (state["residual_norm"] + 1e-8)).clamp(min=self.limiter) / self.limiter
            rest, norm = rest / excess, norm / excess
        state["residual_norm"] = norm
        return super().full(p, gradient, reduced, direction) + rest
