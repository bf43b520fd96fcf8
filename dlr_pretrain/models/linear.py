"""The linear layers of a block, in groups that read the same input.

A *group* owns one or more *projections* of equal shape (q, k and v; gate and up; o; down), each an ordinary module with
its own parameters and keys. A backbone is a subclass of ``Group``. It defines the parameters of a projection, their
initial values, and the formula of the whole group in two halves: ``latent(x, carried) -> (z, carried)`` and
``expand(z) -> y``. In ``LowRank`` layers z is the vector that B multiplies. A dense layer is all in the second half.

The parameters of a group are views of one storage (``Stack``). Projections with the same input thus run as one
product, and the up-projections as one batch, while optimizers, checkpoints and folding see one matrix per projection.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.tensors import named_generator, one_storage

INIT_STD = 0.02  # of dense weights


@dataclass(frozen=True)
class GroupSpec:
    """What a block requires of a group: its projections' names and common shape, and the index of the block.

    ``pad_in`` and ``pad_out`` are the actual widths of the activations (at least ``d_in`` and ``d_out``; the rest is
    zero), because odd widths such as 5461 are slow on tensor cores.
    """

    names: tuple[str, ...]
    d_in: int
    d_out: int
    pad_in: int
    pad_out: int
    block: int


class SeededInit:
    """Initial values that depend on (seed, parameter name) alone, not on device, number of ranks or backbone."""

    def __init__(self, seed: int):
        self.seed = seed

    def normal(self, name: str, shape: tuple[int, ...], std: float) -> Tensor:
        """A CPU fp32 tensor of independent N(0, std^2) values."""
        return torch.randn(shape, generator=self.generator(name)) * std

    def uniform(self, name: str, shape: tuple[int, ...], bound: float) -> Tensor:
        """A CPU fp32 tensor of independent values between -bound and bound."""
        return (torch.rand(shape, generator=self.generator(name)) * 2 - 1) * bound

    def kaiming(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A weight [d_out, d_in] of independent values between -1/sqrt(d_in) and 1/sqrt(d_in)."""
        return self.uniform(name, shape, shape[1] ** -0.5)

    def generator(self, name: str) -> torch.Generator:
        return named_generator(self.seed, name)


class Factors(nn.Module):
    """The factors of one projection: ``a.weight`` is A [rank, d_in], ``b.weight`` is B [d_out, rank]."""

    def __init__(self, spec: GroupSpec, knobs: dict[str, Any]):
        super().__init__()
        self.a = nn.Linear(spec.d_in, knobs["rank"], bias=False)
        self.b = nn.Linear(knobs["rank"], spec.d_out, bias=False)


