"""Gradients of one update: summed over micro-batches and ranks, and their norm."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from dlr_pretrain.util.tensors import global_norm

if TYPE_CHECKING:
    from dlr_pretrain.train.weights import Weights


class Gradients:
    """Runs backward passes through ``weights`` and hands the optimizer their sum over micro-batches and ranks.

    Micro-batches are summed in the gradients' own dtype: in bf16, 32 of them have an error of about 0.6%. The reduction
    over ranks overlaps with the last backward pass.
    """

    def __init__(self, weights: Weights, world_size: int):
        self.weights = weights
        self.module: Any = weights.model
        self.working = [p for p in weights.model.parameters() if p.requires_grad]
        self.bucketed = world_size > 1 and not weights.sharded  # DDP reduces the gradients, in buckets
        if self.bucketed:
            buffers = [name for name, _ in weights.model.named_buffers()]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(weights.model, buffers)
            self.module = DistributedDataParallel(weights.model, gradient_as_bucket_view=True)
            self.module.register_comm_hook(None, _summed)

    def add(self, inputs: tuple[Tensor, ...], count: Tensor, last: bool) -> Tensor:
        """Run one micro-batch forward and backward; returns its summed loss divided by ``count``.

        ``inputs`` are the model's: ids and targets [b, T], and the document numbers if documents are masked. With the
        ``last`` micro-batch the gradients are summed over ranks.
        """
        with self.module.no_sync() if self.bucketed and not last else nullcontext():
            with record_function("forward"):
                loss = self.module(*inputs) / count
            with record_function("backward"):
                loss.backward()
        return loss.detach()

    def collect(self) -> list[Tensor]:
        """Set the gradient of each optimized tensor, in the tensor's dtype, and return all gradients."""
        optimized = self.weights.optimized.values()
        for value, gradient in zip(optimized, gradients_of(self.working), strict=True):
            value.grad = gradient.to(value.dtype)
        return gradients_of(optimized)

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """The l2 norm over all gradients that ``collect`` returned; the same on all ranks."""
        return global_norm(gradients)

    def clear(self) -> None:
        if self.bucketed:  # the gradients are views of the buckets and must stay so
            torch._foreach_zero_(gradients_of(self.working))
        else:
            self.module.zero_grad()
        if self.weights.masters is not None:
            for master in self.weights.masters.values():
                master.grad = None


def gradients_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of ``tensors``, which have one each."""
    return [tensor.grad for tensor in tensors if tensor.grad is not None]


def _summed(_, bucket):  # DDP refuses annotations that are strings
    """Has DDP sum gradients, not average them: the loss is already divided by the global count of targets."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])
