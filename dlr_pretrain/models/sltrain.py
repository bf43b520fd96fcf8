"""SLTrain: a low-rank plus a sparse matrix of fixed random support, y = (s B A + S) x (Han et al., 2024)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlr_pretrain.models.linear import Factors, Group, GroupSpec, SeededInit, Stack
from dlr_pretrain.models.lora import down_factor
from dlr_pretrain.util.tensors import at_least_fp32


class SltrainProjection(Factors):
    """A [r, d_in], B [d_out, r], and S [d_out, d_in] as its trained ``values`` at the sorted flat positions ``index``.

    S has int(sparsity d_in d_out) entries.
    """

    index: Tensor

    def __init__(self, d_in: int, d_out: int, rank: int, sparsity: float):
        super().__init__(d_in, d_out, rank)
        entries = int(sparsity * d_in * d_out)
        self.values = nn.Parameter(torch.empty(entries))
        self.register_buffer("index", torch.empty(entries, dtype=torch.int64))


class Sltrain(Group):
    """y = (s B A + S) x, s = alpha / rank. At the start B is zero, A and the values uniform with bound 1/sqrt(d_in).

    Forward and backward each form the dense matrix and drop it. With ``grouped=False`` (``parallel=fsdp``), forward
    keeps it for backward. The layer is deployed as this matrix.
    """

    deployed_dense = True

    def __init__(self, spec: GroupSpec, projections: list, knobs: dict, grouped: bool):
        super().__init__(spec, projections, knobs, grouped)
        self.scale = knobs["alpha"] / knobs["rank"]
        if grouped:
            self.a = Stack([p.a for p in projections], spec.pad_in, knobs["rank"])
            self.b = Stack([p.b for p in projections], knobs["rank"], spec.pad_out)

    @staticmethod
    def projection(spec: GroupSpec, knobs: dict) -> nn.Module:
        return SltrainProjection(spec.d_in, spec.d_out, knobs["rank"], knobs["sparsity"])

    @torch.no_grad()
    def init_(self, seeded: SeededInit, prefix: str) -> None:
        for own, p in self.named(prefix):
            p.a.weight.copy_(down_factor(seeded, f"{own}.a.weight", p.a.weight.shape))
            p.b.weight.zero_()
            p.values.copy_(seeded.uniform(f"{own}.values", p.values.shape, self.spec.d_in**-0.5))
            order = torch.randperm(self.spec.d_out * self.spec.d_in, generator=seeded.generator(f"{own}.index"))
            p.index.copy_(order[: len(p.index)].sort().values)

    def expand(self, z: Tensor) -> tuple[Tensor, ...]:
        if not self.grouped:
            formed = (form(p.b.weight, p.a.weight, p.values, p.index, self.scale) for p in self.projections)
            return tuple(F.linear(z, weight) for weight in formed)
        arguments = z.flatten(0, -2), self.a.joined, self.b.joined, *(p.values for p in self.projections)
        y = checkpoint(self.multiply, *arguments, use_reentrant=False, preserve_rng_state=False)
        return y.view(*z.shape[:-1], len(self.projections), -1).unbind(-2)

    def multiply(self, x: Tensor, a: Tensor, b: Tensor, *values: Tensor) -> Tensor:
        """x [N, pad_in], A [G, r, pad_in], B [G, pad_out, r] and the values of the G supports -> [N, G pad_out]."""
        size, padding = b.shape[1] * a.shape[2], self.spec.pad_in - self.spec.d_in
        own = [p.index + p.index // self.spec.d_in * padding for p in self.projections]
        index = torch.cat([g * size + of_one for g, of_one in enumerate(own)])
        return x @ form(b, a, torch.cat(values), index, self.scale).flatten(0, 1).T

    def dense(self, tensors: dict[str, Tensor]) -> Tensor:
        b, a, values = (tensors[name] for name in ("b.weight", "a.weight", "values"))
        wide = at_least_fp32(a.dtype)
        return form(b.to(wide), a.to(wide), values.to(wide), tensors["index"], self.scale).to(a.dtype)


def form(b: Tensor, a: Tensor, values: Tensor, index: Tensor, scale: float) -> Tensor:
    """scale B A + S, [..., d_out, d_in]. Positions are unique, so that the order of additions does not matter."""
    product = scale * (b @ a)
    return product.flatten().index_add(0, index, values).view(product.shape)


BACKBONE = Sltrain
