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

from dlr_pretrain.train import checkpoint
from dlr_pretrain.train.checkpoint import Keep, Piece, Snapshot
from dlr_pretrain.train.runtime import Runtime
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import write_durably

T = TypeVar("T")
# The writing thread lowers its own priority (on Linux every thread has one of its own). That does not help between
# ranks in different sessions, so the thread also works for only a fifth of the time, as long as nobody waits for it.
NICENESS = 19
REST = 4
SHOWN = 60.0  # seconds until all machines see a new folder: NFS may cache the contents of its parent for so long


class NotSaved(UserError):
    """A checkpoint could not be written; another attempt may succeed."""


class Saver:
    """Writes checkpoints under ``root``, one at a time: each rank writes its part, and rank 0 the manifest.

    Rank 0 calls ``permit()`` before a checkpoint becomes valid, which it does not if ``permit`` raises, and
    ``done(step)`` afterwards. ``about``, the identity of the run, is added to the checkpoint's state. ``passed_over``
    are the damaged checkpoints that rank 0 found at the start; the first save deletes them.
    The ranks' writing threads have their own process group: collectives of two threads in one group would mix.
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
        self.error: Exception | None = None  # why the last save failed; set on all ranks, but not at the same instant
        self._passed_over = passed_over
        self._group = runtime.new_group()
        self._buffers: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._awaited = threading.Event()

    def rehearse(self) -> None:
        """Have every rank write a file where checkpoints will be, so that a problem shows now and not hours later."""
        runtime = self.runtime
        aside = self._together(lambda: checkpoint.aside(self.root, "rehearsal") if runtime.is_main else None)[0]
        try:
            self._together(lambda: _write_in(aside, runtime.rank))
        finally:
            if runtime.is_main:
                shutil.rmtree(aside, ignore_errors=True)

    def save(self, step: int, snapshot: Snapshot) -> UserError | None:
        """Wait for the previous save, then start to save ``snapshot``, which may be overwritten when this returns.

        If the previous save failed and ``wait`` has not raised its error, returns that error if it is a UserError (this
        save takes its place), and raises it otherwise.
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
        """Wait until the last save is durable. Raises UserError, on all ranks, if it failed on any.

        If a rank was lost meanwhile, raises the error of the collective.
        """
        if (error := self._ended()) is not None:
            raise error

    def _ended(self) -> Exception | None:
        """Wait for the last save to end. Returns why it failed, or None; the next call returns None."""
        if self._thread is not None:
            self._awaited.set()
            with self.runtime.patient():
                self._thread.join()
            self._thread = None
        error, self.error = self.error, None
        return error

    def _to_host(self, pieces: dict[str, Piece]) -> tuple[dict[str, Piece], torch.cuda.Event | None]:
        """Copies of ``pieces`` on the host, and the event of their completion: the GPU does not wait for the host."""
        on_gpu = self.runtime.device.type == "cuda"
        copies = {}
        for name, piece in pieces.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != piece.tensor.shape or buffer.dtype != piece.tensor.dtype:
                buffer = torch.empty(piece.tensor.shape, dtype=piece.tensor.dtype, pin_memory=on_gpu)
                self._buffers[name] = buffer  # kept, because new memory costs more than copying
            copies[name] = piece._replace(tensor=buffer.copy_(piece.tensor, non_blocking=True))
        if not on_gpu:
            return copies, None
        copied = torch.cuda.Event(blocking=True)  # the writing thread sleeps while it waits for it
        copied.record()
        return copies, copied

    def _work(self, step: int, pieces: dict[str, Piece], copied, state: dict, layout: dict[str, dict]) -> None:
        runtime = self.runtime
        if copied is not None:  # a new thread starts on GPU 0, and waiting there would allocate half a GB on it
            torch.cuda.set_device(runtime.device)
        with suppress(OSError, AttributeError):  # if cores are few, the threads of the training go first
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
        """Call ``act`` on every rank, and return all results. If it raises on any rank, all ranks raise UserError."""
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
