"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> str:
    """A table without a line's end behind it; the columns whose numbers are in ``right`` stand to the right."""
    numeric = set(right)
    rule = ["---:" if i in numeric else "---" for i in range(len(header))]
    return "\n".join([_line(header), f"| {' | '.join(rule)} |", *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
