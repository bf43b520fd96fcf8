"""Linear low-rank layers, y = B A x."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dlr_pretrain.models.linear import Draw, Group, GroupSpec, Stack
from dlr_pretrain.models.spectrum import factors
from dlr_pretrain.util.tensors import at_least_fp32


class LowRankProjection(nn.Module):
    """The two factors of one projection, and theta if a learned s = tanh(theta) scales its latents."""

    def __init__(self, d_in: int, d_out: int, rank: int, learned_scale: bool = False):
        super().__init__()
        self.a = nn.Linear(d_in, rank, bias=False)
        self.b = nn.Linear(rank, d_out, bias=False)
        if learned_scale:
            self.theta = nn.Parameter(torch.empty(()))


class LowRank(Group):
    """y = s B A x: ``a.weight`` is A [r, d_in], ``b.weight`` B [d_out, r].

    Knob ``init``: "cola", normal with Var[(B A)_ij] = 1 / (d_in + d_out), as in CoLA and DLR; "kaiming", uniform with
    bound 1/sqrt(fan_in), as in the benchmark of Glentis et al.; "xavier", normal with variance 2 / (fan_in + fan_out),
    as in LORO. ``latent_scale`` is s, which is fixed. With ``learn_latent_scale``, s = tanh(theta) instead, and theta
    starts at 1. ``b_gain`` multiplies the initial B.
    """

    def __init__(self, spec: GroupSpec, projections: list[nn.Module], knobs: dict, grouped: bool):
        super().__init__(spec, projections, knobs, grouped)
        if grouped:
            self.a = Stack([p.a for p in projections], pad_in=spec.pad_in, pad_out=knobs["rank"])
            self.b = Stack([p.b for p in projections], pad_in=knobs["rank"], pad_out=spec.pad_out)

    @staticmethod
    def projection(spec: GroupSpec, knobs: dict) -> nn.Module:
        return LowRankProjection(spec.d_in, spec.d_out, knobs["rank"], knobs.get("learn_latent_scale", False))

    @torch.no_grad()
    def init_(self, draw: Draw, prefix: str) -> None:
        for name, p in zip(self.spec.names, self.projections, strict=True):
            for factor in ("a", "b"):
                self.init_factor_(draw, f"{prefix}{name}.{factor}.weight", p.get_submodule(factor).weight)
            if hasattr(p, "theta"):
                p.theta.fill_(1.0)

    def init_factor_(self, draw: Draw, name: str, weight: Tensor) -> None:
        """Draw A [r, d_in] or B [d_out, r]."""
        gain = self.knobs.get("b_gain", 1.0) if name.endswith(".b.weight") else 1.0
        match self.knobs.get("init", "cola"):
            case "cola":
                std = (self.knobs["rank"] * (self.spec.d_in + self.spec.d_out)) ** -0.25
                weight.copy_(draw.normal(name, weight.shape, gain * std))
            case "xavier":
                weight.copy_(draw.normal(name, weight.shape, gain * (2 / sum(weight.shape)) ** 0.5))
            case "kaiming":
                weight.copy_(draw.uniform(name, weight.shape, gain * weight.shape[1] ** -0.5))

    @torch.no_grad()
    def start_from_(self, dense: list[Tensor]) -> None:
        """Set s B A to the best approximation of rank r of each dense weight, with B^T B = A A^T."""
        for p, weight in zip(self.projections, dense, strict=True):
            b, a = factors(weight.double() / latent_scale(p.state_dict(), self.knobs), self.knobs["rank"])
            p.a.weight.copy_(a)
            p.b.weight.copy_(b)

    def dense(self, tensors: dict[str, Tensor]) -> Tensor:
        own = type(self)
        if (own.activate, own.latent) != (LowRank.activate, LowRank.latent):  # not a single matrix
            return super().dense(tensors)
        a, b = tensors["a.weight"], tensors["b.weight"]
        wide = at_least_fp32(a.dtype)
        return (latent_scale(tensors, self.knobs) * (b.to(wide) @ a.to(wide))).to(a.dtype)

    def down(self, x: Tensor) -> Tensor:
        """x [..., pad_in] -> A x [..., G, r]."""
        if self.grouped:
            return self.a.shared(x)
        return torch.stack([p.a(x) for p in self.projections], dim=-2)

    def activate(self, h: Tensor) -> Tensor:
        """The function between the factors; here the identity."""
        return h

    def latent(self, x: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [..., pad_in] -> z [..., G, r], the vectors that multiply B."""
        z = self.activate(self.down(x))
        if self.knobs.get("learn_latent_scale", False):
            scale = torch.stack([p.theta for p in self.projections]).tanh()  # may be wider than z (bf16_sr, FSDP)
            return z * scale.to(z.dtype)[:, None], None
        scale = self.knobs.get("latent_scale", 1.0)
        return (z if scale == 1.0 else z * scale), None

    def expand(self, z: Tensor) -> tuple[Tensor, ...]:
        """z [..., G, r] -> B z, one [..., pad_out] per projection."""
        if self.grouped:
            return self.b.batched(z).unbind(0)
        return tuple(p.b(z_p) for p, z_p in zip(self.projections, z.unbind(-2), strict=True))


def latent_scale(tensors: dict[str, Tensor], knobs: dict) -> float | Tensor:
    """s of the projection that holds ``tensors``."""
    if "theta" in tensors:
        theta = tensors["theta"]
        return theta.to(at_least_fp32(theta.dtype)).tanh()
    return knobs.get("latent_scale", 1.0)


BACKBONE = LowRank
