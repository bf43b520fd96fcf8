"""The loop around the updates: data, records, evaluations, checkpoints, and how a run ends."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import torch
from torch.profiler import record_function

from dlr_pretrain.config import Config
from dlr_pretrain.data import Batch, TrainLoader
from dlr_pretrain.models.flops import flops_per_token, peak_flops
from dlr_pretrain.models.linear import require_tied
from dlr_pretrain.optim.schedule import rate
from dlr_pretrain.train import merging
from dlr_pretrain.train.checkpoint import Checkpoint, Snapshot
from dlr_pretrain.train.console import Console
from dlr_pretrain.train.descent import Descent
from dlr_pretrain.train.evaluate import Evaluator
from dlr_pretrain.train.health import SpikeScore, Suspects
from dlr_pretrain.train.metrics import Pending, Throughput, finite_or_none
from dlr_pretrain.train.parts import part
from dlr_pretrain.train.probe import Probe
from dlr_pretrain.train.profile import ASIDE, Profiler
from dlr_pretrain.train.runtime import Runtime
from dlr_pretrain.train.saver import NotSaved, Saver
from dlr_pretrain.util.errors import Diverged, Stalled, Stopped, UserError

CONTINUES = "The same command continues"
TRIES, PAUSE = 11, 30.0  # attempts at a last save, and seconds between them


class Trainer:
    """Trains the weights of ``descent`` from step ``self.step`` to the end of the schedule.

    ``write(record)`` receives each completed update's metrics, in order, on rank 0.
    """

    def __init__(
        self,
        cfg: Config,
        runtime: Runtime,
        descent: Descent,
        evaluator: Evaluator,
        console: Console,
        write: Callable[[dict], None],
        saver: Saver,
        suspects: Suspects,
    ):
        self.cfg, self.runtime, self.descent, self.evaluator = cfg, runtime, descent, evaluator
        self.weights, self.optimizer = descent.weights, descent.optimizer
        self.console, self.write, self.saver, self.suspects = console, write, saver, suspects
        self.probe = Probe(cfg, runtime, self.weights)
        self.probed: dict[int, dict] = {}  # the probe's metrics, by the step that followed
        self.profiler = Profiler(cfg, runtime, console)
        self.positions = cfg.train.global_batch * cfg.train.seq_len  # per update
        self.step = self.tokens = self.real_tokens = 0
        self.batches: dict[int, Batch] = {}  # by unsettled step; each has the data position after it
        self.streams: dict[str, list[int]] = {}  # the data position before these steps
        self.stopping = False  # a rank was asked to stop
        self.failure: UserError | None = None  # why this rank must end the run
        self.broken: tuple[int, float, float] | None = None  # step, loss and norm of the update that ends the run
        self.skipped = self.skipped_in_a_row = self.last_skipped = 0  # skipped updates: two counts, the last one's step
        self.last_save = 0  # step of the last checkpoint that was begun
        self.spikes = SpikeScore()
        self.best = math.inf  # the lowest evaluation loss
        self.owed: dict | None = None  # the record of the last step, if its evaluation was put off
        self.pending, self.throughput = Pending(runtime.device), Throughput()
        self.peak = peak_flops(runtime.device, cfg.precision.name)
        vocab_size = self.weights.model.lm_head.out_features
        self.flops_per_token = flops_per_token(cfg, vocab_size, descent.micro_batch) if self.peak else None

    # ------------------------------------------------------------------------------------------------
    # The loop

    def train(self, loader: TrainLoader) -> None:
        """Train to the last step. If the run is asked to stop before it, save and raise ``Stopped``."""
        steps, stop_after = self.cfg.train.steps, self.cfg.train.stop_after
        if self.owed is not None:
            if (found := self.evaluate(interruptible=True)) is None:
                raise Stopped(f"stopped after step {self.step} of {steps} (asked to stop); saved. {CONTINUES}")
            self.report([self.owed | found])
            self.owed = None
        if self.step < steps:
            self.descent.rehearse()
        while self.step < steps:
            if stop_after is not None and self.step >= stop_after:  # also if the run resumes beyond it
                why = f"train.stop_after={stop_after}"
                raise Stopped(f"stopped after step {self.step} of {steps} ({why}); saved. Without it, the run goes on")
            batch = self.next_batch(loader)
            if self.probe.is_due(self.step):
                self.look_at_gradients(batch)
            values = self.descent.update(batch, self.step, self.lr(self.step), failed=self.failure is not None)
            self.step += 1
            self.runtime.stepped(self.step)
            self.batches[self.step] = batch
            self.pending.push(self.step, values)
            with self.throughput.paused():
                self.profiler.step()

            last = self.step == steps
            evaluate = last or self.step % self.cfg.eval.every == 0
            save = last or self.step % self.cfg.checkpoint.every == 0 or self.step == stop_after
            merge = merging.is_due(self.cfg, self.step)
            skipped = self.skipped
            records = self.settle(everything=evaluate or save or merge)
            if self.skipped > skipped and self.step - self.last_save > self.cfg.train.max_skipped:
                save = True  # a save checks that the weights are finite
            save = save or self.stopping
            if save:
                records += self.settle(everything=True)
            if self.broken:
                self.report(records)
                self.give_up(*self.broken)
            if evaluate:
                save = self.add_evaluation(records, at_once=last or merge or self.cfg.checkpoint.keep_best) or save
            self.report(records)
            if merge:
                with self.aside():
                    merging.merge(self.cfg, self.weights, self.optimizer, self.step)
            if save:
                with self.aside():
                    evaluation = records[-1].get("eval/loss") if records else None
                    leaving = last or self.stopping or self.step == stop_after
                    self.save_or_wait(evaluation) if leaving else self.checkpoint(evaluation, wait=False)
            if self.stopping and not last:
                where = f"stopped after step {self.step} of {steps}"
                raise Stopped(f"{where} (asked to stop); saved. {CONTINUES}")
        failures = list(filter(None, self.runtime.gather(self.failure)))
        if failures:  # of the last step; an earlier one would have ended the run
            raise failures[0]

    def add_evaluation(self, records: list[dict], at_once: bool) -> bool:
        """Evaluate the step of the last of ``records``; returns whether this step is therefore to be saved.

        Unless ``at_once``, a request to stop puts the evaluation off: the next start then completes the record.
        """
        found = None
        if at_once or not self.stopping:
            with self.aside():
                found = self.evaluate(interruptible=not at_once)
        if found is None:
            self.stopping, self.owed = True, records.pop()
            return True
        records[-1] |= found
        best, self.best = self.best, min(self.best, found["eval/loss"])
        return self.cfg.checkpoint.keep_best and self.best < best

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Work within this context counts as no part of a step, neither for the throughput nor in a profile."""
        with self.throughput.paused(), record_function(ASIDE):
            yield

    @part("data")
    def next_batch(self, loader: TrainLoader) -> Batch:
        """The next batch; an empty one if this rank has failed, so that all ranks learn of the failure in the step."""
        try:
            if self.saver.error is not None:
                self.saver.wait()
            if self.failure is None:
                return self.take(loader)
        except UserError as error:
            self.failure = error
        rows = self.cfg.train.global_batch // self.runtime.world_size
        tokens = torch.zeros((rows, self.cfg.train.seq_len + 1), dtype=torch.int32)
        return Batch(tokens, torch.zeros(rows, dtype=torch.int32), 0, {})

    def take(self, loader: TrainLoader) -> Batch:
        """The loader's next batch. Every error becomes a UserError, because the state is sound and can be saved."""
        try:
            return loader.take(lambda: self.runtime.stop_requested, self.runtime.patience)
        except UserError:
            raise
        except Exception as error:  # from a library or the system
            traceback.print_exc()
            raise UserError(f"the training data: {type(error).__name__}: {error}") from error

    def lr(self, update: int) -> float:
        return rate(self.cfg, update)

    def settle(self, everything: bool) -> list[dict]:
        """Take in the updates whose metrics have arrived, oldest first, up to one that ends the run.

        Moves the data position and the counters, notes requests to stop, and returns the records of the updates.
        """
        records: list[dict] = []
        for step, (loss, norm, masked, halted, real_tokens, stop) in self.pending.ready(everything):
            batch = self.batches.pop(step)
            failed = halted and self.cfg.train.on_nonfinite == "skip"
            if masked and not (self.broken or failed):
                self.look_into(step, loss, norm, batch)
            if halted:
                self.broken = self.broken or (step, loss, norm)
                continue
            self.streams = batch.state
            self.tokens += self.positions
            self.real_tokens += int(real_tokens)
            self.stopping = self.stopping or stop > 0
            records.append(self.record_of(step, loss, norm))
        return records

    def record_of(self, step: int, loss: float, norm: float) -> dict:
        speed = self.throughput.step(self.positions)
        return {
            "step": step,
            "train/loss": finite_or_none(loss),
            "train/spike": self.spikes.score(loss),
            "train/lr": self.lr(step - 1),
            "train/grad_norm": finite_or_none(norm),
            "train/skipped": self.skipped,
            "train/tokens": self.tokens,
            "train/real_tokens": self.real_tokens,
            "perf/tokens_per_second": speed,
            "perf/mfu": self.mfu(speed),
            "perf/max_memory_gb": self.runtime.peak_memory() / 1e9,
            "time": time.time(),
        } | self.probed.pop(step, {})

    def look_at_gradients(self, batch: Batch) -> None:
        """Probe the weights before the update from ``batch``."""
        self.runtime.synchronize()  # the throughput must count the GPU's time of earlier steps
        with self.aside():
            self.probed[self.step + 1] = self.probe(batch)

    def give_up(self, step: int, loss: float, norm: float) -> NoReturn:
        """End the run on every rank at update ``step``; save the state before it, unless that was partly updated."""
        self.step = step - 1
        try:
            self.saver.wait()
        except UserError as error:
            self.failure = self.failure or error
        if self.step > self.saver.saved:
            self.save_or_wait(None)
        before = f"The {self.step:,} steps before it are saved" if self.step else "Nothing was trained"
        failures = [(rank, error) for rank, error in enumerate(self.runtime.gather(self.failure)) if error]
        if failures and all(isinstance(error, Stopped) for _, error in failures):
            raise Stopped(f"stopped after step {self.step} of {self.cfg.train.steps} ({failures[0][1]}); saved")
        if failures:
            reasons = "; ".join(f"rank {rank}: {error}" for rank, error in failures)
            kinds = [type(error) for _, error in failures]
            kind = next((kind for kind in (Diverged, Stalled) if kind in kinds), UserError)
            raise kind(f"step {step} was not taken. {before}. {reasons}")
        raise Diverged(
            f"step {step}: loss {loss:g}, gradient norm {norm:g}: not finite. The update was not applied. {before}. "
            f"Lower train.lr={self.cfg.train.lr:g}, look at its batch in {self.suspects.folder}, or leave such steps "
            "out with train.on_nonfinite=skip"
        )

    def save_or_wait(self, evaluation: float | None) -> None:
        """Save before the run ends. If the disk is full or does not answer, try again for some minutes."""
        for left in reversed(range(TRIES)):
            try:
                return self.checkpoint(evaluation, wait=True)
            except NotSaved as error:
                if not left or any(self.runtime.gather(self.runtime.stop_requested)):
                    raise
                self.console.say(f"warning: {error}. It is tried for another {left * PAUSE:.0f} s")
                with self.runtime.patient():
                    time.sleep(PAUSE)

    def look_into(self, step: int, loss: float, norm: float, batch: Batch) -> None:
        """Keep the batch of a masked update whose numbers are not finite; count the update if such ones are skipped."""
        if math.isfinite(loss) and math.isfinite(norm):  # masked because a rank has failed
            return
        try:
            kept = f"its batch is in {self.suspects.keep(step, loss, norm, batch, self.streams)}" if batch.state else ""
        except OSError as error:
            kept = f"its batch could not be written: {error}"
        if self.cfg.train.on_nonfinite == "skip":
            self.skipped += 1
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if self.last_skipped == step - 1 else 1
            self.last_skipped = step
            numbers = f"loss {loss:g}, gradient norm {norm:g}"
            self.console.say(f"warning: step {step}: {numbers}: the update was left out; {kept}")
            self.failure = self.failure or self.too_many_skipped()

    def too_many_skipped(self) -> Diverged | None:
        """The error that ends the run if more than ``train.max_skipped`` updates in a row were skipped, else None."""
        if self.skipped_in_a_row <= self.cfg.train.max_skipped:
            return None
        rule = f"the last {self.skipped_in_a_row} updates were not finite"
        return Diverged(f"{rule}, and train.max_skipped={self.cfg.train.max_skipped}")

    def report(self, records: list[dict]) -> None:
        """Write and show ``records``. If they cannot be written, the next update ends the run."""
        for record in records:
            try:
                self.write(record)
            except UserError as error:
                self.failure = self.failure or error
            self.console.step(record, self.throughput.seconds_per_step())

    def mfu(self, tokens_per_second: float | None) -> float | None:
        """Achieved over peak FLOP/s of all GPUs; None if the throughput or the peak is not known."""
        if tokens_per_second is None or self.peak is None:
            return None
        return tokens_per_second * self.flops_per_token / (self.peak * self.runtime.world_size)

    def evaluate(self, interruptible: bool) -> dict[str, float | None] | None:
        with self.weights.published():
            return self.evaluator(self.weights.model, interruptible)

    # ------------------------------------------------------------------------------------------------
    # State

    def checkpoint(self, evaluation: float | None, wait: bool) -> None:
        """Save everything that the next step depends on, and ``evaluation``, this step's loss on validation text.

        With ``wait``, returns when the checkpoint is durable. Raises UserError if the ranks hold different weights, if
        weights are not finite, or, with ``wait``, if the save fails.
        """
        self.require_sound()
        streams = {}
        for own in self.runtime.gather(self.streams):
            streams |= own
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "real_tokens": self.real_tokens,
            "skipped": [self.skipped, self.skipped_in_a_row, self.last_skipped],
            "losses": list(self.spikes.losses),
            "eval_loss": evaluation,
            "best": self.best if math.isfinite(self.best) else None,
            "owed": self.owed,
            "streams": streams,
        }
        snapshot = Snapshot(
            model=self.weights.state,
            optimizer=self.optimizer.state_tensors(),
            optimizer_layout=self.optimizer.state_layout(),
            random=self.runtime.random_state(),
            state=state,
        )
        if failed := self.saver.save(self.step, snapshot):
            self.console.say(f"warning: {failed}. Step {self.step:,} is saved in its place")
        self.last_save = self.step
        if wait:
            self.saver.wait()

    def require_sound(self) -> None:
        """Raise UserError if weights are not finite or differ between ranks: unequal GPUs may compute unequal SVDs."""
        sums, finite = zip(*self.runtime.gather((self.weights.checksums(), self.weights.finite())), strict=True)
        differ = [name for name, own in sums[0].items() if any(of[name] != own for of in sums)]
        if all(finite) and not differ:
            return
        with suppress(UserError):
            self.saver.wait()
        last = self.saver.saved
        saved = f"Step {last}, the last that was saved, is whole" if last else "Nothing was saved"
        if not all(finite):
            raise Diverged(
                f"step {self.step}: the last updates left weights that are not finite. {saved}. "
                f"Lower train.lr={self.cfg.train.lr:g}"
            )
        raise UserError(
            f"step {self.step}: the ranks hold different weights, {len(differ)} of them from {differ[0]} on. "
            f"{saved}. Use GPUs of one kind and one version of torch on all nodes"
        )

    def resume(self, found: Checkpoint) -> None:
        """Restore the state of ``found``, which any number of ranks may have saved, and close it."""
        self.weights.load(found.model)
        self.optimizer.load_state_tensors(found.optimizer, found.optimizer_layout)
        if len(found.random) == self.runtime.world_size:
            self.runtime.set_random_state(found.random[self.runtime.rank])
        require_tied(self.weights.model)
        found.close()
        state = found.state
        self.step = self.last_save = state["step"]
        self.tokens, self.real_tokens, self.owed = state["tokens"], state["real_tokens"], state["owed"]
        self.skipped, self.skipped_in_a_row, self.last_skipped = state["skipped"]
        if self.step == self.last_skipped == self.cfg.train.steps:  # no update is left to end the row of skipped ones
            self.failure = self.too_many_skipped()
        self.spikes = SpikeScore(state["losses"])
        self.best = math.inf if state["best"] is None else state["best"]
        self.streams = state["streams"] or {}
