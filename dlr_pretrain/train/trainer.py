"""The training step, and the loop around it."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from dlr_pretrain.analysis.flops import flops_per_token, peak_flops
from dlr_pretrain.config import Config
from dlr_pretrain.data import IGNORE, Batch, TrainLoader, inputs_and_targets
from dlr_pretrain.errors import Stopped, UserError
from dlr_pretrain.models import dlr
from dlr_pretrain.models.linear import require_tied
from dlr_pretrain.optim import build as optim
from dlr_pretrain.optim.schedule import rate
from dlr_pretrain.train import merging
from dlr_pretrain.train.checkpoint import Snapshot
from dlr_pretrain.train.console import Console
from dlr_pretrain.train.evaluate import Evaluator
from dlr_pretrain.train.gradients import Gradients, clip, global_norm
from dlr_pretrain.train.metrics import Pending, Throughput, finite_or_none
from dlr_pretrain.train.runtime import Runtime
from dlr_pretrain.train.weights import Weights


class Trainer:
    """Brings ``weights`` from step ``self.step`` to the end of the schedule.

    ``write(record)`` receives each completed update's metrics, in order; ``save(snapshot)`` each checkpoint, on rank 0.
    """

    def __init__(
        self,
        cfg: Config,
        runtime: Runtime,
        weights: Weights,
        evaluator: Evaluator,
        console: Console,
        write: Callable[[dict], None],
        save: Callable[[int, Snapshot], None],
    ):
        self.cfg, self.runtime, self.weights, self.evaluator = cfg, runtime, weights, evaluator
        self.console, self.write, self.save = console, write, save
        self.optimizer = optim.build(cfg.optimizer, weights.optimized, weights.undecayed)
        self.gradients = Gradients(weights, cfg.train.accumulate, runtime.world_size)
        require_tied(weights.model)
        self.micro_batch = cfg.micro_batch(runtime.world_size)
        self.step = self.tokens = self.real_tokens = 0
        self.saved = 0  # the last step that a checkpoint holds
        self.streams: dict[int, dict[str, list[int]]] = {}  # data position after each of the last steps
        self.stopping = False  # a rank was asked to stop
        self.failure: UserError | None = None  # of this rank's data
        self.masked = torch.zeros((), device=runtime.device)  # 1 from the first update on that could not be applied
        self.broken: tuple[int, float, float] | None = None  # that update's step, loss and gradient norm
        self.pending, self.throughput = Pending(runtime.device), Throughput()
        self.peak = peak_flops(runtime.device)
        vocab_size = weights.model.lm_head.out_features
        self.flops_per_token = flops_per_token(cfg, vocab_size, self.micro_batch) if self.peak else None

    # ------------------------------------------------------------------------------------------------
    # One step

    def update(self, batch: Batch, lr: float) -> Tensor:
        """One optimizer update from one global batch. The host waits for nothing but, with optimizers
        other than adamw, for whether to mask.

        An update whose loss or gradient is not finite, or for which a rank has no data, changes nothing, and neither
        does any after it. Returns device metrics: mean loss, gradient norm before clipping, whether the update was
        masked, real tokens, and how many ranks were asked to stop.
        """
        to_device = self.runtime.to_device
        inputs, targets = inputs_and_targets(to_device(batch.tokens), to_device(batch.lengths))
        counts = to_device(torch.tensor([0, batch.real_tokens, self.runtime.stop_requested, self.failure is not None]))
        counts[0] = (targets != IGNORE).sum()
        count, real_tokens, stop, failed = self.runtime.sum(counts)

        micro = list(zip(inputs.split(self.micro_batch), targets.split(self.micro_batch), strict=True))
        with self.weights.published():
            losses = [self.gradients.add(*xy, count, last=i == len(micro)) for i, xy in enumerate(micro, 1)]
        loss = self.runtime.sum(torch.stack(losses).sum())

        gradients = self.gradients.collect()
        norm = global_norm(gradients)
        clip(gradients, norm, self.cfg.train.clip)
        healthy = torch.isfinite(loss) & torch.isfinite(norm) & (failed == 0)
        self.masked = torch.maximum(self.masked, (~healthy).float())
        self.optimizer.update(lr, skip=self.masked)
        if self.cfg.dlr.mode == "decayed_offset":
            share = lr * self.cfg.optimizer.weight_decay * (1 - self.masked)
            dlr.decay_towards_offsets(self.weights.model, self.weights.masters, share)
        self.gradients.clear()
        return torch.stack((loss, norm, self.masked, real_tokens.float(), stop.float()))

    # ------------------------------------------------------------------------------------------------
    # The loop

    def train(self, loader: TrainLoader) -> None:
        """Run to the last step; raises ``Stopped`` after saving where the run was asked to stop before it."""
        steps, stop_after = self.cfg.train.steps, self.cfg.train.stop_after
        while self.step < steps:
            if stop_after is not None and self.step >= stop_after:  # also where the run resumes beyond it
                why = f"train.stop_after={stop_after}"
                raise Stopped(f"stopped after step {self.step} of {steps} ({why}); saved. Without it, the run goes on")
            batch = self.next_batch(loader)
            values = self.update(batch, self.lr(self.step))
            self.step += 1
            self.streams[self.step] = batch.state
            self.streams.pop(self.step - 2 - self.pending.lag, None)
            self.pending.push(self.step, values)

            last = self.step == steps
            evaluate = last or self.step % self.cfg.eval.every == 0
            save = last or self.step % self.cfg.checkpoint.every == 0 or self.step == stop_after
            merge = merging.is_due(self.cfg, self.step)
            records = self.completed(everything=evaluate or save or merge)
            if self.stopping and not last:
                save = True
                records += self.completed(everything=True)
            if evaluate and not self.broken:
                with self.throughput.paused():
                    records[-1] |= self.evaluate()
            for record in records:
                self.write(record)
                self.console.step(record, self.throughput.seconds_per_step())
            if self.broken:
                self.give_up(*self.broken)
            if merge:
                with self.throughput.paused():
                    merging.merge(self.cfg, self.weights, self.optimizer, self.step)
            if save:
                with self.throughput.paused():
                    self.checkpoint()
            if self.stopping and not last:
                where = f"stopped after step {self.step} of {steps}"
                raise Stopped(f"{where} (asked to stop); saved. The same command continues")

    def next_batch(self, loader: TrainLoader) -> Batch:
        """The next batch; an empty one where this rank's data fail, so that all ranks learn of it in the step."""
        try:
            return next(loader)
        except UserError as error:
            self.failure = error
            rows = self.cfg.train.global_batch // self.runtime.world_size
            tokens = torch.zeros((rows, self.cfg.train.seq_len + 1), dtype=torch.int32)
            return Batch(tokens, torch.zeros(rows, dtype=torch.int32), 0, {})

    def lr(self, update: int) -> float:
        return rate(self.cfg, update)

    def completed(self, everything: bool) -> list[dict]:
        """The records of updates whose metrics have arrived, oldest first, up to one that was masked."""
        positions = self.cfg.train.global_batch * self.cfg.train.seq_len
        records: list[dict] = []
        for step, (loss, norm, masked, real_tokens, stop) in self.pending.ready(everything):
            if masked or self.broken:
                self.broken = self.broken or (step, loss, norm)
                continue
            self.tokens += positions
            self.real_tokens += int(real_tokens)
            self.stopping = self.stopping or stop > 0
            rate = self.throughput.step(positions)
            records.append(
                {
                    "step": step,
                    "train/loss": loss,
                    "train/lr": self.lr(step - 1),
                    "train/grad_norm": finite_or_none(norm),
                    "train/tokens": self.tokens,
                    "train/real_tokens": self.real_tokens,
                    "perf/tokens_per_second": rate,
                    "perf/mfu": self.mfu(rate),
                    "perf/max_memory_gb": self.peak_memory(),
                    "time": time.time(),
                }
            )
        return records

    def give_up(self, step: int, loss: float, norm: float) -> NoReturn:
        """End the run at the first masked update, on every rank, with the state before it saved."""
        self.step = step - 1
        if self.step > self.saved:
            self.checkpoint()
        before = f"The {self.step:,} steps before it are saved" if self.step else "Nothing was trained"
        failures = [f"rank {rank}: {error}" for rank, error in enumerate(self.runtime.gather(self.failure)) if error]
        if failures:
            raise UserError(f"no data for step {step}. {before}. " + "; ".join(failures))
        raise UserError(
            f"step {step}: loss {loss:g}, gradient norm {norm:g}: not finite. The update was not applied. {before}. "
            f"Lower train.lr={self.cfg.train.lr:g}, or look at this step's data"
        )

    def mfu(self, tokens_per_second: float | None) -> float | None:
        """Achieved over peak FLOP/s of all GPUs; None where the peak is not known."""
        if tokens_per_second is None or self.peak is None:
            return None
        return tokens_per_second * self.flops_per_token / (self.peak * self.runtime.world_size)

    def peak_memory(self) -> float:
        """Peak of this rank in GB (1e9 bytes): of the GPU's allocator, or of the process on a CPU."""
        if self.runtime.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.runtime.device) / 1e9
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9

    def evaluate(self) -> dict[str, float]:
        with self.weights.published():
            return self.evaluator(self.weights.model)

    # ------------------------------------------------------------------------------------------------
    # State

    def checkpoint(self) -> None:
        """Save everything that the next step depends on; raises UserError where the ranks have drifted apart."""
        self.require_replicas()
        streams = {}
        for part in self.runtime.gather(self.streams[self.step]):
            streams |= part
        snapshot = Snapshot(
            model=self.weights.state,
            optimizer=self.optimizer.state_tensors(),
            optimizer_layout=self.optimizer.state_layout(),
            random=self.runtime.random_state(),
            state={"step": self.step, "tokens": self.tokens, "real_tokens": self.real_tokens, "streams": streams},
        )
        self.runtime.on_main(lambda: self.save(self.step, snapshot))
        self.saved = self.step

    def require_replicas(self) -> None:
        """Refuse to save weights that are not every rank's: equal gradients may give unequal SVDs on unequal GPUs."""
        if self.runtime.world_size == 1:
            return
        sums = self.runtime.gather(self.weights.checksums())
        differ = [name for name, own in sums[0].items() if any(of[name] != own for of in sums)]
        if differ:
            saved = f"Step {self.saved}, the last that was saved, is whole" if self.saved else "Nothing was saved"
            raise UserError(
                f"step {self.step}: the ranks hold different weights, {len(differ)} of them from {differ[0]} on. "
                f"{saved}. Use GPUs of one kind and one version of torch on all nodes"
            )

    def resume(self, snapshot: Snapshot) -> None:
        """Go on from ``snapshot``, saved on any number of ranks; its tensors are let go of."""
        self.weights.load(snapshot.model)
        self.optimizer.load_state_tensors(snapshot.optimizer, snapshot.optimizer_layout)
        if len(snapshot.random) == self.runtime.world_size:
            self.runtime.set_random_state(snapshot.random[self.runtime.rank])
        require_tied(self.weights.model)
        snapshot.model.clear(), snapshot.optimizer.clear()  # or their files stay mapped to the end of the run
        self.step = self.saved = snapshot.state["step"]
        self.tokens, self.real_tokens = snapshot.state["tokens"], snapshot.state["real_tokens"]
