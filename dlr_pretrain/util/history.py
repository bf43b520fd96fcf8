"""The lines of ``metrics.jsonl`` that a run has written, and the perplexity of a loss."""

from __future__ import annotations

import json
import math
from pathlib import Path


def perplexity(loss: float) -> float:
    """The perplexity of a loss in nats per token; infinite if it exceeds the range of a float."""
    return math.exp(loss) if loss < 700 else math.inf


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
