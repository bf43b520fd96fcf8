"""Where shards lie: on this machine, on the hub, or at any address that fsspec opens; and how their bytes arrive.

Local files are opened as they are. Of a remote file, ``Retrying`` reads a range of bytes at a time through fsspec and,
when a request fails, asks again for what is missing. So a row is never read twice or left out.
"""

from __future__ import annotations

import fcntl
import glob
import io
import logging
import os
import queue
import random
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from dlr_pretrain.util.errors import UserError, first_line
from dlr_pretrain.util.files import sync

RANGE_BYTES = 4 << 20  # of one request; each stream holds one such range in memory
FIRST_CONTACT_SECONDS = 7.0  # with the imports, a missing network is told within 10 s
PATIENCE_SECONDS = 480.0  # without any progress; less than run.timeout_minutes by default, so that this ends first
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 60.0  # between tries, doubled each time
FINAL = (401, 404, 410, 451)  # HTTP: another try would get the same answer
AGAIN = "The same command continues once it answers"
HUB_FILE = re.compile(r"(hf://datasets/[^/@]+/[^/@]+)(?:@([^/]+))?(/.*|$)")

T = TypeVar("T")
log = logging.getLogger(__name__)
_jitter = random.Random()  # separate: a wait must not advance a random state that a run depends on


@dataclass(frozen=True)
class File:
    """A file of a source. A copy of it elsewhere has the same ``name`` and ``size``."""

    name: str  # below the root of the source
    address: str  # a local path, or an address for fsspec
    size: int | None  # in bytes; None if the server does not say

    @property
    def is_local(self) -> bool:
        return "://" not in self.address


def find(root: str, pattern: str) -> list[File]:
    """The files that match a glob below ``root`` (or absolute, or an address), sorted by name; [] if there are none."""
    whole = pattern if "://" in pattern or os.path.isabs(pattern) else os.path.join(root, pattern)
    if "://" in whole:
        return _find_remote(root, whole)
    names = set(glob.glob(pattern, root_dir=root or None, recursive=True))  # several ** find some files twice
    found = []
    for name in sorted(names):
        path = os.path.join(root, name)
        if not os.path.isdir(path):
            try:
                found.append(File(name, path, os.path.getsize(path)))
            except OSError as error:
                fix = "Fetch this shard again, or narrow the glob that matches it"
                raise UserError(f"{path}: cannot be opened ({error.strerror}). {fix}") from error
    return found


def _find_remote(root: str, address: str) -> list[File]:
    system, path, protocol = _system(address)
    base = system._strip_protocol(root) if "://" in root else os.path.dirname(path.split("*")[0])

    def ask() -> dict[str, dict]:
        if "*" not in path:
            return {path: system.info(path)}
        return system.glob(path, detail=True)

    try:
        found = insist(ask, address)
    except FileNotFoundError:
        return []
    files = {name: entry for name, entry in found.items() if entry["type"] == "file"}
    return [
        File(name.removeprefix(base).lstrip("/"), name if "://" in name else f"{protocol}://{name}", entry.get("size"))
        for name, entry in sorted(files.items())
    ]


def _system(address: str):
    """fsspec's file system for an address, the path in it, and the protocol."""
    import fsspec

    protocol = address.split("://")[0]
    try:
        system, path = fsspec.core.url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"{address}: {protocol}:// needs a package that is not installed: {first_line(error)}"
        ) from error
    return system, path, protocol


def pinned(address: str, revision: str | None, patient: bool = False) -> tuple[str, str | None]:
    """An address on the hub at a fixed commit, and that commit; any other address as it is, and None.

    The commit is that of ``revision``, or the newest. A hub that does not answer is told within seconds, or, if
    ``patient``, within minutes.
    """
    if (match := HUB_FILE.fullmatch(address)) is None:
        return address, None
    from huggingface_hub import HfApi, constants

    repository, revision, rest = match[1], match[2] or revision, match[3]
    name = repository.removeprefix("hf://datasets/")

    def ask() -> str:
        info = HfApi().dataset_info(name, revision=revision, expand=["sha"], timeout=FIRST_CONTACT_SECONDS)
        return info.sha

    fix = "Offline, use data=sample, or data=local data.root=<folder of the shards>"
    try:
        patient = patient and not constants.HF_HUB_OFFLINE
        commit = insist(lambda: within(FIRST_CONTACT_SECONDS, ask), name, PATIENCE_SECONDS if patient else 0.0)
    except Exception as error:  # the types differ between versions of the client
        said = first_line(error)
        raise UserError(f"{name}: the Hugging Face hub denied access or did not answer: {said}. {fix}") from error
    return f"{repository}@{commit}{rest}", commit


