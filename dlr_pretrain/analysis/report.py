"""Reports of one run or of many, as Markdown and as an HTML page that needs neither server nor network."""

import base64
import html
import json
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

import pandas as pd

from dlr_pretrain.analysis.choice import comparisons, difference_table, verdicts
from dlr_pretrain.analysis.figures import Picture, draw, draw_rates, draw_run
from dlr_pretrain.analysis.runs import Runs, read_runs
from dlr_pretrain.analysis.tables import Table, headline, run_tables, table
from dlr_pretrain.util.files import claim, read_json, write_durably
from dlr_pretrain.util.secrets import redact
from dlr_pretrain.util.text import markdown

DOCUMENT = r"""\documentclass{article}
\usepackage[utf8]{inputenc}
\usepackage[T1]{fontenc}
\usepackage{textcomp,booktabs,graphicx}
\usepackage[landscape,margin=15mm]{geometry}
\begin{document}
%s
\end{document}
"""
# What a spreadsheet takes for a formula. Signed numbers, with or without deviation and count, do not match.
FORMULA = re.compile(r"[=@]|[+-](?![\d.,]+(e[+-]?\d+)?( ± [\d.,]+)?( \(\d+\))?$)")
NUMBERS = ["name", "scale", "label", "seed", "state", "step", "tokens", "loss", "ppl", "convention", "speed", "mfu",
           "memory", "machine"]  # fmt: skip


@dataclass(frozen=True)
class Section:
    """A heading with ``lines`` of its own, for the parts up to the next one. Sections fill the table of contents."""

    name: str
    title: str
    lines: Sequence[str]

    def markdown(self) -> str:
        return "\n".join([f"# {markdown(self.title)}", "", *(f"* {markdown(line)}" for line in self.lines)])


@dataclass(frozen=True)
class Listing:
    """A text that a page shows as it is."""

    title: str
    text: str

    def markdown(self) -> str:
        return f"## {markdown(self.title)}\n\n{textwrap.indent(redact(self.text), '    ')}"

    def html(self) -> str:
        text = html.escape(redact(self.text))
        return f"<details><summary>{html.escape(self.title)}</summary><pre>{text}</pre></details>"


Part = Table | Picture | Section | Listing
More = Callable[[Runs, Path], Sequence[Part]]  # from the runs, and the folder for figures


