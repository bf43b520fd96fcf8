"""Small files that a crash cannot damage, files that other machines write, and the lines of ``metrics.jsonl``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

EXPIRY = 60.0  # seconds without a heartbeat after which the holder of a run directory counts as dead


def write_durably(path: Path, content: str | bytes) -> None:
    """Replace ``path`` with ``content`` so that a crash leaves the old or the new file, whole."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until ``condition()`` holds, such as until a network file system shows what another machine has written.

    Returns whether it holds within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while not (held := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return held


def read_beat(run_dir: Path, rank: int) -> dict:
    """The last heartbeat of a rank of a run, or {} if there is none or it is damaged; see ``train.heartbeat``.

    Opens the file anew each time, because only opening it asks a file server for what others wrote.
    """
    try:
        beat = json.loads((run_dir / ".beats" / str(rank)).read_bytes())
        return beat if {"host", "pid", "machine", "token", "time"} <= beat.keys() else {}
    except (FileNotFoundError, ValueError, AttributeError):
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
        record["step"] + 0  # fails if the record has no step
    except (ValueError, KeyError, TypeError):
        return None
    return record
