"""Dense linear layers: the full-rank LLaMA."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dlr_pretrain.config import Choice
from dlr_pretrain.models.linear import Group, GroupSpec, SeededInit, Stack


class Full(Group):
    """y = W x, W ~ N(0, 0.02^2)."""

    def __init__(self, spec: GroupSpec, projections: list, knobs: dict, grouped: bool):
        super().__init__(spec, projections, knobs, grouped)
        if grouped:
            self.w = Stack(projections, spec.pad_in, spec.pad_out)

    @staticmethod
    def projection(spec: GroupSpec, knobs: dict) -> nn.Module:
        return nn.Linear(spec.d_in, spec.d_out, bias=False)

    @torch.no_grad()
    def init_(self, seeded: SeededInit, prefix: str) -> None:
        for name, p in self.named(prefix):
            p.weight.copy_(seeded.normal(f"{name}.weight", p.weight.shape, 0.02))

    def expand(self, z: Tensor) -> tuple[Tensor, ...]:
        return self.w.shared(z).unbind(-2) if self.grouped else tuple(p(z) for p in self.projections)


BACKBONE = Full
DENSE = Choice("full", {"factorized": False})
