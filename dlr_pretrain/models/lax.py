"""LaX: latent crossing, a gated path from a projection's latent to the latent of the same projection in the next block.

The factors have no activation between them. The order of operations is that of the authors' released code.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlr_pretrain.config.key import key
from dlr_pretrain.models.layer import SeededInit, Spec
from dlr_pretrain.models.lowrank import FactorOptions, LowRank

NORM_EPS = 1e-6


@dataclass
class Options(FactorOptions):
    init: Literal["cola", "kaiming", "xavier"] = key("initialisation; cola: Var[(B A)_ij] = 1 / (d_in + d_out)")
    gate: Literal["tensor", "dense"] = key("a two-sided product (tensor), or r x r with bias (dense)")
    exported_keys = ("rank", "gate")


class Lax(LowRank):
    """y = B z, z = phi(norm(A x + G(c))), where c is the z of the same projection in the previous block.

    phi is ``activate``, and norm is a LayerNorm over r. The first block has no c and computes z = phi(A x).

    With option ``gate`` "tensor", G(c) = E2^T C E1, where C [n1, n2] is c reshaped: n1 n2 = r, and n1 <= n2 are as
    close as possible. With "dense", G(c) = W c + b.
    """

    options: Options
    e1: nn.Parameter
    e2: nn.Parameter
    gate_weight: nn.Parameter
    gate_bias: nn.Parameter
    norm_weight: nn.Parameter
    norm_bias: nn.Parameter

    def __init__(self, spec: Spec, options: Options):
        super().__init__(spec, options)
        rank = self.rank
        if spec.block == 0:
            return
        if options.gate == "tensor":
            short = max(n for n in range(1, math.isqrt(rank) + 1) if rank % n == 0)
            self.fuse("e1", "gate.e1", (rank // short, rank // short))
            self.fuse("e2", "gate.e2", (short, short))
        else:
            self.fuse("gate_weight", "gate.weight", (rank, rank))
            self.fuse("gate_bias", "gate.bias", (rank,))
        self.fuse("norm_weight", "norm.weight", (rank,))
        self.fuse("norm_bias", "norm.bias", (rank,))

    def initial(self, seeded: SeededInit, name: str) -> dict[str, Tensor]:
        values = super().initial(seeded, name)
        for leaf, shape in self.parts.values():
            if leaf.startswith("gate."):
                # each factor of a tensor gate has Kaiming's bound for a ReLU, which doubles the variance
                bound = (6 / shape[0]) ** 0.5 if self.options.gate == "tensor" else self.rank**-0.5
                values[leaf] = seeded.uniform(f"{name}.{leaf}", shape, bound)
            elif leaf.startswith("norm."):
                values[leaf] = torch.ones(shape) if leaf == "norm.weight" else torch.zeros(shape)
        return values

    def latent(self, x: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [..., pad_in], carried [..., G, r] -> z [..., G, r], which also crosses to the next block."""
        h = self.shared(x, self.a)
        z = self.activate(h if carried is None else self.normalise(h + self.gate(carried)))
        return z, z

    def gate(self, c: Tensor) -> Tensor:
        """c [..., G, r] -> G(c)."""
        if self.options.gate == "dense":
            return self.batched(c, self.gate_weight).movedim(0, -2) + self.each(self.gate_bias)
        e1, e2 = self.each(self.e1), self.each(self.e2)
        c = torch.einsum("...gcd,gde->...gce", c.unflatten(-1, (e2.shape[-1], e1.shape[-1])), e1)
        return torch.einsum("...gce,gcf->...gfe", c, e2).flatten(-2)

    def normalise(self, h: Tensor) -> Tensor:
        """h [..., G, r] -> its LayerNorm over r."""
        normed = F.layer_norm(h, h.shape[-1:], eps=NORM_EPS)
        return torch.addcmul(self.each(self.norm_bias), normed, self.each(self.norm_weight))


Options.layer = Lax
