"""Detects that training stands still, says which rank the others wait for, and writes down every rank's stacks.

<run>/.beats/3              rank 3's last step, and where its code is; renewed every few seconds
<run>/stacks/rank_3.txt     its threads' stacks, when it stood still or a collective failed
<run>/stacks/nccl_rank_3    NCCL's flight recorder of its GPU (torchfrtrace reads it)
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

from dlr_pretrain.util import heartbeat
from dlr_pretrain.util.errors import RankLost, first_line, leave

BEAT = 5.0  # seconds between two looks, at most
PATIENCE = 3600.0  # seconds without progress that are allowed before the first step, and while ranks wait for rank 0
SLACK = 120.0  # seconds beyond the limit after which a collective fails by itself, if the watch has not ended it
NAMED = 4  # ranks that a message names
PACKAGE = Path(__file__).resolve().parents[1]


@dataclass
class Beat:
    """The last heartbeat of a rank, and whether heartbeats still come."""

    rank: int
    step: int
    still: float  # seconds since it last advanced
    host: str
    where: str  # its innermost line of this package
    waits: bool  # whether it is in a collective
    silent: bool  # whether it wrote no heartbeat while this rank listened

    def __str__(self) -> str:
        place = "" if self.silent else f", in {self.where}"
        return (
            f"rank {self.rank} on host {self.host} was last seen at step {self.step:,}, {self.still:.0f} s ago{place}"
        )


class Watchdog:
    """A thread of each rank that watches the training, which must advance every ``limit`` seconds (None: no limit).

    The limit holds after the first step. The thread counts only time in which it ran itself: a job that was suspended
    as a whole has not stood still.
    """

    def __init__(self, rank: int, world_size: int, limit: float | None, nccl: bool = False):
        self.rank, self.world_size, self.limit, self.nccl = rank, world_size, limit, nccl
        self.interval = BEAT if limit is None else min(BEAT, limit / 8)
        self.ticks = 0  # increases with every sign of progress
        self.step = 0
        self.started = False  # whether this process has completed a step
        self._patient = 0
        self._still = 0.0
        self._left = False
        self._folder: Path | None = None
        self._stacks: TextIO | None = None
        self._token = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)

    def start(self, run_dir: Path, token: str) -> None:
        """Start the thread. ``token`` distinguishes this start of the run from earlier ones, which may still run."""
        self._folder, self._token = run_dir, token
        for folder in (".beats", "stacks"):  # with its parents: this node's file system may not show them yet
            (run_dir / folder).mkdir(parents=True, exist_ok=True)
        self._stacks = open(run_dir / "stacks" / f"rank_{self.rank}.txt", "a")  # noqa: SIM115 - open while it watches
        with suppress(OSError):
            self._beat()  # so that messages can name a rank that dies at once, too
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and delete this rank's file of stacks and their folder if they are empty."""
        self._stopped.set()
        if self._stacks is None:
            return
        if self._thread.is_alive():
            self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self._stacks.close()
        with suppress(OSError):
            path = Path(self._stacks.name)
            path.stat().st_size or path.unlink()
            path.parent.rmdir()

    def stepped(self, step: int) -> None:
        self.step = step
        self.started = True
        self.ticks += 1

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Within this context the rank may wait long, for rank 0 or for a disk."""
        self.ticks += 1
        self._patient += 1
        try:
            yield
        finally:
            self._patient -= 1
            self.ticks += 1

    # ------------------------------------------------------------------------------------------------
    # In the thread

    def _look(self) -> None:
        ticks, last, dumped = -1, time.monotonic(), False
        while not self._stopped.wait(self.interval):
            now = time.monotonic()
            passed, last = min(now - last, 2 * self.interval), now
            self._still = 0.0 if self.ticks != ticks else self._still + passed
            dumped = dumped and self.ticks == ticks
            ticks = self.ticks
            with suppress(OSError):  # a full disk, or a file server that is away
                self._beat()
            strict = self.started and not self._patient
            limit = self.limit if strict else PATIENCE
            if self.limit is not None:  # in case another thread keeps the interpreter's lock: this thread hangs, too
                faulthandler.dump_traceback_later(limit, file=self._stacks)
            if self.limit is None or dumped or self._still < limit:
                continue
            dumped = True
            self.dump(f"no progress for {self._still:.0f} s after step {self.step}")
            if strict:
                self._give_up()

    def _beat(self) -> None:
        where, waits = _place(sys._current_frames().get(threading.main_thread().ident))
        own = {"step": self.step, "still": self._still, "where": where, "waits": waits, "left": self._left}
        record = own | {"host": socket.gethostname(), "token": self._token, "time": time.time()}
        descriptor = os.open(self._folder / ".beats" / str(self.rank), os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            heartbeat.write(descriptor, record)
        finally:
            os.close(descriptor)

    def _give_up(self) -> None:
        """End this process. Every rank that stands still ends itself; the lowest one that is not silent prints why."""
        beats = self._listen()
        lost = f"no step for {self._still:.0f} s: {self._suspicion(beats)}. {self._fix()}"
        leave(RankLost(lost), say=self.rank == self.speaker(beats))

    # ------------------------------------------------------------------------------------------------
    # What is known of the other ranks

    def report(self, error: BaseException) -> tuple[RankLost, int]:
        """The error to raise for a failed collective, and the rank that prints it; writes down this rank's stacks."""
        self.dump("".join(traceback.format_exception(error)))
        reason = first_line(error).partition(". This is typically")[0]
        beats = self._listen()
        return RankLost(f"{self._suspicion(beats)} ({reason}). {self._fix()}"), self.speaker(beats)

    def dump(self, reason: str) -> None:
        """Append the stacks of this rank's threads to its file in ``<run>/stacks``."""
        if self._stacks is None:
            return
        with suppress(OSError):
            when = time.strftime("%Y-%m-%d %H:%M:%S")
            print(f"\n{when} rank {self.rank} on {socket.gethostname()}: {reason}", file=self._stacks, flush=True)
            faulthandler.dump_traceback(self._stacks, all_threads=True)
        if self.nccl:
            with suppress(Exception):  # the process ends in any case
                record = torch._C._distributed_c10d._dump_nccl_trace()
                (self._folder / "stacks" / f"nccl_rank_{self.rank}").write_bytes(record)

    def speaker(self, beats: list[Beat]) -> int:
        return min((b.rank for b in beats if not b.silent), default=self.rank)

    def _listen(self) -> list[Beat]:
        """The heartbeats of all ranks; listens for long enough to hear every rank that lives."""
        if self._folder is None:
            return []
        before = self._read()
        self._stopped.wait(1.5 * self.interval)
        if threading.current_thread() is self._thread:
            with suppress(OSError):
                self._beat()  # the other ranks listen as well
            self._stopped.wait(self.interval)
        heard = []
        for rank, record in self._read().items():
            silent = rank != self.rank and not record["left"] and record == before.get(rank)
            still = record["still"] + (time.time() - record["time"] if silent else 0.0)
            step = self.step if rank == self.rank else record["step"]  # its own record may be old
            heard.append(Beat(rank, step, still, record["host"], record["where"], record["waits"], silent))
        self._left = True  # tells the others that this rank was not lost
        with suppress(OSError):
            self._beat()
        return heard

    def _read(self) -> dict[int, dict]:
        records = {}
        for rank in range(self.world_size):
            with suppress(OSError):
                record = heartbeat.read(self._folder / ".beats" / str(rank))
                if record.get("token") == self._token:
                    records[rank] = record
        return records

    def _suspicion(self, beats: list[Beat]) -> str:
        """The ranks that the others wait for: the silent ones, else those behind, else those in no collective."""
        if not beats:
            return "a rank was lost"
        first = max(b.step for b in beats)
        suspects = [b for b in beats if b.silent] or [b for b in beats if b.step < first]
        suspects = suspects or [b for b in beats if not b.waits] or beats
        named = "; ".join(map(str, suspects[:NAMED]))
        more = f"; and {len(suspects) - NAMED} more" if len(suspects) > NAMED else ""
        others = f"; the others wait at {first + 1:,}" if len(suspects) < len(beats) else ""
        return named + more + others

    def _fix(self) -> str:
        stacks = f"The ranks' stacks are in {self._folder / 'stacks'}. " if self._folder else ""
        return f"{stacks}The same command continues from the last checkpoint"


def _place(frame) -> tuple[str, bool]:
    """The innermost line of this package on a stack, and whether it waits there for other ranks."""
    waits, distributed = False, os.path.join("torch", "distributed")
    while frame is not None:
        path = frame.f_code.co_filename
        waits = waits or distributed in path
        if path.startswith(str(PACKAGE)):
            return f"{os.path.relpath(path, PACKAGE)}:{frame.f_lineno} ({frame.f_code.co_name})"[:100], waits
        frame = frame.f_back
    return "code of others", waits
