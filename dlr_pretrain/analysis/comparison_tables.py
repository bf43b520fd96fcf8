"""Comparisons of ``tune.py`` in a report of runs: a table and the curve of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from dlr_pretrain.analysis.comparison_view import plot, remarks, verdicts
from dlr_pretrain.analysis.figures import Picture
from dlr_pretrain.analysis.tables import Cell, Figure, Table


def named(compared: Sequence[tuple[Path, dict]]) -> Iterator[tuple[str, dict]]:
    """The stem of each comparison's files: tune, tune_2, ..."""
    for number, (_, found) in enumerate(compared, 1):
        yield f"tune_{number}" if number > 1 else "tune", found


def comparison_table(name: str, found: dict) -> Table:
    """Each method at the rate that is best for it, and the verdicts."""
    rows: list[list[Cell]] = []
    for method, choice in found["chosen"].items():
        ours = choice["held_out"]["perplexity"]
        shown = None if ours is None else Figure(ours["mean"], ours["std"], ours["n"])
        lr = "none" if choice["lr"] is None else f"{choice['lr']:g}"
        rows.append([method, lr, shown, choice["edge"] or ""])
    header = ["Method", "Learning rate", "Perplexity on held-out text", "End of the grid"]
    notes = [*verdicts(found), *remarks(found)]
    missing = any(choice["held_out"]["missing"] for choice in found["chosen"].values())
    fill = [f"python {found['command']}"] if missing else []
    return Table(name, "Each method at its own learning rate", header, rows, notes, fill)


def draw_comparison(name: str, found: dict, folder: Path) -> Picture:
    """Write the curve as PNG and SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    plot(found, [folder / f"{name}.png", folder / f"{name}.svg"])
    return Picture(name, f"Perplexity against learning rate. {' '.join(verdicts(found))}")
