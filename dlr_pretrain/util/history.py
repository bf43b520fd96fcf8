"""The lines of ``metrics.jsonl`` that a run has written, and the perplexity of a loss."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import is_there


def perplexity(loss: float) -> float:
    """The perplexity of a loss in nats per token; infinite if it exceeds the range of a float."""
    return math.exp(loss) if loss < 700 else math.inf


def read_metrics(path: Path) -> list[dict]:
    """The records of a metrics file. An incomplete last line, which a killed run leaves, is left out.

    Raises UserError if another line is damaged.
    """
    return [_record(path, line) for line in _lines(path)]


def sound_records(path: Path) -> tuple[list[dict], int]:
    """The records of ``read_metrics``, and how many damaged lines, as after a power failure, were left out."""
    found, lines = [], _lines(path)
    for line in lines:
        try:
            found.append(_record(path, line))
        except UserError:
            continue
    return found, len(lines) - len(found)


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if is_there(path) else []


def newest_first(path: Path, block: int = 1 << 16) -> Iterator[dict]:
    """The records of ``read_metrics`` in reverse order. The file is read from its end, only as far as necessary."""
    if not is_there(path):
        return
    with open(path, "rb") as file:
        position, rest, cut_off = file.seek(0, os.SEEK_END), b"", True
        while position:
            size = min(block, position)
            position -= size
            file.seek(position)
            text = file.read(size) + rest
            if cut_off:  # drop an incomplete last line
                text, newline, _ = text.rpartition(b"\n")
                cut_off = not newline
            rest, *lines = text.split(b"\n")
            for line in reversed(lines if position else [rest, *lines]):
                if line:
                    yield _record(path, line)


def _record(path: Path, line: bytes) -> dict:
    try:
        record = json.loads(line)
        record["step"] + 0  # fails if the record has no step
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: a line is damaged: {line[:60]!r}. The next start of the run leaves it out") from None
    return record
