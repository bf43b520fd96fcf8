"""The report of many runs: tables in three formats, figures in two, and one page with all of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from dlr_pretrain.analysis import layouts
from dlr_pretrain.analysis.costs import costs
from dlr_pretrain.analysis.drawing import IMAGES, Picture
from dlr_pretrain.analysis.figures import draw
from dlr_pretrain.analysis.groups import Group, differing_text, grouped
from dlr_pretrain.analysis.measured import sft_table, system, take_measured, zero_shot_table
from dlr_pretrain.analysis.page import page
from dlr_pretrain.analysis.paths_tables import draw_probed, paths_table
from dlr_pretrain.analysis.records import RunRecord, find_runs
from dlr_pretrain.analysis.tables import Table, comma_separated, latex, markdown
from dlr_pretrain.analysis.tuning_tables import comparison_tables, draw_comparisons
from dlr_pretrain.util.errors import UserError

FORMATS = {"md": markdown, "csv": comma_separated, "tex": latex}
OWN = re.compile(r"tables/\w+\.(md|csv|tex)|figures/[\w.+-]+\.(png|svg)")  # names that a report gives its files


def write_reports(places: Sequence[str], output: Path, command: str) -> list[str]:
    """Write the report of everything in ``places`` into ``output``, and return the remarks.

    ``index.html`` and ``report.md`` have everything; ``tables/`` has each table as Markdown, CSV and LaTeX;
    ``figures/`` has each figure as PNG and SVG; ``.report_files`` lists the files of both folders, so that the next
    report can remove those that it does not have. ``places`` are run directories, folders of them, globs, JSON of
    ``evaluate.py --output`` and folders of ``sft.py`` and ``tune.py``.
    """
    places, others = take_measured(places)
    runs, remarks = find_runs(places)
    if not runs and not others:
        raise UserError("there is nothing to report: no run could be read. " + " ".join(remarks))
    groups, duplicates = grouped(runs)
    found, unknown = costs(groups)
    remarks += [*duplicates, *what_to_know(runs, groups), *unknown]
    tables = [
        *comparison_tables(others.compared),
        layouts.pairs_table(groups),
        layouts.groups_table(groups, found),
        layouts.table_1(groups),
        layouts.rank_table(groups),
        *(layouts.ablation(groups, name) for name in layouts.ABLATIONS),
        layouts.milestones(groups),
        *paths_table(groups),
        system(groups, found),
        zero_shot_table(others.zero_shot),
        sft_table(others.tuned),
        layouts.runs_table(runs),
    ]
    pictures = draw_comparisons(others.compared, output / "figures")
    pictures += draw(groups, found, output / "figures")
    pictures += draw_probed(groups, output / "figures")
    _write(tables, pictures, remarks, output, command, _summary(runs, groups))
    _forget_earlier(output, [f"tables/{t.name}" for t in tables] + [f"figures/{p.name}" for p in pictures])
    return remarks


def _forget_earlier(output: Path, names: Sequence[str]) -> None:
    """Remove tables and figures that only an earlier report had: readers would take them for parts of this one."""
    record = output / ".report_files"
    before = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
    now = [f"{name}.{suffix}" for name in names for suffix in (FORMATS if name.startswith("tables/") else IMAGES)]
    for name in set(before) - set(now):
        if OWN.fullmatch(name):
            (output / name).unlink(missing_ok=True)
    record.write_text("".join(f"{name}\n" for name in now), encoding="utf-8")


def _summary(runs: Sequence[RunRecord], groups: Sequence[Group]) -> str:
    finished = sum(run.final is not None for run in runs)
    scales = ", ".join(dict.fromkeys(group.scale for group in groups))
    return f"{len(runs)} runs, {finished} of them finished, in {len(groups)} groups of equal settings; {scales}."


def what_to_know(runs: Sequence[RunRecord], groups: Sequence[Group]) -> list[str]:
    """Remarks on what means would hide: unfinished and diverged runs, groups that differ in a key, mixed code or
    evaluation text, damaged records."""
    remarks = []
    for run in runs:
        remarks += [f"{run.name}: {remark}" for remark in run.remarks]
        if not run.metrics:
            remarks.append(f"{run.name} has not taken a step")
        elif not run.final:
            remarks.append(f"{run.name} is unfinished, step {run.step:,} of {run.planned:,}: in curves, not in means")
        elif run.final.get("eval/loss") is None:
            remarks.append(f"{run.name} diverged after step {run.step:,}: it counts as infinite in means")
        if run.metrics and (skipped := run.metrics[-1].get("train/skipped")):
            remarks.append(f"{run.name} has left out {skipped} updates that were not finite")
    for group in groups:
        if group.variant:
            remarks.append(f"{group.method} at {group.scale} with {group.variant} is a group of its own")
        if len(group.codes) > 1:
            remarks.append(f"{group.label} at {group.scale} was trained by different code: {', '.join(group.codes)}")
    for scale in dict.fromkeys(group.scale for group in groups):
        if other := differing_text(run for group in groups if group.scale == scale for run in group.runs):
            keys = ", ".join(other)
            remarks.append(f"evaluations at {scale} are not all of the same text ({keys}): their losses do not compare")
    return remarks


def _write(
    tables: Sequence[Table],
    pictures: Sequence[Picture],
    remarks: Sequence[str],
    output: Path,
    command: str,
    summary: str,
) -> None:
    title = "Pre-training runs"
    (output / "tables").mkdir(parents=True, exist_ok=True)
    for table in tables:
        for suffix, render in FORMATS.items():
            (output / "tables" / f"{table.name}.{suffix}").write_text(render(table), encoding="utf-8")
    listed = "\n".join(f"* {remark}" for remark in remarks)
    images = "\n\n".join(f"![{p.name}](figures/{p.name}.png)\n\n{p.caption}" for p in pictures)
    sections = [
        f"# {title}",
        summary,
        f"## To know before reading on\n\n{listed}" if remarks else "",
        *(markdown(table) for table in tables if table.ours),
        f"## Figures\n\n{images}" if pictures else "",
        *(markdown(table) for table in tables if not table.ours),
        f"Made by `{command}`",
    ]
    (output / "report.md").write_text("\n\n".join(s.strip() for s in sections if s) + "\n", encoding="utf-8")
    whole = page(title, summary, remarks, pictures, output / "figures", tables, command)
    (output / "index.html").write_text(whole, encoding="utf-8")
