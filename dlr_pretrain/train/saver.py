"""Saves checkpoints while training goes on: the state is copied to the host, and a thread writes the copy."""

import shutil
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from dlr_pretrain.config import tree
from dlr_pretrain.config.run_folder import MANIFEST, read_record
from dlr_pretrain.train import checkpoint
from dlr_pretrain.train.checkpoint import TensorRows
from dlr_pretrain.train.console import Console
from dlr_pretrain.train.metrics import MetricsFile
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.record import update_record
from dlr_pretrain.util.errors import UserError, file_error, noting_silence, write_to_stderr
from dlr_pretrain.util.files import wait_for, write_durably

T = TypeVar("T")
FOLDER_WAIT = 60.0  # seconds until all machines see a new folder: NFS may cache the contents of its parent
NOTE_SECONDS = 60.0  # between notes on a save that training waits for
MAX_ATTEMPTS, RETRY_SECONDS = 11, 30.0  # attempts at a save, and seconds between them


class _Unwritten(UserError):
    """A disk refused a write; the next attempt may succeed."""


@dataclass
class Saver(AbstractContextManager["Saver"]):
    """Writes a run's checkpoints one by one: each rank writes a part, and rank 0 turns the parts into a checkpoint.

    Before that, rank 0 makes sure that it still holds the run directory, and that every line of ``metrics`` is on the
    disk. The writing threads have their own process group: collectives of two threads in one group would mix.
    """

    run_dir: Path
    ranks: Ranks
    keep: tree.Checkpoints
    metrics: MetricsFile | None  # on rank 0 only
    console: Console
    saved: int = 0  # step of the last checkpoint; the same on all ranks after ``wait``
    error: Exception | None = None  # why a save failed for good; set on all ranks, not at the same instant

    def __post_init__(self) -> None:
        self.root = self.run_dir / "checkpoints"
        self._group = self.ranks.new_group()
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._thread: threading.Thread | None = None

    def check_disk(self, size: int) -> None:
        """Before the first step, raise UserError unless every rank can write a checkpoint and ``size`` bytes fit."""

        def write() -> None:
            if not wait_for(folder.is_dir, FOLDER_WAIT):
                fix = "Set run.dir to a folder that all machines of the run mount at the same path"
                raise UserError(f"{self.root} on {socket.gethostname()} is not the folder of rank 0. {fix}")
            write_durably(folder / f"rank_{self.ranks.rank}", b"")
            if (free := shutil.disk_usage(folder).free) < size:
                raise UserError(
                    self.root,
                    f"a checkpoint takes {size / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free",
                    "Free some space and repeat the command, or move the run",
                )

        with self.ranks.heartbeat.may_wait():
            folder = self._on_main(lambda: checkpoint.begin(self.root, "check"))
            try:
                self._together(write)
            finally:
                self._discard(folder)

    def save(
        self, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], state: dict[str, Any], final: bool = False
    ) -> None:
        """Start saving tensors by name and the JSON ``state``; waits for the previous save first.

        The tensors may change when this returns. With ``final``, returns when the checkpoint is durable. Raises as
        ``wait`` does.
        """
        self.wait()
        pieces, copied = self._to_host(checkpoint.share(model, optimizer, self.ranks.rank, self.ranks.world_size))
        self._thread = threading.Thread(target=self._write, args=(pieces, copied, state), daemon=True)
        self._thread.start()
        if final:
            self.wait()

    def wait(self) -> None:
        """Wait until the last save is durable. Raises UserError on all ranks if the save has failed for good on any.

        If a rank was lost, raises the error of the collective.
        """
        if self._thread is not None:
            beat, about = self.ranks.heartbeat, f"the save to {self.root} has not ended"
            notes = noting_silence(about, NOTE_SECONDS, NOTE_SECONDS) if self.ranks.is_main else nullcontext()
            with beat.may_wait(beat.limit), notes:  # no longer: a file server that hangs does not return
                self._thread.join()
            self._thread = None
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the error of the last save, if it has failed for good by now."""
        if self.error is not None:
            raise self.error

    def _to_host(self, pieces: dict[str, TensorRows]) -> tuple[dict[str, TensorRows], torch.cuda.Event | None]:
        """Copies of ``pieces`` on the host and, on a GPU, the event that marks their completion.

        The copies share one buffer. It is kept, because new memory is slow and torch rounds each piece of pinned memory
        up to a power of two. Wide dtypes come first, so that every copy is aligned.
        """
        on_gpu, size = self.ranks.device.type == "cuda", sum(piece.tensor.nbytes for piece in pieces.values())
        if len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        free, copies = self._buffer, {}
        for name, piece in sorted(pieces.items(), key=lambda item: -item[1].tensor.itemsize):
            tensor = piece.tensor
            copy = free[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            free = free[tensor.nbytes :]
            copies[name] = piece._replace(tensor=copy.copy_(tensor, non_blocking=True))
        if not on_gpu:
            return copies, None
        copied = torch.cuda.Event(blocking=True)  # the writing thread sleeps while it waits
        copied.record()
        return copies, copied

    def _write(self, pieces: dict[str, TensorRows], copied: torch.cuda.Event | None, state: dict[str, Any]) -> None:
        """In the writing thread: write ``pieces`` and ``state`` as a checkpoint, in at most ``MAX_ATTEMPTS`` attempts.

        Only a write that a disk refused is tried again. All ranks fail together, and the failure is printed once.
        """
        try:
            if copied is not None:
                torch.cuda.set_device(self.ranks.device)  # waiting on GPU 0 would allocate half a GB there
                copied.synchronize()
            for attempt in range(MAX_ATTEMPTS):
                if attempt > 0:
                    time.sleep(RETRY_SECONDS)
                try:
                    return self._attempt(pieces, state)
                except _Unwritten as error:
                    failed = f"checkpoint of step {state['step']} could not be written: {error}"
                if attempt == 0:
                    self.console.say(f"warning: {failed}: trying again for {(MAX_ATTEMPTS - 1) * RETRY_SECONDS:.0f} s")
            self.error = UserError(f"{failed}; the same command resumes")
        except Exception as error:
            self.error = error

    def _attempt(self, pieces: dict[str, TensorRows], state: dict[str, Any]) -> None:
        rank, size, step = self.ranks.rank, self.ranks.world_size, state["step"]

        def commit() -> None:
            if self.metrics is not None:
                self.metrics.sync()
            identity = read_record(self.run_dir).get("identity", {})
            if not identity:
                raise UserError(f"{self.run_dir}: its {MANIFEST} is gone. Was the folder deleted or moved?")
            checkpoint.commit(folder, parts, state | {"identity": identity}, self.keep)
            update_record(self.run_dir, {"saved": step})

        folder = self._on_main(lambda: checkpoint.begin(self.root, checkpoint.name_of(step)))
        try:
            parts = self._together(lambda: checkpoint.write_part(folder, rank, size, pieces))
            self._on_main(commit)
        except UserError:
            self._discard(folder)
            raise
        self.saved = step

    def _discard(self, folder: Path) -> None:
        """Delete the parts of a failed save, which fill the disk, but nothing that another start wrote."""
        if self.ranks.is_main:
            shutil.rmtree(folder, ignore_errors=True)

    def _on_main(self, act: Callable[[], T]) -> T:
        """Call ``act`` on rank 0; all ranks return its result, or raise UserError."""
        result = self._together(lambda: act() if self.ranks.is_main else None)[0]
        return result  # type: ignore[return-value]  # rank 0 has called it

    def _together(self, act: Callable[[], T]) -> list[T]:
        """Call ``act`` on every rank while rank 0 holds the run directory, and return all results.

        If it raises on any rank, all ranks raise UserError: ``_Unwritten`` if only disk writes failed.
        """
        result = failure = None
        self.ranks.heartbeat.tick()  # each stage of a save, and each attempt, is a sign of progress
        try:
            self.ranks.heartbeat.require_held()  # a new save deletes the unfinished ones of others
            result = act()
        except OSError as error:
            failure = True, str(file_error(error))
        except UserError as error:
            failure = False, str(error)
        except Exception as error:
            write_to_stderr(traceback.format_exc())
            failure = False, f"{type(error).__name__}: {error}"
        answers = self.ranks.gather((result, failure), self._group)
        failures = [(failure[0], rank, failure[1]) for rank, (_, failure) in enumerate(answers) if failure]
        if failures:
            of_disk, rank, text = min(failures)  # first those that no retry can mend, then the lowest rank
            raise (_Unwritten if of_disk else UserError)(f"rank {rank}: {text}" if len(answers) > 1 else text)
        return [result for result, _ in answers]  # type: ignore[misc]  # no rank has failed

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        """Wait for a running save, which the end of the process would cut off.

        After an exception it waits at most 60 s, after KeyboardInterrupt not at all.
        """
        if self._thread is not None and kind is not KeyboardInterrupt:
            self._thread.join(None if kind is None else 60.0)
