"""Small files that a crash cannot damage, JSON that may be damaged all the same, and locks on folders."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any

from dlr_pretrain.util.errors import UserError, naming

EXPIRY = 60.0  # seconds without a heartbeat after which the holder of a run directory counts as dead
Shape = type | UnionType | dict[str, "Shape"] | list["Shape"]
NUMBER = int | float
BEAT: Shape = {"host": str, "pid": int, "machine": str, "token": str, "time": NUMBER}


def write_durably(path: Path, content: str | bytes) -> None:
    """Replace ``path`` with ``content`` so that a crash leaves the old or the new file, whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    with naming(path):
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a file of UTF-8; an error names it."""
    with naming(path):
        path.write_text(text, encoding="utf-8")


def copy_file(source: Path, target: Path) -> None:
    """Copy a file's content; an error names the copy."""
    with naming(target):
        shutil.copyfile(source, target)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file, naming(path):
        return hashlib.file_digest(file, "sha256").hexdigest()


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until ``condition()`` holds, such as until a network file system shows what another machine has written.

    Returns whether it holds within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not (held := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return held


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Within this context, no other process holds ``folder``; the kernel releases it where this one is killed.

    Raises UserError, with the holder, if another process has it. A file system without locks refuses nobody.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    with path.open("a+", encoding="utf-8") as file:
        if lock(file.fileno()) is False:
            file.seek(0)
            fix = "Wait for it, stop it, or name another folder"
            raise UserError(f"{folder} is being written by {file.read() or 'another process'}. {fix}")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def lock(descriptor: int) -> bool | None:
    """Lock an open file for this process. False if another has it; None if the file system, such as Lustre, cannot."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def read_json(path: Path, shape: Shape) -> dict:
    """The object in a JSON file, which has a ``shape``: see ``misfit``. Raises ValueError with what is wrong."""
    try:
        found = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if wrong := misfit(found, shape):
        raise ValueError(wrong)
    return found


def misfit(found: Any, shape: Shape, name: str = "it") -> str:
    """Says what of ``found``, from a JSON file, is not as in ``shape``; empty if nothing is.

    A shape is a type, a list with the shape of each item, or an object with the shapes of some of its entries. Those
    whose names end with a question mark may be missing, and "*" has the shape of all entries.
    """
    if not isinstance(found, type(shape) if isinstance(shape, (dict, list)) else shape):
        return f"{name} is of type {type(found).__name__}"
    parts: list[tuple[str, Any, Shape]] = []
    if isinstance(shape, list):
        parts = [(f"{name}[{i}]", item, shape[0]) for i, item in enumerate(found)]
    elif isinstance(shape, dict):
        for key, inside in shape.items():
            if key == "*":
                parts += [(f"{name}.{own}", value, inside) for own, value in found.items()]
            elif (own := key.removesuffix("?")) in found:
                parts.append((own, found[own], inside))
            elif own == key:
                return f"{name} has no {key}"
    return next(filter(None, (misfit(value, inside, own) for own, value, inside in parts)), "")


def read_beat(run_dir: Path, rank: int) -> dict:
    """The last heartbeat of a rank of a run, or {} if there is none or it is damaged; see ``train.heartbeat``.

    Opens the file anew each time, because only opening it asks a file server for what others wrote.
    """
    try:
        return read_json(run_dir / ".beats" / str(rank), BEAT)
    except (FileNotFoundError, ValueError):
        return {}


def read_metrics(path: Path) -> list[dict]:
    """The records of a metrics file; damaged lines, as after a power failure, are left out."""
    return sound_records(path)[0]


def sound_records(path: Path) -> tuple[list[dict], int]:
    """The records of ``read_metrics``, and the number of damaged lines.

    An incomplete last line, which a killed run leaves, counts for nothing.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    records = [record for line in lines if (record := _record(line)) is not None]
    return records, len(lines) - len(records)


def _record(line: bytes) -> dict | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return None if misfit(record, {"step": int}) else record
