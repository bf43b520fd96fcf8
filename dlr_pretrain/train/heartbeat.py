"""The heartbeat of each rank: only one start at a time writes to a run directory, and a rank that hangs is named.

<run>/.beats/3            rank 3's last step, and the line of code it is at; renewed every few seconds
<run>/.beats/0            also the lease: only the process that it names may write to the directory
<run>/stacks/rank_3.txt   rank 3's stacks when it hung or a collective failed
"""

import faulthandler
import json
import math
import os
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import FrameType

from dlr_pretrain.config import Config
from dlr_pretrain.util.errors import RankLost, UserError, exit_process, first_line, naming
from dlr_pretrain.util.files import EXPIRY, lock, read_beat

INTERVAL = 5.0  # longest time between two heartbeats, in seconds
BEAT_BYTES = 512  # length of a beat: one write replaces the previous beat, so that no reader sees half of one
DISK_SECONDS = 60.0  # for the names of the ranks that hang, which are on the disk
MOST_NAMED = 4  # ranks that a message names, at most
AGAIN = "The same command continues from the last checkpoint"
PACKAGE = Path(__file__).resolve().parents[1]


class Heartbeat(AbstractContextManager["Heartbeat"]):
    """Two threads of each rank: one renews its beat, one ends a run without progress for ``run.timeout_minutes``.

    That limit applies after the first step. It counts only time in which the thread itself ran: a job that was
    suspended as a whole is not hanging. The threads are two because a disk may hang.

    Rank 0 holds the run directory from ``take`` to the end of this context. On one machine flock decides, and the
    kernel releases it when a process ends. Other machines may not see flock on a network file system: a start there may
    take over if the beat is not renewed for ``EXPIRY`` seconds. If the former holder was only suspended, it then finds
    another token in the beat, and its process ends.
    """

    def __init__(self, cfg: Config):
        self.rank = int(os.environ.get("RANK", 0))
        self.world_size = int(os.environ.get("WORLD_SIZE", 1))
        minutes = cfg.run.timeout_minutes
        self.limit = math.inf if minutes is None else 60 * minutes  # seconds
        self.interval = min(INTERVAL, self.limit / 8)
        self.ticks = 0  # signs of progress so far
        self.step = 0  # the last step of this process; 0 before the first step of this start
        self.folder, self.token = Path(), ""  # of the run; the token names this start of it
        self._file = -1  # of this rank's beat; -1 before it is opened
        self._machine = machine()
        self._limits: list[float] = []  # seconds of each open ``may_wait``
        self._ends = False  # whether a thread is about to end this process because of a hang
        self._left = False  # tells the other ranks that this rank ended itself and was not lost
        self._failed_at: FrameType | None = None  # where a collective failed, once one has
        self._stopped = threading.Event()
        self.record_end: Callable[[UserError], None] = lambda error: None  # writes into the run how it has ended
        self._threads = [
            threading.Thread(target=act, name="heartbeat", daemon=True) for act in (self._beat, self._watch)
        ]

    def take(self, run_dir: Path) -> str:
        """On rank 0, take the run directory. Returns the token of this start.

        Raises UserError, which names the holder, if the directory is in use. If the holder may be dead, first waits up
        to ``EXPIRY`` seconds for its beat.
        """
        self._open(run_dir)
        self._wait_for_holder()
        self.token = uuid.uuid4().hex
        self._write(time.time())
        return self.token

    def start(self, run_dir: Path, token: str) -> None:
        """On every rank, start the threads, with the ``token`` that ``take`` returned on rank 0."""
        if not self.holds:
            self._open(run_dir)
        self.token = token
        self._write(time.time())  # so that messages can name a rank that dies early
        for thread in self._threads:
            thread.start()

    def _open(self, run_dir: Path) -> None:
        self.folder = run_dir
        (run_dir / ".beats").mkdir(parents=True, exist_ok=True)
        self._file = os.open(run_dir / ".beats" / str(self.rank), os.O_RDWR | os.O_CREAT, 0o644)

    def __exit__(self, *_: object) -> None:
        """End the threads, and release the run directory for the next start."""
        self._stopped.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        if self.token:
            with suppress(OSError, UserError):
                self.require_held()
                self._write(0.0)  # with this token: a former holder that wakes up must not find its own
        if self._file >= 0:
            os.close(self._file)

    # ------------------------------------------------------------------------------------------------
    # The lease

    @property
    def holds(self) -> bool:
        """Whether this process has taken a run directory. It may have lost it since."""
        return self.rank == 0 and bool(self.token)

    def require_held(self) -> None:
        """Raise UserError if another start has taken over the run directory that this rank ``holds``.

        This process must then write nothing more. Call this before a write that matters, such as a checkpoint.
        """
        lease = read_beat(self.folder, 0) if self.holds else {}
        if lease.get("token", self.token) != self.token:
            raise UserError(f"{self.folder} was taken over by {holder(lease)}. This process writes nothing more")

    def _wait_for_holder(self) -> None:
        first, until = read_beat(self.folder, 0), 0.0
        while True:
            locked, lease = self._lock(), read_beat(self.folder, 0)
            if locked and (not lease.get("time") or lease["machine"] == self._machine):  # a holder here has the lock
                return
            if not until:
                until = time.monotonic() + EXPIRY
                about = f"waiting up to {EXPIRY:.0f} s to see whether {holder(lease)} is still alive"
                print(f"{self.folder}: {about}", file=sys.stderr, flush=True)
            over = time.monotonic() > until
            if (lease.get("time") and lease != first) or (over and not locked):
                raise UserError(f"{self.folder} is in use by {holder(lease)}. Wait for it, stop it, or set run.dir")
            if over:
                return
            time.sleep(EXPIRY / 60)

    def _lock(self) -> bool:
        """Try to lock the beat. Without locks in the file system, the beats alone decide."""
        has_lock = lock(self._file)
        if has_lock is None:
            self._machine = uuid.uuid4().hex  # of this process alone
        return has_lock is not False

    # ------------------------------------------------------------------------------------------------
    # Progress

    def stepped(self, step: int) -> None:
        """Record that the host is done with ``step``; the GPU may still be computing it."""
        self.step = step
        self.ticks += 1

    def tick(self) -> None:
        """Count a sign of progress, such as a micro-batch."""
        self.ticks += 1

    @property
    def data_timeout(self) -> float:
        """Seconds that training may wait for data and still have time to save."""
        return 0.8 * self.limit if self.step else math.inf

    @contextmanager
    def may_wait(self, seconds: float = math.inf) -> Iterator[None]:
        """The rank may wait for ``seconds`` seconds within this context, for example for rank 0 or a disk."""
        self.ticks += 1
        self._limits.append(seconds)
        try:
            yield
        finally:
            self.ticks += 1  # first, because ``_watch`` reads the limits before it reads this
            self._limits.remove(seconds)

    def _beat(self) -> None:
        """In a thread, renew the beat."""
        while not self._stopped.wait(self.interval):
            self._renew()

    def _watch(self) -> None:
        """In a thread, end the process if it hangs."""
        ticks, still, last = -1, 0.0, time.monotonic()
        while not self._stopped.wait(self.interval):
            now = time.monotonic()
            passed, last = min(now - last, 2 * self.interval), now
            limit = max(self._limits, default=self.limit if self.step else math.inf)
            still = still + passed if self.ticks == ticks else 0.0
            ticks = self.ticks
            if still >= limit:
                self._end(still)  # every rank that waits for the lost one ends like this

    def _end(self, still: float) -> None:
        """End the process after ``still`` seconds without progress, and record this if the disk answers."""
        self._ends = True
        lost = RankLost(f"no step for {still:.0f} s, and the disk of {self.folder} does not answer. {AGAIN}")
        ending = [(lost, self.rank == 0)]

        def explain() -> None:
            self._write_stacks(f"no progress for {still:.0f} s after step {self.step}")
            ending.append(self._name_suspects(f"no step for {still:.0f} s"))
            self.record_end(ending[-1][0])

        explaining = threading.Thread(target=explain, daemon=True)
        explaining.start()
        explaining.join(DISK_SECONDS + 3 * self.interval)
        lost, prints = ending[-1]
        exit_process(lost, say=prints)

    def _renew(self) -> None:
        """Write this rank's beat. Ends this process if another start has taken over the run."""
        try:
            self.require_held()
            self._write(time.time())
        except UserError as error:
            exit_process(error)
        except OSError:  # a full disk, or an unreachable file server: the next renewal may succeed
            pass

    def _write(self, when: float) -> None:
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        where, waits = innermost_line(self._failed_at or main)
        record = {"rank": self.rank, "step": self.step, "where": where, "waits": waits, "left": self._left}
        record |= {"host": socket.gethostname(), "pid": os.getpid(), "machine": self._machine, "token": self.token}
        with naming(self.folder / ".beats" / str(self.rank)):
            os.pwrite(self._file, json.dumps(record | {"time": when}).ljust(BEAT_BYTES).encode(), 0)
            os.fsync(self._file)

    # ------------------------------------------------------------------------------------------------
    # A rank that hangs or was lost

    def explain_collective(self, error: BaseException) -> tuple[RankLost, bool]:
        """The error to raise for a failed collective, and whether this rank prints it. Writes this rank's stacks."""
        while self._ends:  # a rank that hangs as well has left first; ``_end`` names the reason and exits
            time.sleep(self.interval)
        reason = first_line(error).partition(". This is typically")[0]
        self._failed_at = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
        if not self.token:
            return RankLost(f"a rank was lost ({reason})"), True
        self._write_stacks("".join(traceback.format_exception(error)))
        return self._name_suspects(reason)

    def _write_stacks(self, reason: str) -> None:
        """Append the stacks of this rank's threads to its file in ``<run>/stacks``."""
        with suppress(OSError):
            path = self.folder / "stacks" / f"rank_{self.rank}.txt"
            path.parent.mkdir(exist_ok=True)
            with path.open("a") as file:
                when = time.strftime("%Y-%m-%d %H:%M:%S")
                print(f"\n{when} rank {self.rank} on {socket.gethostname()}: {reason}", file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)

    def _name_suspects(self, reason: str) -> tuple[RankLost, bool]:
        """The error that names the ranks that the others wait for, and whether this rank prints it.

        The lowest rank that is not silent prints it. Waits until every live rank has had time to renew its beat.
        """
        before = self._beats()
        self._stopped.wait(1.5 * self.interval)
        self._renew()  # the other ranks listen as well
        self._stopped.wait(self.interval)
        beats = self._beats()
        silent = {rank for rank, beat in beats.items() if beat == before.get(rank) and not beat["left"]} - {self.rank}
        self._left = True
        self._renew()
        stacks = f"The ranks' stacks are in {self.folder / 'stacks'}"
        lost = RankLost(f"{describe_suspects(beats, silent)} ({reason}). {stacks}. {AGAIN}")
        return lost, self.rank == min(beats.keys() - silent, default=self.rank)

    def _beats(self) -> dict[int, dict]:
        """The beats of all ranks of this start."""
        beats = {}
        for rank in range(self.world_size):
            with suppress(OSError):
                beats[rank] = read_beat(self.folder, rank)
        return {rank: beat for rank, beat in beats.items() if beat.get("token") == self.token}


