"""beta R^T of one up-projection: which output receives which latent, and how it is added to a weight."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from dlr_pretrain.util import sharded
from dlr_pretrain.util.tensors import at_least_fp32

GROUPINGS = ("contiguous", "balanced", "random")


class Residual:
    """beta R^T of one up-projection with weight [d_out, rank]: output i receives beta z[columns[i]].

    beta = alpha / sqrt(K), K = ceil(d_out / rank) (alpha itself without ``variance_correction``). ``columns`` is
    floor(i / K) unless given. If alpha is learned, it is the parameter ``dlr_alpha`` of the layer, and the caller gives
    its value to ``add``. If a weight is sharded by rows, each row on this rank receives the residual of its index in
    the whole weight.
    """

    def __init__(
        self,
        d_out: int,
        rank: int,
        alpha: float,
        variance_correction: bool,
        impl: str,
        columns: Tensor | None = None,
    ):
        self.copies = -(-d_out // rank)
        self.divisor = math.sqrt(self.copies) if variance_correction else 1.0
        self.alpha, self.impl = alpha, impl
        self.rows = torch.arange(d_out)
        self.contiguous = columns is None
        self.columns = self.rows // self.copies if columns is None else columns
        self.merged = False  # whether the weight that is multiplied by holds B + beta R^T at present

    @property
    def beta(self) -> float:
        return self.alpha / self.divisor

    @property
    def checksum(self) -> int:
        """CRC-32 of ``columns``. A float64 holds it exactly."""
        return zlib.crc32(self.columns.cpu().numpy().tobytes())

    def add(self, weight: Tensor, alpha: Tensor | None = None, share: Tensor | float = 1.0) -> None:
        """Add share beta to the entries of ``weight``, in place."""
        own, at = self.entries(weight)
        own[at] = plus(own[at], share * self.strength(weight.dtype, alpha), weight.dtype)

    def entries(self, weight: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The rows of ``weight`` that this rank holds, and the indices of the entries (i, columns[i]) in them."""
        self._follow(weight.device)
        if not sharded.is_sharded(weight):
            return weight, (self.rows, self.columns)
        first, end = sharded.span(weight)
        return sharded.local_rows(weight), (self.rows[: end - first], self.columns[first:end])

    def strength(self, dtype: torch.dtype, alpha: Tensor | None) -> Tensor | float:
        """beta, as it is added to a weight of ``dtype``; ``alpha`` is the learned one, if any."""
        return self.beta if alpha is None else alpha.to(at_least_fp32(dtype)) / self.divisor

    def places(self, weight: Tensor) -> Tensor:
        """The positions of the entries in the storage of ``weight``, counted in values from its start."""
        own, (rows, columns) = self.entries(weight)
        return int(own.storage_offset()) + rows * own.stride(0) + columns * own.stride(1)

    def strength_gradient(self, gradient: Tensor) -> Tensor:
        """dL/dalpha from the gradient of B, in fp32 (fp64 for fp64): the gradient of B is that of B + beta R^T.

        If the gradient is sharded by rows, the result is the part of the rows that this rank holds.
        """
        own, at = self.entries(gradient)
        return own[at].sum(dtype=at_least_fp32(gradient.dtype)) / self.divisor

    def duplicate(self, z: Tensor) -> Tensor:
        """R^T z, [..., rank] -> [..., d_out]. Contiguous copies are full groups of K and a tail.

        Repeating all latents and cutting at d_out gives the same, but inductor's C++ backend (torch 2.13) then does not
        write the last partial group if K > 8.
        """
        if not self.contiguous:
            self._follow(z.device)
            return z.index_select(-1, self.columns)
        full, tail = divmod(len(self.rows), self.copies)
        y = z[..., :full].repeat_interleave(self.copies, dim=-1)
        return torch.cat((y, z[..., full : full + 1].expand(*z.shape[:-1], tail)), dim=-1) if tail else y

    def _follow(self, device: torch.device) -> None:
        if self.rows.device != device:
            self.rows, self.columns = self.rows.to(device), self.columns.to(device)


def columns_of(grouping: str, name: str, d_out: int, rank: int, seed: int) -> Tensor | None:
    """The latent of each output [d_out] under ``grouping``; None for the default, contiguous groups of K.

    "balanced": floor(i rank / d_out); every latent has floor or ceil(d_out / rank) copies. "random": drawn once from
    ``seed`` and the MD5 of the layer's ``name``, as in the paper's study of random duplication.
    """
    if grouping == "balanced":
        return torch.arange(d_out) * rank // d_out
    if grouping == "random":
        digest = hashlib.md5(name.encode(), usedforsecurity=False).digest()
        mixed = (seed ^ int.from_bytes(digest[:8], "little")) % (2**63 - 1)
        return torch.randint(0, rank, (d_out,), generator=torch.Generator("cpu").manual_seed(mixed))
    return None


def plus(entries: Tensor, betas: Tensor | float, dtype: torch.dtype) -> Tensor:
    """entries + betas, formed in fp32 (fp64 for fp64) and rounded once to ``dtype``.

    Training, folding and exporting all add a residual to a weight by this function, so that they agree bit for bit.
    """
    return (entries.to(at_least_fp32(entries.dtype)) + betas).to(dtype)


class UpProjection(nn.Linear):
    """The type of a linear layer that carries a residual; its class in fact stays what it was, or is a ``Branch``."""

    residual: Residual
    dlr_alpha: nn.Parameter  # only if alpha is learned
    dlr_folded: bool  # only once the residual was folded, and is gone
    offset: Residual  # only if it was an initial value of the weight, towards which the weight decays


def residuals(module: nn.Module) -> list[tuple[str, UpProjection]]:
    """The up-projections that carry a residual, with their names."""
    carrying = ((name, m) for name, m in module.named_modules() if isinstance(getattr(m, "residual", None), Residual))
    return [(name, cast(UpProjection, m)) for name, m in carrying]


def require_merged(carrying: Iterable[tuple[str, UpProjection]], *_: object) -> None:
    """Raise RuntimeError if a forward pass would compute B z, which is neither DLR nor what folding gives."""
    for name, up in carrying:
        residual = getattr(up, "residual", None)
        if residual is not None and residual.impl == "weight" and not residual.merged:
            rule = "its weight is without the residual, so this forward pass is that of another model"
            fix = "Run it inside `with active(model):` (under a Trainer, use TrainsWithDlr), or after fold_(model)"
            raise RuntimeError(f"{name or 'an up-projection'}: {rule}. {fix}")


def learned_alpha(up: nn.Linear) -> nn.Parameter | None:
    return getattr(up, "dlr_alpha", None)


def full_name(module: str, leaf: str) -> str:
    """The name of a parameter of the submodule ``module``, which is empty for the module itself."""
    return f"{module}.{leaf}" if module else leaf


class Branch(nn.Linear):
    """The paper's residual path, mixed into the class of a linear layer: y + beta R^T z.

    It is a class and not a forward hook because ``torch.compile`` guards on classes but, by default, not on hooks.
    """

    residual: Residual

    def forward(self, z: Tensor) -> Tensor:
        learned = learned_alpha(self)  # detached: ``strength_gradient`` gives its gradient here too
        beta = self.residual.beta if learned is None else learned.detach() / self.residual.divisor
        return super().forward(z) + beta * self.residual.duplicate(z)


_BRANCHES: dict[type, type] = {}


def with_branch(linear: type) -> type:
    """One class for all layers of a class, so that equal blocks share one compiled graph."""
    if linear not in _BRANCHES:
        _BRANCHES[linear] = type(f"Branch{linear.__name__}", (Branch, linear), {})
    return _BRANCHES[linear]
