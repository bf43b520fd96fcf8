"""A CPU's stand-in for a CUDA graph: it records the operations of a function, and repeats them without its Python.

A replay works on the memory that the operations had. A number that Python computed, a gradient or weight that has
moved, and an input that was not copied all show as wrong values, as on a GPU. What the function freed is NaN after each
replay, because another graph may use that memory.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

UNDECLARED = ("c10d", "fsdp")  # namespaces of operations whose schemas do not say what they change


class Operation(NamedTuple):
    """``function`` with its arguments, and the memory of each result that the operation allocated (else None)."""

    function: Any
    args: tuple
    kwargs: dict
    results: list[Tensor | None]


def tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def storages(tree: object) -> set[int]:
    return {t.untyped_storage()._cdata for t in tensors(tree)}


def run(function: Any, args: tuple, kwargs: dict) -> Any:
    """The result of an operation, when it is complete.

    Gloo copies the result of a reduce-scatter from memory of its own whenever somebody waits for it, which a tape would
    repeat with old values. A sum over ranks, of which this rank takes its part, copies nothing.
    """
    if function is torch.ops.c10d._reduce_scatter_base_.default:
        output, whole, group, operation, *_ = args
        summed = whole.clone()
        _, work = torch.ops.c10d.allreduce_([summed], group, operation, None)
        dist.distributed_c10d.Work.unbox(work).wait()
        rank = dist.ProcessGroup.unbox(group).rank()
        output.copy_(summed.chunk(whole.numel() // output.numel())[rank])
        return output, work
    out = function(*args, **kwargs)
    if function.namespace == "c10d":
        dist.distributed_c10d.Work.unbox(out[-1]).wait()
    return out


class Tape(TorchDispatchMode):
    """A graph for ``Recorded.capture``. ``outliving`` returns the tensors that remain after the recorded function."""

    def __init__(self, outliving: Callable[[], Iterable[Tensor]]):
        super().__init__()
        self.outliving, self.operations, self.replays = outliving, [], 0
        self.allocated: set[int] = set()  # storages
        self.overwritten: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # older, and a copy of each
        self.sizes: dict[int, tuple[torch.UntypedStorage, int]] = {}  # FSDP empties storages, which graphs keep

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for t in tensors((args, kwargs)):
                if not storages(t) <= self.allocated | self.overwritten.keys():
                    storage = t.untyped_storage()
                    self.overwritten[storage._cdata] = storage, storage.clone()
        given, out = storages((args, kwargs)), run(func, args, kwargs)
        for t in tensors((args, kwargs, out)):
            storage = t.untyped_storage()
            self.sizes[storage._cdata] = storage, max(storage.nbytes(), self.sizes.get(storage._cdata, (None, 0))[1])
        new = [t for t in tensors(out) if not storages(t) <= given]
        changes = func._schema.is_mutable or func.namespace in UNDECLARED
        if new or changes:  # a view needs no repetition
            self.allocated |= storages(new)
            held = tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, (args, kwargs))
            results = [t.detach() if any(t is each for each in new) else None for t in tree_leaves(out)]
            self.operations.append(Operation(func, *held, results))
        return out

    def record(self, function: Callable[[], Tensor]) -> Tensor:
        with self:
            result = function()
        self.fill_storages()
        remaining = storages([result, *self.outliving()])
        results = [t for operation in self.operations for t in operation.results if t is not None]
        self.freed = [t for t in results if not storages(t) <= remaining and t.is_floating_point()]
        for t in results:  # a recording computes nothing
            t.fill_(torch.nan if t.is_floating_point() else 0)
        for storage, copy in self.overwritten.values():
            storage.copy_(copy)
        return result

    def pool(self) -> None:
        """Tapes share no memory."""

    def fill_storages(self) -> None:
        for storage, size in self.sizes.values():
            if storage.nbytes() < size:
                storage.resize_(size)

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        self.fill_storages()
        for function, args, kwargs, results in self.operations:
            out = tree_leaves(run(function, args, kwargs))
            for target, value in zip(results, out, strict=True):
                if target is not None:
                    target.copy_(value)
        for t in self.freed:
            t.fill_(torch.nan)
