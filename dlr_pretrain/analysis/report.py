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
from dlr_pretrain.analysis.tables import Table, run_tables
from dlr_pretrain.util.files import write_durably
from dlr_pretrain.util.text import loading

NUMBERS = ["name", "scale", "label", "seed", "state", "step", "tokens", "loss", "ppl", "convention", "speed", "mfu",
           "memory", "machine"]  # fmt: skip
Part = Table | Picture | tuple[str, str]  # a table, a figure, or a title and code


def write_reports(places: Sequence[str], output: Path, command: str) -> list[str]:
    """Write the report of the runs in ``places``, as ``read_runs`` takes them, into ``output``; returns the remarks.

    ``index.html`` and ``report.md`` have everything; ``numbers.csv`` has the numbers of each run in all digits, and
    ``figures/`` each figure in the formats of ``figures.IMAGES``.
    """
    found = read_runs(places)
    parts = [*run_tables(found), *draw(found, output / "figures"), ("Made by", command)]
    write_page("Pre-training runs", found.remarks, parts, output, output / "figures", "index")
    found.runs[NUMBERS].to_csv(output / "numbers.csv", index=False)
    return found.remarks


def write_report(run_dir: Path) -> None:
    """Write ``report.md``, ``report.html`` and ``plots/`` of a run into its directory."""
    found = read_runs([run_dir])
    plots, folded = run_dir / "plots", run_dir / "folded"
    loss = curves(found, plots, "loss", "train/loss", "train/tokens", LOSS)
    parts: list[Part] = [*run_tables(found), loss]
    if (folded / "config.json").exists():
        parts.append(("The folded checkpoint", loading(str(folded), trust=any(folded.glob("modeling_*.py")))))
    parts.append(("Made by", shlex.join(found.runs.start.iloc[0].get("command", []))))
    write_page(found.runs["name"].iloc[0], found.remarks, parts, run_dir, plots)


def write_page(
    title: str, remarks: Sequence[str], parts: Sequence[Part], folder: Path, figures: Path, name: str = "report"
) -> None:
    """Write ``report.md`` and ``<name>.html`` into ``folder``; pictures are in ``figures``, in or below it.

    ``remarks`` are what a reader must know first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    body = "\n".join(_html(part, figures) for part in parts)
    items = "".join(f"<li>{html.escape(remark)}</li>" for remark in remarks)
    write_durably(folder / f"{name}.html", template.substitute(title=html.escape(title), remarks=items, body=body))
    listed = "\n".join(f"* {remark}" for remark in remarks)
    sections = [f"# {title}", listed, *(_markdown(part, figures.relative_to(folder)) for part in parts)]
    write_durably(folder / "report.md", "\n\n".join(section.strip() for section in sections if section) + "\n")


def _markdown(part: Part, figures: Path) -> str:
    if isinstance(part, Table):
        return part.markdown()
    if isinstance(part, Picture):
        return f"![{part.name}]({figures / part.name}.png)\n\n{part.caption}"
    title, code = part
    return f"## {title}\n\n```\n{code}\n```"


def _html(part: Part, figures: Path) -> str:
    if isinstance(part, Table):
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in part.notes)
        title = f'<h2 id="{part.name}">{html.escape(part.title)}</h2>'
        return f"{title}<div class=scroll>{part.frame.to_html(index=False, border=0)}</div><ul>{notes}</ul>"
    if isinstance(part, Picture):
        image = base64.b64encode((figures / f"{part.name}.png").read_bytes()).decode()
        caption = f"<figcaption>{html.escape(part.caption)}</figcaption>"
        return f'<figure id="{part.name}"><img alt="" src="data:image/png;base64,{image}">{caption}</figure>'
    title, code = part
    return f"<h2>{html.escape(title)}</h2><pre>{html.escape(code)}</pre>"
