"""This process as one of the ranks of a job, and agreement between ranks."""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from dlr_pretrain.config import Config
from dlr_pretrain.train.device import find_device, prepare_device
from dlr_pretrain.train.heartbeat import Heartbeat
from dlr_pretrain.util import process
from dlr_pretrain.util.errors import RankLost, Stopped, UserError, file_error, first_line, write_to_stderr

T = TypeVar("T")
NETWORK = "NCCL_SOCKET_IFNAME"
CONNECT_SECONDS = 600.0  # seconds in which the devices of all ranks must reach each other
COLLECTIVE_SECONDS = 3600.0  # shortest limit of a collective: ranks wait in it for what rank 0 does alone
SLACK_SECONDS = 120.0  # added to the heartbeat's limit for a collective: the heartbeat should end it first
LONGEST_SECONDS = 1e8  # longest limit that torch accepts
SOCKETS = 3  # of a rank to each other rank: the default group, ``control``, and that of the saver's thread
OTHER_FILES = 512  # that a rank has open


class Ranks(AbstractContextManager["Ranks"]):
    """This process as one of ``world_size`` ranks, and how they agree.

    ``control`` (gloo) is the process group for decisions on the host. The default group is for tensors on ``device``.
    """

    def __init__(self, cfg: Config, heartbeat: Heartbeat | None = None):
        self.heartbeat = heartbeat or Heartbeat(cfg)
        self.rank, self.world_size = self.heartbeat.rank, self.heartbeat.world_size
        self.is_main = self.rank == 0
        self.device = find_device(cfg)
        self.control: dist.ProcessGroup | None = None
        process.die_with_agent()
        seconds = max(COLLECTIVE_SECONDS, self.heartbeat.limit + SLACK_SECONDS)
        self._wait = timedelta(seconds=min(seconds, LONGEST_SECONDS))
        if self.world_size > 1:
            require_files(self.world_size)
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            try:
                dist.init_process_group(backend, timeout=self._wait)
                self.control = self.new_group()
            except (RuntimeError, ValueError) as error:
                reason = f"rank {self.rank} of {self.world_size} cannot reach the other ranks: {first_line(error)}"
                fix = "On several nodes, GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network to use"
                raise UserError(f"{reason}. {fix}") from error
        self._network = os.environ.get(NETWORK)
        self._cudnn_attention = torch.backends.cuda.cudnn_sdp_enabled()
        if cfg.data.mask_documents:  # its gradients with a mask may be NaN, at lengths such as 192 (#196678)
            torch.backends.cuda.enable_cudnn_sdp(False)
        torch.manual_seed(cfg.seed)

    def use_device(self) -> None:
        """Use the device for the first time, after all checks that need none."""
        prepare_device(self.device)
        if self.world_size > 1:  # NCCL connects in the first collective, and may wait indefinitely for a broken link
            with self.heartbeat.may_wait(max(CONNECT_SECONDS, self.heartbeat.limit)):
                self.sum(torch.zeros((), device=self.device)).item()

    def to_device(self, tensor: Tensor) -> Tensor:
        """``tensor`` on ``device``. Copies from pinned memory: other copies wait for the GPU's queue."""
        self.heartbeat.tick()  # a batch is a sign of progress, in an evaluation too
        if self.device.type == "cuda" and tensor.device.type == "cpu":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)

    def start_heartbeat(self, run_dir: Path) -> None:
        """Take the run directory, and watch this rank's progress from now on."""
        token = self.on_main(lambda: self.heartbeat.take(run_dir))
        _readable(lambda: self.heartbeat.start(run_dir, token))

    # ------------------------------------------------------------------------------------------------
    # Agreement between ranks

    def on_main(self, decide: Callable[[], T]) -> T:
        """Call ``decide`` on rank 0, while it holds the run directory, and return its result on every rank.

        If it raises a UserError, every rank raises it. If it raises another exception, rank 0 raises that, and the
        other ranks raise a UserError that names it.
        """
        answer: list = [None, None]
        raised: Exception | None = None
        with self.heartbeat.may_wait():
            if self.is_main:
                try:
                    self.heartbeat.require_held()
                    answer[0] = _readable(decide)
                except Exception as error:
                    raised = error
                    other = UserError(f"rank 0 failed: {type(error).__name__}: {error}")
                    answer[1] = error if isinstance(error, UserError) else other
            if self.world_size > 1:
                dist.broadcast_object_list(answer, src=0, group=self.control)
        if answer[1] is not None:
            raise raised or answer[1]
        return answer[0]

    def main_first(self, act: Callable[[], T]) -> T:
        """Call ``act`` on rank 0, then on the other ranks, which find what rank 0 has cached."""
        result: list[T] = []
        self.on_main(lambda: result.append(act()))
        return result[0] if self.is_main else act()

    def gather(self, value: T, group: dist.ProcessGroup | None = None) -> list[T]:
        """The ``value`` of every rank, in the order of ranks, on every rank. ``group`` replaces ``control``."""
        if self.world_size == 1:
            return [value]
        values: list = [None] * self.world_size
        dist.all_gather_object(values, value, group=group or self.control)
        return values

    def require_equal(self, values: Mapping[str, object]) -> None:
        """Raise UserError if ``values`` differ between ranks: in commands, devices, or files at the same path."""
        for rank, other in enumerate(self.gather(values)):
            pairs = ((name, values.get(name, "missing"), other.get(name, "missing")) for name in {**values, **other})
            lines = [f"  {name}: {a} on rank {self.rank}, {b} on rank {rank}" for name, a, b in pairs if a != b]
            if lines:
                fix = "Start every rank with the same command, on the same files and kind of device"
                raise UserError("\n".join(["the ranks differ:", *lines, fix]))

    def new_group(self) -> dist.ProcessGroup | None:
        """A new group for collectives on the host, such as those of another thread. All ranks must call this."""
        return dist.new_group(backend="gloo", timeout=self._wait) if self.world_size > 1 else None

    @record_function("communication")
    def sum(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy rank 0's ``tensors`` to every rank."""
        if self.world_size > 1:
            for tensor in tensors:
                value = tensor.contiguous()
                dist.broadcast(value, src=0)
                tensor.copy_(value)

    # ------------------------------------------------------------------------------------------------
    # The end

    def __exit__(self, _type, error: BaseException | None, _trace) -> None:
        """Destroy the process group if all ranks leave together. Raises RankLost if ``error`` comes from a lost rank.

        A rank that fails may be alone, and leaves the group as it is: NCCL would wait for the other ranks.
        """
        torch.backends.cuda.enable_cudnn_sdp(self._cudnn_attention)
        lost = self._lost(error)
        together = error is None or self.world_size == 1 or (isinstance(error, Stopped) and self.heartbeat.step)
        if dist.is_initialized() and together:
            dist.destroy_process_group()
        if self._network is None:  # a group of one rank sets it (see ``parallel``), also for later jobs of a sweep
            os.environ.pop(NETWORK, None)
        if lost is not None:
            raise lost from error

    def _lost(self, error: BaseException | None) -> RankLost | None:
        """The error that names the lost rank, if ``error`` is that of a collective; else None."""
        collective = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
        if error is None or not collective:
            return None
        lost, prints = self.heartbeat.explain_collective(error)
        if prints and not self.is_main:  # cli.py prints only rank 0's errors
            write_to_stderr(f"error: {lost}")
        return lost


def require_files(world_size: int) -> None:
    """Raise this process's limit of open files to what its connections to all ranks need.

    Raises UserError if the system does not allow it.
    """
    needed = SOCKETS * world_size + OTHER_FILES
    if not process.allow_files(needed):
        rule = f"a rank of {world_size:,} needs {needed:,} open files, more than this system allows (ulimit -Hn)"
        raise UserError(f"{rule}. Ask for a higher hard limit, or use fewer ranks")


def _readable(act: Callable[[], T]) -> T:
    """The result of ``act``. An OSError becomes a UserError: the user can fix the file system."""
    try:
        return act()
    except OSError as error:
        raise file_error(error) from error
