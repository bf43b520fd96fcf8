"""Reports as Markdown and as one page of HTML that needs neither server nor network: of many runs, and of one."""

from __future__ import annotations

import base64
import html
import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template

from dlr_pretrain.analysis.figures import LOSS, Picture, curves, draw, draw_paths
from dlr_pretrain.analysis.paper import TASKS, facts
from dlr_pretrain.analysis.runs import read_runs
from dlr_pretrain.analysis.tables import Table, run_tables, table
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import write_durably
from dlr_pretrain.util.text import loading

FIGURES_OF_A_RUN = ["name", "scale", "label", "seed", "state", "step", "tokens", "loss", "ppl", "convention", "speed",
                    "mfu", "memory", "machine"]  # fmt: skip
Part = Table | Picture | tuple[str, str]  # a table, a figure, or a title and code


def write_reports(places: Sequence[str], output: Path, command: str) -> list[str]:
    """Write the report of everything in ``places`` into ``output``, and return the remarks.

    ``index.html`` and ``report.md`` have everything; ``tables/`` has each table as Markdown, CSV and LaTeX, and the
    numbers of each run in all digits as ``runs.csv``; ``figures/`` has each figure in the formats of
    ``figures.IMAGES``. ``places`` are run directories, folders of them, globs of either, and JSON of ``evaluate.py
    --output``.
    """
    files = [Path(place) for place in places if Path(place).suffix == ".json"]
    of_runs = [place for place in places if Path(place) not in files]
    (output / "tables").mkdir(parents=True, exist_ok=True)
    tables, pictures, remarks = [*accuracy_table(files)], [], []
    if of_runs:
        found = read_runs(of_runs)
        tables, remarks = [*run_tables(found), *tables], found.remarks
        pictures = [*draw(found, output / "figures")]
    for one in tables:
        (output / "tables" / f"{one.name}.md").write_text(one.markdown(), encoding="utf-8")
        (output / "tables" / f"{one.name}.tex").write_text(one.latex(), encoding="utf-8")
        one.frame.to_csv(output / "tables" / f"{one.name}.csv", index=False)
    if of_runs:
        found.runs[FIGURES_OF_A_RUN].to_csv(output / "tables" / "runs.csv", index=False)
    parts = [*tables, *pictures, ("Made by", command)]
    write_page("Pre-training runs", remarks, parts, output, output / "figures", "index")
    return remarks


def write_report(run_dir: Path) -> None:
    """Write ``report.md``, ``report.html`` and ``plots/`` of a run into its directory."""
    found = read_runs([run_dir])
    plots, folded = run_dir / "plots", run_dir / "folded"
    loss = curves(found, plots, "loss", "train/loss", "train/tokens", LOSS)
    parts: list[Part] = [*run_tables(found), loss, *draw_paths(found, plots)]
    if (folded / "config.json").exists():
        parts.append(("The folded checkpoint", loading(str(folded), trust=any(folded.glob("modeling_*.py")))))
    parts.append(("Made by", shlex.join(found.runs.start.iloc[0].get("command", []))))
    write_page(found.runs["name"].iloc[0], found.remarks, parts, run_dir, plots)


def accuracy_table(files: Sequence[Path]) -> Iterator[Table]:
    """Accuracies in percent that evaluate.py has measured, beside the paper's; nothing without files."""
    rows = facts("downstream_1b").to_dict("records")
    notes = ["The paper's convention is as_in_paper."]
    for path in files:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            told = found["tasks"] | ({"average": found["average"]} if set(TASKS) <= set(found["tasks"]) else {})
            n, limit = len(found["checkpoints"]), found["limit"]
            row = {"stage": str(path), "method": found["checkpoints"][0]["folder"]}
            for task, of in told.items():
                deviation = f" ± {100 * of['std']:.2f}" if of.get("std") else ""
                row[task] = f"{100 * of['acc']:.2f}{deviation} ({n})"
            rows.append(row)
            same = ", ".join(task for task, of in told.items() if of.get("distinct_choices") == 1)
            notes.append(
                f"{path}: convention {found['convention']}, contexts of {found['context_length']:,} tokens, "
                f"{found['dtype']}, data: {found['data']}{f', the first {limit:,} documents' if limit else ''}"
                f"{f'; always the same choice in {same}' if same else ''}"
            )
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(f"{path} cannot be read as JSON of scripts/evaluate.py --output: {error}") from None
    if files:
        yield table("zero_shot", "Zero-shot accuracy, % (the paper's at 1B)", rows, notes)


# ----------------------------------------------------------------------------------------------------
# One page


def write_page(
    title: str, remarks: Sequence[str], parts: Sequence[Part], folder: Path, figures: Path, name: str = "report"
) -> None:
    """Write ``report.md`` and ``<name>.html`` into ``folder``; pictures are in ``figures``, in or below it.

    ``remarks`` are what a reader must know first.
    """
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
