"""The state of a run: its model, its optimizer and a few counters. What each precision keeps in which dtype:

=================  =================  ==============================  ======================
precision          working weights    values                          gradients and moments
=================  =================  ==============================  ======================
bf16               bf16               the working weights             bf16
bf16_sr            bf16               the working weights             bf16, or moments in 8 bits; see ``optim.adamw``
bf16_mixed         bf16               fp32 masters                    fp32
bf16_mixed, fsdp   fp32 shards (1)    the working weights             fp32
fp32               fp32               the working weights             fp32
=================  =================  ==============================  ======================

(1) cast to bf16 as they are gathered

The model multiplies by the working weights. The optimizer updates the values, and a checkpoint holds them. DLR makes
them differ: see ``models.residual``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dlr_pretrain.config import Config
from dlr_pretrain.models import build_model
from dlr_pretrain.models.adapter import split
from dlr_pretrain.models.llama import Llama
from dlr_pretrain.models.pretrained import PretrainedFolder
from dlr_pretrain.models.residual import Residuals, add_, entries
from dlr_pretrain.optim.optimizer import Optimizer
from dlr_pretrain.train.checkpoint import StoredTensor
from dlr_pretrain.train.parallel import is_fsdp, shard_
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.util import sharded
from dlr_pretrain.util.tensors import STATE_DTYPE, WORKING_DTYPE


class Skipped(NamedTuple):
    """Counts the updates that were skipped because their loss or gradient was not finite."""

    total: int = 0
    in_a_row: int = 0  # without a break, up to the last one
    last: int = 0  # step of the last one

    def and_step(self, step: int) -> Skipped:
        return Skipped(self.total + 1, self.in_a_row + 1 if self.last == step - 1 else 1, step)


@dataclass
class TrainState:
    """What a checkpoint holds besides the tensors of the model and the optimizer.

    ``streams`` is the position in the data: for each stream, by its number, the integers of ``data.streams.Position``
    (five) or of ``data.mixture``. ``Loop.drain`` moves it.
    """

    step: int = 0  # finished updates
    tokens: int = 0  # positions so far, padding included
    real_tokens: int = 0  # without padding
    streams: dict[str, list[int]] = field(default_factory=dict)  # after the first batch, this rank's
    skipped: Skipped = field(default_factory=Skipped)


def new_model(
    cfg: Config, ranks: Ranks, vocab_size: int, pretrained: PretrainedFolder | None = None, initialize: bool = True
) -> Llama:
    """The model of a run on this rank's device, with B in its weights: from ``pretrained``, or drawn from the seed.

    Rank 0 computes the values and sends them to the other ranks: another machine might round LOST's SVD differently.
    Without ``initialize`` the values are undefined until a checkpoint is loaded. Under ``parallel=fsdp`` and ``hsdp``
    this rank keeps only its rows.
    """
    model = build_model(cfg, vocab_size, ranks.device, STATE_DTYPE[cfg.precision.name], initialize and ranks.is_main)
    if pretrained is not None and ranks.is_main:
        pretrained.put_into_(model)
        if cfg.dlr.enabled:  # training adds the residual again, and then multiplies by the weights of the folder
            add_(model.state_dict(), model, cfg.dlr, factor=-1.0)
    if initialize:
        ranks.broadcast(model.state_dict().values())
    if cfg.parallel.name != "ddp":
        shard_(cfg, model)
    return model


def new_optimizer(cfg: Config, model: Llama) -> Optimizer:
    """The optimizer of ``model``. The model is given in the state's dtype, and is cast to its working weights."""
    precision, dlr = cfg.precision.name, cfg.dlr
    working, compiled = dict(model.named_parameters()), bool(cfg.compile)
    values = residuals = None
    if STATE_DTYPE[precision] != WORKING_DTYPE[precision] and not is_fsdp(model):
        values = {name: p.detach() for name, p in working.items()}  # the fp32 masters
        for p in working.values():
            p.data = p.data.to(WORKING_DTYPE[precision])
            p.grad_dtype = STATE_DTYPE[precision]  # micro-batches and ranks sum in fp32 what fp32 masters take
    if dlr.has_residual:
        residuals = Residuals(model, dlr, values or working, compiled and model.lm_head.weight.is_cuda)
    return Optimizer(
        cfg.optimizer,
        working,
        values=values,
        residuals=residuals,
        split=partial(split, model),
        compiled=compiled,
        rounding_seed=cfg.seed if precision == "bf16_sr" else None,
    )


def saved_tensors(model: Llama, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint, by name: the optimizer's ``values`` and the buffers of ``model``."""
    return {**values, **dict(model.named_buffers())}


@torch.no_grad()
def load_tensors(model: Llama, optimizer: Optimizer, tensors: Mapping[str, StoredTensor]) -> None:
    """Load the tensors of a checkpoint of this model."""
    with optimizer.taken_out() as values:
        for name, value in saved_tensors(model, values).items():
            sharded.local_rows(value).copy_(sharded.own_part(value, tensors[name]))


@torch.no_grad()
def folded(cfg: Config, model: Llama, optimizer: Optimizer, keep: bool) -> dict[str, Tensor]:
    """The tensors to deploy, by their exported names, whole and on the host; empty unless ``keep``.

    They are the working weights; under ``bf16_mixed`` they are the fp32 masters with their residuals, which round to
    the working weights. All ranks must call this. Raises RuntimeError if a tensor does not round to its working weight.
    """
    if not (keep or is_fsdp(model)):
        return {}
    working = dict(model.named_parameters())
    tensors = {name: optimizer.values[name] for name in working}
    if optimizer.has_masters and optimizer.residuals is not None:
        tensors |= {name: tensors[name].clone() for name in entries(model, cfg.dlr)}
        add_(optimizer.values | tensors, model, cfg.dlr)
    for name, p in working.items():
        if not torch.equal(sharded.local_rows(tensors[name]).to(p.dtype), sharded.local_rows(p)):
            raise RuntimeError(f"{name}: the folded tensor is not the working weight")
    tensors |= dict(model.named_buffers())
    whole = ((name, sharded.gathered(tensors.pop(name))) for name in list(tensors))  # one by one on the device
    return split(model, {name: tensor.cpu() for name, tensor in whole if keep})