class Stack:
    """The weights of ``linears`` (G matrices [d_out, d_in]) as views of one zero-padded storage.

    The storage is [G, pad_out, d_in], row-major. If the input is padded, it is [G, pad_in, d_out] instead, and the
    weights are transposed views of it, so that each weight stays dense and holds exactly its own entries. No parameter,
    gradient, optimizer state or checkpoint contains the padding, which stays zero. The transposed storage ignores
    ``pad_out``.
    """

    def __init__(self, linears: Sequence[Any], pad_in: int, pad_out: int):
        d_out, d_in = linears[0].weight.shape
        self.linears, self.transposed = linears, pad_in > d_in
        self.shape = (len(linears), pad_in, d_out) if self.transposed else (len(linears), pad_out, d_in)
        self.share_storage()

    @torch.no_grad()
    def share_storage(self, memory: Tensor | None = None) -> None:
        """Give the weights one common storage; their values and parameter objects stay.

        ``memory``, if given, becomes that storage: a flat tensor of as many zeros as ``shape`` has.
        """
        weights = [linear.weight for linear in self.linears]
        storage = weights[0].new_zeros(self.shape) if memory is None else memory.view(self.shape)
        self.storage = storage.transpose(1, 2) if self.transposed else storage  # [G, d_out, d_in], padded
        d_out, d_in = weights[0].shape
        for slot, weight in zip(self.storage, weights, strict=True):
            view = slot[:d_out, :d_in]
            view.copy_(weight)
            weight.data = view

    def shares_storage(self) -> bool:
        pairs = zip(self.storage, self.linears, strict=True)
        return all(slot.data_ptr() == linear.weight.data_ptr() for slot, linear in pairs)

    @property
    def joined(self) -> Tensor:
        """The weights [G, d_out, d_in] as one tensor, padding included; its gradient goes to the weights themselves."""
        # Dynamo (torch 2.13) fails on autograd functions if gradients are disabled, or none of their inputs has one
        if not (torch.is_grad_enabled() and any(linear.weight.requires_grad for linear in self.linears)):
            return self.storage
        return _Joined.apply(self.storage, *(linear.weight for linear in self.linears))

    def shared(self, x: Tensor) -> Tensor:
        """x [..., pad_in] -> [..., G, rows of the storage]: one product for projections with the same input.

        ``train.activation_checkpointing=latent`` keeps such products, the only ones in a block that are not batched.
        """
        y = x.flatten(0, -2) @ self.joined.flatten(0, 1).T
        return y.view(*x.shape[:-1], len(self.linears), -1)

    def batched(self, z: Tensor, *beside: Stack) -> Tensor:
        """z [..., G, width] -> [G, ..., pad_out]: each projection reads its own input.

        It multiplies by the weights of this stack and of those ``beside`` it, in this order along the input.
        """
        rows, stacks = z.flatten(0, -3), (self, *beside)
        if torch.is_grad_enabled():
            y = _OwnInput.apply(rows, *(stack.joined for stack in stacks))
        else:
            y = torch.bmm(rows.transpose(0, 1), _side_by_side([s.storage for s in stacks], rows.shape[-1]).mT)
        return y.view(len(self.linears), *z.shape[:-2], -1)


class _Joined(torch.autograd.Function):
    """The storage of the leaves that are views of it. Of its gradient each leaf gets its own part."""

    @staticmethod
    def forward(ctx, storage: Tensor, *leaves: Tensor) -> Tensor:
        ctx.shape = leaves[0].shape
        return storage.view_as(storage)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        d_out, d_in = ctx.shape
        return None, *(g[:d_out, :d_in] for g in gradient)


