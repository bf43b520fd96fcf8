"""LOST: a low-rank and a channel-sparse branch, y = gamma B silu(A x) + (1 - gamma) W_s x_I (Li et al., 2025).

x_I are k fixed input channels. Both branches start from one dense weight W [d_out, d_in]: B A is its best approximation
of rank r, I are the most important columns of W - B A, and W_s are these columns of W itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlr_pretrain.models.linear import INIT_STD, Factors, GroupSpec, SeededInit, Stack
from dlr_pretrain.models.lowrank import LowRank, balanced, leading

ALIGNMENT = 8  # widths of fast products are multiples of this; the rank that fits the parameter budget is mostly odd


class LostProjection(Factors):
    """The factors of one projection, W_s (``s.weight`` [d_out, k]) and its ``channels`` I in ascending order."""

    channels: Tensor

    def __init__(self, spec: GroupSpec, knobs: dict):
        super().__init__(spec, knobs)
        count = max(1, int(knobs["sparsity"] * spec.d_in))
        self.s = nn.Linear(count, spec.d_out, bias=False)
        self.register_buffer("channels", torch.arange(count))


class Lost(LowRank):
    """y = gamma B phi(A x) + (1 - gamma) W_s x_I; the latent is (gamma phi(A x), (1 - gamma) x_I).

    B multiplies gamma phi(A x), so that a residual added to B (DLR) is inside the low-rank branch.

    I are the columns of largest l2 norm in a part of W: that of the ``residual_rank`` singular values after the first
    r.
    """

    projection = LostProjection

    def __init__(self, spec: GroupSpec, knobs: dict, grouped: bool):
        super().__init__(spec, knobs, grouped)
        self.gamma, self.rank = knobs["gamma"], knobs["rank"]
        channels = self.projections[0].s.in_features
        self.width = self.rank + channels
        if grouped:
            self.width = _aligned(self.width)
            self.a = Stack([p.a for p in self.projections], spec.pad_in, pad_out=_aligned(self.rank))
            self.s = Stack([p.s for p in self.projections], channels, spec.pad_out)

    @torch.no_grad()
    def init_(self, seeded: SeededInit, prefix: str) -> None:
        rest = slice(self.rank, None)
        for name, p in self.named(prefix):
            drawn = seeded.normal(f"{name}.weight", (self.spec.d_out, self.spec.d_in), INIT_STD)
            w = drawn.to(p.b.weight.device)
            looked_at = min(self.knobs["residual_rank"], min(w.shape) - self.rank)
            u, s, vh = leading(w, self.rank + looked_at)
            b, a = balanced(u[:, : self.rank], s[: self.rank], vh[: self.rank])
            p.b.weight.copy_(b)
            p.a.weight.copy_(a)
            scores = (s[rest, None] * vh[rest]).norm(dim=0)  # U is orthonormal
            ranking = scores.sort(descending=True, stable=True).indices
            p.channels.copy_(ranking[: len(p.channels)].sort().values)
            p.s.weight.copy_(w[:, p.channels])

    def activate(self, h: Tensor) -> Tensor:
        return F.silu(h) if self.knobs["activation"] == "silu" else h

    def latent(self, x: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [..., pad_in] -> [..., G, r + k]: gamma phi(A x), (1 - gamma) x_I, and zeros up to ``width``."""
        h = self.activate(self.down(x)[..., : self.rank])
        channels = torch.cat([p.channels for p in self.projections])
        chosen = x.index_select(-1, channels).unflatten(-1, (len(self.projections), -1))
        zeros = h.new_zeros(*h.shape[:-1], self.width - self.rank - chosen.shape[-1])
        return torch.cat((h * self.gamma, chosen * (1 - self.gamma), zeros), dim=-1), None

    def expand(self, z: Tensor) -> tuple[Tensor, ...]:
        """[..., G, width] -> B z_1 + W_s z_2, one [..., pad_out] per projection."""
        if not self.grouped:
            parts = z.split((self.rank, z.shape[-1] - self.rank), dim=-1)
            both = zip(self.projections, *(part.unbind(-2) for part in parts), strict=True)
            return tuple(p.b(z_1) + p.s(z_2) for p, z_1, z_2 in both)
        return self.b.batched(z, self.s).unbind(0)


def _aligned(width: int) -> int:
    return -(-width // ALIGNMENT) * ALIGNMENT


BACKBONE = Lost
