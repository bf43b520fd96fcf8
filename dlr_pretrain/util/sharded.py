"""Sharded tensors, of which each rank holds some rows: DTensors that are sharded on their first dimension.

Every function also takes plain tensors, of which a rank holds all rows. DTensors are recognised by an attribute and not
by their class: importing it takes half a second, and only ``parallel=fsdp`` makes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class Stored(Protocol):
    """A tensor stored elsewhere, whose rows are read on request."""

    def whole(self) -> Tensor: ...

    def rows(self, first: int, end: int) -> Tensor: ...


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    return hasattr(tensor, "device_mesh")


def span(tensor: Tensor) -> tuple[int, int]:
    """The range [first, end) of the rows of ``tensor`` that this rank holds, divided as by torch.chunk."""
    if not is_sharded(tensor):
        return 0, len(tensor)
    if [placement.is_shard(0) for placement in tensor.placements] != [True]:
        raise ValueError(f"tensors are sharded by rows here, and not this one: {tensor}")
    count = tensor.shape[0]
    each = -(-count // tensor.device_mesh.size())
    first = min(each * tensor.device_mesh.get_local_rank(), count)
    return first, min(first + each, count)


def local_rows(tensor: Tensor) -> Tensor:
    """The rows of ``tensor`` that this rank holds, in its memory; always the same object, as optimizers need."""
    if not is_sharded(tensor):
        return tensor
    kept = vars(tensor)
    if "_local_rows" not in kept:
        with torch.no_grad():
            kept["_local_rows"] = tensor.to_local()
    return kept["_local_rows"]


def shard_like(tensor: Tensor, own: Tensor) -> Tensor:
    """A tensor of the shape of ``tensor``, sharded like it, with ``own`` as the rows here."""
    if not is_sharded(tensor):
        return own
    from torch.distributed.tensor import DTensor

    shape, stride = tensor.shape, torch.empty(tensor.shape, device="meta").stride()
    return DTensor.from_local(own, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride)


def whole(stored: Tensor | Stored) -> Tensor:
    return stored if isinstance(stored, Tensor) else stored.whole()


def own_part(tensor: Tensor, stored: Tensor | Stored) -> Tensor:
    """The rows of ``stored``, a whole tensor, at the indices of the rows that this rank holds of ``tensor``."""
    if not is_sharded(tensor):
        return whole(stored)
    first, end = span(tensor)
    return stored[first:end] if isinstance(stored, Tensor) else stored.rows(first, end)


@torch.no_grad()
def gathered(tensor: Tensor) -> Tensor:
    """All rows of ``tensor``, on every rank; all ranks must call."""
    own = tensor.detach()
    return own.full_tensor() if is_sharded(own) else own


def summed_(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` summed in place over the ranks that hold rows of ``like``; all of them must call."""
    if is_sharded(like):
        torch.distributed.all_reduce(tensor, group=like.device_mesh.get_group())
    return tensor
