"""One writer a run directory: an advisory lock for this machine, a lease with a heartbeat for the others."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

from dlr_pretrain.errors import UserError

HEARTBEAT = 10.0  # seconds between beats
EXPIRY = 60.0  # seconds without a beat after which the holder counts as dead
LEASE_BYTES = 512  # a beat overwrites all of the last one in one write, so that nobody reads half of it


class RunLock:
    """Held by rank 0 from before the first write to after the last; released by the end of the process, too.

    The kernel's lock says at once whether a holder on this machine lives. Network file systems may not carry it to
    other machines, so the holder also renews a lease in ``<run>/.lock``; a fresh lease of another host is respected.
    """

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.descriptor: int | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="run-lock", daemon=True)

    def acquire(self) -> None:
        """Take the run directory, or raise a UserError that names its holder."""
        run_dir = self.run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        self.descriptor = os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._take()
            self._beat()
        except BaseException:
            os.close(self.descriptor)
            raise
        self._thread.start()

    def release(self) -> None:
        """Let the next one in; without effect on a process that does not hold the lock."""
        if not self._thread.is_alive():
            return
        self._stopped.set()
        self._thread.join()
        with suppress(OSError):
            os.ftruncate(self.descriptor, 0)
        os.close(self.descriptor)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_) -> None:
        self.release()

    def _take(self) -> None:
        own = socket.gethostname()
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{self.run_dir} is in use by {self._holder()}. Wait for it, stop it, or set run.dir"
            ) from None
        except OSError:  # a file system without locks (Lustre may be one): the lease alone decides, on this host, too
            own = None
        lease = self._read()
        age = time.time() - lease.get("beat", 0)
        if lease.get("host") not in (None, own) and age < EXPIRY:
            left = f"If that process is dead, its lease ends in {EXPIRY - age:.0f} s"
            raise UserError(f"{self.run_dir} is in use by {self._holder()}. {left}")

    def _keep(self) -> None:
        while not self._stopped.wait(HEARTBEAT):
            with suppress(OSError):  # a full disk or a file server that is away: the next beat may come through
                self._beat()

    def _beat(self) -> None:
        lease = {"host": socket.gethostname(), "pid": os.getpid(), "beat": time.time()}
        os.pwrite(self.descriptor, json.dumps(lease).ljust(LEASE_BYTES).encode(), 0)

    def _read(self) -> dict:
        """The lease; nothing where there is none, or where it is damaged."""
        try:
            lease = json.loads(os.pread(self.descriptor, LEASE_BYTES, 0))
            return {"host": str(lease["host"]), "pid": int(lease["pid"]), "beat": float(lease["beat"])}
        except (ValueError, TypeError, KeyError):
            return {}

    def _holder(self) -> str:
        lease = self._read()
        if not lease:
            return "another process"
        return f"process {lease['pid']} on {lease['host']}, last heartbeat {time.time() - lease['beat']:.0f} s ago"
