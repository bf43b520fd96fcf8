"""This process as one of the ranks of a job: its device, agreement between ranks, signals."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import record_function

from dlr_pretrain.config import Config, ConfigError, compiler_problem
from dlr_pretrain.train.heartbeat import Heartbeat
from dlr_pretrain.util import process
from dlr_pretrain.util.errors import Stopped, UserError, first_line, write_to_stderr

T = TypeVar("T")
CONNECT = 600.0  # seconds in which the devices of all ranks have to reach each other
COLLECTIVE = 3600.0  # seconds that a collective may take at least, because ranks wait there for what rank 0 does alone
SLACK = 120.0  # seconds beyond the limit after which a collective fails by itself, if the heartbeat has not ended it
FOR_EVER = 1e8  # seconds
BEFORE, AFTER = "before the first step of this start", "after the last step, before the folded checkpoint"


class Ranks:
    """This process as one of ``world_size`` ranks, and the means by which they agree.

    Collectives on ``control`` (gloo) serve decisions on the host; the default group serves tensors on ``device``.
    """

    def __init__(self, cfg: Config, heartbeat: Heartbeat | None = None):
        self.cfg, self._settings = cfg, ExitStack()
        self.heartbeat = heartbeat or Heartbeat(cfg)
        self.rank, self.world_size = self.heartbeat.rank, self.heartbeat.world_size
        self.is_main = self.rank == 0
        self.device = _device(cfg)
        self.control: dist.ProcessGroup | None = None
        process.die_with_agent()
        self._wait = timedelta(seconds=min(max(COLLECTIVE, self.heartbeat.limit + SLACK), FOR_EVER))
        if self.world_size > 1:
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            try:
                dist.init_process_group(backend, timeout=self._wait)
                self.control = self.new_group()
            except (RuntimeError, ValueError) as error:
                reason = f"rank {self.rank} of {self.world_size} cannot reach the other ranks: {first_line(error)}"
                fix = "On several nodes, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network to use"
                raise UserError(f"{reason}. {fix}") from error
        self.stop_requested = self.trained = False
        for number in process.stop_signals():
            self._settings.callback(signal.signal, number, signal.signal(number, self._request_stop))
        self.stop_requested = bool(process.stop_requests)
        torch.manual_seed(cfg.seed)

    # ------------------------------------------------------------------------------------------------
    # Requests to stop

    def _request_stop(self, number: int, _frame) -> None:
        """Stop at the next step boundary; at once before the first step of this start, and after the last one.

        A second Ctrl-C stops at once, too.
        """
        again, self.stop_requested = self.stop_requested, True
        if again and number == signal.SIGINT:
            raise KeyboardInterrupt
        if again:
            return
        if self.trained or not self.heartbeat.step:
            raise _stopped(AFTER if self.trained else BEFORE)
        if self.is_main:
            write_to_stderr("\nasked to stop: saving after this step; Ctrl-C once more leaves at once")

    def finishing(self) -> None:
        """Note that all steps are saved: the run stops at once if it was asked to, or is from now on."""
        self.trained = True
        self.stop_if_asked(AFTER)

    def stop_if_asked(self, when: str) -> None:
        """Between the stages of a run: raise ``Stopped`` on every rank if any rank was asked to stop."""
        if any(self.gather(self.stop_requested)):
            raise _stopped(when)

    def start_heartbeat(self, run_dir: Path) -> None:
        """Take the run directory, and watch the progress of all ranks from now on."""
        token = self.on_main(lambda: self.heartbeat.take(run_dir))
        _readable(lambda: self.heartbeat.start(run_dir, token))

    # ------------------------------------------------------------------------------------------------
    # Agreement between ranks

    def on_main(self, decide: Callable[[], T]) -> T:
        """Call ``decide`` on rank 0, and return its result on every rank.

        If it raises a ``UserError``, every rank raises it. If it raises another exception, rank 0 raises that, and the
        other ranks raise a ``UserError`` that names it.
        """
        answer: list = [None, None]
        own: Exception | None = None
        with self.heartbeat.may_wait():
            if self.is_main:
                try:
                    answer[0] = _readable(decide)
                except Exception as error:
                    own = error
                    other = UserError(f"rank 0 failed: {type(error).__name__}: {error}")
                    answer[1] = error if isinstance(error, UserError) else other
            if self.world_size > 1:
                dist.broadcast_object_list(answer, src=0, group=self.control)
        if answer[1] is not None:
            raise own or answer[1]
        return answer[0]

    def main_first(self, act: Callable[[], T]) -> T:
        """Call ``act`` on rank 0, then on the other ranks, so that they find what rank 0 has cached."""
        result: list[T] = []
        self.on_main(lambda: result.append(act()))
        return result[0] if self.is_main else act()

    def gather(self, value: T, group: dist.ProcessGroup | None = None) -> list[T]:
        """``value`` of every rank, in the order of ranks, on every rank. ``group`` replaces ``control``."""
        if self.world_size == 1:
            return [value]
        values: list = [None] * self.world_size
        dist.all_gather_object(values, value, group=group or self.control)
        return values

    def require_equal(self, values: Mapping[str, object]) -> None:
        """Raise UserError if ``values`` differ between ranks: other commands, devices, or files at the same path."""
        for rank, other in enumerate(self.gather(values)):
            pairs = ((name, *(of.get(name, "not there") for of in (values, other))) for name in {**values, **other})
            lines = [f"  {name}: {a} on rank {self.rank}, {b} on rank {rank}" for name, a, b in pairs if a != b]
            if lines:
                fix = "Start every rank with the same command, on the same files and kind of device"
                raise UserError("\n".join(["the ranks differ:", *lines, fix]))

    def new_group(self) -> dist.ProcessGroup | None:
        """A new group for collectives on the host, such as those of another thread; all ranks must call together."""
        return dist.new_group(backend="gloo", timeout=self._wait) if self.world_size > 1 else None

    @record_function("communication")
    def sum(self, tensor: Tensor) -> Tensor:
        """``tensor`` summed over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy rank 0's ``tensors`` to every rank: an initial SVD may round differently on other machines."""
        if self.world_size > 1:
            for tensor in tensors:
                value = tensor.contiguous()
                dist.broadcast(value, src=0)
                tensor.copy_(value)

    # ------------------------------------------------------------------------------------------------
    # The device

    def use_device(self) -> None:
        """Use the device for the first time, after all checks that need none."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            gc.collect()  # frees models of a multirun's earlier runs: a compiled model is a reference cycle
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        elif self.device.type == "cpu":
            process.keep_freed_memory()
        if self.world_size > 1:  # NCCL connects with the first collective, and may wait for ever for a broken link
            with self.heartbeat.may_wait(max(CONNECT, self.heartbeat.limit)):
                self.sum(torch.zeros((), device=self.device)).item()

    def peak_memory(self) -> int:
        """The peak memory of this rank, in bytes: of the GPU's allocator, or of the process on a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def to_device(self, tensor: Tensor) -> Tensor:
        """``tensor`` on ``device``; from pinned memory, because the copy would otherwise wait for the GPU's queue."""
        self.heartbeat.ticks += 1  # a batch is a sign of progress, also in an evaluation
        if self.device.type == "cuda" and tensor.device.type == "cpu":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)

    # ------------------------------------------------------------------------------------------------
    # Start and end

    def __enter__(self) -> Ranks:
        """Change torch's settings of the whole process; ``__exit__`` restores them, for a multirun's next run."""
        if self.cfg.data.mask_documents:  # cuDNN's gradients with a mask may be NaN, at lengths such as 192 (#196678)
            others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
            self._settings.enter_context(sdpa_kernel(others))
        if self.cfg.compile:  # Dynamo would split each graph along DDP's buckets
            self._settings.enter_context(torch._dynamo.config.patch(optimize_ddp=False))
        return self

    def __exit__(self, _type, error: BaseException | None, _trace) -> None:
        """Restore the signal handlers, and destroy the process group if all ranks leave together.

        A rank that fails may be alone, and ends without that: NCCL would wait for the other ranks, and they for it.
        If ``error`` follows from the loss of another rank or from an early request to stop, that cause is raised.
        """
        cause = self._cause(error)
        self._settings.close()
        together = error is None or self.world_size == 1 or (isinstance(error, Stopped) and self.heartbeat.step)
        if dist.is_initialized() and together:
            dist.destroy_process_group()
        if cause is not None:
            raise cause from error

    def _cause(self, error: BaseException | None) -> UserError | None:
        """The cause of ``error`` if that is a lost rank or an early request to stop; otherwise None."""
        if not isinstance(error, Exception) or isinstance(error, UserError):
            return None
        if self.stop_requested and not self.heartbeat.step:  # a compiler wraps the exception of a signal handler
            return _stopped(BEFORE)
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
            lost, speaks = self.heartbeat.report(error)
            if speaks and not self.is_main:  # cli.py prints only rank 0's errors
                write_to_stderr(f"error: {lost}")
            return lost
        return None


def _stopped(when: str) -> Stopped:
    return Stopped(f"stopped {when} (asked to stop). The same command continues")


def _readable(act: Callable[[], T]) -> T:
    """The result of ``act``. An OSError becomes a UserError, because the user can fix the file system."""
    try:
        return act()
    except OSError as error:
        reason = f"{error.filename2 or error.filename or 'a file'}: {error.strerror or error}"
        raise UserError(f"{reason}. Look at run.dir and its disk") from error


def _device(cfg: Config) -> torch.device:
    """The device of this rank. Raises UserError if the machine lacks it, ConfigError if it lacks a needed compiler."""
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
