"""LaX: latent crossing, a gated path from a projection's latent to that of the same projection in the next block.

There is no activation between the factors. The order of operations is that of the authors' released code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlr_pretrain.models.linear import Factors, GroupSpec, SeededInit, Stack
from dlr_pretrain.models.lowrank import LowRank

NORM_EPS = 1e-6


class TensorGate(nn.Module):
    """G(c) = E2^T C E1, where C [n1, n2] is c reshaped: n1 n2 = r, n1 <= n2, and both are as close as possible."""

    def __init__(self, rank: int):
        super().__init__()
        short = max(n for n in range(1, math.isqrt(rank) + 1) if rank % n == 0)
        self.e1 = nn.Parameter(torch.empty(rank // short, rank // short))
        self.e2 = nn.Parameter(torch.empty(short, short))

    def forward(self, c: Tensor) -> Tensor:
        return two_sided(c[..., None, :], self.e1[None], self.e2[None]).squeeze(-2)


def two_sided(c: Tensor, e1: Tensor, e2: Tensor) -> Tensor:
    """c [..., G, n1 n2], E1 [G, n2, n2], E2 [G, n1, n1] -> E2^T C E1 [..., G, n1 n2]."""
    c = torch.einsum("...gcd,gde->...gce", c.unflatten(-1, (e2.shape[-1], e1.shape[-1])), e1)
    return torch.einsum("...gce,gcf->...gfe", c, e2).flatten(-2)


def stacked(modules: Sequence[nn.Module], name: str) -> Tensor:
    """The parameters ``name`` of equal ``modules``, [G, ...]."""
    return torch.stack([getattr(module, name) for module in modules])


class LaxProjection(Factors):
    """The factors of one projection and, from the second block on, its gate (tensor, or dense: W c + b) and norm."""

    def __init__(self, spec: GroupSpec, knobs: dict):
        super().__init__(spec, knobs)
        if spec.block > 0:
            rank = knobs["rank"]
            self.gate = TensorGate(rank) if knobs["gate"] == "tensor" else nn.Linear(rank, rank)
            self.norm = nn.LayerNorm(rank, eps=NORM_EPS)


class Lax(LowRank):
    """y = B z, z = phi(norm(A x + G(c))), where c is the z of the same projection in the previous block.

    phi is ``activate``. The first block, which has no c, computes z = phi(A x).
    """

    projection = LaxProjection

    def __init__(self, spec: GroupSpec, knobs: dict, grouped: bool):
        super().__init__(spec, knobs, grouped)
        if grouped and spec.block > 0 and knobs["gate"] == "dense":
            self.dense_gate = Stack([p.gate for p in self.projections], knobs["rank"], knobs["rank"])

    @torch.no_grad()
    def init_(self, seeded: SeededInit, prefix: str) -> None:
        super().init_(seeded, prefix)
        for name, p in self.named(prefix) if self.spec.block > 0 else ():
            for key, value in p.gate.named_parameters():
                # a tensor gate: Kaiming's bound for a ReLU, by which each factor doubles the variance
                bound = (6 / len(value)) ** 0.5 if self.knobs["gate"] == "tensor" else self.knobs["rank"] ** -0.5
                value.copy_(seeded.uniform(f"{name}.gate.{key}", value.shape, bound))
            p.norm.reset_parameters()

    def latent(self, x: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [..., pad_in], carried [..., G, r] -> z [..., G, r], and the latent that crosses to the next block."""
        h = self.down(x)
        z = self.activate(h if carried is None else self.normalise(h + self.gate(carried)))
        return z, z

    def gate(self, c: Tensor) -> Tensor:
        """c [..., G, r] -> G(c)."""
        gates = [p.gate for p in self.projections]
        if not self.grouped:
            return torch.stack([gate(c_p) for gate, c_p in zip(gates, c.unbind(-2), strict=True)], dim=-2)
        if self.knobs["gate"] == "tensor":
            return two_sided(c, stacked(gates, "e1"), stacked(gates, "e2"))
        return self.dense_gate.batched(c).movedim(0, -2) + stacked(gates, "bias")

    def normalise(self, h: Tensor) -> Tensor:
        """h [..., G, r] -> its LayerNorm over r."""
        norms = [p.norm for p in self.projections]
        if not self.grouped:
            return torch.stack([norm(h_p) for norm, h_p in zip(norms, h.unbind(-2), strict=True)], dim=-2)
        normed = F.layer_norm(h, h.shape[-1:], eps=NORM_EPS)
        return torch.addcmul(stacked(norms, "bias"), normed, stacked(norms, "weight"))


BACKBONE = Lax
