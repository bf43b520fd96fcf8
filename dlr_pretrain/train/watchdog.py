"""Detects that training stands still, says which rank the others wait for, and writes down every rank's stacks.

<run>/.beats/3              rank 3's last step, and where its code is; renewed every few seconds
<run>/stacks/rank_3.txt     its threads' stacks, when it stood still or a collective failed
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
from pathlib import Path
from types import FrameType

from dlr_pretrain.util.errors import RankLost, first_line, leave
from dlr_pretrain.util.files import read_beat, write_beat

INTERVAL = 5.0  # seconds between two heartbeats, at most
PATIENCE = 3600.0  # seconds without progress that are allowed before the first step, and while ranks wait for rank 0
NAMED = 4  # ranks that a message names
PACKAGE = Path(__file__).resolve().parents[1]


class Watchdog:
    """A thread of each rank that watches the training, which must advance every ``limit`` seconds (None: no limit).

    The limit holds after the first step. The thread counts only time in which it ran itself: a job that was suspended
    as a whole has not stood still.
    """

    def __init__(self, rank: int, world_size: int, limit: float | None):
        self.rank, self.world_size, self.limit = rank, world_size, limit
        self.interval = INTERVAL if limit is None else min(INTERVAL, limit / 8)
        self.ticks = 0  # increases with every sign of progress
        self.step = 0
        self.started = False  # whether this process has completed a step
        self._patient = 0  # contexts in which it may wait long
        self._still = 0.0  # seconds without a sign of progress
        self._left = False  # tells the others that this rank ended itself and was not lost
        self._folder, self._token = Path(), ""  # of a run, once it has started
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self, run_dir: Path, token: str) -> None:
        """Start the thread. ``token`` distinguishes this start of the run from earlier ones, which may still run."""
        self._folder, self._token = run_dir, token
        (run_dir / ".beats").mkdir(parents=True, exist_ok=True)  # this node's file system may not show its parents yet
        self._beat()  # so that messages can name a rank that dies at once, too
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def stepped(self, step: int) -> None:
        self.step, self.started = step, True
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

    def report(self, error: BaseException) -> tuple[RankLost, bool]:
        """The error to raise for a failed collective, and whether this rank prints it; writes down its stacks."""
        self._dump("".join(traceback.format_exception(error)))
        return self._verdict(first_line(error).partition(". This is typically")[0])

    # ------------------------------------------------------------------------------------------------
    # In the thread

    def _watch(self) -> None:
        ticks, last, dumped = -1, time.monotonic(), False
        while not self._stopped.wait(self.interval):
            now = time.monotonic()
            passed, last = min(now - last, 2 * self.interval), now
            if self.ticks != ticks:
                ticks, self._still, dumped = self.ticks, 0.0, False
            else:
                self._still += passed
            self._beat()
            strict = self.started and not self._patient
            if self.limit is None or dumped or self._still < (self.limit if strict else PATIENCE):
                continue
            dumped = True
            self._dump(f"no progress for {self._still:.0f} s after step {self.step}")
            if strict:  # every rank that stands still ends itself
                lost, speaks = self._verdict(f"no step for {self._still:.0f} s")
                leave(lost, say=speaks)

    def _beat(self) -> None:
        where, waits = place(sys._current_frames().get(threading.main_thread().ident or 0))
        record = {"rank": self.rank, "step": self.step, "still": self._still, "where": where, "waits": waits}
        record |= {"host": socket.gethostname(), "token": self._token, "time": time.time(), "left": self._left}
        with suppress(OSError):  # a full disk, or a file server that is away
            descriptor = os.open(self._folder / ".beats" / str(self.rank), os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                write_beat(descriptor, record)
            finally:
                os.close(descriptor)

    def _dump(self, reason: str) -> None:
        """Append the stacks of this rank's threads to its file in ``<run>/stacks``."""
        if not self._token:
            return
        with suppress(OSError):
            path = self._folder / "stacks" / f"rank_{self.rank}.txt"
            path.parent.mkdir(exist_ok=True)
            with path.open("a") as file:
                when = time.strftime("%Y-%m-%d %H:%M:%S")
                print(f"\n{when} rank {self.rank} on {socket.gethostname()}: {reason}", file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)

    # ------------------------------------------------------------------------------------------------
    # What is known of the other ranks

    def _verdict(self, reason: str) -> tuple[RankLost, bool]:
        """The error that names the ranks that the others wait for, and whether this rank prints it.

        The lowest rank prints that is not silent.
        """
        beats = self._listen()
        speaker = min((beat["rank"] for beat in beats if not beat["silent"]), default=self.rank)
        stacks = f"The ranks' stacks are in {self._folder / 'stacks'}. " if self._token else ""
        text = f"{suspicion(beats)} ({reason}). {stacks}The same command continues from the last checkpoint"
        return RankLost(text), self.rank == speaker

    def _listen(self) -> list[dict]:
        """The heartbeats of all ranks, and whether each is ``silent``: this takes as long as every live rank beats."""
        if not self._token:
            return []
        before = self._read()
        self._stopped.wait(1.5 * self.interval)
        self._beat()  # the other ranks listen as well
        self._stopped.wait(self.interval)
        beats = self._read()
        for rank, beat in beats.items():
            beat["silent"] = rank != self.rank and not beat["left"] and beat == before.get(rank)
            if beat["silent"]:
                beat["still"] += time.time() - beat["time"]
        self._left = True
        self._beat()
        return list(beats.values())

    def _read(self) -> dict[int, dict]:
        records = {}
        for rank in range(self.world_size):
            with suppress(OSError):
                record = read_beat(self._folder / ".beats" / str(rank))
                if record.get("token") == self._token:
                    records[rank] = record
        return records


def suspicion(beats: list[dict]) -> str:
    """The ranks that the others wait for: the silent ones, else those behind, else those in no collective."""
    if not beats:
        return "a rank was lost"
    first = max(beat["step"] for beat in beats)
    suspects = [b for b in beats if b["silent"]] or [b for b in beats if b["step"] < first]
    suspects = suspects or [b for b in beats if not b["waits"]] or beats
    named = [
        f"rank {b['rank']} on host {b['host']} was last seen at step {b['step']:,}, {b['still']:.0f} s ago"
        + ("" if b["silent"] else f", in {b['where']}")
        for b in suspects[:NAMED]
    ]
    named += [f"and {len(suspects) - NAMED} more"] if len(suspects) > NAMED else []
    named += [f"the others wait at {first + 1:,}"] if len(suspects) < len(beats) else []
    return "; ".join(named)


def place(frame: FrameType | None) -> tuple[str, bool]:
    """The innermost line of this package on a stack, and whether it waits there for other ranks."""
    waits, distributed = False, os.path.join("torch", "distributed")
    while frame is not None:
        path = frame.f_code.co_filename
        waits = waits or distributed in path
        if path.startswith(str(PACKAGE)):
            return f"{os.path.relpath(path, PACKAGE)}:{frame.f_lineno} ({frame.f_code.co_name})"[:100], waits
        frame = frame.f_back
    return "code of others", waits
