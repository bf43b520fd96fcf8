"""beta R^T: the entries of B to which DLR adds, and the weights W = round(B + beta R^T) of a model in training.

Output i of an up-projection B [d_out, r] is (B z)_i plus beta times latent g(i) = floor(i / K). Each latent has K =
ceil(d_out / r) copies, and beta = alpha / sqrt(K). B + beta R^T therefore differs from B only in the d_out entries
(i, g(i)). The loss depends on W alone, and the gradient of B equals that of W. DLR acts in two places: it changes the
initial W, and it leaves B, not W, to the weight decay and rounding of an update. In the trainer the model therefore
holds W. The optimizer takes the residual out before an update and puts it in afterwards.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from dlr_pretrain.config.tree import Dlr
from dlr_pretrain.models.layer import Layer, named_layers, projections
from dlr_pretrain.util import sharded
from dlr_pretrain.util.tensors import ALPHA, at_least_fp32, one_storage


def columns_of(grouping: str, name: str, d_out: int, rank: int, seed: int) -> Tensor:
    """The latent g(i) of each output i, [d_out]: floor(i / K), K = ceil(d_out / rank).

    With ``grouping`` "random" it is drawn from ``seed`` and the MD5 of ``name`` (of the module that holds B), as in the
    paper's study.
    """
    if grouping == "random":
        digest = hashlib.md5(name.encode(), usedforsecurity=False).digest()
        mixed = (seed ^ int.from_bytes(digest[:8], "little")) % (2**63 - 1)
        return torch.randint(0, rank, (d_out,), generator=torch.Generator("cpu").manual_seed(mixed))
    return torch.arange(d_out) // -(-d_out // rank)


def divisor_of(d_out: int, rank: int, variance_correction: bool) -> float:
    """alpha / beta: sqrt(K), or 1 without ``variance_correction``."""
    return math.sqrt(-(-d_out // rank)) if variance_correction else 1.0


def plus(entries: Tensor, betas: Tensor | float) -> Tensor:
    """entries + betas, formed in fp32 (fp64 for fp64) and rounded once."""
    return (entries.to(at_least_fp32(entries.dtype)) + betas).to(entries.dtype)


@dataclass(frozen=True)
class Entries:
    """The entries of a fused B [G pad_out, r] that receive a residual, [n] each."""

    rows: Tensor
    columns: Tensor
    projections: Tensor  # number of the entry's projection in the model, ascending
    divisor: float  # alpha / beta

    def own(self, b: Tensor) -> Entries:
        """The entries in the rows of ``b`` that this rank holds, on its device; row 0 is the rank's first row."""
        first, end = sharded.span(b)
        here = (first <= self.rows) & (self.rows < end)
        rows, columns, projections = (t[here].to(b.device) for t in (self.rows, self.columns, self.projections))
        return Entries(rows - first, columns, projections, self.divisor)

    @cached_property
    def parts(self) -> list[tuple[int, slice]]:
        """The number of each projection, and the slice of its entries."""
        numbers, counts = torch.unique_consecutive(self.projections.cpu(), return_counts=True)
        ends = counts.cumsum(0).tolist()
        slices = [slice(end - count, end) for end, count in zip(ends, counts.tolist(), strict=True)]
        return list(zip(numbers.tolist(), slices, strict=True))


def entries(model: nn.Module, dlr: Dlr) -> dict[str, Entries]:
    """The entries of each fused B of ``model``, by the name of B; empty without DLR."""
    found: dict[str, Entries] = {}
    number = 0
    for path, layer in named_layers(model) if dlr.enabled else ():
        d_out, rank = layer.parts["b"].shape
        names = projections(path, layer)
        columns = [columns_of(dlr.grouping, name, d_out, rank, dlr.grouping_seed) for name in names]
        rows = [torch.arange(d_out) + layer.spec.pad_out * i for i in range(layer.count)]
        numbers = torch.arange(number, number + layer.count).repeat_interleave(d_out)
        divisor = divisor_of(d_out, rank, dlr.variance_correction)
        found[f"{path}.b"] = Entries(torch.cat(rows), torch.cat(columns), numbers, divisor)
        number += layer.count
    return found


