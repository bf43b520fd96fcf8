"""One update of the weights from a batch. If the loss or the gradient is not finite, the weights do not change."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.profiler import record_function

from dlr_pretrain.config import Config
from dlr_pretrain.data import Batch, inputs_and_targets
from dlr_pretrain.models import Llama, relora
from dlr_pretrain.models.layer import SeededInit, named_layers
from dlr_pretrain.optim.build import Optimizer
from dlr_pretrain.train import parallel
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.util.tensors import IGNORE

MATRICES = 7200.0  # seconds that an update of matrices may take: GaLore decomposes all gradients of 7b in one
Scalar = TypeVar("Scalar", Tensor, float)  # on the device, and on the host


class Outcome(NamedTuple, Generic[Scalar]):
    """What an update reports; the same on all ranks."""

    loss: Scalar  # mean over the targets of all ranks, in nats
    norm: Scalar  # of the gradient before clipping
    skipped: Scalar  # 1: the update changed nothing
    ends: Scalar  # 1: nor does any later one, the run ends
    real_tokens: Scalar  # of all ranks
    stops: Scalar  # ranks that were asked to stop


class Update:
    """Computes all gradients of a global batch, then takes the optimizer's step."""

    def __init__(self, cfg: Config, ranks: Ranks, model: Llama, optimizer: Optimizer):
        self.cfg, self.ranks, self.model, self.optimizer = cfg, ranks, model, optimizer
        if cfg.compile:
            parallel.compile_(cfg, model, ranks.world_size)
        self.module, self.parameters = parallel.replicated(model, ranks.world_size), list(model.parameters())
        self.micro_batch = cfg.micro_batch(ranks.world_size)
        self.tokens = cfg.train.global_batch * cfg.train.seq_len  # positions of an update, padding included
        self.ends = torch.zeros((), device=ranks.device)  # becomes 1 with the update that ends the run

    def __call__(
        self, batch: Batch, index: int, lr: float, failed: bool = False, stop: bool = False
    ) -> Outcome[Tensor]:
        """One optimizer update from one global batch, of which ``batch`` holds this rank's rows.

        With adamw and adamw_8bit the host never waits for the device. With other optimizers it waits once, to read
        whether to skip, and the clip factor. ``index`` counts the updates of the run from 0.

        An update whose loss or gradient is not finite changes nothing. If ``train.on_nonfinite`` is "stop", no later
        update changes anything either. If this or another rank has ``failed``, this update and all later ones change
        nothing. ``stop`` says whether this rank was asked to stop. What is returned is still on the device.
        """
        inputs = self.inputs(batch)
        counts = self.ranks.to_device(torch.tensor([0, batch.real_tokens, stop, failed]))
        counts[0] = (inputs[1] != IGNORE).sum()
        count, real_tokens, stops, failures = self.ranks.sum(counts)

        micro_batches = list(zip(*(rows.split(self.micro_batch) for rows in inputs), strict=True))
        loss = self.ranks.sum(self.forward_backward(micro_batches, count))
        norm, skipped = self.step(loss, index, lr, failures)
        return Outcome(loss, norm, skipped, self.ends, real_tokens, stops)

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """The model's inputs on the device."""
        to_device = self.ranks.to_device
        return inputs_and_targets(to_device(batch.tokens), to_device(batch.lengths), batch.separator)

    def forward_backward(self, micro_batches: Sequence[tuple[Tensor, ...]], count: Tensor) -> Tensor:
        """Gradients of the mean loss over the ``count`` targets of all ranks; returns this rank's share of that loss.

        ``micro_batches`` holds the model's inputs: ids and targets [b, T], and the document numbers if documents are
        masked. Micro-batches are summed in the gradients' own dtype: in bf16, 32 of them have an error of about 0.6%.
        """
        losses = []
        for number, inputs in enumerate(micro_batches, 1):
            self.ranks.heartbeat.tick()
            with parallel.summing(self.module, last=number == len(micro_batches)):
                with record_function("forward"):
                    loss = self.module(*inputs) / count
                with record_function("backward"):
                    loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    @record_function("optimizer")
    def step(self, loss: Tensor, index: int, lr: float, failures: Tensor) -> tuple[Tensor, Tensor]:
        """Step with the summed, clipped gradients; returns their norm before clipping, and whether it was skipped."""
        norm = parallel.norm_of(self.optimizer.collect())
        skipped = self.skip(torch.isfinite(loss) & torch.isfinite(norm), failures)
        with nullcontext() if self.optimizer.reads_on_device else self.ranks.heartbeat.may_wait(MATRICES):
            self.optimizer.update(lr, skipped, self.clip_factor(norm), index=index)
        self.optimizer.clear()
        parallel.clear_gradients(self.module, self.parameters)
        return norm, skipped

    def clip_factor(self, norm: Tensor) -> Tensor | None:
        """The factor that scales a gradient of ``norm`` down to the bound, at most 1; None if there is no bound."""
        bound = self.cfg.train.clip
        return None if bound is None else (bound / (norm + 1e-6)).clamp(max=1.0)

    def skip(self, finite: Tensor, failures: Tensor) -> Tensor:
        """Returns 1 if this update is to be left out, else 0: if it is not ``finite``, or if the run has ended.

        The run ends for good, on all ranks, when a rank has failed. It also ends with an update that is not ``finite``
        if ``train.on_nonfinite`` is "stop".
        """
        ends = failures > 0
        if self.cfg.train.on_nonfinite == "stop":
            ends = ends | ~finite
        self.ends = torch.maximum(self.ends, ends.float())
        return torch.maximum(self.ends, (~finite).float())

    def merge(self, step: int) -> None:
        """ReLoRA's merge after update ``step``: the factors' product goes into the frozen weights, they start anew.

        Most of their optimizer state is dropped. The result depends on the state, the configuration and ``step`` alone:
        it is the same on every rank and after a resume. Source: Lialin et al. (2023).
        """
        options = cast(relora.Options, self.cfg.backbone)
        seeded, number, factors = SeededInit(self.cfg.seed), step // options.merge_every, set()
        with self.optimizer.taken_out() as values:
            for path, layer in named_layers(self.model):
                if isinstance(layer, relora.Relora):
                    factors |= set(layer.merge_(values, seeded, path, number))
        self.optimizer.prune(factors, 1 - options.prune_ratio, (self.cfg.seed << 32) + number)

    def warm_up(self) -> None:
        """Run one backward pass without targets, before the first update of a process.

        DDP rebuilds its buckets after the first backward pass of a process, and with three or more ranks the rounding
        of a sum depends on its place in a bucket. Without this pass, the first step after a resume would differ from
        that of an uninterrupted run.
        """
        if self.module is not self.model:
            nothing = self.inputs(Batch.empty(self.cfg, self.micro_batch))
            self.forward_backward([nothing], torch.ones((), device=self.ranks.device))
            parallel.clear_gradients(self.module, self.parameters)
