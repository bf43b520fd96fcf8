"""SLTrain: a low-rank plus a sparse matrix of fixed random support, y = (s B A + S) x (Han et al., 2024)."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlr_pretrain.config.key import key
from dlr_pretrain.config.tree import BackboneOptions
from dlr_pretrain.models.layer import Layer, SeededInit, Spec
from dlr_pretrain.util.tensors import at_least_fp32


@dataclass
class Options(BackboneOptions):
    rank: int = key("rank r of the factors", ge=1)
    alpha: float = key("s = alpha / rank", gt=0)
    sparsity: float = key("share of trained entries of S", gt=0, le=1)


class Sltrain(Layer):
    """y = (s B A + S) x, s = alpha / rank. B starts at zero; A and the values start uniform with bound 1/sqrt(d_in).

    S [d_out, d_in] has int(sparsity d_in d_out) entries: trained ``values`` at the sorted flat positions ``index``.
    The forward and the backward pass each form the dense matrix and drop it; in ``eval`` mode, autograd keeps it. The
    export contains this matrix.
    """

    deployed_dense = True
    options: Options
    a: nn.Parameter
    b: nn.Parameter
    values: nn.Parameter
    index: Tensor

    def __init__(self, spec: Spec, options: Options):
        super().__init__(spec, options)
        rank, self.scale = options.rank, options.alpha / options.rank
        entries = int(options.sparsity * spec.d_in * spec.d_out)
        self.fuse("a", "a.weight", (rank, spec.d_in))
        self.fuse("b", "b.weight", (spec.d_out, rank))
        self.fuse("values", "values", (entries,))
        self.fuse("index", "index", (entries,), dtype=torch.int64)

    def initial(self, seeded: SeededInit, name: str) -> dict[str, Tensor]:
        (_, a), (_, b), (_, values), _ = self.parts.values()
        order = torch.randperm(self.spec.d_out * self.spec.d_in, generator=seeded.generator(f"{name}.index"))
        return {
            "a.weight": seeded.kaiming(f"{name}.a.weight", a),
            "b.weight": torch.zeros(b),
            "values": seeded.uniform(f"{name}.values", values, self.spec.d_in**-0.5),
            "index": order[: values[0]].sort().values,
        }

    def expand(self, z: Tensor) -> Tensor:
        projections = zip(*(self.each(t).unbind(0) for t in (self.b, self.a, self.values, self.index)), strict=True)
        if not self.training:
            return torch.stack([self.multiply(z, *tensors) for tensors in projections])
        again = partial(checkpoint, self.multiply, use_reentrant=False, preserve_rng_state=False)
        return torch.stack([again(z, *tensors) for tensors in projections])

    def multiply(self, z: Tensor, b: Tensor, a: Tensor, values: Tensor, index: Tensor) -> Tensor:
        """z [..., pad_in] -> the output [..., pad_out] of one projection."""
        padding = (0, self.spec.pad_in - self.spec.d_in, 0, self.spec.pad_out - self.spec.d_out)
        return F.linear(z, F.pad(form(b, a, values, index, self.scale), padding))

    def dense(self, tensors: dict[str, Tensor]) -> Tensor:
        b, a, values = (tensors[name] for name in ("b.weight", "a.weight", "values"))
        wide = at_least_fp32(a.dtype)
        return form(b.to(wide), a.to(wide), values.to(wide), tensors["index"], self.scale).to(a.dtype)


def form(b: Tensor, a: Tensor, values: Tensor, index: Tensor, scale: float) -> Tensor:
    """scale B A + S, [d_out, d_in]. Positions are unique, so the order of additions does not matter."""
    product = scale * (b @ a)
    return product.flatten().index_add(0, index, values).view(product.shape)


Options.layer = Sltrain
