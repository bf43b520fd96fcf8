"""``parallel=fsdp``: each rank holds its rows of every parameter, gradient and moment; blocks are gathered as they run.

The sharded tensors are the state: under ``bf16_mixed`` the fp32 masters, which are rounded to the working weights when
they are gathered. Residuals are added to the rows of the state before that, so that state and residual are
rounded together, once. Every rank holds the scalars (alpha).
Source: Rajbhandari et al. (ZeRO stage 3, 2020), as torch's ``fully_shard``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from dlr_pretrain.models.llama import Llama
from dlr_pretrain.train.weights import Gradients, Weights, gradients_of
from dlr_pretrain.util import sharded
from dlr_pretrain.util.tensors import WORKING_DTYPE, global_norm


class ShardedWeights(Weights):
    """The parameters of ``model``, of which each rank keeps its rows; given whole in ``STATE_DTYPE[precision]``.

    Blocks are gathered one by one, the rest for the step. Gradients are summed over ranks, not averaged, because the
    loss is divided by the global count.
    Creates a process group of a single rank if there is no process group.
    """

    sharded = True

    def __init__(self, model: Llama, precision: str):
        device = model.lm_head.weight.device
        if not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # one rank needs no network, and NCCL looks for one
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(WORKING_DTYPE[precision], cast_forward_inputs=False)
        scalars = {p for p in model.parameters() if p.dim() == 0}
        for module in (*model.model.layers, model):
            shards = fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=scalars)
            shards.set_gradient_divide_factor(1.0)
            shards.set_force_sum_reduction_for_comms(True)
        super().__init__(model, precision)

    def gradients(self, world_size: int) -> Gradients:
        return ShardedGradients(self, world_size)

    @contextmanager
    def with_residual(self) -> Iterator[None]:
        with super().with_residual():
            yield
            if isinstance(self.model, FSDPModule):
                self.model.reshard()  # without a backward pass the root module would keep its gathered weights


class ShardedGradients(Gradients):
    """Runs backward passes, and gives the optimizer of each rank its rows of the sum over micro-batches and ranks.

    FSDP sums over ranks after every micro-batch, and over micro-batches in the dtype of the state.
    """

    @torch.no_grad()
    def collect(self) -> list[Tensor]:
        """Give each optimized tensor its gradient, in the tensor's dtype; return this rank's rows of all gradients."""
        scalars = [p for p in self.working if not sharded.is_sharded(p)]
        if scalars:
            summed = torch.stack([g.float() for g in gradients_of(scalars)])
            dist.all_reduce(summed)
            for p, gradient in zip(scalars, summed.unbind(), strict=True):
                p.grad = gradient.to(p.dtype)
        return [sharded.local_rows(gradient) for gradient in gradients_of(self.weights.optimized.values())]

    def norm(self, gradients: list[Tensor]) -> Tensor:
        rows = [g for g in gradients if g.dim() > 0]
        scalars = [g for g in gradients if g.dim() == 0]  # every rank holds them
        square = global_norm(rows).square()
        dist.all_reduce(square)
        return torch.sqrt(square + global_norm(scalars).square() if scalars else square)