def strengths(model: nn.Module, dlr: Dlr, like: Tensor) -> dict[str, Tensor]:
    """The initial learned alphas [projections] by their name in a checkpoint, in fp32 (fp64 for fp64); or empty."""
    if not (dlr.enabled and dlr.learn_alpha):
        return {}
    count = sum(layer.count for _, layer in named_layers(model))
    return {ALPHA: torch.full((count,), dlr.alpha, dtype=at_least_fp32(like.dtype), device=like.device)}


@torch.no_grad()
def add_(tensors: Mapping[str, Tensor], model: nn.Module, dlr: Dlr, share: float = 1.0) -> None:
    """Add ``share`` times beta R^T to each B in ``tensors`` (by the names in ``model``), rounded once.

    Learned alphas are taken from ``tensors``.
    """
    learned = tensors.get(ALPHA)
    for name, whole in entries(model, dlr).items():
        own, b = whole.own(tensors[name]), sharded.local_rows(tensors[name])
        beta = dlr.alpha / own.divisor if learned is None else learned.to(b.device)[own.projections] / own.divisor
        b[own.rows, own.columns] = plus(b[own.rows, own.columns], share * beta)


class Residuals:
    """Takes the residuals out of the weights of ``model`` before an update, and puts them in afterwards.

    ``values`` are the tensors that an update changes, by the names of the parameters: the parameters themselves, or
    fp32 masters, which always hold B. Unless B is sharded, all Bs move into one storage, which a single kernel can
    update. ``compiled`` fuses the kernels. ``alpha`` [projections] are the alphas if they are learned.
    """

    def __init__(self, model: nn.Module, dlr: Dlr, values: Mapping[str, Tensor], compiled: bool = False):
        working, found = dict(model.named_parameters()), entries(model, dlr)
        own = {name: whole.own(working[name]) for name, whole in found.items()}
        weights: list[Tensor] = [working[name] for name in found]
        updated = [values[name] for name in found]
        self.alpha: Tensor | None = strengths(model, dlr, like=updated[0]).get(ALPHA)
        self.learned = own if dlr.learn_alpha else {}
        _into_one_storage_(weights)
        if updated[0] is not weights[0]:
            _into_one_storage_(updated)
        put_in = torch.compile(_put_in, fullgraph=True, dynamic=True) if compiled else _put_in
        groups: dict[int, list[tuple[Tensor, Tensor, Entries]]] = {}
        for part in zip(weights, updated, own.values(), strict=True):
            groups.setdefault(sharded.local_rows(part[0]).untyped_storage()._cdata, []).append(part)
        self.storages = [_Storage(group, dlr.alpha, self.alpha, put_in) for group in groups.values()]

    @torch.no_grad()
    def take_out(self) -> None:
        """Restore B in the values, bit for bit."""
        for storage in self.storages:
            storage.take_out()

    @torch.no_grad()
    def put_in(self) -> None:
        """Set the weights to W = round(B + beta R^T)."""
        for storage in self.storages:
            storage.put_in()

    def nbytes(self) -> int:
        """Bytes of all tensors here except weights and values: indices, alphas, and the entries of B."""
        learned = [t for own in self.learned.values() for t in (own.rows, own.columns, own.projections)]
        held = [self.alpha, *learned, *(tensor for storage in self.storages for tensor in storage.held())]
        return sum({id(tensor): tensor.nbytes for tensor in held if tensor is not None}.values())

    @torch.no_grad()
    def alpha_gradient(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The gradient of ``alpha`` from the gradients of the Bs, by name; summed over the ranks under fsdp."""
        assert self.alpha is not None
        total = torch.zeros_like(self.alpha)
        for name, own in self.learned.items():
            entries = sharded.local_rows(gradients[name])[own.rows, own.columns].to(total.dtype) / own.divisor
            for number, part in own.parts:  # index_add_ is not deterministic on a GPU
                total[number] = entries[part].sum()
        return sharded.summed_(total, gradients[name])


class _Storage:
    """Parameters that share one storage, and whose values share one storage."""

    def __init__(
        self, group: list[tuple[Tensor, Tensor, Entries]], alpha: float, learned: Tensor | None, put_in: Callable
    ):
        weight, value, _ = group[0]
        self.in_place, self.learned, self.add = weight is value, learned, put_in
        self.weights = _memory(weight)
        self.values = self.weights if self.in_place else _memory(value)  # torch 2.11 does not compile two aliases
        self.write_at = torch.cat([_places(w, own) for w, _, own in group])
        self.read_at = self.write_at if self.in_place else torch.cat([_places(v, own) for _, v, own in group])
        wide = at_least_fp32(self.values.dtype)
        divisors = [torch.full((len(own.rows),), own.divisor, dtype=torch.float64) for _, _, own in group]
        self.betas = (alpha / torch.cat(divisors)).to(self.weights.device, wide)
        if learned is not None:
            self.projections = torch.cat([own.projections for _, _, own in group])
            self.divisors = torch.cat(divisors).to(self.weights.device, wide)
        self.kept: Tensor | None = None  # the entries of B while the weights hold W

    def held(self) -> tuple[Tensor | None, ...]:
        learned = () if self.learned is None else (self.projections, self.divisors)
        return self.write_at, self.read_at, self.betas, self.kept, *learned

    def take_out(self) -> None:
        if self.kept is not None:
            self.values[self.read_at], self.kept = self.kept, None

    def put_in(self) -> None:
        self.take_out()  # in case this is the second call in a row
        if self.learned is not None:
            self.betas = self.learned[self.projections] / self.divisors
        kept = self.add(self.weights, self.values, self.write_at, self.read_at, self.betas)
        self.kept = kept if self.in_place else None


def _put_in(weights: Tensor, values: Tensor, write_at: Tensor, read_at: Tensor, betas: Tensor) -> Tensor:
    """Set ``weights[write_at]`` to ``values[read_at]`` plus ``betas``; returns the values read. All are flat."""
    b = values[read_at]
    weights[write_at] = plus(b, betas).to(weights.dtype)
    return b


@torch.no_grad()
def _into_one_storage_(tensors: list[Tensor]) -> None:
    """Move ``tensors`` into one storage, unless they are sharded."""
    if sharded.is_sharded(tensors[0]):
        return
    for tensor, memory in zip(tensors, one_storage((t.numel() for t in tensors), like=tensors[0]), strict=True):
        tensor.data = memory.view(tensor.shape).copy_(tensor)


def _places(tensor: Tensor, own: Entries) -> Tensor:
    """The positions of the entries in the storage of ``tensor``, counted in values."""
    rows = sharded.local_rows(tensor)
    return int(rows.storage_offset()) + own.rows * rows.stride(0) + own.columns * rows.stride(1)


def _memory(tensor: Tensor) -> Tensor:
    """The whole storage of this rank's rows of ``tensor``, flat; not as a view, which compiled code cannot change."""
    own = sharded.local_rows(tensor).detach()
    size = own.untyped_storage().nbytes() // own.element_size()
    return own.new_empty(0).set_(own.untyped_storage(), 0, (size,))  # type: ignore[call-overload]


def branch_(model: nn.Module, dlr: Dlr, learned: Tensor | None = None) -> None:
    """Make a ``model`` that holds B compute B z + beta R^T z, the paper's formula: a reference to compare with.

    ``learned`` [projections] are the learned alphas.
    """
    layers = dict(named_layers(model))
    for name, whole in entries(model, dlr).items():
        layer = layers[name.rpartition(".")[0]]
        columns, numbers = (t.view(layer.count, -1) for t in (whole.columns, whole.projections))
        alphas = [dlr.alpha] * layer.count if learned is None else learned[numbers[:, 0]].tolist()
        _branch_(layer, columns.to(layer.get_parameter("b").device), [alpha / whole.divisor for alpha in alphas])


def _branch_(layer: Layer, columns: Tensor, betas: list[float]) -> None:
    expand, padding = layer.expand, (0, layer.spec.pad_out - columns.shape[1])

    def both(z: Tensor) -> Tensor:
        own = zip(z.unbind(-2), columns, betas, strict=True)
        residual = [nn.functional.pad(beta * z_p.index_select(-1, at), padding) for z_p, at, beta in own]
        return expand(z) + torch.stack(residual)

    layer.expand = both  # type: ignore[method-assign]
