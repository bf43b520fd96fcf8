"""Gradients of one update: summed over micro-batches and ranks, and their norm."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from dlr_pretrain.models import dlr

if TYPE_CHECKING:
    from dlr_pretrain.train.weights import Weights

# Values of a piece of a norm on a CPU. Of a whole tensor torch casts all to fp32, more than any cache holds, and adds
# the squares up one after the other: of 16 million it is off by 2.5e-4.
CACHED = 1 << 15


class Gradients:
    """Runs backward passes and hands the optimizer their sum over micro-batches and ranks.

    ``native`` sums micro-batches in the gradients' own dtype and overlaps the reduction over ranks with the last
    backward pass; ``fp32`` sums both in one fp32 buffer (32 bf16 micro-batches cost about 0.6% of the gradient).
    """

    def __init__(self, weights: Weights, accumulate: str, world_size: int):
        self.weights, self.world_size = weights, world_size
        self.module: nn.Module = weights.model
        self.buffer, self.sums = None, None
        if accumulate == "fp32":
            working = list(weights.differentiated.values())
            self.buffer = torch.zeros(sum(p.numel() for p in working), device=working[0].device)
            self.sums = _views(self.buffer, working)
        elif world_size > 1:
            left_out = [*weights.strengths, *(name for name, _ in weights.model.named_buffers())]  # nothing moves them
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(weights.model, left_out)
            self.module = DistributedDataParallel(weights.model, gradient_as_bucket_view=True)
            self.module.register_comm_hook(None, _summed)

    @property
    def bucketed(self) -> bool:
        """Whether DDP reduces the gradients, in buckets."""
        return isinstance(self.module, DistributedDataParallel)

    def add(self, inputs: tuple[Tensor, ...], count: Tensor, last: bool) -> Tensor:
        """Forward and backward of one micro-batch, its summed loss divided by ``count``; returns that loss.

        ``inputs`` are those of the model: ids and targets [b, T], and where rows are separated the documents.

        With the ``last`` micro-batch the sums are reduced over ranks.
        """
        with nullcontext() if last or not self.bucketed else self.module.no_sync():
            with record_function("forward"):
                loss = self.module(*inputs) / count
            with record_function("backward"):
                loss.backward()
        if self.sums is not None:
            torch._foreach_add_(self.sums, [p.grad for p in self.weights.differentiated.values()])
            self.module.zero_grad()
            if last and self.world_size > 1:
                with record_function("communication"):
                    dist.all_reduce(self.buffer)
        return loss.detach()

    def collect(self) -> list[Tensor]:
        """Give each tensor that is optimized its gradient, in its own dtype, and return them all."""
        working = self.weights.differentiated
        sources = self.sums if self.sums is not None else [p.grad for p in working.values()]
        gradients = dict(zip(working, sources, strict=True))
        if self.weights.strengths:
            gradients |= dlr.strength_gradients(self.weights.model, gradients)
        optimized = self.weights.optimized
        for name, value in optimized.items():
            value.grad = gradients[name].to(value.dtype)
        return [value.grad for value in optimized.values()]

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """The l2 norm over all that ``collect`` returned, on all ranks."""
        return global_norm(gradients)

    def clear(self) -> None:
        if self.bucketed:  # the gradients are views of the buckets: keep them so
            torch._foreach_zero_([p.grad for p in self.weights.differentiated.values()])
        else:
            self.module.zero_grad()
        if self.weights.masters is not None:
            for master in self.weights.masters.values():
                master.grad = None
        if self.buffer is not None:
            self.buffer.zero_()


def global_norm(gradients: list[Tensor]) -> Tensor:
    """The l2 norm over all gradients, in fp32, on the device."""
    return torch.linalg.vector_norm(torch.stack(norms(gradients)))


def norms(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The l2 norm of each, in fp32, on the device."""
    if tensors[0].device.type != "cpu":
        return torch._foreach_norm(tensors, 2.0, dtype=torch.float32)
    pieces = [_flat(tensor).split(CACHED) for tensor in tensors]  # see CACHED
    return [torch.linalg.vector_norm(torch.stack(torch._foreach_norm(p, 2.0, dtype=torch.float32))) for p in pieces]


def _flat(tensor: Tensor) -> Tensor:
    """Its values in the order of the memory: no copy, also where it is a transposed one."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True)).reshape(-1)


def _summed(_, bucket):  # DDP refuses annotations that are strings
    """DDP's reduction as a sum: the loss is already divided by the global count of targets."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


def _views(buffer: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """Consecutive pieces of ``buffer`` in each parameter's own shape and memory layout."""
    views, start = [], 0
    for p in parameters:
        views.append(buffer.as_strided(p.shape, p.stride(), start))
        start += p.numel()
    return views
