"""Small files that a crash leaves whole, and whether a file is there."""

from __future__ import annotations

import os
from pathlib import Path


def write_durably(path: Path, content: str | bytes) -> None:
    """Replace ``path`` with ``content`` so that a crash leaves the old or the new file, whole."""
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_bytes(content.encode() if isinstance(content, str) else content)
    sync(aside)
    os.replace(aside, path)
    sync(path.parent)


def sync_all(folder: Path) -> None:
    """Have the disk hold a folder with everything in it."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def is_there(path: Path) -> bool:
    """Whether there is such a file. Raises OSError where its disk does not answer: Path.exists may say no to that."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def sync(path: Path) -> None:
    """Have the disk hold a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
