"""What a run has logged."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dlr_pretrain.durable import is_there
from dlr_pretrain.errors import UserError


def read_metrics(path: Path) -> list[dict]:
    """The complete lines of a metrics file; a last line that a kill cut off is left out."""
    return [_record(path, line) for line in _lines(path)]


def sound_records(path: Path) -> list[dict]:
    """The records of ``read_metrics`` without damaged lines, such as a loss of power leaves."""
    found = []
    for line in _lines(path):
        with suppress(UserError):
            found.append(_record(path, line))
    return found


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if is_there(path) else []


def newest_first(path: Path, block: int = 1 << 16) -> Iterator[dict]:
    """The records of ``read_metrics`` from the last one on, without reading more of the file than is asked for."""
    if not is_there(path):
        return
    with open(path, "rb") as file:
        position, rest, cut_off = file.seek(0, os.SEEK_END), b"", True
        while position:
            size = min(block, position)
            position -= size
            file.seek(position)
            text = file.read(size) + rest
            if cut_off:  # drop what stands behind the last end of a line
                text, newline, _ = text.rpartition(b"\n")
                cut_off = not newline
            rest, *lines = text.split(b"\n")
            for line in reversed(lines if position else [rest, *lines]):
                if line:
                    yield _record(path, line)


def _record(path: Path, line: bytes) -> dict:
    try:
        record = json.loads(line)
        record["step"] + 0  # every line is a step's
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: a line is damaged: {line[:60]!r}. The next start of the run leaves it out") from None
    return record
