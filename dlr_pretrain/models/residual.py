"""beta R^T: the entries of B to which DLR adds, and the weights W = round(B + beta R^T) of a model in training.

Output i of an up-projection B [d_out, r] is (B z)_i plus beta times latent g(i) = floor(i / K). A latent has at most
K = ceil(d_out / r) copies, and beta = alpha / sqrt(K). B + beta R^T therefore differs from B only in the d_out entries
(i, g(i)). The loss depends on W alone, and the gradient of B equals that of W. DLR acts in two places: it changes the
initial W, and it leaves B, not W, to the weight decay and rounding of an update. In the trainer the model therefore
holds W. The optimizer takes the residual out before an update and puts it in afterwards: the entries of B that W
replaces are kept beside it. fp32 masters always hold B.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dlr_pretrain.config.tree import Dlr
from dlr_pretrain.models.layer import Layer, named_layers, projections
from dlr_pretrain.util import sharded
from dlr_pretrain.util.tensors import ALPHA, at_least_fp32


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


def plus(b: Tensor, betas: Tensor | float) -> Tensor:
    """Entries of W = B + beta R^T from those of B and their betas, formed in fp32 (fp64 for fp64) and rounded once."""
    return (b.to(at_least_fp32(b.dtype)) + betas).to(b.dtype)


class Entries(NamedTuple):
    """The entries of a fused B [G pad_out, r] that receive a residual, [n] each, in the order of rows."""

    rows: Tensor
    columns: Tensor
    projections: Tensor  # number of the entry's projection in the model
    divisors: Tensor  # alpha / beta, in fp64

    def betas(self, alpha: float | Tensor, dtype: torch.dtype) -> Tensor:
        """[n], in ``dtype``. Learned alphas are [projections], in this dtype."""
        if isinstance(alpha, Tensor):
            return alpha[self.projections] / self.divisors.to(dtype)
        return (alpha / self.divisors).to(dtype)

    def local(self, b: Tensor) -> Entries:
        """The entries in the rows of ``b`` that this rank holds; row 0 is the rank's first row."""
        first, end = sharded.span(b)
        here = (first <= self.rows) & (self.rows < end)
        return Entries(self.rows[here] - first, *(tensor[here] for tensor in self[1:]))

    def to(self, device: torch.device) -> Entries:
        return Entries(*(tensor.to(device) for tensor in self))


def entries(model: nn.Module, dlr: Dlr) -> dict[str, Entries]:
    """The entries of each fused B of ``model``, by the name of B; empty without DLR."""
    by_name: dict[str, Entries] = {}
    number = 0
    for path, layer in named_layers(model) if dlr.enabled else ():
        d_out, rank = layer.parts["b"].shape
        names = projections(path, layer)
        columns = [columns_of(dlr.grouping, name, d_out, rank, dlr.grouping_seed) for name in names]
        rows = [torch.arange(d_out) + layer.spec.pad_out * i for i in range(layer.count)]
        numbers = torch.arange(number, number + layer.count).repeat_interleave(d_out)
        divisors = torch.full(numbers.shape, divisor_of(d_out, rank, dlr.variance_correction), dtype=torch.float64)
        by_name[f"{path}.b"] = Entries(torch.cat(rows), torch.cat(columns), numbers, divisors)
        number += layer.count
    return by_name


def strengths(model: nn.Module, dlr: Dlr, like: Tensor) -> dict[str, Tensor]:
    """The initial learned alphas [projections] by their name in a checkpoint, in fp32 (fp64 for fp64); or empty."""
    if not (dlr.enabled and dlr.learn_alpha):
        return {}
    count = sum(layer.count for _, layer in named_layers(model))
    return {ALPHA: torch.full((count,), dlr.alpha, dtype=at_least_fp32(like.dtype), device=like.device)}


@torch.no_grad()
def add_(tensors: Mapping[str, Tensor], model: nn.Module, dlr: Dlr, factor: float = 1.0) -> None:
    """Add ``factor`` times beta R^T to each B in ``tensors`` (by the names in ``model``), rounded once.

    Learned alphas are taken from ``tensors``.
    """
    alpha = tensors.get(ALPHA, dlr.alpha)
    for name, whole in entries(model, dlr).items():
        local, b = whole.local(tensors[name]).to(tensors[name].device), sharded.local_rows(tensors[name])
        alphas = factor * (alpha.to(b.device) if isinstance(alpha, Tensor) else alpha)
        _put_in(b, b, local.rows, local.columns, local.betas(alphas, at_least_fp32(b.dtype)))


def _put_in(weights: Tensor, values: Tensor, rows: Tensor, columns: Tensor, betas: Tensor) -> Tensor:
    """Write entries of W to ``weights`` [R, r], computed from B in ``values`` [R, r]. Returns those entries of B."""
    b = values[rows, columns]
    weights[rows, columns] = plus(b, betas).to(weights.dtype)
    return b


