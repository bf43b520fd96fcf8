"""What kept runs took: one table for a page that quotes several pieces, with a row for each.

python -m dlr_pretrain.analysis.spent benchmarks/evidence/pairs benchmarks/evidence/paper
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from dlr_pretrain.analysis.records import RunRecord, find_runs
from dlr_pretrain.analysis.tables import Cell, Figure, Table, markdown, rounded
from dlr_pretrain.util.command import command
from dlr_pretrain.util.text import amount

HEADER = ["Piece", "Runs", "Seeds", "Precision", "Tokens per run", "Hours", "Minutes per run", "Commits"]
NOTE = (
    "Hours of one core per run, from the first update to the last, with evaluations, saves, and what a machine stood "
    "still in between; minutes are the shortest, the median and the longest. A run of several pieces counts in each."
)


def by_piece(pieces: Iterable[Path]) -> Table:
    """A row per piece, a folder whose ``runs`` were kept by ``keep``. Raises UserError if one has none."""
    rows = [[piece.name, *_row(find_runs([piece / "runs"])[0])] for piece in pieces]
    return Table("spent", "What the runs took", HEADER, rows, [NOTE])


def _row(runs: Sequence[RunRecord]) -> list[Cell]:
    hours = [float(run.hours()[-1]) for run in runs]
    minutes = ", ".join(f"{60 * over(hours):.2g}" for over in (min, median, max))
    return [
        Figure(len(runs), digits=0),
        _listed(run.seed for run in runs),
        _listed(run.config["precision"]["name"] for run in runs),
        _listed((run.step * run.positions for run in runs), shown=amount),
        rounded(sum(hours)),
        minutes,
        _listed(code[:7] for run in runs for code in run.codes),
    ]


def _listed(values: Iterable, shown=str) -> str:
    return ", ".join(map(shown, sorted(set(values))))


if __name__ == "__main__":
    sys.exit(command(lambda: print(markdown(by_piece(map(Path, sys.argv[1:]))))))
