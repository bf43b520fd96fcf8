"""The linear layers of an exported model. An export holds this text in its modeling file, which needs no other package.

    lowrank    y = s B A x
    cola       y = s B silu(A x)
    lost       y = gamma B phi(A x) + (1 - gamma) S x_I, where x_I are some of the input channels
    lax        y = B z, where z joins A x with the latent of the same projection in the previous block
    cola_lax   the same, with a SiLU between the factors

A layer is built with the widths, the configuration, the index of its block and the name of its projection, such as
q_proj. Before the first step, a run compares the exported layer of a user's own backbone with the one that it trains
(see ``exportable.py``).
"""

import threading

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CALL = threading.local()  # its ``latents`` are those of the block that this thread is in


class Settings:
    """What config.json says of the layers: the kind (``backbone``), the ``rank``, and the settings of the formula.

    lowrank, cola: ``latent_scale`` is s. lost: ``gamma``, ``sparsity`` (the share of the channels of x that are in x_I)
    and ``activation`` (phi, "silu" or "none"). lax, cola_lax: ``gate`` ("tensor" or "dense").
    """

    num_hidden_layers: int
    backbone: str = "lowrank"
    rank: int = 128
    latent_scale: float = 1.0
    gamma: float = 0.7
    sparsity: float = 0.01
    activation: str = "silu"
    gate: str = "tensor"


class Latents:
    """The latents of one forward pass by (block, projection), [..., rank]. Not a dict, which hooks would copy.

    A block that gradient checkpointing recomputes keeps the latents of its first run, to whose graph they belong.
    """

    def __init__(self) -> None:
        self.by_layer: dict[tuple[int, str], Tensor] = {}


class LowRankLinear(nn.Module):
    """y = s B phi(A x) with A [rank, d_in] and B [d_out, rank]; x [..., d_in] -> y [..., d_out].

    phi is a SiLU in cola, cola_lax and, unless ``activation`` is "none", lost; it is the identity in lowrank and lax.
    """

    crosses = False  # True: each block reads ``CALL.latents`` of the previous one

    def __init__(self, d_in: int, d_out: int, config: Settings, block: int, name: str):
        super().__init__()
        self.block, self.name = block, name
        self.a = nn.Linear(d_in, config.rank, bias=False)
        self.b = nn.Linear(config.rank, d_out, bias=False)
        self.scale = config.latent_scale
        self.silu = config.backbone in ("cola", "cola_lax") or (config.backbone, config.activation) == ("lost", "silu")

    def activate(self, h: Tensor) -> Tensor:
        return F.silu(h) if self.silu else h

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.activate(self.a(x)) * self.scale)


class LostLinear(LowRankLinear):
    """y = gamma B phi(A x) + (1 - gamma) S x_I, where I are the ``channels``."""

    def __init__(self, d_in: int, d_out: int, config: Settings, block: int, name: str):
        super().__init__(d_in, d_out, config, block, name)
        count = max(1, int(config.sparsity * d_in))
        self.d_in = d_in
        self.s = nn.Linear(count, d_out, bias=False)
        self.channels = nn.Buffer(self.spread(count))
        self.gamma = config.gamma

    def spread(self, count: int) -> Tensor:
        """The channels until a checkpoint sets them: ``count`` equally spaced ones."""
        return torch.arange(count) * self.d_in // count

    def forward(self, x: Tensor) -> Tensor:
        z = self.activate(self.a(x))
        return self.b(z * self.gamma) + self.s(x.index_select(-1, self.channels) * (1 - self.gamma))


class TensorGate(nn.Module):
    """G(c) = E2^T C E1, where C [n1, n2] is c reshaped, n1 n2 = rank, and n1 <= n2 are as close as possible."""

    def __init__(self, rank: int):
        super().__init__()
        short = max(n for n in range(1, int(rank**0.5) + 1) if rank % n == 0)
        self.e1 = nn.Parameter(torch.empty(rank // short, rank // short))
        self.e2 = nn.Parameter(torch.empty(short, short))

    def forward(self, c: Tensor) -> Tensor:
        return (self.e2.T @ (c.unflatten(-1, (len(self.e2), len(self.e1))) @ self.e1)).flatten(-2)


class LaxLinear(LowRankLinear):
    """y = B z, z = phi(norm(A x + G(c))), where c is the previous block's z. In the first block, z = phi(A x)."""

    crosses = True

    def __init__(self, d_in: int, d_out: int, config: Settings, block: int, name: str):
        super().__init__(d_in, d_out, config, block, name)
        self.last = block == config.num_hidden_layers - 1
        if block:
            self.gate = TensorGate(config.rank) if config.gate == "tensor" else nn.Linear(config.rank, config.rank)
            self.norm = nn.LayerNorm(config.rank, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        h, latents = self.a(x), CALL.latents.by_layer
        if self.block:
            h = self.norm(h + self.gate(latents[self.block - 1, self.name].to(h.device)))
        z = self.activate(h)
        if not self.last:
            latents.setdefault((self.block, self.name), z)
        return self.b(z)


LAYERS = {
    "lowrank": LowRankLinear,
    "cola": LowRankLinear,
    "lost": LostLinear,
    "lax": LaxLinear,
    "cola_lax": LaxLinear,
}
