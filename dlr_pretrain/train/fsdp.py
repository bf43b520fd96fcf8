"""``parallel=fsdp``: each rank holds its rows of every parameter, gradient and moment; blocks are gathered as they run.

The sharded tensors are the state: under ``bf16_mixed`` the fp32 masters, which are rounded to the working weights when
they are gathered. Residuals are added to the rows of the state before that, so that state and residual are
rounded together, once. Every rank holds the scalars (alpha, theta).
Source: Rajbhandari et al. (ZeRO stage 3, 2020), as torch's ``fully_shard``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from dlr_pretrain.models import dlr
from dlr_pretrain.models.llama import Llama
from dlr_pretrain.models.precision import WORKING_DTYPE
from dlr_pretrain.train.gradients import Gradients, of
from dlr_pretrain.train.weights import Weights
from dlr_pretrain.util import sharded
from dlr_pretrain.util.tensors import global_norm


class ShardedWeights(Weights):
    """The parameters of ``model``, of which each rank keeps its rows; given whole in ``STATE_DTYPE[precision]``.

    Creates a process group of a single rank if there is no process group.
    """

    sharded = True

    def __init__(self, model: Llama, precision: str, accumulate: str = "native"):
        shard_(model, WORKING_DTYPE[precision], torch.float32 if accumulate == "fp32" else None)
        super().__init__(model, precision, accumulate)

    def gradients(self, world_size: int) -> Gradients:
        return ShardedGradients(self, world_size)

    @contextmanager
    def with_residual(self) -> Iterator[None]:
        with super().with_residual():
            yield
            if isinstance(self.model, FSDPModule):
                self.model.reshard()  # without a backward pass the root module would keep its gathered weights


def shard_(model: Llama, dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> None:
    """Keep only this rank's rows of the parameters of ``model``; blocks are gathered one by one, the rest for the step.

    The model multiplies by weights in ``dtype``. Gradients are summed over ranks, not averaged, because the loss is
    divided by the global count; in ``reduce_dtype``, or in their own dtype if it is None.
    """
    device = model.lm_head.weight.device
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    scalars = {p for p in model.parameters() if p.dim() == 0}
    for module in (*model.model.layers, model):
        shards = fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=scalars)
        shards.set_gradient_divide_factor(1.0)
        shards.set_force_sum_reduction_for_comms(True)


class ShardedGradients(Gradients):
    """Runs backward passes, and gives the optimizer of each rank its rows of the sum over micro-batches and ranks.

    Ranks sum after every micro-batch. ``native`` sums over ranks in the gradients' own dtype, and over micro-batches in
    the dtype of the state; ``fp32`` sums over both in fp32. The sums take 1/ranks of the memory that those of a
    replicated model take.
    """

    def prepare(self) -> None:
        self.totals: list[_Total] = []
        model = self.weights.model
        if self.weights.accumulate == "fp32" and model.lm_head.weight.dtype != torch.float32:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    self.totals.append(_Total())
                    module.set_all_reduce_hook(self.totals[-1])

    def add(self, inputs: tuple[Tensor, ...], count: Tensor, last: bool) -> Tensor:
        for p in self.working if self.totals else ():
            p.grad = None if sharded.is_sharded(p) else p.grad  # the totals hold the sum
        return self.forward_backward(inputs, count)

    @torch.no_grad()
    def collect(self) -> list[Tensor]:
        """Give each optimized tensor its gradient, in the tensor's dtype; return this rank's rows of all gradients."""
        weights = self.weights
        scalars = [p for p in self.working if not sharded.is_sharded(p)]
        own = dlr.strength_gradients(weights.model, {name: p.grad for name, p in weights.differentiated.items()})
        partial = [*of(scalars), *own.values()]
        if partial:
            summed = torch.stack([g.float() for g in partial])
            dist.all_reduce(summed)
            scalars += [weights.model.get_parameter(name) for name in own]
            for p, gradient in zip(scalars, summed.unbind(), strict=True):
                p.grad = gradient.to(p.dtype)
        return [sharded.local_rows(gradient) for gradient in of(weights.optimized.values())]

    def norm(self, gradients: list[Tensor]) -> Tensor:
        whole = [not sharded.is_sharded(p) for p in self.weights.optimized.values()]
        rows = [g for g, is_whole in zip(gradients, whole, strict=True) if not is_whole]
        scalars = [g for g, is_whole in zip(gradients, whole, strict=True) if is_whole]
        square = global_norm(rows).square()
        dist.all_reduce(square)
        return torch.sqrt(square + global_norm(scalars).square() if scalars else square)

    def clear(self) -> None:
        self.module.zero_grad()
        for total in self.totals:
            total.fresh = True


class _Total:
    """The fp32 sum over micro-batches of one block's gradients, before these are rounded to the state's dtype.

    FSDP calls it with its buffer of gradients summed over ranks, on another stream than that of the buffer, and drops
    the buffer when the call returns. The allocator must not reuse the buffer before this stream has read it.
    """

    def __init__(self) -> None:
        self.sum: Tensor | None = None
        self.fresh = True

    def __call__(self, reduced: Tensor) -> None:
        if reduced.is_cuda:
            reduced.record_stream(torch.cuda.current_stream())
        if self.sum is None:
            self.sum = torch.empty_like(reduced)
        if self.fresh:
            self.sum.copy_(reduced)
            self.fresh = False
        else:
            reduced.copy_(self.sum.add_(reduced))