def describe_suspects(beats: dict[int, dict], silent: set[int]) -> str:
    """Describes the ranks that the others wait for: the silent ones, else those behind, else those in no collective."""
    if not beats:
        return "a rank was lost"
    first = max(beat["step"] for beat in beats.values())
    suspects = [b for b in beats.values() if b["rank"] in silent] or [b for b in beats.values() if b["step"] < first]
    suspects = suspects or [b for b in beats.values() if not b["waits"]] or list(beats.values())
    seen = "rank {rank} on host {host} was last seen at step {step:,}, in {where}"
    others = [f"the others wait at {first + 1:,}"] if len(suspects) < len(beats) else []
    return "; ".join([*(seen.format(**beat) for beat in suspects[:MOST_NAMED]), *others])


def innermost_line(frame: FrameType | None) -> tuple[str, bool]:
    """The innermost line of this package on a stack, and whether it waits there for other ranks or the GPU."""
    waits, distributed = False, (os.path.join("torch", "distributed"), os.path.join("torch", "cuda", "streams.py"))
    while frame is not None:
        path = frame.f_code.co_filename
        waits = waits or any(part in path for part in distributed)
        if path.startswith(str(PACKAGE)):
            return f"{os.path.relpath(path, PACKAGE)}:{frame.f_lineno} ({frame.f_code.co_name})"[:100], waits
        frame = frame.f_back
    return "other code", waits


def holder(lease: dict) -> str:
    """The process that a lease names, as text."""
    if not lease.get("time"):
        return "another process"
    return f"process {lease['pid']} on {lease['host']}, last heartbeat {time.time() - lease['time']:.0f} s ago"


def machine() -> str:
    """An id of this machine since its last boot. Containers on a machine share the id, and its file locks."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
