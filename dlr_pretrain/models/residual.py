"""beta R^T of one up-projection: which output receives which latent, and how that enters a weight."""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor, nn

from dlr_pretrain import shards
from dlr_pretrain.tensors import at_least_fp32

GROUPINGS = ("contiguous", "balanced", "random")


class Residual:
    """beta R^T of one up-projection with weight [d_out, rank]: output i receives beta z[columns[i]].

    beta = alpha / sqrt(K), K = ceil(d_out / rank) (alpha itself without ``variance_correction``). ``columns`` is
    floor(i / K) unless given. alpha may be learned: then it is the parameter ``dlr_alpha`` of the layer, and ``add``
    is given its value. Of a weight that is sharded by rows, those that are here receive the residual of their index in
    the whole.
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
        self.saved: tuple[Tensor, Tensor] | None = None  # B and its entries while the residual is published into it
        self.version = 0  # of B's memory when it was published
        self._places: dict[tuple, Tensor] = {}  # by the layout of a weight
        self._betas: Tensor | None = None

    @property
    def beta(self) -> float:
        return self.alpha / self.divisor

    @cached_property
    def checksum(self) -> int:
        """CRC-32 of ``columns``, which a float64 holds exactly."""
        return zlib.crc32(self.columns.cpu().numpy().tobytes())

    def entries(self, weight: Tensor) -> Tensor:
        """The entries (i, columns[i]) of ``weight``, one for each of its rows that are here."""
        own, at = self._entries_of(weight)
        return own[at]

    def write(self, weight: Tensor, entries: Tensor) -> None:
        own, at = self._entries_of(weight)
        own[at] = entries

    @property
    def untouched(self) -> bool:
        """Whether the weight is as publishing has left it, or not published at all."""
        return self.saved is None or shards.here(self.saved[0])._version == self.version

    def withdraw(self) -> bool:
        """Take the residual out of the weight that it is published in, if any; whether that was ``untouched``."""
        untouched = self.untouched
        if self.saved is not None:
            with torch.no_grad():
                self.write(*self.saved)
            self.saved = None
        return untouched

    def _entries_of(self, weight: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The rows of ``weight`` that are here, and the indices of the entries in them."""
        self._follow(weight.device)
        if not shards.is_sharded(weight):
            return weight, (self.rows, self.columns)
        first, end = shards.span(weight)
        return shards.here(weight), (self.rows[: end - first], self.columns[first:end])

    def add(self, weight: Tensor, alpha: Tensor | None = None, share: Tensor | float = 1.0) -> None:
        """Add share beta to the entries of ``weight``, in place."""
        beta = self.beta if alpha is None else alpha.to(at_least_fp32(weight.dtype)) / self.divisor
        self.write(weight, plus(self.entries(weight), share * beta, weight.dtype))

    def places(self, weight: Tensor) -> Tensor:
        """Where in the memory of ``weight`` the entries are, counted in values from its beginning."""
        own = shards.here(weight)
        layout = own.storage_offset(), *own.stride(), own.shape[0], own.device, getattr(weight, "device_mesh", None)
        if layout not in self._places:
            rows, columns = self._entries_of(weight)[1]
            self._places[layout] = layout[0] + rows * layout[1] + columns * layout[2]
        return self._places[layout]

    def betas(self, entries: Tensor, alpha: Tensor | None = None) -> Tensor:
        """beta for each of ``entries``, in the dtype in which it is added to them."""
        dtype = at_least_fp32(entries.dtype)
        if alpha is not None:
            return (alpha.to(dtype) / self.divisor).expand(len(entries))
        if self._betas is None or self._betas.dtype != dtype or self._betas.device != entries.device:
            self._betas = entries.new_full(self.rows.shape, self.beta, dtype=dtype)
        return self._betas[: len(entries)]

    def strength_gradient(self, gradient: Tensor) -> Tensor:
        """dL/dalpha from the gradient of B, in fp32 (fp64 for fp64): B and beta R^T enter the same product.

        Of a gradient that is sharded by rows, it is the part of those that are here.
        """
        return self.entries(gradient).sum(dtype=at_least_fp32(gradient.dtype)) / self.divisor

    def duplicate(self, z: Tensor) -> Tensor:
        """R^T z, [..., rank] -> [..., d_out]; contiguous copies as full groups plus a tail.

        Repeating all latents and cutting at d_out is the same, but inductor's C++ backend (torch 2.13) leaves the last
        partial group unwritten for K > 8.
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
    """The latent of each output [d_out] under ``grouping``; None for the contiguous groups of K that are the default.

    "balanced": floor(i rank / d_out), every latent has floor or ceil(d_out / rank) copies. "random": as in the paper's
    study of random duplication, drawn once from ``seed`` and the MD5 of the layer's ``name``.
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

    The one sum by which a residual enters a weight: in training, folding and exporting alike.
    """
    return (entries.to(at_least_fp32(entries.dtype)) + betas).to(dtype)


@dataclass(frozen=True)
class Shared:
    """The entries that ``residuals`` touch in ``tensors``, which share a memory: read and written by one kernel."""

    residuals: Sequence[Residual]
    tensors: Sequence[Tensor]

    def read(self) -> Tensor:
        """The entries of all, one after another."""
        return self._memory[self._places]

    def write(self, values: Tensor) -> None:
        self._memory[self._places] = values
        torch.autograd.graph.increment_version([shards.here(tensor) for tensor in self.tensors])

    @cached_property
    def _memory(self) -> Tensor:
        first = shards.here(self.tensors[0]).detach()
        return first.as_strided((first.untyped_storage().nbytes() // first.element_size(),), (1,), 0)

    @cached_property
    def _places(self) -> Tensor:
        return joined([r.places(t) for r, t in zip(self.residuals, self.tensors, strict=True)])


def joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def by_memory(tensors: Sequence[tuple[Tensor, ...]]) -> list[list[int]]:
    """The indices of ``tensors`` in groups: within one, all first tensors share a storage, all second ones another."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, some in enumerate(tensors):
        groups.setdefault(tuple(shards.here(t).untyped_storage()._cdata for t in some), []).append(i)
    return list(groups.values())


class Branch:
    """The paper's residual path, mixed into the class of a linear layer: y + beta * (each latent repeated K times).

    A class of its own, and not a forward hook: ``torch.compile`` guards on classes but, by default, not on hooks.
    """

    def forward(self, z: Tensor) -> Tensor:
        learned = getattr(self, "dlr_alpha", None)  # its gradient is ``strength_gradient``, on this path as well
        beta = self.residual.beta if learned is None else learned.detach() / self.residual.divisor
        return super().forward(z) + beta * self.residual.duplicate(z)


@cache
def with_branch(linear: type[nn.Linear]) -> type[nn.Linear]:
    """One class for all layers of a class, so that equal blocks share one compiled graph."""
    return type(f"Branch{linear.__name__}", (Branch, linear), {})
