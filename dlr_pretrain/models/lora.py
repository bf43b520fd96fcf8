"""LoRA from scratch, y = (W0 + s B A) x with a frozen W0 (Hu et al., 2022, as a baseline of pre-training)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dlr_pretrain.models.linear import INIT_STD, Factors, Group, GroupSpec, SeededInit, Stack
from dlr_pretrain.util.tensors import at_least_fp32


class LoraProjection(Factors):
    """The frozen ``weight`` W0 [d_out, d_in] and the factors ``a`` A [r, d_in] and ``b`` B [d_out, r]."""

    def __init__(self, spec: GroupSpec, knobs: dict):
        super().__init__(spec, knobs)
        self.weight = nn.Parameter(torch.empty(spec.d_out, spec.d_in), requires_grad=False)


class Lora(Group):
    """y = (W0 + s B A) x, s = alpha / rank.

    W0 is drawn from N(0, 0.02^2) or taken from a dense model, and never trained. A starts uniform with bound
    1/sqrt(d_in), B at zero. The layer is deployed as the dense weight W0 + s B A.
    """

    projection = LoraProjection
    deployed_dense = True

    def __init__(self, spec: GroupSpec, knobs: dict, grouped: bool):
        super().__init__(spec, knobs, grouped)
        self.scale = knobs["alpha"] / knobs["rank"]
        if grouped:
            self.w = Stack(self.projections, spec.pad_in, spec.pad_out)
            self.a = Stack([p.a for p in self.projections], spec.pad_in, knobs["rank"])
            self.b = Stack([p.b for p in self.projections], knobs["rank"], spec.pad_out)

    @torch.no_grad()
    def init_(self, seeded: SeededInit, prefix: str) -> None:
        for name, p in self.named(prefix):
            p.weight.copy_(seeded.normal(f"{name}.weight", p.weight.shape, INIT_STD))
            p.a.weight.copy_(seeded.kaiming(f"{name}.a.weight", p.a.weight.shape))
            p.b.weight.zero_()

    def expand(self, z: Tensor) -> tuple[Tensor, ...]:
        if self.grouped:
            learned = self.b.batched(self.scale * self.a.shared(z)).unbind(0)
            return tuple(y + b for y, b in zip(self.w.shared(z).unbind(-2), learned, strict=True))
        return tuple(z @ p.weight.T + p.b(self.scale * p.a(z)) for p in self.projections)

    def dense(self, tensors: dict[str, Tensor]) -> Tensor:
        return merged(tensors["weight"], tensors["b.weight"], tensors["a.weight"], self.scale)


def merged(weight: Tensor, b: Tensor, a: Tensor, scale: float) -> Tensor:
    """W0 + scale B A, formed in fp32 (fp64 for fp64) and rounded once to the dtype of ``weight``."""
    wide = at_least_fp32(weight.dtype)
    return torch.addmm(weight.to(wide), b.to(wide), a.to(wide), alpha=scale).to(weight.dtype)


BACKBONE = Lora
