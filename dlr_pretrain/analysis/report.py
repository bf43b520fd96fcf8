"""The report of many runs, and that of one run: tables, figures, and one page with all of it."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Sequence
from glob import glob, has_magic
from pathlib import Path

import pandas as pd

from dlr_pretrain.analysis import tune
from dlr_pretrain.analysis.figures import IMAGES, LOSS, curves, draw, draw_paths, draw_rates
from dlr_pretrain.analysis.page import Code, Page
from dlr_pretrain.analysis.paper import TASKS, facts
from dlr_pretrain.analysis.runs import Spread, read_runs
from dlr_pretrain.analysis.tables import Table, run_tables
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.text import loading

FORMATS = {"md": Table.markdown, "csv": Table.csv, "tex": Table.latex}


def write_reports(places: Sequence[str], output: Path, command: str) -> list[str]:
    """Write the report of everything in ``places`` into ``output``, and return the remarks.

    ``index.html`` and ``report.md`` have everything; ``tables/`` has each table as Markdown, CSV and LaTeX;
    ``figures/`` has each figure in the formats of ``IMAGES``. Files that an earlier report has left are removed.
    ``places`` are run directories, folders of them, JSON of ``evaluate.py --output``, folders of ``tune.py``, or globs.
    """
    places, accuracies, compared = _take(places)
    (output / "tables").mkdir(parents=True, exist_ok=True)
    written = output / ".report_files"
    for name in written.read_text(encoding="utf-8").splitlines() if written.exists() else []:
        (output / "/".join(Path(name).parts[-2:])).unlink(missing_ok=True)
    tables, pictures = [*tune.tables(compared)], [*draw_rates(compared, output / "figures")]
    remarks = []
    if places:
        found = read_runs(places)
        remarks = found.remarks
        tables += run_tables(found)
        pictures += draw(found, output / "figures")
    tables += accuracy_table(accuracies)
    for table in tables:
        for kind, render in FORMATS.items():
            (output / "tables" / f"{table.name}.{kind}").write_text(render(table), encoding="utf-8")
    names = [f"tables/{table.name}.{kind}" for table in tables for kind in FORMATS]
    names += [f"figures/{picture.name}.{kind}" for picture in pictures for kind in IMAGES]
    written.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    parts = [*tables, *pictures, Code("Made by", command)]
    Page("Pre-training runs", remarks, parts).write(output, output / "figures", "index")
    return remarks


def _take(places: Sequence[str]) -> tuple[list[str], dict[str, dict], list[dict]]:
    """The places of runs, the results of evaluate.py by their files, and the comparisons of tune.py."""
    runs, files = [], {}
    for place in places:
        paths = sorted(map(Path, glob(place))) if has_magic(place) and not Path(place).exists() else [Path(place)]
        found = [[path] if path.suffix == ".json" else sorted(path.glob("tune.json")) for path in paths]
        found = [own or (sorted(path.glob("*/tune.json")) if path.name == "tune" else [])
                 for own, path in zip(found, paths, strict=True)]  # fmt: skip
        if not found or not all(found):
            runs.append(place)
        files |= {path.resolve(): path for own in found for path in own}
    accuracies, compared = {}, []
    for path in files.values():
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
            if path.name == "tune.json":
                design, trials = tune.Design(**read["design"]), [tune.Trial(**trial) for trial in read["trials"]]
                compared.append(read | tune.compare(design, trials))
            else:
                accuracies[str(path)] = read | {"n": len(read["checkpoints"])}
        except (OSError, ValueError, LookupError, TypeError) as error:
            what = "tune.py" if path.name == "tune.json" else "evaluate.py --output"
            raise UserError(f"{path} cannot be read as JSON of scripts/{what}: {error}") from None
    return runs, accuracies, compared


def accuracy_table(files: dict[str, dict]) -> Iterator[Table]:
    """Accuracies in percent that evaluate.py has measured, beside the paper's."""
    rows = facts("downstream_1b").to_dict("records")
    notes = ["The paper's convention is as_in_paper."]
    for path, found in files.items():
        told = found["tasks"] | ({"average": found["average"]} if set(TASKS) <= set(found["tasks"]) else {})
        cells = {
            task: Spread(100 * of["acc"], 100 * (of.get("std") or math.nan), found["n"]) for task, of in told.items()
        }
        rows.append({"stage": path, "method": found["checkpoints"][0]["folder"]} | cells)
        limit = f", the first {found['limit']:,} documents" if found["limit"] else ""
        setting = f"contexts of {found['context_length']:,} tokens, {found['dtype']}, data: {found['data']}{limit}"
        same = ", ".join(task for task, of in told.items() if of.get("distinct_choices") == 1)
        setting += f"; always the same choice in {same}" if same else ""
        notes.append(f"{path}: convention {found['convention']}, {setting}")
    if files:
        yield Table("zero_shot", "Zero-shot accuracy, % (the paper's at 1B)", pd.DataFrame(rows), notes)


def write_report(run_dir: Path) -> None:
    """Write ``report.md``, ``report.html`` and ``plots/`` of a run into its directory."""
    found = read_runs([run_dir])
    plots, folded = run_dir / "plots", run_dir / "folded"
    loss = curves(found, plots, "loss", "train/loss", "train/tokens", LOSS)
    parts = [*run_tables(found), loss, *draw_paths(found, plots)]
    if (folded / "config.json").exists():
        parts.append(Code("The folded checkpoint", loading(str(folded), trust=any(folded.glob("modeling_*.py")))))
    parts.append(Code("Made by", shlex.join(found.runs.start.iloc[0].get("command", []))))
    Page(found.runs["name"].iloc[0], found.remarks, parts).write(run_dir, plots)
