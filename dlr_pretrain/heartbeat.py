"""A small record in a file that one process renews and others look at, on file systems of several machines, too."""

from __future__ import annotations

import json
import os
from pathlib import Path

EXPIRY = 60.0  # seconds without a beat after which the holder of a run directory counts as dead
BYTES = 512  # a beat overwrites all of the last one in one write, so that nobody reads half of it


def write(descriptor: int, record: dict) -> None:
    """Overwrite the record. Over a network file system others see it once the descriptor is synchronised or closed."""
    os.pwrite(descriptor, json.dumps(record).ljust(BYTES).encode(), 0)


def read(path: Path) -> dict:
    """The record, or {} where it is damaged. Opened anew each time: only that asks a file server what others wrote."""
    try:
        record = json.loads(path.read_bytes())
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
