"""Tables of figures as Markdown, CSV and LaTeX. Missing cells are marked, with the commands that fill them."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from dlr_pretrain.analysis.groups import Spread
from dlr_pretrain.util.text import diverged_of
from dlr_pretrain.util.text import table as markdown_table

MISSING = "–"


@dataclass(frozen=True)
class Figure:
    """A number in a cell: a mean over ``n`` seeds, with ``std`` if there are several.

    ``n`` is None for other numbers, such as published ones. ``note`` follows the number, such as "1 of 2 diverged".
    """

    value: float
    std: float | None = None
    n: int | None = None
    digits: int = 2
    signed: bool = False
    note: str = ""

    @property
    def text(self) -> str:
        if not math.isfinite(self.value):
            return self.note or "not finite"
        sign = "+" if self.signed else ""
        shown = f"{self.value:{sign},.{self.digits}f}"
        spread = "" if self.std is None else f" ± {self.std:,.{self.digits}f}"
        seeds = "" if self.n is None else f" ({self.n})"
        return f"{shown}{spread}{seeds}" + (f" {self.note}" if self.note else "")


Cell = Figure | str | None  # None: missing


@dataclass(frozen=True)
class Table:
    """A table. ``name`` is the stem of its files; ``fill`` are the commands that fill missing cells; ``ours`` says
    whether any figure is ours."""

    name: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = field(default=())
    fill: Sequence[str] = field(default=())
    ours: bool = True


def figure(spread: Spread | None, digits: int = 2, signed: bool = False) -> Figure | None:
    if spread is None:
        return None
    if not spread.finite:
        return Figure(math.inf, n=spread.n, note=diverged_of(spread.diverged, spread.n))
    return Figure(spread.mean, spread.std, spread.n, digits, signed)


def published(value: float | None, std: float | None = None, digits: int = 2, signed: bool = False) -> Figure | None:
    return None if value is None else Figure(value, std, None, digits, signed)


def rounded(value: float) -> Figure:
    """A figure with at least three significant digits."""
    return Figure(value, digits=max(0, 2 - math.floor(math.log10(value))))


def text(cell: Cell) -> str:
    return MISSING if cell is None else cell if isinstance(cell, str) else cell.text


def is_numeric(table: Table, column: int) -> bool:
    """Whether a column holds figures, and is therefore aligned to the right."""
    cells = [row[column] for row in table.rows]
    return any(isinstance(cell, Figure) for cell in cells) or (column > 0 and all(cell is None for cell in cells))


def markdown(table: Table) -> str:
    """A section with the table, its notes and commands."""
    rows = [[text(cell) for cell in row] for row in table.rows]
    figures = [i for i in _columns(table) if is_numeric(table, i)]
    lines = [f"## {table.title}", "", markdown_table(table.header, rows, right=figures)]
    if table.notes:
        lines += ["", *(f"* {note}" for note in table.notes)]
    if table.fill:
        lines += ["", f"To fill what is missing ({MISSING}):", "", "```bash", *table.fill, "```"]
    return "\n".join(lines) + "\n"


def comma_separated(table: Table) -> str:
    """The table as CSV, figures with all digits. Columns for std, n and note follow a column that needs them."""
    needs = {"std": ("std", "n"), "n": ("n",), "note": ("note",)}
    beside = [
        [part for part, of in needs.items() if any(_part(row[i], one) is not None for row in table.rows for one in of)]
        for i in _columns(table)
    ]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = list(zip(table.header, beside, strict=True))
    writer.writerow([word for name, parts in columns for word in (name, *(f"{name}: {part}" for part in parts))])
    for row in table.rows:
        cells: list[object] = []
        for cell, parts in zip(row, beside, strict=True):
            cells.append(repr(cell.value) if isinstance(cell, Figure) else cell or "")
            cells += ["" if (value := _part(cell, part)) is None else value for part in parts]
        writer.writerow(cells)
    return out.getvalue()


def _part(cell: Cell, name: str) -> object:
    """The ``std``, ``n`` or ``note`` of a figure; None if it has none, or if the cell is no figure."""
    value = getattr(cell, name) if isinstance(cell, Figure) else None
    return None if value == "" else value


def _columns(table: Table) -> range:
    return range(len(table.header))


SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--", "−": "$-$", "Δ": r"$\Delta$",
    "…": r"\ldots{}", "×": r"$\times$",
}  # fmt: skip


def latex(table: Table) -> str:
    """A table environment that uses booktabs; the notes are LaTeX comments."""

    def line(cells: Sequence[str]) -> str:
        return " & ".join(map(escaped, cells)) + r" \\"

    shape = "".join("r" if is_numeric(table, i) else "l" for i in _columns(table))
    return "\n".join(
        [
            *(f"% {note}" for note in table.notes),
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{escaped(table.title)}}}",
            rf"\label{{tab:{table.name}}}",
            rf"\begin{{tabular}}{{{shape}}}",
            r"\toprule",
            line(table.header),
            r"\midrule",
            *(line([text(cell) for cell in row]) for row in table.rows),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def escaped(words: str) -> str:
    """``words`` with LaTeX's special characters escaped."""
    return re.sub("|".join(map(re.escape, SPECIAL)), lambda found: SPECIAL[found[0]], words)
