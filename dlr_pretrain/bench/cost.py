"""What DLR costs, by backbone: one table from several measurements of ``benchmark.py step``.

python -m dlr_pretrain.bench.cost benchmarks/evidence/cost/*.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from dlr_pretrain.bench import tables
from dlr_pretrain.bench.rounds import median_interval, ratios

COLUMNS = ["backbone", "ms/step", "with DLR", "positions/s", "with DLR", "ratio", "the same once more"]
NOTE = (
    "ratio: seconds with DLR over those without in the same round, median [its 95 % interval]. The last column is the "
    "same of a second step without DLR."
)


def by_backbone(measured: Iterable[Path]) -> str:
    """One row per measurement. Its arms are one backbone: without DLR, again without DLR, and with DLR."""
    rows = []
    for plain, again, dlr in (json.loads(path.read_text())["arms"] for path in measured):
        speeds = (tables.number(arm[name]) for name in ("ms", "tokens_per_second") for arm in (plain, dlr))
        rows.append([plain["config"]["backbone"], *speeds, *(_ratio(arm, plain) for arm in (dlr, again))])
    return f"# Cost\n\n{tables.table(COLUMNS, rows)}\n\n* {NOTE}"


def _ratio(arm: dict, plain: dict) -> str:
    if not arm["parity"]["passes"]:
        return tables.parity(arm["parity"])
    return tables.ratio(median_interval(ratios(arm["seconds"], plain["seconds"]))._asdict())


if __name__ == "__main__":
    print(by_backbone(map(Path, sys.argv[1:])))
