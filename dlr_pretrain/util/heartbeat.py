"""A small record in a file that one process renews and others read, also from other machines."""

from __future__ import annotations

import json
import os
from pathlib import Path

EXPIRY = 60.0  # seconds without a beat after which the holder of a run directory counts as dead
BYTES = 512  # length of a beat: one write replaces the whole last one, so that nobody reads half a beat


def write(descriptor: int, record: dict) -> None:
    """Overwrite the record. On a network file system, others see it once the descriptor is synchronised or closed."""
    os.pwrite(descriptor, json.dumps(record).ljust(BYTES).encode(), 0)


def read(path: Path) -> dict:
    """The record, or {} if it is damaged.

    Opens the file anew each time, because only opening it asks a file server for what others wrote.
    """
    try:
        record = json.loads(path.read_bytes())
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
