"""Dense linear layers: the full-rank LLaMA."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dlr_pretrain.config import Choice
from dlr_pretrain.models.linear import INIT_STD, Group, GroupSpec, SeededInit, Stack


class DenseProjection(nn.Linear):
    """W [d_out, d_in], without a bias."""

    def __init__(self, spec: GroupSpec, knobs: dict):
        super().__init__(spec.d_in, spec.d_out, bias=False)


class Full(Group):
    """y = W x, W ~ N(0, 0.02^2)."""

    projection = DenseProjection

    def __init__(self, spec: GroupSpec, knobs: dict, grouped: bool):
        super().__init__(spec, knobs, grouped)
        if grouped:
            self.w = Stack(self.projections, spec.pad_in, spec.pad_out)

    @torch.no_grad()
    def init_(self, seeded: SeededInit, prefix: str) -> None:
        for name, p in self.named(prefix):
            p.weight.copy_(seeded.normal(f"{name}.weight", p.weight.shape, INIT_STD))

    def expand(self, z: Tensor) -> tuple[Tensor, ...]:
        return self.w.shared(z).unbind(-2) if self.grouped else tuple(p(z) for p in self.projections)


BACKBONE = Full
DENSE = Choice("full", {"factorized": False})
