"""Linear low-rank layers, y = B A x."""

from __future__ import annotations

import torch
from torch import nn

from dlr_pretrain.models.linear import Draw, FactorizedGroup, GroupSpec


class LowRankProjection(nn.Module):
    """The two factors of one projection; ``forward`` is for those who call a projection on its own."""

    def __init__(self, d_in: int, d_out: int, rank: int):
        super().__init__()
        self.a = nn.Linear(d_in, rank, bias=False)
        self.b = nn.Linear(rank, d_out, bias=False)


class LowRank(FactorizedGroup):
    """y = B A x, with Var[(B A)_ij] = 1 / (d_in + d_out) at the start (the initialisation of CoLA and of DLR)."""

    @staticmethod
    def projection(spec: GroupSpec, knobs: dict) -> nn.Module:
        return LowRankProjection(spec.d_in, spec.d_out, knobs["rank"])

    @torch.no_grad()
    def init_(self, draw: Draw, prefix: str) -> None:
        rank = self.knobs["rank"]
        std = rank**-0.25 * (self.spec.d_in + self.spec.d_out) ** -0.25
        for name, p in zip(self.spec.names, self.projections, strict=True):
            p.a.weight.copy_(draw.normal(f"{prefix}{name}.a.weight", p.a.weight.shape, std))
            p.b.weight.copy_(draw.normal(f"{prefix}{name}.b.weight", p.b.weight.shape, std))


BACKBONE = LowRank
