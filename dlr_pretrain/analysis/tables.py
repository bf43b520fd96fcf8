"""Tables: their formats, and those of a report. Cells are text; a missing value shows as –."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import pandas as pd

from dlr_pretrain.analysis.runs import NONE, Runs, differing, digits, ended, spread
from dlr_pretrain.util.text import amount, markdown, markdown_table, one_line

CONVENTION = (
    "PPL is the unbiased perplexity after the last update. GaLore-style PPL is what scripts of the GaLore family "
    "print, and what published tables show: the loss of n batches is divided by n + 1. It needs enough text."
)
BOLD = re.compile(r"\*\*([^*<&]+)\*\*")  # within a cell of HTML or LaTeX
FITTING = r"\ifdim\width>\linewidth\linewidth\else\width\fi"  # in LaTeX: at most as wide as the text


@dataclass(frozen=True)
class Table:
    """``frame`` has text in each cell, **bold** as in Markdown. Its columns may have two levels.

    ``name`` is the stem of the table's files.
    """

    name: str
    title: str
    frame: pd.DataFrame
    notes: Sequence[str] = ()

    @property
    def header(self) -> list[str]:
        """The columns, each on one line."""
        return [column if isinstance(column, str) else " ".join(filter(None, column)) for column in self.frame]

    def markdown(self) -> str:
        rows = markdown_table([*map(markdown, self.header)], self.frame.map(markdown).to_numpy().tolist())
        return "\n".join([f"## {markdown(self.title)}", "", rows, "", *(f"* {markdown(note)}" for note in self.notes)])

    def html(self) -> str:
        return BOLD.sub(r"<strong>\1</strong>", self.frame.to_html(index=False, border=0))

    def latex(self) -> str:
        """A table environment for booktabs and graphicx, which shrinks a table that is wider than the text."""
        whole = self.frame.to_latex(index=False, escape=True, caption=self.title, label=f"tab:{self.name}",
                                    multicolumn_format="c")  # fmt: skip
        whole = whole.replace(r"\begin{tabular}", rf"\centering\resizebox{{{FITTING}}}{{!}}{{\begin{{tabular}}")
        whole = whole.replace(r"\end{tabular}", r"\end{tabular}}")
        return BOLD.sub(r"\\textbf{\1}", whole).replace("Δ", r"$\Delta$")  # the other signs are known to LaTeX


def table(name: str, title: str, rows: Sequence[dict], notes: Sequence[str] = ()) -> Table:
    """A table of ``rows``, without the columns that are empty. A key of two parts is a column of two levels."""
    frame = pd.DataFrame(rows, dtype=object).fillna(NONE).map(lambda cell: one_line(str(cell)))
    if isinstance(frame.columns[0], tuple):
        frame.columns = pd.MultiIndex.from_tuples(frame.columns)
    return Table(name, title, frame.loc[:, (frame != NONE).any()], notes)


def varying(name: str, title: str, rows: Sequence[dict], notes: Sequence[str] = ()) -> Table:
    """A table of ``rows`` without the columns that have one value in all of several rows, which a note gives."""
    whole = table(name, title, rows, notes)
    constant = [column for column in whole.frame if len(rows) > 1 and whole.frame[column].nunique() == 1]
    listed = ", ".join(f"{column} {whole.frame[column].iloc[0]}" for column in constant)
    notes = [f"In all rows: {listed}.", *notes] if constant else notes
    return Table(name, title, whole.frame.drop(columns=constant), notes)


# ----------------------------------------------------------------------------------------------------
# Of runs


def run_tables(all_runs: Runs) -> list[Table]:
    """All tables of runs, the most important ones first."""
    return [groups_table(all_runs), *settings_table(all_runs), runs_table(all_runs)]


def headline(all_runs: Runs) -> Table:
    """The result of a single run, and what it took."""
    run = all_runs.runs.iloc[0]
    results = {
        "Model": f"{run.scale}, {run.label}, {_amount(run.parameters, 3)} parameters, {run.shared['precision.name']}",
        "Text": run.start.get("text", NONE),
        "Steps": f"{run.step:,} of {run.planned:,}, {amount(run.tokens)} tokens",
        "Evaluation loss": NONE if run.state == "unfinished" else digits(run.loss, ".4f"),
        "Perplexity": digits(run.ppl, ",.2f"),
        "Perplexity (GaLore-style)": digits(run.convention, ",.2f"),
        "Evaluated on": NONE if pd.isna(run.evaluated) else f"{run.evaluated:,.0f} tokens of validation text",
        "Training took": f"{timedelta(seconds=round(3600 * (run.hours if run.step else 0)))} on {run.machine}",
        "Speed": NONE if pd.isna(run.speed) else f"{run.speed:,.0f} tokens/s",
        "MFU": digits(run.mfu, ".1%"),
        "Memory": NONE if pd.isna(run.memory) else f"{run.memory:.2f} GB at its peak, per GPU or process",
        "Code": ", ".join(run.code),
        "Versions": ", ".join(f"{name} {version}" for name, version in run.start.get("packages", {}).items()),
    }
    rows = [{"": name, "Result": value} for name, value in results.items() if value != NONE]
    notes = ["The evaluation is of validation text after the last update, in nats per token."]
    return table("headline", "Result", rows, notes + _about_convention(all_runs))


def groups_table(all_runs: Runs) -> Table:
    """A row for each group: its results, cost and setting. At each scale, the lowest perplexity is first."""

    def place(pair: tuple[pd.Series, pd.DataFrame]) -> tuple:
        mean = ended(pair[1]).ppl.mean()  # infinite if a run diverged
        return pair[0]["size"], pair[0].scale, math.inf if math.isnan(mean) else mean

    rows, order = [], sorted(all_runs.groups(), key=place)
    sets = dict.fromkeys(name for one in all_runs.runs.sets for name in one if name != all_runs.of_set)
    for group, runs in order:
        rows.append({
            "Scale": group.scale,
            "Method": group.label,
            "Seeds": ", ".join(runs.seed[runs.state == "finished"]),
            "Loss": spread(ended(runs).loss, ".4f"),
            "PPL": spread(ended(runs).ppl),
            "PPL (GaLore-style)": spread(ended(runs).convention),
            **{f"PPL {name}": spread(one.get(name, math.nan) for one in ended(runs).sets) for name in sets},
            "Tokens": _amount(runs.tokens.max()),
            "Parameters": _amount(runs.parameters.max()),
            "FLOPs": digits(runs.flops.max(), ".2e"),
            "Precision": group.shared["precision.name"],
            "Packing": group.shared["data.packing"],
            "lr": digits(group.lr, "g"),
        })  # fmt: skip
    notes = ["Mean ± standard deviation (seeds). Tokens include padding, up to the last update."]
    return varying("groups", "What was trained", rows, notes + _about_convention(all_runs))


def _about_convention(all_runs: Runs) -> list[str]:
    return [CONVENTION] if all_runs.runs.convention.notna().any() else []


def _amount(value: float, places: int = 4) -> str:
    return NONE if pd.isna(value) else amount(value, places)


def settings_table(all_runs: Runs) -> Iterator[Table]:
    """The keys in which groups differ, with the values of each; nothing for a single group."""
    settings = {f"{group.scale} {group.label}": group.shared for group, _ in all_runs.groups()}
    keys = differing(settings.values())
    if keys := [key for key in keys if key != "dlr.enabled" or "dlr.name" not in keys]:
        rows = [{"Key": key} | {name: str(shared.get(key, NONE)) for name, shared in settings.items()} for key in keys]
        yield table("settings", "What differs", rows)


def runs_table(all_runs: Runs) -> Table:
    """Each run: its progress, and what it took."""
    rows = [
        {"Run": run.folder, "Seed": run.seed, "State": run.state, "Steps": f"{run.step:,} of {run.planned:,}",
         "Loss": digits(run.loss, ".4f"), "PPL": digits(run.ppl, ",.2f"), "tokens/s": digits(run.speed, ",.0f"),
         "MFU": digits(run.mfu, ".1%"), "Peak GB": digits(run.memory, ".2f"), "Machine": run.machine}
        for run in all_runs.runs.rename(columns={"name": "folder"}).itertuples()
    ]  # fmt: skip
    notes = [
        "Compare speed and memory only on the same machine. Peak GB is per GPU, or process on a CPU, in 1e9 bytes."
    ]
    if all_runs.runs.speed.notna().any():
        about = "tokens/s is the median, since the last start, of means over 20 steps without evaluation and saving"
        notes = [f"{about}; it includes padding.", *notes]
    return varying("runs", "Runs", rows, notes)
