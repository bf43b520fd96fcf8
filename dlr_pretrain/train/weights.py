"""For each precision, the tensors that the optimizer updates and those, with residuals, that the model multiplies by.

=============  =================  ============================  ======================
precision      working weights    state (optimizer, checkpoint)  gradients and moments
=============  =================  ============================  ======================
bf16           bf16               the working weights            bf16
bf16_sr        bf16               the working weights            bf16, or moments in 8 bits; see ``optim.adamw``
               (scalars: fp32)                                   (fp32)
bf16_mixed     bf16               fp32 masters                   bf16 (fsdp: fp32); moments fp32
fp32           fp32               the working weights            fp32
=============  =================  ============================  ======================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from dlr_pretrain.config import Config
from dlr_pretrain.models import build, dlr
from dlr_pretrain.models.linear import stacks_in_one_storage_
from dlr_pretrain.models.llama import Llama
from dlr_pretrain.models.pretrained import PretrainedFolder
from dlr_pretrain.models.residual import MergedResiduals
from dlr_pretrain.train.checkpoint import Stored
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.util import sharded
from dlr_pretrain.util.tensors import STATE_DTYPE, WORKING_DTYPE, global_norm, one_storage

ONE_GRAPH = 400_000_000  # parameters: full-rank 350m has 368 million, low-rank 1b 609 million


def build_weights(
    cfg: Config, ranks: Ranks, vocab_size: int, pretrained: PretrainedFolder | None = None, initialize: bool = True
) -> Weights:
    """The weights of a run on this rank's device, from ``pretrained`` or drawn from the seed.

    Rank 0 draws them (or decomposes them, for LOST) and sends them: other machines might round an SVD differently.
    Without ``initialize`` they have no values yet, for a checkpoint to be loaded into.
    """
    model = build(cfg, vocab_size, ranks.device, STATE_DTYPE[cfg.precision.name], initialize and ranks.is_main)
    if pretrained is not None and ranks.is_main:
        pretrained.put_into_(model)
    if initialize:
        ranks.broadcast(model.state_dict().values())
    return place(cfg, ranks, model)


def place(cfg: Config, ranks: Ranks, model: Llama) -> Weights:
    """The ``Weights`` of ``model``, given whole in the dtype of the state; sharded under ``parallel=fsdp``."""
    kind = Weights
    if cfg.parallel.name == "fsdp":
        from dlr_pretrain.train.fsdp import ShardedWeights  # its imports take half a second

        kind = ShardedWeights
    weights = kind(model, cfg.precision.name)
    if cfg.compile:
        torch.compiler.reset()  # in a multirun, the previous run compiled other shapes
        weights.compile_(cfg, ranks.world_size)
    return weights


class Weights:
    """The parameters of ``model``, given in ``STATE_DTYPE[precision]``, under that precision."""

    sharded = False  # whether a rank holds only some rows of the parameters
    compiled = False  # by ``compile_``

    def __init__(self, model: Llama, precision: str):
        self.model = model
        self.masters: dict[str, Tensor] | None = None
        if STATE_DTYPE[precision] != WORKING_DTYPE[precision] and not self.sharded:
            self.masters = _copies(dict(model.named_parameters()))
            model.to(WORKING_DTYPE[precision])
            for name, p in model.named_parameters():
                if p.dim() == 0:  # a learned alpha scales a whole layer: in bf16 it would move in steps of 0.004
                    p.data = self.masters[name].clone()
        stacks_in_one_storage_(model)
        self.trained = [name for name, p in model.named_parameters() if p.requires_grad]

    def compile_(self, cfg: Config, world_size: int) -> None:
        """Compile the model in place: on one GPU as one graph, up to 350m, and otherwise block by block.

        The backward pass of one graph yields all gradients at its end: ranks could not overlap their reduction with
        it. Activation checkpointing recomputes block by block.
        """
        values = sum(p.numel() for p in self.model.parameters())
        self.compiled = True
        alone = world_size == 1 and not self.sharded and self.model.lm_head.weight.is_cuda
        whole = alone and cfg.train.activation_checkpointing == "none" and values <= ONE_GRAPH
        # Without CUDA graphs, whose replays overwrite gradients that the sum over micro-batches still needs
        mode = "max-autotune-no-cudagraphs" if cfg.compile == "max-autotune" else None
        self.model.compile_(whole, mode)

    def gradients(self, world_size: int) -> Gradients:
        """What runs backward passes through these weights and sums their gradients over ``world_size`` ranks."""
        return Gradients(self, world_size)

    @property
    def state(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint, by name: parameters (also frozen ones; B without its residual) and buffers."""
        parameters = dict(self.model.named_parameters()) if self.masters is None else self.masters
        return parameters | dict(self.model.named_buffers())

    @cached_property
    def optimized(self) -> dict[str, Tensor]:
        """The part of the state that the optimizer updates."""
        state = self.state
        return {name: state[name] for name in self.trained}

    def with_residual(self) -> AbstractContextManager[None]:
        """Within this context the model multiplies by state plus residual, rounded once. Outside, the state holds B."""
        return self._merged.active()

    @cached_property
    def _merged(self) -> MergedResiduals:
        return MergedResiduals(self.model, self.masters, self.compiled and self.model.lm_head.weight.is_cuda)

    @torch.no_grad()
    def checksums(self) -> dict[str, int]:
        """A sum over the bytes of each state tensor that every rank holds whole: equal states have equal sums."""
        state = {name: value for name, value in self.state.items() if not sharded.is_sharded(value)}
        sums = [t.contiguous().flatten().view(torch.int8).sum(dtype=torch.int64) for t in state.values()]
        return dict(zip(state, torch.stack(sums).tolist(), strict=True)) if state else {}

    @torch.no_grad()
    def finite(self) -> bool:
        """Whether all values of the state that this rank holds are finite."""
        own = map(sharded.local_rows, self.state.values())
        floats = [t for t in own if t.is_floating_point() and t.numel()]
        return bool(torch.stack([end.float() for t in floats for end in t.aminmax()]).isfinite().all())

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Stored]) -> None:
        """Load the state of a checkpoint of this model."""
        for name, value in self.state.items():
            sharded.local_rows(value).copy_(sharded.own_part(value, tensors[name]))

    def folded(self, keep: bool) -> dict[str, Tensor]:
        """The state to deploy, with every residual folded in, whole and on the host; empty unless ``keep``.

        All ranks must call. Raises RuntimeError if this state, rounded to the working dtype, differs by any bit from
        the weights that the training forward multiplies by.
        """
        if not (keep or self.sharded):
            return {}
        folded = dlr.folded_state(self.model, {name: value.detach() for name, value in self.state.items()})
        branches = {f"{name}.weight" for name, up in dlr.residuals(self.model) if up.residual.impl == "branch"}
        with self.with_residual():
            for name, p in self.model.named_parameters():
                own = sharded.local_rows(folded[name]) if name in folded.keys() - branches else None
                if own is not None and not torch.equal(own.to(p.dtype), sharded.local_rows(p).detach()):
                    raise RuntimeError(f"{name}: the folded tensor is not the working weight")
        whole = ((name, sharded.gathered(folded.pop(name))) for name in list(folded))
        return {name: value.cpu() for name, value in whole if keep}


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
            for p in self.working:  # module.zero_grad() would walk all modules
                p.grad = None
        for master in (self.weights.masters or {}).values():
            master.grad = None


def gradients_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of those of ``tensors`` that have one."""
    return [tensor.grad for tensor in tensors if tensor.grad is not None]


def _summed(_, bucket):  # DDP refuses annotations that are strings
    """Has DDP sum gradients, not average them: the loss is already divided by the global count of targets."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


@torch.no_grad()
def _copies(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of dense ``parameters`` in one storage, each in its own memory layout."""
    memories = one_storage((p.numel() for p in parameters.values()), like=next(iter(parameters.values())))
    named = zip(parameters.items(), memories, strict=True)
    return {name: memory.as_strided(p.shape, p.stride()).copy_(p) for (name, p), memory in named}
