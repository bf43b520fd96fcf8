"""Everything that may end a run before its last step.

An update whose loss or gradient is not finite changes nothing on the device. ``Guard`` counts it, keeps its batch, and
ends the run if ``train.on_nonfinite`` or ``train.max_skipped`` says so. A rank whose data fail carries the failure into
its next update, which changes nothing on any rank: all ranks end at the same step. A save that fails for good fails on
all ranks. If any rank was asked to stop, all ranks learn this in the next update.
"""

from __future__ import annotations

import json
import math
import signal
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor
from torch.profiler import record_function

from dlr_pretrain.config import Config
from dlr_pretrain.data import Batch, Tokenizer, TrainLoader
from dlr_pretrain.train.console import Console
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.record import record_stop
from dlr_pretrain.train.saver import Saver
from dlr_pretrain.train.state import Skipped, TrainState
from dlr_pretrain.train.update import Outcome
from dlr_pretrain.util import process, sharded
from dlr_pretrain.util.errors import Diverged, Stalled, Stopped, UserError, exit_process, first_line, write_to_stderr

BEFORE_TRAINING = "before the first step of this start"
MOST_KEPT = 20  # batches of updates that are not finite, of each rank
AFTER_TRAINING = "after the last step, before the folded checkpoint"


class StopRequest(AbstractContextManager["StopRequest"]):
    """Whether this rank was ``asked`` to stop. Within this context, stop signals ask it to.

    A run stops at the next step boundary. Before the first step of this start, and when all steps are saved, nothing
    would be lost, so the signal handler ends the process at once, without an exception (see ``process.prepare``). A
    second Ctrl-C also ends the process at once.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.asked = self.trained = False

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._ask) for number in process.stop_signals()}
        self.asked = self.asked or bool(process.stop_requests)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _frame: object) -> None:
        """The signal handler."""
        again, self.asked = self.asked, True
        if process.is_worker:
            process.stop_requests.append(number)  # for its later jobs
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        if again:
            return
        if (self.trained or not self.ranks.heartbeat.step) and not process.is_worker:
            stopped = _stopped(AFTER_TRAINING if self.trained else BEFORE_TRAINING)
            record_stop(self.ranks.heartbeat, stopped)
            exit_process(stopped, say=self.ranks.is_main)
        if self.ranks.is_main:
            write_to_stderr("\nasked to stop: saving after this step; a second Ctrl-C exits at once")

    def training_done(self) -> None:
        """Note that all steps are saved: the run stops at once if it was asked to, or is asked from now on."""
        self.trained = True
        self.raise_if_asked(AFTER_TRAINING)

    def raise_if_asked(self, when: str) -> None:
        """Between the stages of a run: raise ``Stopped`` on every rank if any rank was asked to stop."""
        if any(self.ranks.gather(self.asked)):
            raise _stopped(when)


def _stopped(when: str) -> Stopped:
    return Stopped(f"stopped {when} (asked to stop). The same command continues")


@dataclass
class Guard:
    """Decides whether a run goes on.

    Writes batches of updates that are not finite to ``<run>/nonfinite``, decoded by ``tokenizer``.
    """

    cfg: Config
    ranks: Ranks
    stop: StopRequest
    saver: Saver
    console: Console
    tokenizer: Tokenizer
    error: UserError | None = None  # why this rank must end the run: the first reason
    ended_by: tuple[int, Outcome[float]] | None = None  # step and outcome of the update that ended the run, unapplied
    stop_requested: bool = False  # whether any rank was asked to stop; the same on all ranks

    @record_function("data")
    def next_batch(self, loader: TrainLoader) -> Batch:
        """The next batch; an empty one if this rank has failed, which all ranks learn in the update."""
        try:
            self.saver.raise_error()
            if self.error is None:
                return self._take(loader)
        except UserError as error:
            self.error = self.error or error
        return Batch.empty(self.cfg, self.cfg.train.global_batch // self.ranks.world_size)

    def _take(self, loader: TrainLoader) -> Batch:
        """The loader's next batch. Any error becomes a UserError: the state is sound and can be saved."""
        try:
            return loader.take(lambda: self.stop.asked, self.ranks.heartbeat.data_timeout)
        except UserError:
            raise
        except MemoryError as error:
            rows, length = self.cfg.train.global_batch // self.ranks.world_size, self.cfg.train.seq_len
            rule = f"no memory for the training data, {rows:,} sequences of {length:,} tokens per rank and step"
            raise UserError(f"{rule}: {first_line(error)}. Lower train.global_batch, or use more ranks") from error
        except Exception as error:  # from a library or the system
            write_to_stderr(traceback.format_exc())
            raise UserError(f"the training data: {type(error).__name__}: {error}") from error

    def review(self, state: TrainState, step: int, outcome: Outcome[float], batch: Batch) -> bool:
        """Take note of an update, and count it if it was skipped. Returns whether the run goes on from it."""
        self.stop_requested = self.stop_requested or outcome.stops > 0
        skip = self.cfg.train.on_nonfinite == "skip"
        finite = math.isfinite(outcome.loss) and math.isfinite(outcome.norm)
        if not finite and not (outcome.ends and skip):  # else it was skipped because a rank has failed
            is_kept = self._keep_batch(step, outcome, batch)
            if skip:
                state.skipped = state.skipped.and_step(step)
                where = f"see {self.folder}" if is_kept else f"its batch is not kept, as {self.folder} has {MOST_KEPT}"
                self.console.say(f"warning: step {step}: {_describe(outcome)}: skipped, {where}")
                self._fail_if_too_many(state.skipped)
        if outcome.ends:
            self.ended_by = (step, outcome)
        return self.ended_by is None

    def _keep_batch(self, step: int, outcome: Outcome[float], batch: Batch) -> bool:
        """Write this rank's rows of a batch to a file, for inspection. Returns False if there are enough files."""
        if not batch.positions:  # an empty batch
            return True
        if len([*self.folder.glob(f"*_rank_{self.ranks.rank}.json")]) >= MOST_KEPT:
            return False
        rows = [tokens[:length].tolist() for tokens, length in zip(batch.tokens, batch.lengths, strict=True)]
        content = {
            "step": step,
            "loss": str(outcome.loss),
            "grad_norm": str(outcome.norm),
            "tokens": rows,
            "text": [self.tokenizer.decode(row) for row in rows],
        }
        try:
            self.folder.mkdir(exist_ok=True)
            path = self.folder / f"step_{step:08d}_rank_{self.ranks.rank}.json"
            path.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
        except OSError as error:
            self.console.say(f"warning: step {step}: its batch could not be written: {error}")
        return True

    @property
    def folder(self) -> Path:
        return self.saver.run_dir / "nonfinite"

    def _fail_if_too_many(self, skipped: Skipped) -> None:
        if skipped.in_a_row > self.cfg.train.max_skipped:
            rule = f"the last {skipped.in_a_row} updates were not finite"
            self.error = self.error or Diverged(f"{rule}, and train.max_skipped={self.cfg.train.max_skipped}")

    def stops_after(self, step: int) -> bool:
        """Whether the run was asked to save and end after ``step``."""
        return self.stop_requested or step == self.cfg.train.stop_after

    def require_sound(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Raise UserError if ``tensors``, which are to be saved, are not finite or differ between ranks.

        They differ if GPUs of several kinds compute different initial values or updates.
        """
        sums, finite = zip(*self.ranks.gather((checksums(tensors), all_finite(tensors))), strict=True)
        seen: dict[tuple[str, int], int] = {}
        pairs = (pair for of_rank in sums for pair in of_rank.items())
        differ = list(dict.fromkeys(key[0] for key, of_rank in pairs if seen.setdefault(key, of_rank) != of_rank))
        if all(finite) and not differ:
            return
        with suppress(UserError):
            self.saver.wait()
        last = self.saver.saved
        saved = f"Step {last}, the last that was saved, is intact" if last else "Nothing was saved"
        if not all(finite):
            raise Diverged(
                f"step {step}: the last updates produced weights that are not finite. {saved}. "
                f"Lower train.lr={self.cfg.train.lr:g}"
            )
        raise UserError(
            f"step {step}: the ranks hold different weights, {len(differ)} in all, the first of them {differ[0]}. "
            f"{saved}. Use GPUs of one kind and one version of torch on all nodes"
        )

    def raise_if_stopped(self, step: int) -> None:
        """Raise Stopped if the run was asked to end after ``step``; that step is saved."""
        steps, stop_after = self.cfg.train.steps, self.cfg.train.stop_after
        where = f"stopped after step {step} of {steps}"
        if step == steps:
            return
        if self.stop_requested:
            raise Stopped(f"{where} (asked to stop); saved. The same command continues")
        if stop_after is not None and step >= stop_after:  # also if the run resumes beyond it
            raise Stopped(f"{where} (train.stop_after={stop_after}); saved. Without this setting, the run goes on")

    def raise_reason(self, step: int, outcome: Outcome[float]) -> NoReturn:
        """Raise the reason why update ``step`` ends the run, on every rank. The state before it is saved."""
        before = f"The {step - 1:,} steps before it are saved" if step > 1 else "Nothing was trained"
        errors = [(rank, error) for rank, error in enumerate(self.ranks.gather(self.error)) if error]
        if errors:
            reasons = "; ".join(f"rank {rank}: {error}" for rank, error in errors)
            kinds = {type(error) for _, error in errors}
            kind = next((kind for kind in (Diverged, Stalled) if kind in kinds), UserError)
            raise (Stopped if kinds == {Stopped} else kind)(f"step {step} was not taken. {before}. {reasons}")
        rule = f"step {step}: {_describe(outcome)}: not finite. The update was not applied"
        fix = f"Lower train.lr={self.cfg.train.lr:g}, look at its batch in {self.folder}, or skip such steps with"
        raise Diverged(f"{rule}. {before}. {fix} train.on_nonfinite=skip")

    def raise_if_failed(self) -> None:
        """After the last step, raise the error of any rank: no later update can carry it."""
        for error in filter(None, self.ranks.gather(self.error)):
            raise error

    def resume(self, state: TrainState) -> None:
        """Fail again if the run that left ``state`` failed at its last step: no update is left to end this one."""
        if state.step == state.skipped.last == self.cfg.train.steps:
            self._fail_if_too_many(state.skipped)


@torch.no_grad()
def checksums(tensors: Mapping[str, Tensor]) -> dict[tuple[str, int], int]:
    """Sums over the bytes of what several ranks hold: equal values have equal sums.

    The keys are a tensor's name and its first row here: 0 for a tensor that every rank holds whole.
    """
    held = {(name, 0): value for name, value in tensors.items() if not sharded.is_sharded(value)}
    for name, value in tensors.items():
        if sharded.copy_of(value)[1] > 1:
            held[name, sharded.span(value)[0]] = sharded.local_rows(value)
    sums = [t.contiguous().flatten().view(torch.int8).sum(dtype=torch.int64) for t in held.values()]
    return dict(zip(held, torch.stack(sums).tolist(), strict=True)) if held else {}


@torch.no_grad()
def all_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Whether all values that this rank holds are finite."""
    local = map(sharded.local_rows, tensors.values())
    floats = [t for t in local if t.is_floating_point() and t.numel()]
    return bool(torch.stack([end.float() for t in floats for end in t.aminmax()]).isfinite().all())


def _describe(outcome: Outcome[float]) -> str:
    return f"loss {outcome.loss:g}, gradient norm {outcome.norm:g}"