def within(seconds: float, ask: Callable[[], T]) -> T:
    """The answer of ``ask``, which runs in a thread: a look-up of a name has no time-out. Raises TimeoutError."""
    answers: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((ask(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=run, name="first contact", daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return answer


def insist(ask: Callable[[], T], name: str, patience: float | None = None) -> T:
    """The answer of ``ask``, which is asked again after errors that may pass, for ``patience`` seconds.

    A server that answers, if only that it is busy, is always asked again: many jobs may start together.
    """
    since, wait = time.monotonic(), FIRST_WAIT_SECONDS
    while True:
        try:
            return ask()
        except Exception as error:  # the types differ between file systems
            answer = getattr(error, "response", None)
            status = getattr(answer, "status_code", None) or getattr(error, "status", None)
            allowed = PATIENCE_SECONDS if patience is None or status is not None else patience
            gated = "GatedRepo" in (getattr(answer, "headers", None) or {}).get("X-Error-Code", "")
            final = gated or status in FINAL or isinstance(error, (FileNotFoundError, PermissionError, UserError))
            if final or time.monotonic() - since >= allowed:
                raise
            headers = getattr(answer, "headers", None) or getattr(error, "headers", None) or {}
            asked = str(headers.get("Retry-After", ""))
            pause = max(wait * _jitter.uniform(0.5, 1.5), float(asked) if asked.isdigit() else 0.0)
            log.info("%s: %s; asking again in %.1f s", name, first_line(error), pause)
            time.sleep(pause)
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)


class Retrying(io.RawIOBase):
    """The bytes of a remote file. What a failed request leaves out is asked for again, from where it stood."""

    def __init__(self, file: File):
        self._entry, self._at, self._stream = file, 0, None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._entry.size or 0}[whence]
        return self._at

    def readinto(self, buffer) -> int:
        left = min(len(buffer), RANGE_BYTES)
        if self._entry.size is not None:
            left = min(left, self._entry.size - self._at)
        if left <= 0:
            return 0
        try:
            content = insist(lambda: self._ask(left), self._entry.address)
        except Exception as error:
            said = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"{self._entry.address}: cannot be read: {said[:400]}. {AGAIN}") from error
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)

    def _ask(self, size: int) -> bytes:
        try:
            if self._stream is None:
                system, path, _ = _system(self._entry.address)
                self._stream = system.open(path, "rb", block_size=RANGE_BYTES, cache_type="none")
            if self._stream.tell() != self._at:
                self._stream.seek(self._at)
            content = self._stream.read(size)
            if not content and self._entry.size is not None:
                raise ConnectionError(f"the answer ended at byte {self._at:,} of {self._entry.size:,}")
            return content
        except Exception:
            self._drop()
            raise

    def _drop(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(Exception):  # it has failed before
                stream.close()

    def close(self) -> None:
        self._drop()
        super().close()


def open_file(file: File, cache: str | None = None) -> BinaryIO:
    """The bytes of a file. If ``cache`` names a folder, a remote file is fetched into it once, and read from there."""
    try:
        if file.is_local:
            return open(file.address, "rb")
        if cache is not None:
            return _kept(file, Path(cache, re.sub(r"[^\w.=@-]+", "/", file.address)))
    except FileNotFoundError as error:
        raise UserError(
            f"{error.filename}: no such file. Was it moved? Check data.root and the globs of data"
        ) from error
    except OSError as error:
        raise UserError(f"{error.filename or file.address}: cannot be opened ({error.strerror or error})") from error
    if file.size is not None:
        return io.BufferedReader(Retrying(file), RANGE_BYTES)
    whole = tempfile.TemporaryFile()  # noqa: SIM115 (a server that names no length sends no ranges; the caller closes it)
    with Retrying(file) as source:
        shutil.copyfileobj(source, whole)
    whole.seek(0)
    return whole


def _kept(file: File, path: Path) -> BinaryIO:
    """A file of the cache. One process fetches it while others wait; one that was killed has left its part."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        with part.open("ab") as written, Retrying(file) as source:
            fcntl.flock(written, fcntl.LOCK_EX)
            if not path.exists():
                source.seek(written.seek(0, io.SEEK_END))
                shutil.copyfileobj(io.BufferedReader(source, RANGE_BYTES), written, RANGE_BYTES)
                written.flush()
                os.fsync(written.fileno())
                os.replace(part, path)
                sync(path.parent)
        part.unlink(missing_ok=True)
    return path.open("rb")
