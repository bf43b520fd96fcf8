"""Tensors sharded by rows (DTensors), and plain tensors, which a rank holds whole, behind the same functions.

Rows are sharded along the last dimension of the device mesh. Under HSDP the mesh has a first dimension, along which
ranks hold copies. A DTensor is recognised by an attribute and not by its class, whose import takes half a second and is
needed for ``parallel=fsdp`` and ``hsdp`` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    return hasattr(tensor, "device_mesh")


def span(tensor: Tensor) -> tuple[int, int]:
    """The range [first, end) of rows that this rank holds of ``tensor``; rows are divided as by torch.chunk."""
    if not is_sharded(tensor):
        return 0, len(tensor)
    mesh, (*copies, rows) = tensor.device_mesh, tensor.placements
    if not rows.is_shard(0) or any(not placement.is_replicate() for placement in copies):
        raise ValueError(f"expected a tensor sharded by rows, got {tensor}")
    count = tensor.shape[0]
    each = -(-count // mesh.size(mesh.ndim - 1))
    first = min(each * mesh.get_local_rank(mesh.ndim - 1), count)
    return first, min(first + each, count)


def copy_of(tensor: Tensor) -> tuple[int, int]:
    """The index of the copy of ``tensor`` that this rank holds rows of, and the number of copies."""
    mesh = tensor.device_mesh if is_sharded(tensor) else None
    return (mesh.get_local_rank(0), mesh.size(0)) if mesh is not None and mesh.ndim == 2 else (0, 1)


def local_rows(tensor: Tensor) -> Tensor:
    """The rows of ``tensor`` that this rank holds. Every call returns the same object, as optimizers need."""
    if not is_sharded(tensor):
        return tensor
    attributes = vars(tensor)
    if "_local_rows" not in attributes:
        with torch.no_grad():
            attributes["_local_rows"] = tensor.to_local()
    return attributes["_local_rows"]


def shard_like(tensor: Tensor, rows: Tensor) -> Tensor:
    """A tensor with the shape and sharding of ``tensor``, whose rows on this rank are ``rows``."""
    if not is_sharded(tensor):
        return rows
    from torch.distributed.tensor import DTensor

    shape, stride = tensor.shape, torch.empty(tensor.shape, device="meta").stride()
    return DTensor.from_local(rows, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride)


def whole(stored: Any) -> Tensor:
    """``stored``, a tensor or a ``train.checkpoint.StoredTensor``, as a tensor."""
    return stored if isinstance(stored, Tensor) else stored.whole()


def own_part(tensor: Tensor, stored: Any) -> Tensor:
    """The rows of ``stored``, which is as in ``whole``, that correspond to this rank's rows of ``tensor``."""
    if not is_sharded(tensor):
        return whole(stored)
    first, end = span(tensor)
    return stored[first:end] if isinstance(stored, Tensor) else stored.rows(first, end)


@torch.no_grad()
def gathered(tensor: Tensor) -> Tensor:
    """All rows of ``tensor``, on every rank. All ranks must call this."""
    plain = tensor.detach()
    return plain.full_tensor() if is_sharded(plain) else plain


def summed_(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` summed over the ranks that ``like`` is sharded on. All of them must call this.

    Terms are added in the order of ranks: an all-reduce may choose another order on each node, and copies would drift
    apart.
    """
    if not is_sharded(like):
        return tensor
    mesh, shards = like.device_mesh, like.device_mesh.ndim - 1
    parts = tensor.new_empty(mesh.size(shards), tensor.numel())
    # Into views of one tensor: the function that fills it directly has another name from torch 2.13 on.
    torch.distributed.all_gather(list(parts), tensor.flatten(), group=mesh.get_group(shards))
    return parts.sum(0).view(tensor.shape)
