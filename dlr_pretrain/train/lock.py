"""One writer a run directory: an advisory lock for this machine, a lease with a heartbeat for the others."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import TextIO

from dlr_pretrain.errors import UserError

HEARTBEAT = 10.0  # seconds between beats
EXPIRY = 60.0  # seconds without a beat after which the holder counts as dead


class RunLock:
    """Held by rank 0 from before the first write to after the last; released by the end of the process, too.

    The kernel's lock says at once whether a holder on this machine lives. Network file systems may not carry it to
    other machines, so the holder also renews a lease in ``<run>/.lock``; a fresh lease of another host is respected.
    """

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.file: TextIO | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="run-lock", daemon=True)

    def acquire(self) -> None:
        """Take the run directory, or raise a UserError that names its holder."""
        run_dir = self.run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        self.file = open(run_dir / ".lock", "a+")  # noqa: SIM115 - held until release
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{run_dir} is in use by {self._holder()}. Wait for it, stop it, or set run.dir") from None
        lease = self._read()
        age = time.time() - lease.get("beat", 0)
        if lease.get("host") not in (None, socket.gethostname()) and age < EXPIRY:
            left = f"If that machine is dead, its lease ends in {EXPIRY - age:.0f} s"
            raise UserError(f"{run_dir} is in use by {self._holder()}. {left}")
        self._beat()
        self._thread.start()

    def release(self) -> None:
        """Let the next one in; without effect on a process that does not hold the lock."""
        if not self._thread.is_alive():
            return
        self._stopped.set()
        self._thread.join()
        self.file.truncate(0)
        self.file.close()

    def _keep(self) -> None:
        while not self._stopped.wait(HEARTBEAT):
            self._beat()

    def _beat(self) -> None:
        lease = {"host": socket.gethostname(), "pid": os.getpid(), "beat": time.time()}
        self.file.seek(0)
        self.file.truncate()
        self.file.write(json.dumps(lease))
        self.file.flush()

    def _read(self) -> dict:
        self.file.seek(0)
        try:
            return json.loads(self.file.read() or "{}")
        except json.JSONDecodeError:  # the holder died within a beat
            return {}

    def _holder(self) -> str:
        lease = self._read()
        if not lease:
            return "another process"
        return f"process {lease['pid']} on {lease['host']}, last heartbeat {time.time() - lease['beat']:.0f} s ago"
