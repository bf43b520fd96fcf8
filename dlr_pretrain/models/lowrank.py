"""Linear low-rank layers, y = B A x."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from dlr_pretrain.config.key import key
from dlr_pretrain.config.tree import BackboneOptions
from dlr_pretrain.models.layer import Layer, SeededInit, Spec
from dlr_pretrain.util.tensors import at_least_fp32


@dataclass
class FactorOptions(BackboneOptions):
    """Options of every layer with factors A and B of rank r."""

    factorized = True
    rank: int = key("rank r of the factors", ge=1)
    init: str = "cola"
    latent_scale: float = 1.0


@dataclass
class Options(FactorOptions):
    init: Literal["cola", "kaiming", "xavier"] = key("initialisation; cola: Var[(B A)_ij] = 1 / (d_in + d_out)")
    latent_scale: float = key("factor s of the latent", gt=0)
    exported_keys = ("rank", "latent_scale")


class LowRank(Layer):
    """y = s B A x: ``a`` holds A [r, d_in] of each projection, ``b`` holds B [d_out, r].

    Option ``init``: "cola", normal with Var[(B A)_ij] = 1 / (d_in + d_out), as in CoLA and DLR; "kaiming", uniform with
    bound 1/sqrt(fan_in), as in the benchmark of Glentis et al.; "xavier", normal with variance 2 / (fan_in + fan_out),
    as in LORO. Option ``latent_scale`` is s.
    """

    options: FactorOptions
    a: nn.Parameter
    b: nn.Parameter

    def __init__(self, spec: Spec, options: FactorOptions, pad_rank: int | None = None):
        super().__init__(spec, options)
        self.rank, self.scale = options.rank, options.latent_scale
        self.fuse("a", "a.weight", (self.rank, spec.d_in), (pad_rank or self.rank, spec.pad_in))
        self.fuse("b", "b.weight", (spec.d_out, self.rank), (spec.pad_out, self.rank))

    def initial(self, seeded: SeededInit, name: str) -> dict[str, Tensor]:
        shapes = {"a.weight": (self.rank, self.spec.d_in), "b.weight": (self.spec.d_out, self.rank)}
        return {leaf: self.initial_factor(seeded, f"{name}.{leaf}", shape) for leaf, shape in shapes.items()}

    def initial_factor(self, seeded: SeededInit, name: str, shape: tuple[int, int]) -> Tensor:
        """A [r, d_in] or B [d_out, r]."""
        match self.options.init:
            case "cola":
                return seeded.normal(name, shape, (self.rank * (self.spec.d_in + self.spec.d_out)) ** -0.25)
            case "xavier":
                return seeded.normal(name, shape, (2 / sum(shape)) ** 0.5)
            case _:
                return seeded.kaiming(name, shape)

    def dense(self, tensors: dict[str, Tensor]) -> Tensor:
        layer = type(self)
        if (layer.activate, layer.latent) != (LowRank.activate, LowRank.latent):  # not a single matrix
            return super().dense(tensors)
        return product(tensors["b.weight"], tensors["a.weight"], self.scale)

    def activate(self, h: Tensor) -> Tensor:
        """The function between the factors: the identity, unless a subclass overrides it."""
        return h

    def latent(self, x: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [..., pad_in] -> z [..., G, r], the vectors that multiply B."""
        z = self.activate(self.shared(x, self.a))
        return (z if self.scale == 1.0 else z * self.scale), None

    def expand(self, z: Tensor) -> Tensor:
        """z [..., G, r] -> B z [G, ..., pad_out]."""
        return self.batched(z, self.b)


def product(b: Tensor, a: Tensor, scale: float = 1.0) -> Tensor:
    """scale B A, formed in fp32 (fp64 for fp64) and rounded once."""
    wide = at_least_fp32(b.dtype)
    return (scale * (b.to(wide) @ a.to(wide))).to(b.dtype)


def leading(weight: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The SVD of ``weight`` [m, n] at ``rank`` k, in float64: U [m, k], S [k], Vh [k, n].

    It is computed from the eigenvectors of the smaller Gram matrix. For the sizes here this is several times faster
    than an SVD, which finds all vectors on both sides. In float64 the squared condition number costs no precision that
    the weights have.

    The sign of a pair of singular vectors is arbitrary, and libraries and devices choose it differently. It matters
    when there is a nonlinearity between the factors. Here the largest entry of the shorter vector is positive.
    """
    wide = weight.double()
    if weight.shape[0] > weight.shape[1]:
        u, s, vh = leading(wide.T, rank)
        return vh.T, s, u.T
    u = torch.linalg.eigh(wide @ wide.T).eigenvectors.flip(-1)[:, :rank]
    u = u * u.gather(0, u.abs().argmax(0, keepdim=True)).sign()
    projected = u.T @ wide
    s = projected.norm(dim=1)
    return u, s, projected / s[:, None].clamp_min(torch.finfo(s.dtype).tiny)


def balanced(u: Tensor, s: Tensor, vh: Tensor) -> tuple[Tensor, Tensor]:
    """B = U sqrt(S) [m, k] and A = sqrt(S) Vh [k, n], for which B^T B = A A^T."""
    root = s.sqrt()
    return u * root, root[:, None] * vh


Options.layer = LowRank
