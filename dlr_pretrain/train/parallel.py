"""A model on many devices: replicated (DDP), sharded by rows (``parallel=fsdp``), or both (``parallel=hsdp``).

FSDP: each rank holds its rows of every parameter, gradient and moment. A block is gathered while the block before it
runs; the other parameters are gathered for the whole step. The sharded tensors are the state: under ``bf16_mixed`` they
are fp32 rows, rounded as they are gathered. Source: Rajbhandari et al. (ZeRO stage 3, 2020), as ``fully_shard``.

HSDP: each node holds a copy, whose rows are divided among its ranks. Weights are gathered only within a node; the rows
of gradients are summed over nodes once per update.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch import config as functorch
from torch.nn.parallel import DistributedDataParallel

from dlr_pretrain.config import Config
from dlr_pretrain.models.llama import Llama
from dlr_pretrain.util import sharded
from dlr_pretrain.util.tensors import WORKING_DTYPE, global_norm


def shard_(cfg: Config, model: Llama) -> None:
    """Shard the parameters of ``model``: this rank keeps its rows.

    Gradients are summed over ranks, not averaged, because the loss is divided by the global count of targets. Without
    a process group, creates one of a single rank.
    """
    from torch.distributed.device_mesh import init_device_mesh  # these imports take half a second
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device = model.lm_head.weight.device
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # NCCL looks for a network, but one rank needs none
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    ranks = dist.get_world_size()
    shards = cfg.shards(ranks)
    if cfg.parallel.name == "hsdp":  # the ranks of a node follow each other
        mesh = init_device_mesh(device.type, (ranks // shards, shards), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device.type, (shards,))
    policy = MixedPrecisionPolicy(WORKING_DTYPE[cfg.precision.name], cast_forward_inputs=False)
    for module in (*model.model.layers, model):
        sharded_module = fully_shard(module, mesh=mesh, mp_policy=policy)
        sharded_module.set_gradient_divide_factor(1.0)
        sharded_module.set_force_sum_reduction_for_comms(True)
    for module, following in pairwise((model, *model.model.layers)):
        module.set_modules_to_forward_prefetch([following])  # torch does so only in the backward pass


def is_fsdp(model: Llama) -> bool:
    return hasattr(model, "reshard")  # an FSDPModule: its parameters are whole while it computes


def replicated(model: Llama, world_size: int) -> Any:
    """The module whose backward pass sums gradients over ranks: ``model`` itself if it is sharded or on a single rank.

    DDP sums in buckets, during the last backward pass of a step.
    """
    if world_size == 1 or is_fsdp(model):
        return model
    buffers = [name for name, _ in model.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, buffers)
    module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    module.register_comm_hook(None, _summed)
    return module


def summing(module: Any, last: bool) -> AbstractContextManager[None]:
    """Within this context, the backward pass of the ``last`` micro-batch of a step sums gradients over ranks.

    FSDP sums after every micro-batch, because whole gradients would need the memory that it saves. HSDP does so within
    a node, in the dtype of the working weights, and sums over nodes after the ``last``.
    """
    if isinstance(module, DistributedDataParallel):
        return nullcontext() if last else module.no_sync()
    if is_fsdp(module):
        module.set_requires_all_reduce(last)
    return nullcontext()


def clear_gradients(module: Any, parameters: Sequence[Tensor]) -> None:
    """Clear the gradients of ``parameters``, all those of ``module``; module.zero_grad() would walk all modules."""
    if isinstance(module, DistributedDataParallel):  # gradients are views of the buckets and must stay so
        torch._foreach_zero_([p.grad for p in parameters if p.grad is not None])
    else:
        for p in parameters:
            p.grad = None


def norm_of(gradients: list[Tensor]) -> Tensor:
    """The L2 norm over all gradients, the same on all ranks."""
    rows = [sharded.local_rows(g) for g in gradients if sharded.is_sharded(g)]
    whole = [g for g in gradients if not sharded.is_sharded(g)]
    if not rows:
        return global_norm(whole)
    square = sharded.summed_(global_norm(rows).square(), gradients[0])
    return torch.sqrt(square + global_norm(whole).square() if whole else square)


def compile_(cfg: Config, model: Llama) -> None:
    """Compile ``model`` in place, block by block.

    A start compiles one block of a kind, not all of them, and ranks can reduce the gradients of a block while those of
    the previous one are computed. One graph of the whole model would move as many bytes.
    """
    torch.compiler.reset()  # in a multirun, the previous run compiled other shapes
    torch._dynamo.config.optimize_ddp = False  # it would split each graph along DDP's buckets
    # Keep what the compiler derives from a graph for the next start, although the layers have an autograd function. Its
    # code is part of the cache's key. torch has no public name for this setting.
    functorch.autograd_cache_allow_custom_autograd_functions = True
    # No CUDA graphs: their replays overwrite gradients that the sum over micro-batches still needs
    model.compile_("max-autotune-no-cudagraphs" if cfg.compile == "max-autotune" else None)


def _summed(_, bucket):  # DDP refuses annotations that are strings
    """Makes DDP sum gradients, not average them: the loss is already divided by the global count of targets."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])
