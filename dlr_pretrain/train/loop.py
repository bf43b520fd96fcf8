"""The training loop: update, record, evaluate, save."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import NoReturn

from torch import Tensor
from torch.profiler import profile, schedule, tensorboard_trace_handler

from dlr_pretrain.config import Config
from dlr_pretrain.data import Batch, TrainLoader
from dlr_pretrain.models import Llama
from dlr_pretrain.optim.schedule import merge_due, rate
from dlr_pretrain.train.checkpoint import Checkpoint
from dlr_pretrain.train.console import Console
from dlr_pretrain.train.guard import Guard
from dlr_pretrain.train.metrics import Meter
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.saver import Saver
from dlr_pretrain.train.state import Skipped, TrainState, load_tensors, saved_tensors
from dlr_pretrain.train.update import Outcome, Update, to_host

LAG = {"cpu": 0, "cuda": 1}  # how many steps after its update an outcome is read on the host


def profiler(cfg: Config, run_dir: Path, ranks: Ranks) -> profile:
    """Traces the steps that ``cfg.profile`` names. Each rank writes a file to ``<run>/profile`` if it can."""
    write = tensorboard_trace_handler(str(run_dir / "profile"), f"rank_{ranks.rank}", use_gzip=True)

    def write_if_possible(traced: profile) -> None:
        with suppress(OSError, RuntimeError):
            write(traced)

    steps = schedule(wait=cfg.profile.start - 1, warmup=1, active=cfg.profile.steps, repeat=1)
    return profile(schedule=steps, on_trace_ready=write_if_possible)


@dataclass
class Loop:
    """Trains the model of ``update`` from ``state`` to the last step."""

    cfg: Config
    ranks: Ranks
    update: Update
    evaluator: Callable[[Llama], dict[str, float | None] | None]  # returns the metrics; None if a stop was asked for
    sinks: Sequence[Callable[[dict], None]]  # they take the record of each step; on rank 0 only
    saver: Saver
    guard: Guard
    console: Console
    state: TrainState = field(default_factory=TrainState)
    unevaluated: dict | None = None  # the record of the resumed step, whose evaluation was abandoned

    def __post_init__(self) -> None:
        self.profiler = profiler(self.cfg, self.saver.run_dir, self.ranks) if self.cfg.profile.enabled else None
        self.meter = Meter(self.cfg, self.ranks, self.update.model, self.update.micro_batch)
        self.pending: deque[tuple[int, Callable[[], Outcome[float]], Batch]] = deque()  # outcomes not yet read
        self.lag = LAG[self.ranks.device.type]

    def fit(self, loader: TrainLoader) -> None:
        """Train to the last step. ``guard`` raises the error that ends the run earlier."""
        cfg, guard, state = self.cfg, self.guard, self.state
        guard.raise_if_stopped(state.step)
        if self.unevaluated is not None:
            self.report(self.unevaluated, evaluates=True)
            guard.raise_if_stopped(state.step)
        while state.step < cfg.train.steps:
            batch = guard.next_batch(loader)
            failed, stop = guard.error is not None, guard.stop.asked
            outcome = self.update(batch, state.step, rate(cfg, state.step), failed, stop)
            state.step += 1
            self.push(outcome, batch)

            last = state.step == cfg.train.steps
            evaluates = last or state.step % cfg.eval.every == 0
            merges = merge_due(cfg, state.step)
            saves = last or state.step % cfg.checkpoint.every == 0
            self.drain(evaluates, at_once=evaluates or merges or saves)
            if guard.ended_by is not None:
                self.end_before(*guard.ended_by)
            with self.meter.paused():
                if merges:
                    self.update.merge(state.step)
                if saves or guard.stops_after(state.step):
                    self.save(final=last or guard.stops_after(state.step))
            guard.raise_if_stopped(state.step)
        guard.raise_if_failed()

    def push(self, outcome: Outcome[Tensor], batch: Batch) -> None:
        """Start copying the outcome of the update to the host, while the device continues."""
        self.ranks.heartbeat.stepped(self.state.step)
        self.pending.append((self.state.step, to_host(outcome), batch))
        if self.profiler is not None:
            with self.meter.paused():
                self.profiler.step()

    def drain(self, evaluates: bool, at_once: bool) -> None:
        """Record the pending updates, oldest first: all but the last ``lag``, or all if ``at_once``.

        The position in the data moves here, behind the batch of each recorded update. Evaluates after the last if
        ``evaluates``. Stops at an update that ends the run.
        """
        state = self.state
        while len(self.pending) > (0 if at_once or self.guard.stops_after(state.step) else self.lag):
            step, arrived, batch = self.pending.popleft()
            outcome = arrived()
            if not self.guard.review(state, step, outcome, batch):
                break
            state.streams = batch.positions
            state.tokens += self.update.tokens
            state.real_tokens += int(outcome.real_tokens)
            self.report(self.meter.record(step, outcome, state) | batch.record, evaluates and step == state.step)

    def report(self, record: dict, evaluates: bool) -> None:
        """Write the record of an update. A stop abandons its evaluation; the resumed run then evaluates this step."""
        if evaluates:
            with self.meter.paused():
                metrics = self.evaluator(self.update.model)
            self.guard.stop_requested = self.guard.stop_requested or metrics is None
            record = record | (metrics or {})
        for sink in self.sinks:
            sink(record)
        self.console.step(record)

    def end_before(self, step: int, outcome: Outcome[float]) -> NoReturn:
        """Save the state before update ``step``, which changed nothing, and raise the error that says why the run ends.

        If a save has failed for good, raises its error: the run then ends with the checkpoint before it.
        """
        self.state.step = step - 1
        self.saver.wait()
        if self.state.step > self.saver.saved:
            self.save(final=True)
        self.guard.raise_reason(step, outcome)

    def save(self, final: bool = False) -> None:
        """Save everything that the next step depends on. With ``final``, returns when it is durable.

        Raises UserError if the weights are not sound, or if the previous save (with ``final``, this save) has failed
        for good.
        """
        streams: dict[str, list[int]] = {}
        for positions in self.ranks.gather(self.state.streams):
            streams |= positions
        state = replace(self.state, streams=streams)
        model, optimizer = self.update.model, self.update.optimizer
        with optimizer.taken_out() as values:
            tensors = saved_tensors(model, values)
            self.guard.require_sound(self.state.step, tensors)
            self.saver.save(tensors, optimizer.state_tensors(), asdict(state), final)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Restore the state of ``checkpoint``, saved by any number of ranks, and close it."""
        load_tensors(self.update.model, self.update.optimizer, checkpoint.model)
        self.update.optimizer.load_state_tensors(checkpoint.optimizer)
        self.state = TrainState(**{declared.name: checkpoint.state[declared.name] for declared in fields(TrainState)})
        self.state.skipped = Skipped(*self.state.skipped)
        self.guard.resume(self.state)
        checkpoint.close()
