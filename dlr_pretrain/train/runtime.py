"""The process's place in the job: device, ranks and their agreement, signals, random state."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dlr_pretrain import process
from dlr_pretrain.config import Config, ConfigError, compiler_problem
from dlr_pretrain.errors import Stopped, UserError, tell
from dlr_pretrain.train.parts import part
from dlr_pretrain.train.watch import PATIENCE, SLACK, Watch

T = TypeVar("T")
MEETING = timedelta(minutes=10)  # in which all ranks must have come
FOR_EVER = timedelta(days=1000)
GRACE = 20.0  # seconds for the folded checkpoint, where a job is about to be killed; that of a small model takes less
BEFORE, AFTER = "before the first step of this start", "after the last step, before the folded checkpoint"


class Runtime:
    """This process among ``world_size`` ranks, and what they agree on.

    Collectives on ``control`` (gloo) serve decisions on the host; the default group serves tensors on ``device``.
    """

    def __init__(self, cfg: Config):
        self.rank = int(os.environ.get("RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.is_main = self.rank == 0
        self.device = _device(cfg)
        self.control: dist.ProcessGroup | None = None
        self._agreed: Exception | None = None  # raised on every rank
        self.limit = None if cfg.run.timeout_minutes is None else 60 * cfg.run.timeout_minutes
        nccl = self.device.type == "cuda" and self.world_size > 1
        self.watch = Watch(self.rank, self.world_size, self.limit, nccl)
        process.die_with_agent()
        if self.world_size > 1:
            self._meet(cfg)
        self.stop_requested = self.trained = False
        self._handlers = {s: signal.signal(s, self._request_stop) for s in process.stop_signals()}
        self._handlers[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._end)
        self.stop_requested = process.stop_requested()
        torch.manual_seed(cfg.seed)

    def _meet(self, cfg: Config) -> None:
        """Make the process groups. Their collectives wait long until the first step, as ranks compile and load."""
        if self.device.type == "cuda":  # where NCCL leaves its own record of a collective that failed
            os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{Path(cfg.run.dir).absolute()}/stacks/nccl_rank_")
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, timeout=MEETING)
        except (dist.DistError, ValueError) as error:
            raise UserError(f"rank {self.rank} of {self.world_size} cannot reach the other ranks: {error}") from error
        dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=PATIENCE))
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=PATIENCE))
        self.control = self.new_group()

    def _request_stop(self, number: int, _frame) -> None:
        """Stop at the next step boundary, or at once where no step is complete: then there is nothing to save.

        A second interrupt from the keyboard stops at once, too.
        """
        again, self.stop_requested = self.stop_requested, True
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        if again or self.trained:
            return self._hurry()
        if not self.watch.started:
            raise _stopped(BEFORE)
        if self.is_main:
            tell("\nasked to stop: saving after this step; Ctrl-C once more leaves at once")

    def finishing(self) -> None:
        """All steps are saved. What is left has ``GRACE`` seconds from a request to stop on, then Stopped ends it."""
        self.trained = True
        self._hurry()

    def _hurry(self) -> None:
        if self.trained and self.stop_requested and signal.getitimer(signal.ITIMER_REAL)[0] == 0:
            signal.setitimer(signal.ITIMER_REAL, GRACE)

    def _end(self, _number: int, _frame) -> None:
        raise _stopped(AFTER)

    def stepped(self, step: int) -> None:
        """Step ``step`` is complete as far as the host is concerned. From the first on, ranks wait less for others."""
        first = not self.watch.started
        self.watch.stepped(step)
        if first and self.world_size > 1:
            wait = FOR_EVER if self.limit is None else timedelta(seconds=self.limit + SLACK)
            dist.distributed_c10d._set_pg_timeout(wait)

    def advancing(self, items: Iterable[T]) -> Iterator[T]:
        """``items``, each of which is a sign of progress: the micro-batches of a step."""
        for item in items:
            self.watch.ticks += 1
            yield item

    @property
    def patience(self) -> float | None:
        """Seconds that the training may wait for data, and save before the watch would end it; None for any."""
        return 0.8 * self.limit if self.limit is not None and self.watch.started else None

    def patient(self) -> AbstractContextManager[None]:
        """In here this rank may wait for longer than ``run.timeout_minutes``: for a disk, or for another rank's."""
        return self.watch.patient()

    def on_main(self, decide: Callable[[], T]) -> T:
        """The result of ``decide`` on rank 0, on every rank.

        Where it raises a ``UserError``, every rank does; after any other exception the others raise one that names it.
        """
        with self.patient():
            return self._on_main(decide)

    def _on_main(self, decide: Callable[[], T]) -> T:
        if self.world_size == 1:
            return decided(decide)
        answer: list = [None, None]
        own: Exception | None = None
        if self.is_main:
            try:
                answer[0] = decided(decide)
            except Exception as error:
                own = error
                known = isinstance(error, UserError)
                answer[1] = error if known else UserError(f"rank 0 failed: {type(error).__name__}: {error}")
        dist.broadcast_object_list(answer, src=0, group=self.control)
        if answer[1] is not None:
            self._agreed = own or answer[1]
            raise self._agreed
        return answer[0]

    def main_first(self, act: Callable[[], T]) -> T:
        """``act`` on rank 0, then on the others: what rank 0 caches is there for them."""
        result: list[T] = []
        self.on_main(lambda: result.append(act()))
        return result[0] if self.is_main else act()

    def stop_if_asked(self, when: str) -> None:
        """Between the stages of a run: raise ``Stopped`` on every rank where any was asked to stop."""
        if any(self.gather(self.stop_requested)):
            raise _stopped(when)

    def require_equal(self, values: dict[str, object]) -> None:
        """Refuse ranks that would train different things: other commands, devices, or files at the same path."""
        for rank, other in enumerate(self.gather(values)):
            pairs = {name: (values.get(name, "not there"), other.get(name, "not there")) for name in values | other}
            lines = [f"  {n}: {a} on rank {self.rank}, {b} on rank {rank}" for n, (a, b) in pairs.items() if a != b]
            if lines:
                fix = "Start every rank with the same command, on the same files and kind of device"
                raise UserError("\n".join(["the ranks differ:", *lines, fix]))

    def use_device(self) -> None:
        """Touch the GPU for the first time, when nothing is left to refuse."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            gc.collect()  # of a multirun's earlier runs; a compiled model is a cycle of references
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_memory(self) -> int:
        """The most bytes that this rank has held: of the GPU's allocator, or of the process on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return process.peak_memory()

    def gather(self, value: T, group: dist.ProcessGroup | None = None) -> list[T]:
        """``value`` of every rank, in the order of ranks, on every rank; by ``group`` instead of ``control``."""
        if self.world_size == 1:
            return [value]
        values: list = [None] * self.world_size
        dist.all_gather_object(values, value, group=group or self.control)
        return values

    def new_group(self) -> dist.ProcessGroup | None:
        """A group for collectives on the host of another thread than the main one; all ranks ask for it together."""
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE)) if self.world_size > 1 else None

    @part("communication")
    def sum(self, tensor: Tensor) -> Tensor:
        """``tensor`` summed over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank rank 0's values: what starts from an SVD may differ in rounding between machines."""
        if self.world_size > 1:
            for tensor in tensors:
                value = tensor.contiguous()
                dist.broadcast(value, src=0)
                tensor.copy_(value)

    def to_device(self, tensor: Tensor) -> Tensor:
        """``tensor`` on ``device``; through pinned memory, or the copy would wait for the GPU's queue."""
        self.watch.ticks += 1  # a batch, of an evaluation too
        if self.device.type == "cuda" and tensor.device.type == "cpu":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)

    def synchronize(self) -> None:
        """Wait for the GPU's queue."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def random_state(self) -> list[Tensor]:
        """The generators' states of every rank, [CPU, GPU if any] as one uint8 tensor each."""
        states = [torch.get_rng_state()]
        if self.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.device))
        return self.gather(torch.cat(states))

    def set_random_state(self, state: Tensor) -> None:
        host = torch.get_rng_state().numel()
        torch.set_rng_state(state[:host])
        if self.device.type == "cuda" and state.numel() > host:
            torch.cuda.set_rng_state(state[host:], self.device)

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, _type, error: BaseException | None, _trace) -> None:
        """Give the signals back, and leave the process group where all ranks do.

        A rank that fails alone, or is stopped before the first step, which each is by itself, just ends: leaving NCCL
        in order would wait for the others, which wait for this rank.
        What fails since another rank is gone, or since this one was asked to stop early, is raised as just that.
        """
        instead = self._reason(error)
        self.watch.stop()
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        together = error is None or error is self._agreed or (isinstance(error, Stopped) and self.watch.started)
        if dist.is_initialized() and together:
            dist.destroy_process_group()
        if instead is not None:
            raise instead from error

    def _reason(self, error: BaseException | None) -> UserError | None:
        """What lies behind ``error``, if it is but a consequence."""
        if not isinstance(error, Exception) or isinstance(error, UserError):
            return None
        if self.stop_requested and not self.watch.started:  # a compiler wraps what a signal raised
            return _stopped(BEFORE)
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
            lost, speaker = self.watch.report(error)
            if self.rank == speaker and not self.is_main:  # which is mute: the front door lets rank 0 speak
                tell(f"error: {lost}")
            return lost
        return None


def _stopped(when: str) -> Stopped:
    return Stopped(f"stopped {when} (asked to stop). The same command continues")


def decided(decide: Callable[[], T]) -> T:
    """The result of ``decide``; what the file system refuses is for the user to fix."""
    try:
        return decide()
    except OSError as error:
        raise UserError(
            f"{error.filename or 'a file'}: {error.strerror or error}. Look at run.dir and its disk"
        ) from error


def _device(cfg: Config) -> torch.device:
    """The device of this rank; refuses what the machine does not have before anything is built."""
    if cfg.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: torch finds no GPU here. Use device=cpu, or a CUDA build of torch")
    device = torch.device("cpu")
    if cfg.device != "cpu" and torch.cuda.is_available():
        local, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if local >= count:
            raise UserError(f"local rank {local} has no GPU of its own: {count} visible. Use --nproc-per-node {count}")
        device = torch.device("cuda", local)
    if problem := compiler_problem(cfg, device.type):
        raise ConfigError([problem])
    return device
