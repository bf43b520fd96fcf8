"""One writer per run directory: a kernel lock on this machine, and a lease with a heartbeat for other machines."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dlr_pretrain.config.written import MANIFEST
from dlr_pretrain.util import heartbeat
from dlr_pretrain.util.errors import UserError, leave
from dlr_pretrain.util.files import is_there
from dlr_pretrain.util.heartbeat import EXPIRY

HEARTBEAT = 10.0  # seconds between beats
LISTEN = 2.5 * HEARTBEAT  # seconds within which a live holder surely beats: clocks differ, so a beat's age says little
POLL = 1.0  # seconds between two looks at a lease
SETTLE = 2.0  # seconds after which two processes that wrote the lease at once see which wrote last
CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # goes on while the machine sleeps


@functools.cache
def kernel() -> str:
    """An id of this machine since its last boot. All containers on a machine share it, and share its locks."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class Lease:
    """The lock on a run directory. Rank 0 holds it from before its first write until after its last.

    The kernel's lock tells at once whether a holder on this machine is alive: the end of a process releases it. Network
    file systems may not carry it to other machines, so the holder also renews a lease in ``<run>/.lock``. Another
    process may take over a lease that is not renewed for ``EXPIRY`` seconds. If its holder was only suspended, it then
    finds the other's token in the lease and calls ``lost``, which ends it.
    """

    def __init__(self, run_dir: Path, lost: Callable[[UserError], object] = leave):
        self.run_dir, self.lost = run_dir, lost
        self.path = run_dir / ".lock"
        self.token = uuid.uuid4().hex
        self.descriptor: int | None = None
        self._beaten = 0.0  # when the lease was last renewed, by ``CLOCK``
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="run-lock", daemon=True)

    def acquire(self) -> str:
        """Take the run directory; returns the token of this start, or raises a UserError that names the holder.

        If the holder may be dead, first waits for up to 2 * ``EXPIRY`` seconds to be sure.
        """
        while not self._take():  # the holder before this one has deleted its file, because it recorded nothing
            pass
        self._thread.start()
        return self.token

    def _take(self) -> bool:
        """Take the lease; returns False if its file was deleted meanwhile."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            with suppress(FileNotFoundError):  # the file was deleted: the next one may be free
                while True:
                    alone = self._wait()
                    self._beat()
                    if alone or self._settled():
                        break
                if self._there():
                    return True
        except BaseException:
            os.close(self.descriptor)
            raise
        os.close(self.descriptor)
        return False

    def _there(self) -> bool:
        """Whether the open file still has its name: a file that was deleted keeps nobody out."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def require_held(self, at_most: float = 0.0) -> None:
        """Raise UserError if another start has taken the run over, or the lease was deleted.

        This process may write nothing more then. Reads the lease, unless it was renewed less than ``at_most`` seconds
        ago. Call this before a write that counts, such as that of a checkpoint's manifest.
        """
        if self._now() - self._beaten < at_most:
            return
        try:
            lease = self._read()
        except FileNotFoundError:
            raise UserError(f"{self.path} was deleted: this process writes nothing more. Start the run again") from None
        if lease and lease["token"] != self.token:
            away = self._now() - self._beaten
            raise UserError(
                f"{self.run_dir} was taken over by {holder(lease)}, after this process had been away for {away:.0f} s. "
                "It writes nothing more"
            )

    @property
    def held(self) -> bool:
        """Whether this process has taken the lock; it may have lost it since (see ``require_held``)."""
        return self._thread.is_alive()

    def release(self) -> None:
        """Release the lock for the next process; does nothing if this process does not hold it.

        A start that recorded nothing of its run leaves nothing behind.
        """
        if not self.held:
            return
        self._stopped.set()
        self._thread.join()
        with suppress(OSError, UserError):
            self.require_held()
            if is_there(self.run_dir / MANIFEST):
                self._write(0.0)  # the token stays: a former holder that wakes up must see that it is not its own
            else:
                self.path.unlink()
                shutil.rmtree(self.run_dir / ".beats", ignore_errors=True)
                self.run_dir.rmdir()  # fails if there is anything else
        os.close(self.descriptor)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_) -> None:
        self.release()

    # ------------------------------------------------------------------------------------------------

    def _wait(self) -> bool:
        """Wait until nobody else holds the directory; returns True if the kernel's lock keeps others out from now."""
        first, deadline = None, 0.0
        while True:
            locked, lease = self._lock(), self._read()
            here = not lease.get("beat") or lease["kernel"] == kernel()  # no holder, or one on this machine
            if locked and here:
                return True
            if locked is None and not lease.get("beat"):
                return False
            if first is None:
                first, wait = lease, _waiting_time(lease, blocked=locked is False, here=here)
                deadline = self._now() + wait
                if wait:
                    about = f"{self.run_dir}: waiting up to {wait:.0f} s to see whether {holder(lease)} still lives"
                    print(about, file=sys.stderr, flush=True)
            late = self._now() >= deadline
            if (lease.get("beat") and lease != first) or (late and locked is False):
                raise UserError(f"{self.run_dir} is in use by {holder(lease)}. Wait for it, stop it, or set run.dir")
            if late:
                return bool(locked)
            time.sleep(POLL)

    def _lock(self) -> bool | None:
        """Try to take the kernel's lock: whether it worked; None on a file system without locks (Lustre may be one)."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return None
        return True

    def _settled(self) -> bool:
        """Whether the lease is still this process's after ``SETTLE`` seconds, when simultaneous writers are done."""
        time.sleep(SETTLE)
        return self._read().get("token") == self.token

    def _keep(self) -> None:
        while not self._stopped.wait(HEARTBEAT):
            try:
                self.require_held()
                self._beat()
            except UserError as error:
                self.lost(error)
                return
            except OSError:  # a full disk or an unreachable file server: the next beat may succeed
                continue

    def _beat(self) -> None:
        self._write(time.time())
        self._beaten = self._now()

    def _write(self, beat_time: float) -> None:
        lease = {"host": socket.gethostname(), "pid": os.getpid(), "kernel": kernel(), "token": self.token}
        heartbeat.write(self.descriptor, lease | {"beat": beat_time})
        os.fsync(self.descriptor)

    def _read(self) -> dict:
        """The lease; {} if the file holds none, or a damaged one. Raises FileNotFoundError if there is no file."""
        lease = heartbeat.read(self.path)
        try:
            known = {"host": str(lease["host"]), "pid": int(lease["pid"]), "beat": float(lease["beat"])}
        except (ValueError, TypeError, KeyError):
            return {}
        return known | {name: str(lease.get(name)) for name in ("kernel", "token")}

    @staticmethod
    def _now() -> float:
        return time.clock_gettime(CLOCK)


def holder(lease: dict) -> str:
    """The process that a lease names, for messages."""
    if not lease.get("beat"):
        return "another process"
    return f"process {lease['pid']} on {lease['host']}, last heartbeat {time.time() - lease['beat']:.0f} s ago"


def _waiting_time(lease: dict, blocked: bool, here: bool) -> float:
    """Seconds after which a live holder of ``lease`` has beaten, or a dead holder's kernel lock has been released."""
    if blocked:
        return LISTEN if here else 2 * EXPIRY
    age = time.time() - lease["beat"]
    return min(EXPIRY, max(EXPIRY - age, LISTEN))  # at least LISTEN, whatever the age: the clocks of machines differ
