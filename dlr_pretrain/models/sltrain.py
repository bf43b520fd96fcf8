"""SLTrain: a low-rank plus a sparse matrix of fixed random support, y = (s B A + S) x (Han et al., 2024)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlr_pretrain.models.linear import Factors, Group, GroupSpec, SeededInit
from dlr_pretrain.util.tensors import at_least_fp32


class SltrainProjection(Factors):
    """A [r, d_in], B [d_out, r], and S [d_out, d_in] as its trained ``values`` at the sorted flat positions ``index``.

    S has int(sparsity d_in d_out) entries.
    """

    index: Tensor

    def __init__(self, spec: GroupSpec, knobs: dict):
        super().__init__(spec, knobs)
        entries = int(knobs["sparsity"] * spec.d_in * spec.d_out)
        self.values = nn.Parameter(torch.empty(entries))
        self.register_buffer("index", torch.empty(entries, dtype=torch.int64))


class Sltrain(Group):
    """y = (s B A + S) x, s = alpha / rank. At the start B is zero, A and the values uniform with bound 1/sqrt(d_in).

    Forward and backward each form the dense matrix and drop it. With ``grouped=False`` (``parallel=fsdp``), forward
    keeps it for backward. The layer is deployed as this matrix.
    """

    projection = SltrainProjection
    deployed_dense = True

    def __init__(self, spec: GroupSpec, knobs: dict, grouped: bool):
        super().__init__(spec, knobs, grouped)
        self.scale = knobs["alpha"] / knobs["rank"]

    @torch.no_grad()
    def init_(self, seeded: SeededInit, prefix: str) -> None:
        for own, p in self.named(prefix):
            p.a.weight.copy_(seeded.kaiming(f"{own}.a.weight", p.a.weight.shape))
            p.b.weight.zero_()
            p.values.copy_(seeded.uniform(f"{own}.values", p.values.shape, self.spec.d_in**-0.5))
            order = torch.randperm(self.spec.d_out * self.spec.d_in, generator=seeded.generator(f"{own}.index"))
            p.index.copy_(order[: len(p.index)].sort().values)

    def expand(self, z: Tensor) -> tuple[Tensor, ...]:
        multiply: Callable[..., Tensor] = self.multiply
        if self.grouped:
            multiply = partial(checkpoint, self.multiply, use_reentrant=False, preserve_rng_state=False)
        return tuple(multiply(z, p.b.weight, p.a.weight, p.values, p.index) for p in self.projections)

    def multiply(self, z: Tensor, b: Tensor, a: Tensor, values: Tensor, index: Tensor) -> Tensor:
        """z [..., pad_in] -> the output [..., pad_out] of one projection."""
        padding = (0, self.spec.pad_in - self.spec.d_in, 0, self.spec.pad_out - self.spec.d_out)
        return F.linear(z, F.pad(form(b, a, values, index, self.scale), padding))

    def dense(self, tensors: dict[str, Tensor]) -> Tensor:
        b, a, values = (tensors[name] for name in ("b.weight", "a.weight", "values"))
        wide = at_least_fp32(a.dtype)
        return form(b.to(wide), a.to(wide), values.to(wide), tensors["index"], self.scale).to(a.dtype)


def form(b: Tensor, a: Tensor, values: Tensor, index: Tensor, scale: float) -> Tensor:
    """scale B A + S, [d_out, d_in]. Positions are unique, so that the order of additions does not matter."""
    product = scale * (b @ a)
    return product.flatten().index_add(0, index, values).view(product.shape)


BACKBONE = Sltrain
