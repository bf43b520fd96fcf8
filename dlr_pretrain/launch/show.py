"""Tables for a terminal of 80 or more columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from itertools import takewhile

GAP = "  "
NUMBERS = ">"  # a header that begins with it aligns its column to the right


def table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int, notes: Sequence[str] = ()) -> str:
    """Rows under a header of as many columns; a header that begins with ">" aligns its column to the right.

    The second column holds names, which ``shorten`` cuts if the table would be wider than ``width``. ``notes`` has the
    text under each row, of up to three lines, or empty. From the third on, columns without any entry are left out.
    """
    used = [i for i in range(len(header)) if i < 2 or any(row[i] for row in rows)]
    titles = [header[i].removeprefix(NUMBERS) for i in used]
    cells = [[row[i] for i in used] for row in rows]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    room = width - sum(widths) + widths[1] - len(GAP) * (len(used) - 1)
    for row, name in zip(cells, shorten([row[1] for row in cells], max(12, room)), strict=True):
        row[1] = name
    widths[1] = max(len(row[1]) for row in [titles, *cells])

    def line(entries: Sequence[str]) -> str:
        aligned = (
            f"{e:{'>' if header[i][0] == NUMBERS else '<'}{w}}" for e, i, w in zip(entries, used, widths, strict=True)
        )
        return GAP.join(aligned).rstrip()

    lines = [line(titles)]
    for i, row in enumerate(cells):
        lines.append(line(row))
        if i < len(notes) and notes[i]:
            indent = " " * (widths[0] + len(GAP))
            lines += textwrap.wrap(notes[i], width, initial_indent=indent, subsequent_indent=indent, max_lines=3)
    return "\n".join(lines)


def shorten(names: Sequence[str], width: int) -> list[str]:
    """The names, cut to ``width`` columns: first without the parts that all share, then without their middle."""
    if len(names) > 1:
        for end in (1, -1):  # the beginning first
            if max(map(len, names)) > width:
                parts = [re.findall(r".*?[-/]|.+", name)[::end] for name in names]
                same = takewhile(lambda part: len(set(part)) == 1, zip(*parts, strict=False))
                shared = len(list(same))
                names = ["".join([*(["…"] if shared else []), *p[shared:]][::end]) for p in parts]
    tail = (width - 1) // 2
    return [n if len(n) <= width else f"{n[: width - 1 - tail]}…{n[-tail:]}" for n in names]


def duration(seconds: float | None) -> str:
    """``seconds`` in the two largest units, such as 3h12m; empty for None."""
    if seconds is None:
        return ""
    for unit, size, below, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if seconds >= size:
            return f"{seconds // size:.0f}{unit}{seconds % size // part:.0f}{below}"
    return f"{seconds:.0f}s"


def number(value: float | None, digits: int) -> str:
    """``value`` with ``digits`` decimals; empty for None."""
    return "" if value is None else f"{value:,.{digits}f}"
