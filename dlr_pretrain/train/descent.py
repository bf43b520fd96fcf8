"""One update of the weights from a batch. If the loss or the gradient is not finite, the weights do not change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlr_pretrain.config import Config
from dlr_pretrain.data import Batch, inputs_and_targets
from dlr_pretrain.models import dlr
from dlr_pretrain.models.linear import require_tied
from dlr_pretrain.optim import build as optim
from dlr_pretrain.train.gradients import Gradients
from dlr_pretrain.train.parts import Entering, part
from dlr_pretrain.train.runtime import Runtime
from dlr_pretrain.train.weights import Weights
from dlr_pretrain.util.tensors import IGNORE

Micro = Sequence[tuple[Tensor, ...]]  # the model's inputs, one tuple for each micro-batch


class Descent:
    """Computes all gradients of an update, then takes the optimizer's step."""

    def __init__(self, cfg: Config, runtime: Runtime, weights: Weights):
        require_tied(weights.model)
        self.cfg, self.runtime, self.weights = cfg, runtime, weights
        self.micro_batch = cfg.micro_batch(runtime.world_size)
        self.optimizer = optim.build(
            cfg.optimizer,
            weights.optimized,
            weights.undecayed,
            compiled=cfg.compile,
            rounding_seed=cfg.seed if cfg.precision.name == "bf16_sr" else None,
            advancing=runtime.advancing,
        )
        self.halted = torch.zeros((), device=runtime.device)  # becomes 1 with the update that ends the run
        self.gradients = self.weights.gradients(self.runtime.world_size)

    def update(self, batch: Batch, index: int, lr: float, failed: bool = False) -> Tensor:
        """One optimizer update from one global batch, of which ``batch`` holds this rank's rows.

        With adamw and adamw_8bit the host never waits for the device. With other optimizers it waits once, to read the
        mask and the clip factor. ``index`` counts the updates of the run from 0.

        An update whose loss or gradient is not finite changes nothing. If ``train.on_nonfinite`` is "stop", no later
        update changes anything either. If this or another rank has ``failed``, this update and all later ones change
        nothing. Returns metrics on the device, in fp64: mean loss, gradient norm before clipping, whether this update
        was masked, whether all later ones will be, real tokens, and how many ranks were asked to stop.
        """
        to_device = self.runtime.to_device
        inputs = inputs_and_targets(to_device(batch.tokens), to_device(batch.lengths), batch.separator)
        counts = to_device(torch.tensor([0, batch.real_tokens, self.runtime.stop_requested, failed]))
        counts[0] = (inputs[1] != IGNORE).sum()
        count, real_tokens, stop, failures = self.runtime.sum(counts)

        micro = list(zip(*(rows.split(self.micro_batch) for rows in inputs), strict=True))
        loss, norm, masked = self.take(micro, count, index, lr, failures)
        metrics = loss, norm, masked, self.halted, real_tokens, stop
        return torch.stack([metric.double() for metric in metrics])  # fp64 holds any token count

    def rehearse(self) -> None:
        """Run one backward pass without targets, before the first step of a process.

        DDP rebuilds its buckets after the first backward pass of a process, and with three or more ranks the rounding
        of a sum depends on its place in a bucket. Without this pass, the first step after a resume would differ from
        that of an uninterrupted run.
        """
        if isinstance(self.gradients, Gradients) and self.gradients.bucketed:
            device, train = self.runtime.device, self.cfg.train
            rows = torch.zeros(self.micro_batch, train.seq_len + 1, dtype=torch.int32, device=device)
            nothing = inputs_and_targets(rows, rows[:, 0], 1 if self.cfg.data.mask_documents else None)
            with self.weights.published():
                self.gradients.add(nothing, torch.ones((), device=device), last=True)
            self.gradients.clear()

    def take(self, micro: Micro, count: Tensor, index: int, lr: float, failed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The update from ``micro``, which has ``count`` targets over all ranks; masked if a rank has ``failed``.

        ``index`` counts the updates of the run from 0. Returns, on the device, the loss, the gradient norm before
        clipping, and whether the update was masked.
        """
        numbered = enumerate(self.runtime.advancing(micro), 1)
        with Entering("publish", self.weights.published()):
            losses = [self.gradients.add(some, count, last=i == len(micro)) for i, some in numbered]
        loss = self.runtime.sum(torch.stack(losses).sum())
        return loss, *self.apply(loss, index, lr, failed)

    @part("optimizer")
    def apply(self, loss: Tensor, index: int, lr: float, failed: Tensor) -> tuple[Tensor, Tensor]:
        """Step with the summed, clipped gradients; returns their norm before clipping, and whether it was masked."""
        norm = self.gradients.norm(self.gradients.collect())
        masked = self.mask(torch.isfinite(loss) & torch.isfinite(norm), failed)
        self.optimizer.update(lr, masked, self.clip_factor(norm), index=index)
        if self.cfg.dlr.mode == "decayed_offset":
            knobs = self.cfg.optimizer.knobs
            share = lr * knobs.get("b_lr", 1.0) * knobs["weight_decay"] * (1 - masked)
            dlr.decay_towards_offsets(self.weights.model, self.weights.masters, share)
        self.gradients.clear()
        return norm, masked

    def clip_factor(self, norm: Tensor) -> Tensor | None:
        """The factor that scales a gradient of ``norm`` down to the bound, at most 1; None if there is no bound."""
        bound = self.cfg.train.clip
        return None if bound is None else (bound / (norm + 1e-6)).clamp(max=1.0)

    def mask(self, finite: Tensor, failed: Tensor) -> Tensor:
        """Returns 1 if this update is to be left out, else 0. After a halt every update is left out.

        Halts the run if a rank failed, or if the update is not ``finite`` and ``train.on_nonfinite`` is "stop".
        """
        halt = failed > 0
        if self.cfg.train.on_nonfinite == "stop":
            halt = halt | ~finite
        self.halted = torch.maximum(self.halted, halt.float())
        return torch.maximum(self.halted, (~finite).float())
