"""Gradient paths in a report of runs: a table of all groups that were probed, and a figure of each."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from dlr_pretrain.analysis.drawing import Picture, save
from dlr_pretrain.analysis.groups import Group
from dlr_pretrain.analysis.paths_view import EXPLAINED, Probes, plot_paths, probes
from dlr_pretrain.analysis.tables import Cell, Figure, Table

LONGEST = 80  # name of a figure, before a hash takes the place of the rest
COLUMNS = {"rho": "rho", "rho_mean": "Mean of ratios", "isotropic": "Isotropic", "cosine": "Cosine"}


def paths_table(groups: Sequence[Group]) -> Iterator[Table]:
    """The first and the last look at each projection, for one run of each probed group; no table without any."""
    rows: list[list[Cell]] = []
    for group, found in _probed(groups):
        for layer, looks in found.items():
            for step, numbers in dict([looks[0], looks[-1]]).items():
                figures = (Figure(numbers[name], digits=3, signed=name == "cosine") for name in COLUMNS)
                rows.append([f"{group.scale} {group.label}", layer, f"{step:,}", *figures])
    if rows:
        header = ["Run", "Projection", "Before update", *COLUMNS.values()]
        yield Table("paths", "Gradient paths", header, rows, [EXPLAINED])


def draw_probed(groups: Sequence[Group], folder: Path) -> Iterator[Picture]:
    """Write the figure of one run of each probed group."""
    taken: set[str] = set()
    for group, found in _probed(groups):
        title = f"{group.scale} {group.label}"
        name = re.sub(r"\W+", "_", f"gradient_paths_{title}").strip("_")
        if len(name) > LONGEST or name in taken:
            name = f"{name[:LONGEST]}_{hashlib.sha256(title.encode()).hexdigest()[:8]}"
        taken.add(name)
        yield save(plot_paths(found, title), folder, name, f"{title}: {EXPLAINED}")


def _probed(groups: Sequence[Group]) -> Iterator[tuple[Group, Probes]]:
    for group in groups:
        for run in group.runs:
            if found := probes(run.metrics):
                yield group, found
                break
