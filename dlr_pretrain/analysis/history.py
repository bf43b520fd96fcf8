"""What a run has logged."""

from __future__ import annotations

import json
from pathlib import Path

from dlr_pretrain.errors import UserError


def read_metrics(path: Path) -> list[dict]:
    """The complete lines of a metrics file; a last line that a kill cut off is left out."""
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
            record["step"] + 0  # every line is a step's
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{path}: line {number} is damaged. Move the file away, or cut it before that line"
            ) from None
        records.append(record)
    return records
