"""One writer per run directory: a file lock on this machine, and a lease with a heartbeat for other machines."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dlr_pretrain.util.errors import UserError, leave
from dlr_pretrain.util.files import EXPIRY, read_beat, write_beat

HEARTBEAT = 10.0  # seconds between two renewals of the lease
POLL = 1.0  # seconds between two reads of somebody else's lease
RACE = 2.0  # seconds after which processes that wrote the lease at the same time see which of them wrote last


class Lease:
    """The right to write to a run directory. Rank 0 holds it from before its first write until after its last.

    On one machine flock decides, and the end of a process releases it. Network file systems may not carry it to other
    machines, so the holder also renews a lease in ``<run>/.lock``. Another process may take over a lease that is not
    renewed for ``EXPIRY`` seconds. A holder that was only suspended then finds another token in the lease and calls
    ``lost``, which ends the process.
    """

    def __init__(self, run_dir: Path, lost: Callable[[UserError], object] = leave):
        self.run_dir, self.lost = run_dir, lost
        self.path, self.token = run_dir / ".lock", uuid.uuid4().hex
        self._renewed = 0.0  # when this process last renewed it
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def acquire(self) -> str:
        """Take the run directory; returns the token of this start. Raises UserError, with the holder, if it is in use.

        If the holder may be dead, first waits for up to ``EXPIRY`` seconds to be sure.
        """
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            certain = self._wait()
            self._renew()
            if not certain:
                time.sleep(RACE)
                self.require_held()
        except BaseException:
            os.close(self._file)
            raise
        self._thread.start()
        return self.token

    def require_held(self, at_most: float = 0.0) -> None:
        """Raise UserError if another start has taken the run over, or the lease was deleted.

        This process may write nothing more then. Reads the lease, unless it was renewed less than ``at_most`` seconds
        ago. Call this before a write that counts, such as that of a checkpoint's manifest.
        """
        away = time.time() - self._renewed
        if away < at_most:
            return
        try:
            lease = read(self.path)
        except FileNotFoundError:
            raise UserError(f"{self.path} was deleted: this process writes nothing more. Start the run again") from None
        if lease and lease["token"] != self.token:
            raise UserError(
                f"{self.run_dir} was taken over by {holder(lease)}, after this process had been away for {away:.0f} s. "
                "It writes nothing more"
            )

    @property
    def held(self) -> bool:
        """Whether this process has taken the lease; it may have lost it since (see ``require_held``)."""
        return self._thread.is_alive()

    def release(self) -> None:
        """Release the lease for the next process; does nothing if this process does not hold it."""
        if not self.held:
            return
        self._stopped.set()
        self._thread.join()
        with suppress(OSError, UserError):
            self.require_held()
            self._write(0.0)  # the token stays: a former holder that wakes up must see that it is not its own
        os.close(self._file)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_) -> None:
        self.release()

    def _wait(self) -> bool:
        """Wait until nobody else holds the directory; returns whether flock keeps others out from now on."""
        first, until = read(self.path), 0.0
        while True:
            locked, lease = self._flock(), read(self.path)
            if locked and (not lease.get("beat") or lease["machine"] == machine()):  # a holder here would have the lock
                return True
            if locked is None and not lease.get("beat"):
                return False
            if not until:
                until = time.monotonic() + EXPIRY
                about = f"waiting up to {EXPIRY:.0f} s to see whether {holder(lease)} still lives"
                print(f"{self.run_dir}: {about}", file=sys.stderr, flush=True)
            over = time.monotonic() > until
            if (lease.get("beat") and lease != first) or (over and locked is False):
                raise UserError(f"{self.run_dir} is in use by {holder(lease)}. Wait for it, stop it, or set run.dir")
            if over:
                return bool(locked)
            time.sleep(POLL)

    def _flock(self) -> bool | None:
        """Try to take the file lock: whether it worked; None on a file system without locks (Lustre may be one)."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        return True

    def _keep(self) -> None:
        while not self._stopped.wait(HEARTBEAT):
            try:
                self.require_held()
                self._renew()
            except UserError as error:
                self.lost(error)
                return
            except OSError:  # a full disk or an unreachable file server: the next renewal may succeed
                continue

    def _renew(self) -> None:
        self._write(time.time())
        self._renewed = time.time()

    def _write(self, beat: float) -> None:
        lease = {"host": socket.gethostname(), "pid": os.getpid(), "machine": machine(), "token": self.token}
        write_beat(self._file, lease | {"beat": beat})
        os.fsync(self._file)


def read(path: Path) -> dict:
    """The lease in a file; {} if it holds none, or a damaged one. Raises FileNotFoundError if there is no file."""
    lease = read_beat(path)
    sound = {"host", "pid", "machine", "token"} <= lease.keys() and isinstance(lease.get("beat"), float)
    return lease if sound else {}


def holder(lease: dict) -> str:
    """The process that a lease names, for messages."""
    if not lease.get("beat"):
        return "another process"
    return f"process {lease['pid']} on {lease['host']}, last heartbeat {time.time() - lease['beat']:.0f} s ago"


def machine() -> str:
    """An id of this machine since its last boot. All containers on a machine share it, and share its file locks."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