class _OwnInput(torch.autograd.Function):
    """z [N, G, width], weights [G, d_out, r_1], [G, d_out, r_2], ... -> [G, N, d_out], in one product.

    Several weights are put side by side: this moves fewer bytes than adding their outputs, and the sum is rounded once.
    The backward pass puts them together again, so that no second copy of them is kept.
    """

    @staticmethod
    def forward(ctx, z: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(z, *weights)
        return torch.bmm(z.transpose(0, 1), _side_by_side(weights, z.shape[-1]).mT)

    @staticmethod
    def backward(ctx, dy: Tensor):
        z, *weights = ctx.saved_tensors
        dz = torch.bmm(dy, _side_by_side(weights, z.shape[-1])).transpose(0, 1)
        if not any(ctx.needs_input_grad[1:]):
            return dz, *[None] * len(weights)
        dw = torch.bmm(dy.mT, z.transpose(0, 1))
        widths = [weight.shape[-1] for weight in weights]
        return dz, *dw[..., : sum(widths)].split(widths, dim=-1)


def _side_by_side(weights: Sequence[Tensor], width: int) -> Tensor:
    """[G, d_out, r_1], [G, d_out, r_2], ... -> [G, d_out, width], filled up with zeros; one of that width as it is."""
    missing = width - sum(weight.shape[-1] for weight in weights)
    if len(weights) == 1 and not missing:
        return weights[0]
    return torch.cat((*weights, weights[0].new_zeros(*weights[0].shape[:-1], missing)), dim=-1)


class Group(ABC):
    """Projections of one shape that read the same input; the base of every backbone.

    A subclass names the class of a projection's parameters (``projection``, made from ``spec`` and ``knobs``), draws
    their initial values (``init_``), and computes the group in two halves (``latent``, ``expand``). With
    ``grouped=False`` it must call the projections' own modules one by one. Hooks, sharding and parity tests use this
    simpler path.
    """

    projection: type[nn.Module]
    deployed_dense = False  # whether the layers are deployed as the weights of ``dense``, in a plain LLaMA

    def __init__(self, spec: GroupSpec, knobs: dict[str, Any], grouped: bool):
        self.spec, self.knobs, self.grouped = spec, knobs, grouped
        self.projections: list[Any] = [self.projection(spec, knobs) for _ in spec.names]

    @abstractmethod
    def init_(self, seeded: SeededInit, prefix: str) -> None:
        """Draw the initial values of the projections, whose full names are ``prefix + name``."""

    def latent(self, x: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [..., pad_in] -> the input of ``expand``, and the tensor for the same group of the next block (or None)."""
        return x, None

    @abstractmethod
    def expand(self, z: Tensor) -> tuple[Tensor, ...]:
        """The latent -> one [..., pad_out] per projection."""

    def dense(self, tensors: dict[str, Tensor]) -> Tensor:
        """The weight [d_out, d_in] that a projection multiplies by; ``tensors`` are its own, by their names in it.

        It is formed in fp32 (fp64 for fp64) and rounded once. Raises UserError if a projection is not a single matrix.
        """
        raise UserError(f"{type(self).__name__} layers are not a single matrix: they cannot be merged into dense ones")

    def named(self, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """The projections, each with its name after ``prefix``."""
        return ((f"{prefix}{name}", p) for name, p in zip(self.spec.names, self.projections, strict=True))

    def stacks(self) -> list[Stack]:
        return [value for value in vars(self).values() if isinstance(value, Stack)]


class GroupHolder(nn.Module):
    """A module whose linear layers are groups; it restores their common storages after moves and copies."""

    def add_group(self, group: Group) -> Group:
        """Register the projections of ``group`` as children under their own names, and return it."""
        for name, projection in group.named():
            setattr(self, name, projection)
        return group

    def groups(self) -> list[Group]:
        return [value for value in vars(self).values() if isinstance(value, Group)]

    def share_storage(self) -> None:
        """Restore the common storages after the parameters were moved, cast or copied."""
        for group in self.groups():
            for stack in group.stacks():
                stack.share_storage()

    def _apply(self, fn: Callable, recurse: bool = True):
        super()._apply(fn, recurse)
        self.share_storage()
        return self

    def __setstate__(self, state: dict) -> None:  # deepcopy and unpickling end with this call
        super().__setstate__(state)
        self.share_storage()


def named_groups(model: nn.Module) -> Iterator[tuple[str, Group]]:
    """The groups of ``model``, each with the prefix that completes the names of its projections."""
    for name, module in model.named_modules():
        if isinstance(module, GroupHolder):
            for group in module.groups():
                yield f"{name}." if name else "", group


@torch.no_grad()
def stacks_in_one_storage_(model: nn.Module) -> None:
    """Put every stack whose linears all carry a residual into one storage, so that one kernel can reach all of them.

    When the model is moved, cast or copied, each stack gets a storage of its own again.
    """
    stacks = [stack for _, group in named_groups(model) for stack in group.stacks()]
    stacks = [stack for stack in stacks if all(hasattr(linear, "residual") for linear in stack.linears)]
    if stacks:
        memories = one_storage((stack.storage.numel() for stack in stacks), like=stacks[0].storage)
        for stack, memory in zip(stacks, memories, strict=True):
            stack.share_storage(memory)


def require_shared_storage(model: nn.Module) -> None:
    """Raise RuntimeError if a parameter has left the storage that products read: its updates would have no effect."""
    for prefix, group in named_groups(model):
        if not all(stack.shares_storage() for stack in group.stacks()):
            raise RuntimeError(f"{prefix[:-1]}: {', '.join(group.spec.names)} have lost their common storage")
