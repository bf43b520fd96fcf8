"""Saves while training goes on: the state is copied to the host, and a thread writes the copy as a checkpoint."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from dlr_pretrain.train import checkpoint
from dlr_pretrain.train.checkpoint import Keep, Piece, Snapshot
from dlr_pretrain.train.console import Console
from dlr_pretrain.train.lease import Lease
from dlr_pretrain.train.metrics import MetricsFile
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.record import update_record
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import write_durably

T = TypeVar("T")
# On a CPU the writing thread would take the cores of the training. It lowers its own priority (on Linux every thread
# has one of its own). That does not help between ranks in different sessions, so it also works for only a fifth of the
# time, as long as nobody waits for it.
NICENESS = 19
REST = 4
SHOWN = 60.0  # seconds until all machines see a new folder: NFS may cache the contents of its parent for so long
TRIES, PAUSE = 11, 30.0  # attempts at a last save, and seconds between them


class NotSaved(UserError):
    """A checkpoint could not be written; another attempt may succeed."""


class Saver:
    """Writes the checkpoints of a run, one at a time: each rank writes its part, and rank 0 the manifest.

    Before a checkpoint becomes valid, rank 0 makes sure that ``lease`` is still its own and that every line of
    ``metrics`` is on the disk. ``passed_over`` are the damaged checkpoints that rank 0 found at the start; the first
    save deletes them. The ranks' writing threads have their own process group: collectives of two threads in one group
    would mix.
    """

    def __init__(
        self,
        run_dir: Path,
        ranks: Ranks,
        keep: Keep,
        lease: Lease | None,
        metrics: MetricsFile | None,
        console: Console,
        identity: dict,
        saved_step: int = 0,
        passed_over: Collection[Path] = (),
    ):
        self.run_dir, self.root = run_dir, run_dir / "checkpoints"
        self.ranks, self.keep, self.lease, self.metrics = ranks, keep, lease, metrics
        self.console, self.identity = console, identity
        self.saved = saved_step  # the last step that a checkpoint holds; the same on all ranks after ``wait``
        self.begun = saved_step  # the last step of which a save was begun
        self.error: Exception | None = None  # why the last save failed; set on all ranks, but not at the same instant
        self._passed_over = passed_over
        self._group = ranks.new_group()
        self._buffers: dict[torch.dtype, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._awaited = threading.Event()

    def rehearse(self) -> None:
        """Have every rank write a file where checkpoints will be, so that a problem shows now and not hours later."""
        ranks = self.ranks
        with ranks.patient():
            folder = self._together(lambda: checkpoint.tmp_dir(self.root, "rehearsal") if ranks.is_main else None)[0]
            try:
                self._together(lambda: _write_in(folder, ranks.rank))
            finally:
                if ranks.is_main:
                    shutil.rmtree(folder, ignore_errors=True)

    def save(self, step: int, snapshot: Snapshot, final: bool = False) -> None:
        """Start to save ``snapshot``, which may be overwritten when this returns. Waits for the previous save first.

        With ``final``, returns when the checkpoint is durable, and if the disk is full or does not answer, tries again
        for some minutes. If the previous save failed and nobody has asked for its error, this one takes its place.
        """
        for left in reversed(range(TRIES if final else 1)):
            self._start(step, snapshot)
            if not final:
                return
            try:
                return self.wait()
            except NotSaved as error:
                if not left or any(self.ranks.gather(self.ranks.stop_requested)):
                    raise
                self.console.say(f"warning: {error}. It is tried for another {left * PAUSE:.0f} s")
                with self.ranks.patient():
                    time.sleep(PAUSE)

    def wait(self) -> None:
        """Wait until the last save is durable. Raises UserError, on all ranks, if it failed on any.

        If a rank was lost meanwhile, raises the error of the collective.
        """
        if (error := self._ended()) is not None:
            raise error

    def raise_error(self) -> None:
        """Raise the error of the last save, if it has failed by now."""
        if self.error is not None:
            self.wait()

    def _start(self, step: int, snapshot: Snapshot) -> None:
        failed = self._ended()
        if failed is not None:
            if not isinstance(failed, UserError):
                raise failed
            self.console.say(f"warning: {failed}. Step {step:,} is saved in its place")
        pieces, copied = self._to_host(checkpoint.share(snapshot, self.ranks.rank, self.ranks.world_size))
        self._awaited.clear()
        rest = (step, pieces, copied, snapshot.state, snapshot.optimizer_layout)
        self._thread = threading.Thread(target=self._work, args=rest, name="checkpoint", daemon=True)
        self._thread.start()
        self.begun = step

    def _ended(self) -> Exception | None:
        """Wait for the last save to end. Returns why it failed, or None; the next call returns None."""
        if self._thread is not None:
            self._awaited.set()
            with self.ranks.patient():
                self._thread.join()
            self._thread = None
        error, self.error = self.error, None
        return error

    def _to_host(self, pieces: dict[str, Piece]) -> tuple[dict[str, Piece], torch.cuda.Event | None]:
        """Copies of ``pieces`` on the host, and the event of their completion: the GPU does not wait for the host."""
        on_gpu = self.ranks.device.type == "cuda"
        copies, used = {}, dict.fromkeys(self._sizes(pieces), 0)
        for name, piece in pieces.items():
            dtype, values = piece.tensor.dtype, piece.tensor.numel()
            flat = self._buffers[dtype][used[dtype] : used[dtype] + values]
            used[dtype] += values
            copies[name] = piece._replace(tensor=flat.view(piece.tensor.shape).copy_(piece.tensor, non_blocking=True))
        if not on_gpu:
            return copies, None
        copied = torch.cuda.Event(blocking=True)  # the writing thread sleeps while it waits for it
        copied.record()
        return copies, copied

    def _sizes(self, pieces: dict[str, Piece]) -> dict[torch.dtype, int]:
        """The values of each dtype. Makes room for them: one buffer a dtype, kept, because new memory is slow.

        torch rounds pinned memory up to a power of two, so that one buffer wastes less than one for each tensor.
        """
        sizes: dict[torch.dtype, int] = {}
        for piece in pieces.values():
            sizes[piece.tensor.dtype] = sizes.get(piece.tensor.dtype, 0) + piece.tensor.numel()
        for dtype, values in sizes.items():
            if dtype not in self._buffers or len(self._buffers[dtype]) < values:
                pinned = self.ranks.device.type == "cuda"
                self._buffers[dtype] = torch.empty(values, dtype=dtype, pin_memory=pinned)
        return sizes

    def _work(self, step: int, pieces: dict[str, Piece], copied, state: dict, layout: dict[str, dict]) -> None:
        ranks = self.ranks
        throttle = checkpoint.unthrottled
        if copied is not None:  # a new thread starts on GPU 0, and waiting there would allocate half a GB on it
            torch.cuda.set_device(ranks.device)
        else:
            throttle = self._rest
            with suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            folder = self._together(lambda: self._begin(step) if ranks.is_main else None)[0]
            if folder is not None:
                if copied is not None:
                    copied.synchronize()
                rank, size = ranks.rank, ranks.world_size
                parts = self._together(lambda: checkpoint.write_part(folder, rank, size, pieces, throttle))
                self._together(lambda: self._commit(folder, step, parts, state, layout) if ranks.is_main else None)
            self.saved = step
        except UserError as error:
            self.error = NotSaved(f"checkpoint of step {step} could not be written: {error}")
        except Exception as error:
            self.error = error

    def _rest(self, seconds: float) -> None:
        self._awaited.wait(REST * seconds)

    def _require_permission(self) -> None:
        """On rank 0: raise if another start has taken the run over, or metrics are not on the disk."""
        if self.lease is not None:
            self.lease.require_held()
        if self.metrics is not None:
            self.metrics.sync()

    def _begin(self, step: int) -> Path | None:
        self._require_permission()
        folder = checkpoint.begin(self.root, step)
        if folder is None:
            self._note(step)
        return folder

    def _commit(self, folder: Path, step: int, parts: list[dict], state: dict, layout: dict[str, dict]) -> None:
        self._require_permission()
        files = {name: entry for part in parts for name, entry in part.items()}
        evaluations = self.metrics.evaluations if self.metrics is not None else {}
        state = state | {"identity": self.identity}
        checkpoint.commit(folder, step, files, state, layout, self.keep, self._passed_over, dict(evaluations))
        self._note(step)
        self._passed_over = ()

    def _note(self, step: int) -> None:
        update_record(self.run_dir, {"saved": step})

    def _together(self, act: Callable[[], T]) -> list[T]:
        """Call ``act`` on every rank, and return all results. If it raises on any rank, all ranks raise UserError."""
        result = error = None
        try:
            result = act()
        except Exception as raised:
            error = f"{raised}" if isinstance(raised, OSError | UserError) else f"{type(raised).__name__}: {raised}"
        answers = self.ranks.gather((result, error), self._group)
        failures = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(answers) if error is not None]
        if failures:
            raise UserError("; ".join(failures) if len(answers) > 1 else failures[0].partition(": ")[2])
        return [result for result, _ in answers]

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        """Wait for a running save, which the end of the process would otherwise cut off.

        After an exception the wait is at most 60 s, and after KeyboardInterrupt there is none.
        """
        if self._thread is not None and kind is not KeyboardInterrupt:
            self._awaited.set()
            self._thread.join(None if kind is None else 60.0)


def _write_in(folder: Path, rank: int) -> None:
    """Write a file in the ``folder`` that rank 0 has made, as soon as this machine sees it on a network file system."""
    deadline = time.monotonic() + SHOWN
    while True:
        try:
            return write_durably(folder / f"rank_{rank}", b"")
        except FileNotFoundError:
            if time.monotonic() > deadline:
                fix = "Give run.dir on a file system that all machines of the run mount at the same path"
                raise UserError(f"{folder.parent} on {socket.gethostname()} is not that of rank 0. {fix}") from None
            time.sleep(0.5)
