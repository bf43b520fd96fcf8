"""One update of the weights from a batch. If the loss or the gradient is not finite, the weights do not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from dlr_pretrain.config import Config
from dlr_pretrain.config.written import read_record
from dlr_pretrain.data import Batch, inputs_and_targets
from dlr_pretrain.models import Llama
from dlr_pretrain.models.layer import SeededInit, named_layers
from dlr_pretrain.models.relora import Relora
from dlr_pretrain.optim.build import Optimizer
from dlr_pretrain.train import parallel
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.record import update_record
from dlr_pretrain.train.state import new_model, new_optimizer
from dlr_pretrain.util.errors import UserError, first_line, write_to_stderr
from dlr_pretrain.util.tensors import IGNORE

MATRICES = 7200.0  # seconds that an update of matrices may take: GaLore decomposes all gradients of 7b in one
USABLE = 0.9  # of a GPU's free memory: the plan is right within 5%, and NCCL and cuBLAS need some
# (cfg, vocab_size, ranks) -> the peak bytes of a rank, as the plan estimates them. The command hands it in.
PlannedMemory = Callable[[Config, int, int], int]
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
        # With a mask, gradients of cuDNN's attention may be NaN, at lengths such as 192 (#196678)
        torch.backends.cuda.enable_cudnn_sdp(not cfg.data.mask_documents)
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
        to_device = self.ranks.to_device
        inputs = inputs_and_targets(to_device(batch.tokens), to_device(batch.lengths), batch.separator)
        counts = to_device(torch.tensor([0, batch.real_tokens, stop, failed]))
        counts[0] = (inputs[1] != IGNORE).sum()
        count, real_tokens, stops, failures = self.ranks.sum(counts)

        micro_batches = list(zip(*(rows.split(self.micro_batch) for rows in inputs), strict=True))
        loss = self.ranks.sum(self.forward_backward(micro_batches, count))
        norm, skipped = self.step(loss, index, lr, failures)
        return Outcome(loss, norm, skipped, self.ends, real_tokens, stops)

    def forward_backward(self, micro_batches: Sequence[tuple[Tensor, ...]], count: Tensor) -> Tensor:
        """Gradients of the mean loss over the ``count`` targets of all ranks; returns this rank's share of that loss.

        ``micro_batches`` holds the model's inputs: ids and targets [b, T], and the document numbers if documents are
        masked. Micro-batches are summed in the gradients' own dtype: in bf16, 32 of them have an error of about 0.6%.
        """
        losses = []
        for number, inputs in enumerate(self.ranks.heartbeat(micro_batches), 1):
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
        knobs: dict = self.cfg.backbone.knobs
        seeded, number, factors = SeededInit(self.cfg.seed), step // knobs["merge_every"], set()
        with self.optimizer.taken_out() as values:
            for path, layer in named_layers(self.model):
                if isinstance(layer, Relora):
                    factors |= set(layer.merge_(values, seeded, path, number))
        self.optimizer.prune(factors, 1 - knobs["prune_ratio"], (self.cfg.seed << 32) + number)

    def warm_up(self) -> None:
        """Run one backward pass without targets, before the first update of a process.

        DDP rebuilds its buckets after the first backward pass of a process, and with three or more ranks the rounding
        of a sum depends on its place in a bucket. Without this pass, the first step after a resume would differ from
        that of an uninterrupted run.
        """
        if self.module is not self.model:
            device, train = self.ranks.device, self.cfg.train
            rows = torch.zeros(self.micro_batch, train.seq_len + 1, dtype=torch.int32, device=device)
            nothing = inputs_and_targets(rows, rows[:, 0], 1 if self.cfg.data.mask_documents else None)
            self.forward_backward([nothing], torch.ones((), device=device))
            parallel.clear_gradients(self.module, self.parameters)


def trial(cfg: Config, ranks: Ranks, vocab_size: int, model: Llama | None = None) -> Update:
    """The updates of ``model`` (default: a new one), for checks and measurements without the data of a run."""
    model = model or new_model(cfg, ranks, vocab_size)
    return Update(cfg, ranks, model, new_optimizer(cfg, model))


def random_batch(cfg: Config, ranks: Ranks, vocab_size: int) -> Batch:
    """This rank's batch of random tokens."""
    rows = cfg.train.global_batch // ranks.world_size
    generator = torch.Generator().manual_seed(ranks.rank)
    tokens = torch.randint(2, vocab_size, (rows, cfg.train.seq_len + 1), generator=generator, dtype=torch.int32)
    lengths = torch.full((rows,), cfg.train.seq_len + 1, dtype=torch.int32)
    return Batch(tokens, lengths, rows * cfg.train.seq_len, {}, 1 if cfg.data.mask_documents else None)  # any id


def resolve_micro_batch(
    cfg: Config, ranks: Ranks, vocab_size: int, planned: PlannedMemory | None, run_dir: Path
) -> Config:
    """``cfg`` with a number for ``train.micro_batch=auto``: the largest for which every rank has room. All must call.

    The run's record keeps it for later starts on as many ranks, because another number would change the rounding of the
    losses: they take it as long as it fits at all. Without a GPU, or without ``planned``, ``auto`` is ``null``. Raises
    UserError if no sequence fits.
    """
    if cfg.train.micro_batch != "auto" or planned is None or ranks.device.type != "cuda":
        return cfg
    world = ranks.world_size
    share = cfg.train.global_batch // world
    kept = ranks.on_main(lambda: read_record(run_dir).get("micro_batch", {}))
    most = kept.get(str(world), share)
    room = torch.cuda.mem_get_info(ranks.device)[0] * (1.0 if str(world) in kept else USABLE)

    def fits(rows: int) -> bool:
        return planned(replace(cfg, train=replace(cfg.train, micro_batch=rows)), vocab_size, world) <= room

    divisors = (rows for rows in range(most, 0, -1) if share % rows == 0)
    rows, least = min(ranks.gather((next(filter(fits, divisors), 0), room)))
    if rows == 0:
        rule = f"not one sequence of train.seq_len={cfg.train.seq_len} fits in {least / 1e9:.1f} GB of a GPU"
        fix = "Use train.activation_checkpointing=latent or block, parallel=fsdp, or a smaller scale"
        raise UserError(f"train.micro_batch=auto: {rule}. {fix}; nvidia-smi shows what else is on the GPU")
    ranks.on_main(lambda: update_record(run_dir, {"micro_batch": kept | {str(world): rows}}))
    return replace(cfg, train=replace(cfg.train, micro_batch=rows))


@contextmanager
def explain_out_of_memory(cfg: Config, ranks: Ranks) -> Iterator[None]:
    """Turns an out-of-memory error of torch, numpy, cuBLAS or a new kernel into a UserError that says what helps.

    A rank other than 0 prints the message itself: it fails alone, and the command line prints only rank 0's errors.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        said = any(text in str(error) for text in ("out of memory", "ALLOC_FAILED", "can't allocate memory"))
        if not said and not isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            raise
        t, rows = cfg.train, cfg.micro_batch(ranks.world_size)
        sizes = f"train.micro_batch={rows} of {t.global_batch:,} x {t.seq_len:,} tokens a step"
        fix = "The same command continues with a smaller train.micro_batch; see scripts/plan.py"
        text = f"out of memory on rank {ranks.rank} with {sizes}: {first_line(error)}. {fix}"
        if not ranks.is_main:
            write_to_stderr(f"error: {text}")
        raise UserError(text) from error
