"""A model on many devices: replicated (``parallel=ddp``), sharded by rows (``fsdp``), or both (``hsdp``).

Gradients are summed over ranks, not averaged, because the loss is divided by the global count of targets.

Replicated: each rank has the whole state. A block's gradients are summed over ranks while those of the block before it
are computed. Source: Li et al. (PyTorch Distributed, 2020); its buckets are our blocks.

FSDP: each rank holds its rows of every parameter, gradient and moment. A block is gathered while the block before it
runs; the other parameters are gathered for the whole step. The sharded tensors are the state: under ``bf16_mixed`` they
are fp32 rows, rounded as they are gathered. Source: Rajbhandari et al. (ZeRO stage 3, 2020), as ``fully_shard``.

HSDP: each node holds a copy, whose rows are divided among its ranks. Weights are gathered only within a node; the rows
of gradients are summed over nodes once per update.

Factorised weights are gathered once per micro-batch, and stay until its backward pass has used them: they are small
(5.6 GB at 7b), and a second gathering would be a third of the traffic. Dense blocks are gathered for each pass.
"""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch import config as functorch

from dlr_pretrain.config import Config
from dlr_pretrain.models.llama import Llama
from dlr_pretrain.util import sharded
from dlr_pretrain.util.tensors import SUMS_IN_FLIGHT, WORKING_DTYPE, global_norm, sum_dtype


def shard_(cfg: Config, model: Llama) -> None:
    """Shard the parameters of ``model``: this rank keeps its rows.

    Without a process group, creates one of a single rank.
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
    policy = MixedPrecisionPolicy(
        WORKING_DTYPE[cfg.precision.name], reduce_dtype=sum_dtype(cfg.precision.name, ranks), cast_forward_inputs=False
    )
    for module in (*model.model.layers, model):
        dense = module is not model and not model.factorized
        sharded_module = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=dense)
        sharded_module.set_gradient_divide_factor(1.0)
        sharded_module.set_force_sum_reduction_for_comms(True)
    for module, following in pairwise((model, *model.model.layers)):
        module.set_modules_to_forward_prefetch([following])  # torch does so only in the backward pass


def is_fsdp(model: Llama) -> bool:
    return hasattr(model, "reshard")  # an FSDPModule: its parameters are whole while it computes


@contextmanager
def without_backward(model: Any) -> Iterator[None]:
    """Within this context, gathered weights are freed after their forward pass: no backward pass needs them."""
    if not is_fsdp(model):
        yield
        return
    model.set_reshard_after_forward(True)
    try:
        yield
    finally:
        model.set_reshard_after_forward(not model.factorized)
        model.set_reshard_after_forward(False, recurse=False)


def gradient_groups(model: Llama, world_size: int) -> list[list[Tensor]]:
    """The trained parameters whose replicated gradients are summed at once: of the head, of each block, all others.

    Empty on one rank, and under FSDP, which sums gradients itself.
    """
    if world_size == 1 or is_fsdp(model):
        return []
    groups = [[p for p in part.parameters() if p.requires_grad] for part in (model.lm_head, *model.model.layers)]
    grouped = {p for group in groups for p in group}
    return [*groups, [p for p in model.parameters() if p.requires_grad and p not in grouped]]


@contextmanager
def summed_over_ranks(
    model: Any, groups: Sequence[Sequence[Tensor]], last: bool, dtype: torch.dtype | None = None
) -> Iterator[None]:
    """The context to compute the gradients of a micro-batch in, which may be the ``last`` of an update.

    After the last, gradients are sums over all micro-batches and ranks.

    FSDP sums after every micro-batch, because whole gradients would need the memory that it saves. HSDP does so within
    a node, and sums over nodes after the last.

    Replicated gradients are summed in ``dtype``, by default their own, during the last backward pass. When all of one
    of the ``gradient_groups`` are complete, they are copied into one buffer and become views of it, and its sum starts.
    In another dtype a copy of the buffer is summed, and rounded once.
    """
    if is_fsdp(model):
        model.set_requires_all_reduce(last)
    if not last or not groups:
        yield
        return
    missing = [len(group) for group in groups]
    started: deque[tuple[Any, Tensor, Tensor]] = deque()  # a sum, what it is written to, and the gradients

    def complete(number: int, _: Tensor) -> None:
        missing[number] -= 1
        if missing[number] == 0:
            start(groups[number])

    def start(group: Sequence[Tensor]) -> None:
        gradients = [(p, p.grad) for p in group if p.grad is not None]
        flat = torch.cat([gradient.flatten() for _, gradient in gradients])
        for (p, gradient), part in zip(gradients, flat.split([g.numel() for _, g in gradients]), strict=True):
            p.grad = part.view_as(gradient)
        summed = flat.to(dtype or flat.dtype)
        if summed is not flat:
            finish(SUMS_IN_FLIGHT - 1)
        started.append((dist.all_reduce(summed, async_op=True), summed, flat))

    def finish(remaining: int) -> None:
        while len(started) > remaining:
            work, summed, flat = started.popleft()
            work.wait()
            if summed is not flat:
                flat.copy_(summed)

    parameters = [(number, p) for number, group in enumerate(groups) for p in group]
    hooks = [p.register_post_accumulate_grad_hook(partial(complete, number)) for number, p in parameters]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for group, lacking in zip(groups, missing, strict=True):
        if lacking:  # a parameter that the loss does not depend on has no gradient, on any rank
            start(group)
    finish(0)


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
    # Keep what the compiler derives from a graph for the next start, although the layers have an autograd function. Its
    # code is part of the cache's key. torch has no public name for this setting.
    functorch.autograd_cache_allow_custom_autograd_functions = True
    # Not torch's own CUDA graphs, whose replays overwrite gradients that a sum still needs: see ``recorded``
    model.compile_("max-autotune-no-cudagraphs" if cfg.compile == "max-autotune" else None)
