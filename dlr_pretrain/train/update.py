"""One update of the weights from a batch. If the loss or the gradient is not finite, the weights do not change."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.profiler import record_function

from dlr_pretrain.config import Config
from dlr_pretrain.data import Batch, inputs_and_targets
from dlr_pretrain.models import Llama, relora
from dlr_pretrain.models.layer import SeededInit, named_layers
from dlr_pretrain.optim.optimizer import Optimizer
from dlr_pretrain.train import parallel
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.recorded import Compute, Recorded
from dlr_pretrain.util.tensors import IGNORE, sum_dtype

MATRIX_UPDATE_SECONDS = 7200.0  # for an update of matrices: GaLore's decomposes all gradients of a 7b model
Scalar = TypeVar("Scalar", Tensor, float)  # on the device, and on the host


class Outcome(NamedTuple, Generic[Scalar]):
    """What an update reports: 0-dimensional tensors on the device, or numbers. The same on all ranks."""

    loss: Scalar  # mean over the targets of all ranks, in nats
    norm: Scalar  # of the gradient before clipping
    skipped: Scalar  # 1 if the update changed nothing
    ends: Scalar  # 1 if the run ends: no later update changes anything either
    real_tokens: Scalar  # of all ranks
    stops: Scalar  # how many ranks were asked to stop


def to_host(outcome: Outcome[Tensor]) -> Callable[[], Outcome[float]]:
    """Start a copy of ``outcome`` to the host. The returned function waits for the update, and returns the copy."""
    values = torch.stack([value.double() for value in outcome])  # fp64 holds any count of tokens
    if not values.is_cuda:
        return lambda: Outcome(*values.tolist())
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> Outcome[float]:
        copied.synchronize()
        return Outcome(*host.tolist())

    return wait


def add_gradients(
    model: Llama, groups: Sequence[Sequence[Tensor]], dtype: torch.dtype, last: bool, inputs: tuple[Tensor, ...]
) -> Tensor:
    """Add the gradients of one micro-batch to those of the update; the ``last`` one sums them over ranks.

    They are summed in ``groups`` and in ``dtype``: see ``parallel``. ``inputs`` are those of ``model``, and the count
    of targets that divides its loss. Returns the loss.
    """
    *batch, count = inputs
    with parallel.summed_over_ranks(model, groups, last, dtype):
        with record_function("forward"):
            loss = model(*batch) / count
        with record_function("backward"):
            loss.backward()
    return loss.detach()


class Update:
    """Computes all gradients of a global batch, then takes the optimizer's step."""

    def __init__(self, cfg: Config, ranks: Ranks, model: Llama, optimizer: Optimizer):
        self.cfg, self.ranks, self.model, self.optimizer = cfg, ranks, model, optimizer
        if cfg.compile:
            parallel.compile_(cfg, model)
        summed_in = parallel.gradient_groups(model, ranks.world_size), sum_dtype(cfg.precision.name, ranks.world_size)
        self.compute: Compute = partial(add_gradients, model, *summed_in)
        self.micro_batch = cfg.micro_batch(ranks.world_size)
        if ranks.device.type == "cuda" and cfg.why_no_graphs(ranks.world_size) is None:
            micro_batches = cfg.train.global_batch // ranks.world_size // self.micro_batch
            self.compute = Recorded(self.compute, list(model.parameters()), micro_batches, ranks)
        self.tokens = cfg.train.global_batch * cfg.train.seq_len  # positions of an update, padding included
        self.graph_failure: str | None = None  # after ``close``: why micro-batches were not recorded
        self.ends = torch.zeros((), device=ranks.device)  # becomes 1 with the update that ends the run

    def __call__(
        self, batch: Batch, index: int, lr: float, failed: bool = False, stop: bool = False
    ) -> Outcome[Tensor]:
        """Take one optimizer step from one global batch; ``batch`` holds this rank's rows of it.

        ``index`` numbers the updates of the run from 0. ``stop`` says whether this rank was asked to stop, ``failed``
        whether it has failed. ``skip`` decides whether the update changes anything. The outcome stays on the device,
        for which the host waits at most once: see ``Optimizer.update``. The targets are fewer than the real tokens: the
        last token of a padded or masked document has none.
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
        """The model's inputs on the device: ids and targets [b, T], and document numbers if documents are masked."""
        to_device = self.ranks.to_device
        return inputs_and_targets(to_device(batch.tokens), to_device(batch.lengths), batch.separator)

    def forward_backward(self, micro_batches: Sequence[tuple[Tensor, ...]], count: Tensor) -> Tensor:
        """Compute the gradients of the mean loss over the ``count`` targets of all ranks.

        Returns this rank's part of that loss. The gradients of micro-batches are summed in their own dtype: in bf16,
        the sum of 32 has an error of about 0.6%.
        """
        losses = []
        for number, inputs in enumerate(micro_batches, 1):
            self.ranks.heartbeat.tick()
            losses.append(self.compute(number == len(micro_batches), (*inputs, count)))
        return torch.stack(losses).sum()

    @record_function("optimizer")
    def step(self, loss: Tensor, index: int, lr: float, failures: Tensor) -> tuple[Tensor, Tensor]:
        """Step with the summed gradients, clipped; returns their norm before clipping, and 1 if skipped."""
        norm = parallel.norm_of(self.optimizer.collect())
        skipped = self.skip(torch.isfinite(loss) & torch.isfinite(norm), failures)
        with nullcontext() if self.optimizer.reads_on_device else self.ranks.heartbeat.may_wait(MATRIX_UPDATE_SECONDS):
            self.optimizer.update(lr, skipped, self.clip_factor(norm), index=index)
        self.optimizer.clear()
        return norm, skipped

    def close(self) -> None:
        """Free the CUDA graphs, before the process group that they use ends."""
        if isinstance(self.compute, Recorded):
            self.graph_failure = self.compute.failure
            self.compute = self.compute.compute

    def clip_factor(self, norm: Tensor) -> Tensor | None:
        """The factor that scales a gradient of ``norm`` down to ``train.clip``, at most 1; None without a bound."""
        bound = self.cfg.train.clip
        return None if bound is None else (bound / (norm + 1e-6)).clamp(max=1.0)

    def skip(self, finite: Tensor, failures: Tensor) -> Tensor:
        """1 if this update must change nothing: it is not ``finite``, or the run has ended. Else 0.

        The run ends, on all ranks, when a rank has failed, or at an update that is not ``finite`` if
        ``train.on_nonfinite`` is "stop".
        """
        ends = failures > 0
        if self.cfg.train.on_nonfinite == "stop":
            ends = ends | ~finite
        self.ends = torch.maximum(self.ends, ends.float())
        return torch.maximum(self.ends, (~finite).float())

    def merge(self, step: int) -> None:
        """ReLoRA's merge after update ``step``: add the factors' product to the frozen weights and draw new factors.

        Drops most of the factors' optimizer state. The result depends only on the state, the configuration and
        ``step``: it is the same on every rank and after a resume. Source: Lialin et al. (2023).
        """
        options = cast(relora.Options, self.cfg.backbone)
        seeded, number, factors = SeededInit(self.cfg.seed), step // options.merge_every, set()
        with self.optimizer.taken_out() as values:
            for path, layer in named_layers(self.model):
                if isinstance(layer, relora.Relora):
                    factors |= set(layer.merge_(values, seeded, path, number))
        self.optimizer.prune(factors, 1 - options.prune_ratio, (self.cfg.seed << 32) + number)
