"""A report as one HTML page that needs no server and no network: embedded images, sortable tables, light and dark."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Sequence
from pathlib import Path

from dlr_pretrain.analysis.drawing import Picture
from dlr_pretrain.analysis.tables import Cell, Figure, Table, is_numeric, text

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --line: #d0d7de; --paper: #fff; --band: #f6f8fa;
  --link: #0550ae; --warn: #9a4a00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa4ae; --line: #39424e; --paper: #11151a;
  --band: #1a2028; --link: #79b8ff; --warn: #ffb870; }
  .figure img { filter: invert(1) hue-rotate(180deg); mix-blend-mode: screen; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: .2rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p, li { max-width: 46rem; } .soft, figcaption, li { color: var(--soft); font-size: .9rem; }
a { color: var(--link); } nav a { margin-right: .8rem; white-space: nowrap; }
.look { border-left: 4px solid var(--warn); background: var(--band); padding: .3rem 1rem; }
.look li { color: var(--ink); overflow-wrap: anywhere; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .3rem .6rem; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { background: var(--band); position: sticky; top: 0; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid var(--link); }
th[aria-sort=ascending] button::after { content: " \\25B2"; }
th[aria-sort=descending] button::after { content: " \\25BC"; }
td.number, th.number { text-align: right; } td.missing { color: var(--soft); }
tbody tr:hover { background: var(--band); } tr:last-child td { border-bottom: 0; }
.figure { margin: 1rem 0; overflow-x: auto; } .figure img { max-width: 100%; height: auto; display: block; }
@media (max-width: 44rem) { .figure img { max-width: none; width: 44rem; } figcaption { max-width: 88vw; } }
pre { overflow-x: auto; background: var(--band); padding: .6rem; border-radius: 6px; font-size: .8rem; }
summary { cursor: pointer; color: var(--link); font-size: .9rem; }
@media print { .scroll { overflow: visible; } body { max-width: none; } }
"""

SCRIPT = """
for (const button of document.querySelectorAll('th button')) button.addEventListener('click', () => {
  const head = button.parentElement, body = head.closest('table').tBodies[0];
  const column = head.cellIndex, down = head.getAttribute('aria-sort') === 'ascending';
  for (const other of head.parentElement.children) other.removeAttribute('aria-sort');
  head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
  const value = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const empty = cell => cell === '' || cell === '\\u2013';
  const rows = [...body.rows].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (empty(x) || empty(y)) return empty(x) - empty(y);
    const order = x - y || x.localeCompare(y, 'en', { numeric: true });
    return down ? -order : order;
  });
  body.append(...rows);
});
"""

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(
    title: str,
    summary: str,
    remarks: Sequence[str],
    pictures: Sequence[Picture],
    figures: Path,
    tables: Sequence[Table],
    command: str,
) -> str:
    """The HTML. Pictures are read as SVG files from ``figures``. Tables without a figure of ours are collapsed."""
    links = " ".join(f'<a href="#{table.name}">{html.escape(table.title)}</a>' for table in tables if table.ours)
    look = "".join(f"<li>{html.escape(remark)}</li>" for remark in remarks)
    parts = [
        f"<h1>{html.escape(title)}</h1><p class=soft>{html.escape(summary)}</p><nav>{links}</nav>",
        f"<h2>To know before reading on</h2><div class=look><ul>{look}</ul></div>" if remarks else "",
        *(_section(table) for table in tables if table.ours and table.name != "runs"),
        "<h2 id=figures>Figures</h2>" if pictures else "",
        *(_picture(picture, figures) for picture in pictures),
        *(_section(table) for table in tables if table.name == "runs"),
        *(_folded(table) for table in tables if not table.ours),
        f"<h2>Made by</h2><pre>{html.escape(command)}</pre>",
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(filter(None, parts)) + f"\n<script>{SCRIPT}</script>\n"
        "</body></html>\n"
    )


def _section(table: Table) -> str:
    return f'<h2 id="{table.name}">{html.escape(table.title)}</h2>{_body(table)}'


def _folded(table: Table) -> str:
    title = f"{table.title}: the paper's figures, and how to get ours"
    return f'<details id="{table.name}"><summary>{html.escape(title)}</summary>{_body(table)}</details>'


def _body(table: Table) -> str:
    numeric = [is_numeric(table, i) for i in range(len(table.header))]
    head = "".join(
        f"<th scope=col{' class=number' if number else ''}><button>{html.escape(name)}</button></th>"
        for name, number in zip(table.header, numeric, strict=True)
    )
    rows = "\n".join(
        f"<tr>{''.join(_cell(cell, number) for cell, number in zip(row, numeric, strict=True))}</tr>"
        for row in table.rows
    )
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in table.notes)
    fill = f"<p class=soft>To fill what is missing:</p><pre>{html.escape(chr(10).join(table.fill))}</pre>"
    return (
        f"<div class=scroll tabindex=0><table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>"
        f"<ul>{notes}</ul>{fill if table.fill else ''}"
    )


def _cell(cell: Cell, number: bool) -> str:
    """The HTML of a cell. The ``data-value`` of a figure has all its digits, and the table is sorted by it."""
    classes = [*(["number"] if number else []), *(["missing"] if cell is None else [])]
    marked = f' class="{" ".join(classes)}"' if classes else ""
    exact = f' data-value="{cell.value!r}"' if isinstance(cell, Figure) and math.isfinite(cell.value) else ""
    return f"<td{marked}{exact}>{html.escape(text(cell))}</td>"


def _picture(picture: Picture, folder: Path) -> str:
    image = base64.b64encode((folder / f"{picture.name}.svg").read_bytes()).decode()
    caption = html.escape(picture.caption)
    return (
        f'<figure class=figure id="{picture.name}"><img alt="{caption}" src="data:image/svg+xml;base64,{image}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )
