"""Saving while training goes on: a copy of the state to the host, and a thread that makes a checkpoint of it."""

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

from dlr_pretrain.durable import write_durably
from dlr_pretrain.errors import UserError
from dlr_pretrain.train import checkpoint
from dlr_pretrain.train.checkpoint import Keep, Piece, Snapshot
from dlr_pretrain.train.runtime import Runtime

T = TypeVar("T")
# The thread that writes is nice (on Linux a thread is by itself), and where that does not help, as between ranks that
# are sessions of their own, it works for a fifth of the time, as long as nobody waits for it.
NICENESS = 19
REST = 4
SHOWN = 60.0  # seconds in which all machines see a new folder, as long as NFS keeps what it knows of the one above


class NotSaved(UserError):
    """A disk has not taken a checkpoint; it may yet."""


class Saver:
    """Writes the checkpoints of all ranks under ``root``, one at a time: each rank its part, rank 0 the manifest.

    On rank 0 ``permit()`` is called before a checkpoint counts; what it raises keeps it from counting. ``done(step)``
    is called when it does. ``about`` goes into its state: what the run is. ``passed_over`` are the damaged checkpoints
    that rank 0 has found at the start: the first save deletes them.
    The ranks' threads agree in a process group of their own: collectives of two threads in one group would mix.
    """

    def __init__(
        self,
        root: Path,
        runtime: Runtime,
        keep: Keep,
        permit: Callable[[], None] = lambda: None,
        done: Callable[[int], None] = lambda step: None,
        about: dict | None = None,
        saved_step: int = 0,
        passed_over: Collection[Path] = (),
    ):
        self.root, self.runtime, self.keep, self.permit, self.done = root, runtime, keep, permit, done
        self.about = about or {}
        self.saved = saved_step  # the last step that a checkpoint holds; the same on all ranks after ``wait``
        self.error: Exception | None = None  # why the last save failed; of all ranks, though not at the same instant
        self._passed_over = passed_over
        self._group = runtime.new_group()
        self._buffers: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._awaited = threading.Event()

    def rehearse(self) -> None:
        """Have every rank write a file where checkpoints will stand: what else would be found out hours later."""
        runtime = self.runtime
        aside = self._together(lambda: checkpoint.aside(self.root, "rehearsal") if runtime.is_main else None)[0]
        try:
            self._together(lambda: _write_in(aside, runtime.rank))
        finally:
            if runtime.is_main:
                shutil.rmtree(aside, ignore_errors=True)

    def save(self, step: int, snapshot: Snapshot) -> UserError | None:
        """Start to save ``snapshot``; returns when it may be overwritten. Waits for the save before.

        Returns why that one failed, if it did and nobody has heard: this one takes its place.
        """
        failed = self._ended()
        if failed is not None and not isinstance(failed, UserError):
            raise failed
        pieces, copied = self._to_host(checkpoint.share(snapshot, self.runtime.rank, self.runtime.world_size))
        self._awaited.clear()
        rest = (step, pieces, copied, snapshot.state, snapshot.optimizer_layout)
        self._thread = threading.Thread(target=self._work, args=rest, name="checkpoint", daemon=True)
        self._thread.start()
        return failed

    def wait(self) -> None:
        """Return when the last save is durable; raises UserError, on all ranks, where it failed on any.

        Where a rank was lost meanwhile, raises what the collective said.
        """
        if (error := self._ended()) is not None:
            raise error

    def _ended(self) -> Exception | None:
        """Wait for the last save; why it failed, once."""
        if self._thread is not None:
            self._awaited.set()
            with self.runtime.patient():
                self._thread.join()
            self._thread = None
        error, self.error = self.error, None
        return error

    def _to_host(self, pieces: dict[str, Piece]) -> tuple[dict[str, Piece], torch.cuda.Event | None]:
        """Copies of ``pieces``, and what says when they are there: the GPU goes on without waiting for the host."""
        on_gpu = self.runtime.device.type == "cuda"
        copies = {}
        for name, piece in pieces.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != piece.tensor.shape or buffer.dtype != piece.tensor.dtype:
                buffer = torch.empty(piece.tensor.shape, dtype=piece.tensor.dtype, pin_memory=on_gpu)
                self._buffers[name] = buffer  # new memory costs more than copying
            copies[name] = piece._replace(tensor=buffer.copy_(piece.tensor, non_blocking=True))
        if not on_gpu:
            return copies, None
        copied = torch.cuda.Event(blocking=True)  # the thread sleeps until then
        copied.record()
        return copies, copied

    def _work(self, step: int, pieces: dict[str, Piece], copied, state: dict, layout: dict[str, dict]) -> None:
        runtime = self.runtime
        if copied is not None:  # a new thread is on GPU 0, and waiting there would take half a GB of it
            torch.cuda.set_device(runtime.device)
        with suppress(OSError, AttributeError):  # the training's threads first, where cores are few
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            aside = self._together(lambda: self._begin(step) if runtime.is_main else None)[0]
            if aside is not None:
                if copied is not None:
                    copied.synchronize()
                parts = self._together(
                    lambda: checkpoint.write_part(aside, runtime.rank, runtime.world_size, pieces, self._rest)
                )
                self._together(lambda: self._commit(aside, step, parts, state, layout) if runtime.is_main else None)
            self.saved = step
        except UserError as error:
            self.error = NotSaved(f"checkpoint of step {step} could not be written: {error}")
        except Exception as error:
            self.error = error

    def _rest(self, seconds: float) -> None:
        self._awaited.wait(REST * seconds)

    def _begin(self, step: int) -> Path | None:
        self.permit()
        aside = checkpoint.begin(self.root, step)
        if aside is None:
            self.done(step)
        return aside

    def _commit(self, aside: Path, step: int, parts: list[dict], state: dict, layout: dict[str, dict]) -> None:
        self.permit()
        files = {name: entry for part in parts for name, entry in part.items()}
        checkpoint.commit(aside, step, files, state | self.about, layout, self.keep, self._passed_over)
        self.done(step)
        self._passed_over = ()

    def _together(self, act: Callable[[], T]) -> list[T]:
        """What ``act`` returned on every rank; where it raised on any, all raise."""
        result = error = None
        try:
            result = act()
        except Exception as raised:
            error = f"{raised}" if isinstance(raised, OSError | UserError) else f"{type(raised).__name__}: {raised}"
        answers = self.runtime.gather((result, error), self._group)
        failures = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(answers) if error is not None]
        if failures:
            raise UserError("; ".join(failures) if len(answers) > 1 else failures[0].partition(": ")[2])
        return [result for result, _ in answers]

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        """Let a save that is under way come to its end, so that it is not lost with the process."""
        if self._thread is not None and kind is not KeyboardInterrupt:
            self._awaited.set()
            self._thread.join(None if kind is None else 60.0)


def _write_in(folder: Path, rank: int) -> None:
    """Write a file in what rank 0 has made, as soon as this machine's view of a network's file system shows it."""
    deadline = time.monotonic() + SHOWN
    while True:
        try:
            return write_durably(folder / f"rank_{rank}", b"")
        except FileNotFoundError:
            if time.monotonic() > deadline:
                fix = "Give run.dir on a file system that all machines of the run mount at the same path"
                raise UserError(f"{folder.parent} on {socket.gethostname()} is not that of rank 0. {fix}") from None
            time.sleep(0.5)
