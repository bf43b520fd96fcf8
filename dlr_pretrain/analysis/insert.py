"""Inserts tables and figures of reports into a page that is written by hand.

    python -m dlr_pretrain.analysis.insert docs/evidence.md runs/evidence/report

The rows and notes of ``runs/evidence/report/pairs/tables/tune.md`` replace the text between ``<!-- pairs/tune -->`` and
``<!-- end -->``. If the page links an image as ``evidence/pairs/tune_rates.png`` (the page's name comes first),
``tune_rates.png`` is copied there from ``runs/evidence/report/pairs/figures``.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from dlr_pretrain.util.command import command
from dlr_pretrain.util.errors import UserError

TABLE = re.compile(r"(<!-- (\w+)/(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def insert(page: Path, reports: Path) -> None:
    """Update the tables and figures of ``page``. Raises UserError if a report lacks one of them."""
    text = page.read_text(encoding="utf-8")

    def body(found: re.Match) -> str:
        table = _there(reports / found[2] / "tables" / f"{found[3]}.md").read_text(encoding="utf-8")
        _heading, _, rows = table.partition("\n\n")
        return f"{found[1]}\n{rows.strip()}\n\n{found[4]}"

    text = TABLE.sub(body, text)
    for piece, name in re.findall(rf"\({page.stem}/(\w+)/(\w+\.png)\)", text):
        target = page.with_suffix("") / piece / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_there(reports / piece / "figures" / name), target)
    page.write_text(text, encoding="utf-8")


def _there(path: Path) -> Path:
    if not path.is_file():
        raise UserError(f"{path}: no such file, and the page shows it. Give scripts/report.py the runs of that name")
    return path


def main(page: str, reports: str) -> int:
    return command(lambda: insert(Path(page), Path(reports)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
