"""LOST: a low-rank and a channel-sparse branch, y = gamma B silu(A x) + (1 - gamma) W_s x_I (Li et al., 2025).

x_I are k fixed input channels. Both branches start from a dense weight W [d_out, d_in]: B A is its best approximation
of rank r, I are the largest columns of W - B A, and W_s holds the columns I of W.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlr_pretrain.config.key import key
from dlr_pretrain.models.layer import INIT_STD, SeededInit, Spec
from dlr_pretrain.models.lowrank import FactorOptions, LowRank, balanced, leading


@dataclass
class Options(FactorOptions):
    rank: int = key("rank r; default: the largest within the parameter budget of plain factors of scale.rank", ge=1)
    gamma: float = key("share of the low-rank branch", ge=0, le=1)
    sparsity: float = key("input channels of the sparse branch, as a share of d_in (at least one)", gt=0, le=1)
    activation: Literal["silu", "none"] = key("activation between the factors")
    residual_rank: int = key("singular values beyond the rank that choose the channels", ge=1)
    exported_keys = ("rank", "gamma", "sparsity", "activation")


class Lost(LowRank):
    """y = gamma B phi(A x) + (1 - gamma) W_s x_I; the latent is (gamma phi(A x), (1 - gamma) x_I).

    B multiplies gamma phi(A x), so a residual added to B (DLR) is inside the low-rank branch.

    I (``channels``, ascending) are the columns with the largest l2 norm in the part of W that belongs to the
    ``residual_rank`` singular values after the first r. ``s`` holds W_s [d_out, k].
    """

    options: Options
    s: nn.Parameter
    channels: Tensor

    def __init__(self, spec: Spec, options: Options):
        # the rank that keeps the parameter budget is rarely aligned
        super().__init__(spec, options, pad_rank=_aligned(options.rank, spec.alignment))
        chosen = max(1, int(options.sparsity * spec.d_in))
        self.width = _aligned(self.rank + chosen, spec.alignment)
        self.fuse("s", "s.weight", (spec.d_out, chosen), (spec.pad_out, chosen))
        self.fuse("channels", "channels", (chosen,), dtype=torch.int64)

    def initial(self, seeded: SeededInit, name: str) -> dict[str, Tensor]:
        w = seeded.normal(f"{name}.weight", (self.spec.d_out, self.spec.d_in), INIT_STD).to(self.b.device)
        looked_at = min(self.options.residual_rank, min(w.shape) - self.rank)
        u, s, vh = leading(w, self.rank + looked_at)
        b, a = balanced(u[:, : self.rank], s[: self.rank], vh[: self.rank])
        scores = (s[self.rank :, None] * vh[self.rank :]).norm(dim=0)  # U is orthonormal
        ranking = scores.sort(descending=True, stable=True).indices
        channels = ranking[: self.parts["channels"].shape[0]].sort().values
        return {"a.weight": a, "b.weight": b, "s.weight": w[:, channels], "channels": channels}

    def activate(self, h: Tensor) -> Tensor:
        return F.silu(h) if self.options.activation == "silu" else h

    def latent(self, x: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [..., pad_in] -> [..., G, r + k]: gamma phi(A x), (1 - gamma) x_I, and zeros up to ``width``."""
        gamma = self.options.gamma
        h = self.activate(self.shared(x, self.a)[..., : self.rank])
        chosen = x.index_select(-1, self.channels).unflatten(-1, (self.count, -1))
        zeros = h.new_zeros(*h.shape[:-1], self.width - self.rank - chosen.shape[-1])
        return torch.cat((h * gamma, chosen * (1 - gamma), zeros), dim=-1), None

    def expand(self, z: Tensor) -> Tensor:
        """[..., G, width] -> B z_1 + W_s z_2 [G, ..., pad_out]."""
        return self.batched(z, self.b, self.s)


def _aligned(width: int, alignment: int) -> int:
    return -(-width // alignment) * alignment


Options.layer = Lost
