"""Linear low-rank layers, y = B A x."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dlr_pretrain.models.linear import Factors, Group, GroupSpec, SeededInit, Stack
from dlr_pretrain.util.tensors import at_least_fp32


class LowRank(Group):
    """y = s B A x: ``a.weight`` is A [r, d_in], ``b.weight`` B [d_out, r].

    Knob ``init``: "cola", normal with Var[(B A)_ij] = 1 / (d_in + d_out), as in CoLA and DLR; "kaiming", uniform with
    bound 1/sqrt(fan_in), as in the benchmark of Glentis et al.; "xavier", normal with variance 2 / (fan_in + fan_out),
    as in LORO. ``latent_scale`` is s.
    """

    projection: type[nn.Module] = Factors

    def __init__(self, spec: GroupSpec, knobs: dict, grouped: bool):
        super().__init__(spec, knobs, grouped)
        self.scale = knobs.get("latent_scale", 1.0)
        if grouped:
            self.a = Stack([p.a for p in self.projections], pad_in=spec.pad_in, pad_out=knobs["rank"])
            self.b = Stack([p.b for p in self.projections], pad_in=knobs["rank"], pad_out=spec.pad_out)

    @torch.no_grad()
    def init_(self, seeded: SeededInit, prefix: str) -> None:
        for name, p in self.named(prefix):
            self.init_factor_(seeded, f"{name}.a.weight", p.a.weight)
            self.init_factor_(seeded, f"{name}.b.weight", p.b.weight)

    def init_factor_(self, seeded: SeededInit, name: str, weight: Tensor) -> None:
        """Draw A [r, d_in] or B [d_out, r]."""
        match self.knobs.get("init", "cola"):
            case "cola":
                std = (self.knobs["rank"] * (self.spec.d_in + self.spec.d_out)) ** -0.25
                weight.copy_(seeded.normal(name, weight.shape, std))
            case "xavier":
                weight.copy_(seeded.normal(name, weight.shape, (2 / sum(weight.shape)) ** 0.5))
            case "kaiming":
                weight.copy_(seeded.kaiming(name, weight.shape))

    def dense(self, tensors: dict[str, Tensor]) -> Tensor:
        own = type(self)
        if (own.activate, own.latent) != (LowRank.activate, LowRank.latent):  # not a single matrix
            return super().dense(tensors)
        a, b = tensors["a.weight"], tensors["b.weight"]
        wide = at_least_fp32(a.dtype)
        return (self.scale * (b.to(wide) @ a.to(wide))).to(a.dtype)

    def down(self, x: Tensor) -> Tensor:
        """x [..., pad_in] -> A x [..., G, r]."""
        return self.a.shared(x) if self.grouped else torch.stack([p.a(x) for p in self.projections], dim=-2)

    def activate(self, h: Tensor) -> Tensor:
        """The function between the factors; here the identity."""
        return h

    def latent(self, x: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [..., pad_in] -> z [..., G, r], the vectors that multiply B."""
        z = self.activate(self.down(x))
        return (z if self.scale == 1.0 else z * self.scale), None

    def expand(self, z: Tensor) -> tuple[Tensor, ...]:
        """z [..., G, r] -> B z, one [..., pad_out] per projection."""
        if self.grouped:
            return self.b.batched(z).unbind(0)
        return tuple(p.b(z_p) for p, z_p in zip(self.projections, z.unbind(-2), strict=True))


def leading(weight: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """U [m, k], S [k], Vh [k, n] of the k = ``rank`` largest singular values of ``weight`` [m, n], in float64.

    They come from the eigenvectors of the smaller Gram matrix. For the sizes here this is several times faster than an
    SVD, which finds all vectors of both sides. In float64 the squared condition number loses no precision that the
    weights have.

    The sign of a pair of singular vectors is arbitrary, but a nonlinearity between the factors makes it matter.
    Libraries and devices choose it differently. Here the largest entry of the shorter side's vector is positive.
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


BACKBONE = LowRank
