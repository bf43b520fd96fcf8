"""SLTrain: a low-rank plus a sparse matrix of fixed random support, y = (s B A + S) x (Han et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        rows, count = z.flatten(0, -2), len(self.projections)
        entries = *(p.index for p in self.projections), *(p.values for p in self.projections)
        if torch.is_grad_enabled():
            y = _Formed.apply(rows, self.scale, self.spec.d_in, self.a.joined, self.b.joined, *entries)
        else:  # for dynamo, as in Stack
            storages = self.a.storage, self.b.storage
            dense = _form_group(self.scale, self.spec.d_in, *storages, entries[:count], entries[count:])
            y = rows @ dense.flatten(0, 1).T
        return y.view(*z.shape[:-1], count, -1).unbind(-2)

    def dense(self, tensors: dict[str, Tensor]) -> Tensor:
        b, a, values = (tensors[name] for name in ("b.weight", "a.weight", "values"))
        wide = at_least_fp32(a.dtype)
        return form(b.to(wide), a.to(wide), values.to(wide), tensors["index"], self.scale).to(a.dtype)


def form(b: Tensor, a: Tensor, values: Tensor, index: Tensor, scale: float) -> Tensor:
    """scale B A + S, [d_out, d_in]."""
    product = scale * (b @ a)
    return product.flatten().index_add(0, index, values).view(product.shape)


def _positions(index: Tensor, d_in: int, pad_in: int) -> Tensor:
    """Flat positions in [d_out, d_in] -> the flat positions of the same entries in [pad_out, pad_in]."""
    return index if pad_in == d_in else index + index // d_in * (pad_in - d_in)


def _form_group(scale: float, d_in: int, a: Tensor, b: Tensor, index: Sequence[Tensor], values: Sequence[Tensor]):
    """The weights of a group, [G, pad_out, pad_in], from storages A [G, r, pad_in] and B [G, pad_out, r]."""
    dense = torch.bmm(b, a).mul_(scale)
    for slot, where, value in zip(dense.flatten(1), index, values, strict=True):
        at = _positions(where, d_in, a.shape[2])
        slot[at] = slot[at] + value  # positions are unique: no atomics, and the order does not matter
    return dense


class _Formed(torch.autograd.Function):
    """x [N, pad_in], scale, d_in, storages of A and B, G indices and G values -> [N, G pad_out].

    Forward and backward each form the G weights.
    """

    @staticmethod
    def forward(ctx, x: Tensor, scale: float, d_in: int, a: Tensor, b: Tensor, *entries: Tensor) -> Tensor:
        ctx.save_for_backward(x, a, b, *entries)
        ctx.scale, ctx.d_in = scale, d_in
        return x @ _form_group(scale, d_in, a, b, entries[: len(a)], entries[len(a) :]).flatten(0, 1).T

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, a, b, *entries = ctx.saved_tensors
        index, values = entries[: len(a)], entries[len(a) :]
        dx = dy @ _form_group(ctx.scale, ctx.d_in, a, b, index, values).flatten(0, 1)
        dw = (dy.T @ x).view(len(a), -1, a.shape[2])
        da = torch.bmm(dw.transpose(1, 2), b).mul_(ctx.scale).transpose(1, 2)
        db = torch.bmm(dw, a.transpose(1, 2)).mul_(ctx.scale)
        dv = (g[_positions(where, ctx.d_in, a.shape[2])] for g, where in zip(dw.flatten(1), index, strict=True))
        return dx, None, None, da, db, *[None] * len(a), *dv


BACKBONE = Sltrain