def write_tables(tables: Sequence[Table], folder: Path) -> None:
    """Write each table as CSV and LaTeX, and ``tables.tex``, a document that has all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for one in tables:
        write_csv(one.frame.set_axis(one.header, axis="columns"), folder / f"{one.name}.csv")
        (folder / f"{one.name}.tex").write_text(one.latex(), encoding="utf-8")
    listed = "\n".join(f"\\input{{{one.name}.tex}}" for one in tables)
    (folder / "tables.tex").write_text(DOCUMENT % listed, encoding="utf-8")


def write_csv(frame: pd.DataFrame, path: Path) -> None:
    """Write a table in which a spreadsheet takes no name for a formula."""
    frame.map(no_formula).rename(columns=no_formula).to_csv(path, index=False)


def no_formula(cell: object) -> object:
    return f"'{cell}" if isinstance(cell, str) and FORMULA.match(cell) else cell


def write_reports(
    places: Sequence[str | Path], output: Path, command: str, of_set: str = "", more: More = lambda *_: ()
) -> list[str]:
    """Write the report of the runs in ``places`` into ``output``; returns lines for a terminal. See ``read_runs``.

    ``report.html`` and ``report.md`` have everything. ``tables/`` has each table as CSV and LaTeX, ``figures/`` each
    figure in the formats of ``figures.IMAGES``, ``numbers.csv`` the numbers of each run at full precision, and
    ``choice.json`` what ``choice.comparisons`` returns. ``more`` gives the page's last parts.
    """
    claim(output, "report.py")
    all_runs = read_runs(places, of_set)
    compared = list(comparisons(all_runs))
    chosen = [difference_table(compared)] if compared else []
    tables, added = [*chosen, *run_tables(all_runs)], more(all_runs, output / "figures")
    write_tables([*tables, *(part for part in added if isinstance(part, Table))], output / "tables")
    rates = [picture for one in compared for picture in draw_rates(one, output / "figures")]
    parts: list[Part] = [*chosen, *rates, *tables[len(chosen) :], *draw(all_runs, output / "figures"), *added]
    title = f"Pre-training runs, evaluated on {of_set}" if of_set else "Pre-training runs"
    write_page(title, [*verdicts(compared), *all_runs.remarks], parts, command, output)
    write_csv(all_runs.runs[NUMBERS], output / "numbers.csv")
    write_durably(output / "choice.json", json.dumps({"command": redact(command), "scales": compared}, indent=1))
    lines = [f"note: {remark}" for remark in all_runs.remarks] + [one.markdown() for one in chosen]
    return [*lines, f"report      {output / 'report.html'}", f"numbers     {output / 'numbers.csv'}"]


def chosen_runs(output: Path) -> list[str]:
    """For each method of a report whose rate is chosen, the first run at that rate; none without a report."""
    if not (output / "choice.json").exists():
        return []
    scales = json.loads((output / "choice.json").read_text(encoding="utf-8"))["scales"]
    return [
        next(trial["run"] for trial in one["trials"] if (trial["method"], trial["lr"]) == (method, choice["lr"]))
        for one in scales for method, choice in one["chosen"].items() if choice["lr"] is not None
    ]  # fmt: skip


def write_report(run_dir: Path) -> None:
    """Write ``report.md``, ``report.html`` and ``plots/`` of a run into its directory."""
    all_runs = read_runs([run_dir])
    start = all_runs.runs.start.iloc[0]
    files = [{"For": use, "Files": names} for use, names in start.get("files", {}).items()]
    parts: list[Part] = [headline(all_runs), *draw_run(all_runs, run_dir / "plots")]
    parts += _sample(run_dir / "folded" / "sample.json")
    parts += [table("files", "What was read", files)] if files else []
    parts += [Listing("Configuration", (run_dir / "config.yaml").read_text(encoding="utf-8"))]
    write_page(all_runs.runs["name"].iloc[0], all_runs.remarks, parts, shlex.join(start.get("command", [])), run_dir)


def _sample(path: Path) -> Iterator[Table]:
    """The sample that the export has written, if any."""
    if path.exists():
        written = read_json(path, {"prompt": str, "continuation": str})
        rows = [{"": name, "Text": " ".join(written[name].split())} for name in written]
        notes = ["The prompt is from the validation text. The model continued it at temperature 0.8, top-p 0.95."]
        yield table("sample", "A sample", rows, notes)


def write_page(
    title: str, remarks: Sequence[str], parts: Sequence[Part], command: str, folder: Path, name: str = "report"
) -> None:
    """Write ``<name>.md`` and ``<name>.html`` into ``folder``; the pictures lie in or below it.

    ``remarks`` are what a reader must know first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command, remarks = redact(command), [*map(redact, remarks)]
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    sections = [part for part in parts if isinstance(part, Section)]
    links = [f'<li><a href="#{section.name}">{html.escape(section.title)}</a></li>' for section in sections]
    page = template.substitute(
        title=html.escape(title),
        remarks=_list(remarks),
        contents="".join(links),
        body="\n".join(map(_html, parts)),
        command=html.escape(command),
    )
    write_durably(folder / f"{name}.html", page)
    texts = [f"# {markdown(title)}", "\n".join(f"* {markdown(remark)}" for remark in remarks)]
    texts += [_link(part, folder) if isinstance(part, Picture) else part.markdown() for part in parts]
    texts += [f"## Made by\n\n{textwrap.indent(command, '    ')}"]
    write_durably(folder / f"{name}.md", "\n\n".join(text.strip() for text in texts if text) + "\n")


def _link(picture: Picture, folder: Path) -> str:
    return f"![{picture.path.stem}]({picture.path.relative_to(folder)})\n\n{markdown(picture.caption)}"


def _list(lines: Sequence[str]) -> str:
    return "".join(f"<li>{html.escape(line)}</li>" for line in lines)


def _html(part: Part) -> str:
    if isinstance(part, Section):
        return f'<h1 id="{part.name}">{html.escape(part.title)}</h1><ul>{_list(part.lines)}</ul>'
    if isinstance(part, Listing):
        return part.html()
    if isinstance(part, Table):
        title = f'<h2 id="table-{part.name}">{html.escape(part.title)}</h2>'
        return f"{title}<div class=scroll>{part.html()}</div><ul>{_list(part.notes)}</ul>"
    image = base64.b64encode(part.path.read_bytes()).decode()
    caption = f"<figcaption>{html.escape(part.caption)}</figcaption>"
    alt = html.escape(part.caption or part.path.stem)
    small = " class=small" if part.small else ""
    shown = f'<img alt="{alt}" src="data:image/png;base64,{image}">'
    return f'<figure id="{part.path.stem}"{small}>{shown}{caption}</figure>'
