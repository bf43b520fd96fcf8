"""Reports as Markdown and as one page of HTML that needs neither server nor network: of many runs, and of one."""

from __future__ import annotations

import base64
import html
import shlex
from collections.abc import Sequence
from pathlib import Path
from string import Template

from dlr_pretrain.analysis.figures import LOSS, Picture, curves, draw
from dlr_pretrain.analysis.runs import read_runs
from dlr_pretrain.analysis.tables import Table, run_tables, table
from dlr_pretrain.util.files import write_durably

NUMBERS = ["name", "scale", "label", "seed", "state", "step", "tokens", "loss", "ppl", "convention", "speed", "mfu",
           "memory", "machine"]  # fmt: skip


def write_reports(places: Sequence[str], output: Path, command: str) -> list[str]:
    """Write the report of the runs in ``places``, as ``read_runs`` takes them, into ``output``; returns the remarks.

    ``report.html`` and ``report.md`` have everything; ``tables/`` has each table as CSV and LaTeX, ``figures/`` each
    figure in the formats of ``figures.IMAGES``, and ``numbers.csv`` the numbers of each run in all digits.
    """
    found = read_runs(places)
    tables, folder = run_tables(found), output / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    for one in tables:
        one.frame.to_csv(folder / f"{one.name}.csv", index=False)
        (folder / f"{one.name}.tex").write_text(one.latex(), encoding="utf-8")
    parts = [*tables, *draw(found, output / "figures")]
    write_page("Pre-training runs", found.remarks, parts, command, output)
    found.runs[NUMBERS].to_csv(output / "numbers.csv", index=False)
    return found.remarks


def write_report(run_dir: Path) -> None:
    """Write ``report.md``, ``report.html`` and ``plots/`` of a run into its directory."""
    found = read_runs([run_dir])
    loss = curves(found, run_dir / "plots", "loss", "train/loss", "train/tokens", LOSS)
    command = shlex.join(found.runs.start.iloc[0].get("command", []))
    files = found.runs.start.iloc[0].get("files", {})
    read = [table("files", "What was read", [{"For": use, "Files": names} for use, names in files.items()])]
    parts = [*run_tables(found), *(read if files else []), loss]
    write_page(found.runs["name"].iloc[0], found.remarks, parts, command, run_dir)


def write_page(
    title: str, remarks: Sequence[str], parts: Sequence[Table | Picture], command: str, folder: Path
) -> None:
    """Write ``report.md`` and ``report.html`` into ``folder``, in or below which the pictures are.

    ``remarks`` are what a reader must know first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    items = "".join(f"<li>{html.escape(remark)}</li>" for remark in remarks)
    body, made_by = "\n".join(map(_html, parts)), html.escape(command)
    page = template.substitute(title=html.escape(title), remarks=items, body=body, command=made_by)
    write_durably(folder / "report.html", page)
    sections = [f"# {title}", "\n".join(f"* {remark}" for remark in remarks)]
    sections += [part.markdown() if isinstance(part, Table) else _link(part, folder) for part in parts]
    sections += [f"## Made by\n\n```\n{command}\n```"]
    write_durably(folder / "report.md", "\n\n".join(section.strip() for section in sections if section) + "\n")


def _link(picture: Picture, folder: Path) -> str:
    return f"![{picture.path.stem}]({picture.path.relative_to(folder)})\n\n{picture.caption}"


def _html(part: Table | Picture) -> str:
    if isinstance(part, Table):
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in part.notes)
        title = f'<h2 id="{part.name}">{html.escape(part.title)}</h2>'
        return f"{title}<div class=scroll>{part.frame.to_html(index=False, border=0)}</div><ul>{notes}</ul>"
    image = base64.b64encode(part.path.read_bytes()).decode()
    caption = f"<figcaption>{html.escape(part.caption)}</figcaption>"
    return f'<figure id="{part.path.stem}"><img alt="" src="data:image/png;base64,{image}">{caption}</figure>'