class Residuals:
    """Takes the residuals out of the weights of ``model`` before an update, and puts them in afterwards.

    ``values`` are the tensors that an update changes, by the names of the parameters: the parameters themselves, or
    fp32 masters, which always hold B. ``compiled`` fuses the kernels. ``alpha`` [projections] are the alphas if they
    are learned.
    """

    def __init__(self, model: nn.Module, dlr: Dlr, values: Mapping[str, Tensor], compiled: bool = False):
        working = dict(model.named_parameters())
        local = {name: whole.local(working[name]) for name, whole in entries(model, dlr).items()}
        names = list(local)
        self.alpha: Tensor | None = strengths(model, dlr, like=values[names[0]]).get(ALPHA)
        self.learned = {
            name: (here.to(working[name].device), *_counts(here)) for name, here in local.items() if dlr.learn_alpha
        }
        put_in = torch.compile(_put_in, fullgraph=True, dynamic=True) if compiled else _put_in
        groups = [[name] for name in names] if sharded.is_sharded(working[names[0]]) else [names]
        self.stacks = [
            _Stack([(working[name], values[name], local[name]) for name in group], dlr.alpha, self.alpha, put_in)
            for group in groups
        ]

    @torch.no_grad()
    def take_out(self) -> None:
        """Restore B in the values, bit for bit."""
        for stack in self.stacks:
            stack.take_out()

    @torch.no_grad()
    def put_in(self) -> None:
        """Set the weights to W = round(B + beta R^T)."""
        for stack in self.stacks:
            stack.put_in()

    def nbytes(self) -> int:
        """Bytes of all tensors here except weights and values: indices, alphas, and the entries of B."""
        held: list[Tensor | None] = [self.alpha, *(tensor for here, *_ in self.learned.values() for tensor in here)]
        for stack in self.stacks:
            held += [stack.b, stack.betas, stack.rows, stack.columns, *(stack.entries or ())]
        return sum({id(tensor): tensor.nbytes for tensor in held if tensor is not None}.values())

    @torch.no_grad()
    def alpha_gradient(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The gradient of ``alpha`` from the gradients of the Bs, by name; summed over the ranks under fsdp."""
        assert self.alpha is not None
        total = torch.zeros_like(self.alpha)
        for name, (here, numbers, counts) in self.learned.items():
            of_betas = sharded.local_rows(gradients[name])[here.rows, here.columns].to(total.dtype)
            parts = (of_betas / here.divisors.to(total.dtype)).split(counts)
            for number, part in zip(numbers, parts, strict=True):  # index_add_ is not deterministic on a GPU
                total[number] = part.sum()
        return sharded.summed_(total, gradients[name])


def _counts(local: Entries) -> tuple[list[int], list[int]]:
    """The numbers of the projections of ``local``, and how many entries each has."""
    numbers, counts = torch.unique_consecutive(local.projections, return_counts=True)
    return numbers.tolist(), counts.tolist()


class _Stack:
    """Bs below each other in one tensor, and their values in another, so that one kernel reads or writes them all.

    A shard is a stack of its own, because its memory belongs to FSDP. ``parts`` are weights, values and entries.
    """

    def __init__(
        self, parts: list[tuple[Tensor, Tensor, Entries]], alpha: float, learned: Tensor | None, put_in: Callable
    ):
        weights, values, local = zip(*parts, strict=True)
        self.in_place, self.add = weights[0] is values[0], put_in
        self.weights = _stacked_(weights)
        self.values = self.weights if self.in_place else _stacked_(values)  # torch 2.11 does not compile two aliases
        firsts = torch.tensor([0, *(len(b) for b in weights[:-1])]).cumsum(0).tolist()
        moved = (each._replace(rows=each.rows + first) for each, first in zip(local, firsts, strict=True))
        entries = Entries(*(torch.cat(tensors) for tensors in zip(*moved, strict=True))).to(self.weights.device)
        self.rows, self.columns, *_ = entries
        self.betas = entries.betas(alpha, at_least_fp32(self.values.dtype))
        self.alphas = learned
        self.entries = None if learned is None else entries._replace(divisors=entries.divisors.to(learned.dtype))
        self.b: Tensor | None = None  # the entries of B while the weights hold W

    def take_out(self) -> None:
        if self.b is not None:
            self.values[self.rows, self.columns], self.b = self.b, None

    def put_in(self) -> None:
        self.take_out()  # in case this is the second call in a row
        if self.alphas is not None and self.entries is not None:
            self.betas = self.entries.betas(self.alphas, self.alphas.dtype)
        b = self.add(self.weights, self.values, self.rows, self.columns, self.betas)
        self.b = b if self.in_place else None


def _stacked_(tensors: tuple[Tensor, ...]) -> Tensor:
    """One tensor whose rows ``tensors`` become; of a single one, this rank's rows as they are."""
    if len(tensors) == 1:
        return sharded.local_rows(tensors[0]).detach()
    stack = torch.cat([tensor.detach() for tensor in tensors])
    for tensor, rows in zip(tensors, stack.split([len(tensor) for tensor in tensors]), strict=True):
        tensor.data = rows
    return stack


def branch_(model: nn.Module, dlr: Dlr, learned: Tensor | None = None) -> None:
    """Make a ``model`` that holds B compute B z + beta R^T z, the paper's formula: a reference to compare with.

    ``learned`` [projections] are the learned alphas.
    """
    layers = dict(named_layers(model))
    for name, whole in entries(model, dlr).items():
        layer = layers[name.rpartition(".")[0]]
        betas = whole.betas(dlr.alpha if learned is None else learned.cpu(), torch.float64).view(layer.count, -1)
        columns = whole.columns.view(layer.count, -1).to(layer.get_parameter("b").device)
        _branch_(layer, columns, betas[:, 0].tolist())


def _branch_(layer: Layer, columns: Tensor, betas: list[float]) -> None:
    expand, padding = layer.expand, (0, layer.spec.pad_out - columns.shape[1])

    def with_branch(z: Tensor) -> Tensor:
        latents = zip(z.unbind(-2), columns, betas, strict=True)
        residual = [nn.functional.pad(beta * each.index_select(-1, group), padding) for each, group, beta in latents]
        return expand(z) + torch.stack(residual)

    layer.expand = with_branch  # type: ignore[method-assign]
