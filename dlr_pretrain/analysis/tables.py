"""Tables of a report, as functions of the frames of runs, and their text in Markdown, CSV, LaTeX and HTML."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from dlr_pretrain.analysis.paper import facts, marks
from dlr_pretrain.analysis.runs import Runs, Spread, differences, differing, ended, spread
from dlr_pretrain.util.text import table as markdown_table

FORMATS = {"lr": "g", "Loss": ".4f", "Δ loss": "+.4f", "Δ PPL": "+.2f", "Δ convention": "+.2f", "Δ paper": "+.2f",
           "tokens/s": ",.0f", "MFU": ".3f", "PFLOPs": ",.3g", "M tokens": ",.4g", "M parameters": ",.4g",
           "rho": ".3f", "mean of ratios": ".3f", "isotropic": ".3f", "cosine": "+.3f"}  # fmt: skip
CONVENTION = (
    "PPL is the unbiased perplexity after the last update. PPL (convention) is what scripts of the GaLore family "
    "print, as in published tables: the loss of n batches is divided by n + 1. It needs enough text."
)
PATHS = (
    "rho is the mean norm of beta R g, the gradient that reaches a latent through the residual, divided by that of "
    "B^T g, which reaches it through B; the mean of ratios is over single positions. The isotropic value (dashed in "
    "figures) is that of a gradient without a preferred direction: |beta R^T|_F / |B|_F."
)


@dataclass(frozen=True)
class Table:
    """``frame`` has a ``Spread``, a number, text or nothing in each cell; ``name`` is the stem of the table's files."""

    name: str
    title: str
    frame: pd.DataFrame
    notes: Sequence[str] = ()

    def shown(self) -> pd.DataFrame:
        """The cells as text, without columns that have none."""
        return self.frame.dropna(axis=1, how="all").apply(
            lambda column: column.map(lambda cell: text(cell, FORMATS.get(column.name, ",.2f")))
        )

    def markdown(self) -> str:
        shown = self.shown()
        numeric = [i for i, name in enumerate(shown) if not self.frame[name].map(type).isin([str]).any()]
        rows = markdown_table(list(shown), shown.to_numpy().tolist(), right=numeric)
        return "\n".join([f"## {self.title}", "", rows, "", *(f"* {note}" for note in self.notes)])

    def csv(self) -> str:
        """All digits; columns for std, n and diverged seeds follow a column that has them."""
        columns = {}
        for name, cells in self.frame.items():
            columns[name] = [cell.mean if isinstance(cell, Spread) else cell for cell in cells]
            for part in ("std", "n", "diverged"):
                values = pd.Series([getattr(cell, part, math.nan) for cell in cells])
                if values.any(skipna=True):
                    columns[f"{name}: {part}"] = values
        return pd.DataFrame(columns).to_csv(index=False)

    def latex(self) -> str:
        """A table environment for booktabs."""
        whole = self.shown().to_latex(index=False, escape=True, caption=self.title, label=f"tab:{self.name}")
        for sign, command in {"±": r"$\pm$", "Δ": r"$\Delta$", "–": "--", "…": r"\ldots{}"}.items():
            whole = whole.replace(sign, command)
        return whole

    def html(self) -> str:
        return self.shown().to_html(index=False, border=0)


def text(cell: object, spec: str) -> str:
    """A cell as text; means and numbers of type float are in the format ``spec``, – stands for nothing."""
    if isinstance(cell, Spread):
        return cell.text(spec)
    if isinstance(cell, str):
        return cell
    return "–" if cell is None or math.isnan(cell) else f"{cell:{spec if isinstance(cell, float) else ','}}"


def final(of: pd.DataFrame, name: str) -> Spread | None:
    """A column over the runs of a group that have finished or diverged."""
    return spread(ended(of)[name])


# ----------------------------------------------------------------------------------------------------
# Ours


def run_tables(found: Runs) -> list[Table]:
    """All tables of runs, those that matter most first."""
    own = [*pairs_table(found), groups_table(found), *paper_tables(found), *paths_table(found)]
    return [*own, speed_table(found), *settings_table(found), runs_table(found)]


def groups_table(found: Runs) -> Table:
    """A row for each group: its setting, cost and results."""
    rows = [
        {
            "Scale": of.scale.iloc[0], "Method": of.label.iloc[0],
            "Seeds": ", ".join(map(str, of.seed[of.state == "finished"])),
            "PPL": final(of, "ppl"), "PPL (convention)": final(of, "convention"), "M tokens": of.tokens.max() / 1e6,
            "M parameters": of.parameters.max() / 1e6, "PFLOPs": of.flops.max() / 1e15,
            "Precision": of.config.iloc[0]["precision"]["name"], "Packing": of.config.iloc[0]["data"]["packing"],
            "lr": of.config.iloc[0]["train"]["lr"],
        }
        for of in found.groups()
    ]  # fmt: skip
    notes = [f"Mean ± standard deviation (seeds). {CONVENTION} Tokens count padding, up to the last update."]
    return Table("groups", "What was trained", pd.DataFrame(rows), notes)


def settings_table(found: Runs) -> Iterator[Table]:
    """The keys in which groups differ, with the values of each; nothing of a single group."""
    groups = found.groups()
    settings = [of.shared.iloc[0] for of in groups]
    if keys := differing(settings):
        rows = [[key, *(str(setting.get(key, "absent")) for setting in settings)] for key in keys]
        names = [f"{of.scale.iloc[0]} {of.label.iloc[0]}" for of in groups]
        yield Table("settings", "What differs", pd.DataFrame(rows, columns=["Key", *names]))


def pairs(found: Runs) -> list[tuple[pd.DataFrame, pd.DataFrame]]:
    """Pairs of groups (without DLR, with DLR) that differ in nothing else."""
    plain = {of.pair.iloc[0]: of for of in found.groups() if of.dlr.iloc[0] == "off"}
    return [(plain[k], of) for of in found.groups() if of.dlr.iloc[0] == "on" and (k := of.pair.iloc[0]) in plain]


def pairs_table(found: Runs) -> Iterator[Table]:
    """Each backbone without and with DLR, all else equal, and the difference by seed; nothing without such a pair."""
    theirs = facts("table1").set_index(["scale", "method"]).ppl
    rows, notes = [], [f"Differences are between runs with the same seed: mean ± standard deviation. {CONVENTION}"]
    for a, b in pairs(found):
        scale, base, label = b.scale.iloc[0], b.base.iloc[0], b.label.iloc[0]
        by_seed = [ended(of).set_index("seed") for of in (a, b)]
        rows.append({
            "Scale": scale, "Backbone": label.replace("+dlr", "", 1),
            "PPL plain": final(a, "ppl"), "PPL with DLR": final(b, "ppl"),
            "Δ PPL": spread(differences(*(of.ppl for of in by_seed))),
            "Δ convention": spread(differences(*(of.convention for of in by_seed))),
            "Δ paper": theirs.get((scale, f"{base}+dlr"), math.nan) - theirs.get((scale, base), math.nan),
        })  # fmt: skip
        if odd := sorted({*ended(a).seed} ^ {*ended(b).seed}):
            notes.append(f"{label} at {scale}: without a partner, and not in the difference: seed {odd}")
        if {*a.code.sum()} != {*b.code.sum()}:
            codes = f"{', '.join(dict.fromkeys(a.code.sum()))} plain, {', '.join(dict.fromkeys(b.code.sum()))} with DLR"
            notes.append(f"{label} at {scale}: trained by different code: {codes}")
    if rows:
        yield Table("pairs", "DLR by backbone: what it changes", pd.DataFrame(rows), notes)


def runs_table(found: Runs) -> Table:
    """Each run and how far it came."""
    runs = found.runs
    steps = [f"{run.step:,} of {run.planned:,}" for run in runs.itertuples()]
    columns = {"Run": runs["name"], "Seed": runs.seed, "State": runs.state, "Steps": steps, "Loss": runs.last_loss,
               "PPL": runs.last_ppl, "Machine": runs.machine}  # fmt: skip
    note = "Loss and perplexity (unbiased) are those of the last evaluation."
    return Table("runs", "Runs", pd.DataFrame(columns), [note])


def speed_table(found: Runs) -> Table:
    """Speed and memory: a row for each group and machine, since no mean is taken over machines; then the paper's."""
    rows = []
    for of in found.groups():
        for machine, on_it in of.groupby("machine", sort=False):
            figures = {"GB a rank": "memory", "tokens/s": "speed", "MFU": "mfu"}
            rows.append({"Scale": of.scale.iloc[0], "Method": of.label.iloc[0], "Machine": machine}
                        | {title: spread(on_it[name].dropna()) for title, name in figures.items()})  # fmt: skip
    if "1b" in set(found.runs.scale):
        names = {"method": "Method", "memory_gb": "GB a rank", "tokens_per_s_32xh100": "tokens/s"}
        theirs = facts("system_1b").rename(columns=names)[[*names.values()]].astype({"tokens/s": float})
        rows += theirs.assign(Scale="1b", Machine="32 x H100, paper").to_dict("records")
    notes = [
        "tokens/s is the median since the last start of each run, of means over 20 steps without evaluation and "
        "saving; it counts padding. Memory is the peak of a rank. Compare only within a machine."
    ]
    return Table("speed", "Speed and memory", pd.DataFrame(rows), notes)


def probed(metrics: pd.DataFrame) -> pd.DataFrame:
    """The numbers of every probe of gradient paths, a row for each run, projection and step."""
    columns = [name for name in metrics if name.startswith("probe/")]
    long = metrics.melt(id_vars=["run", "step"], value_vars=columns).dropna(subset="value")
    long[["projection", "number"]] = long.variable.astype(str).str.extract(r"^probe/(.*)/(\w+)$")
    return long.pivot(index=["run", "projection", "step"], columns="number", values="value").reset_index()


def paths_table(found: Runs) -> Iterator[Table]:
    """The first and the last probe of each projection of each run; nothing without probes."""
    ends = probed(found.of(found.runs)).groupby(["run", "projection"], sort=False).nth([0, -1])
    if len(ends):
        ends["run"] = ends.run.map(found.runs.set_index("run")["name"])
        names = {"run": "Run", "projection": "Projection", "step": "Before update", "rho": "rho",
                 "rho_mean": "mean of ratios", "isotropic": "isotropic", "cosine": "cosine"}  # fmt: skip
        frame = ends.astype({"step": int})[[*names]].rename(columns=names)
        yield Table("paths", "Gradient paths", frame, [PATHS])


# ----------------------------------------------------------------------------------------------------
# Beside the paper's


def paper_tables(found: Runs) -> Iterator[Table]:
    """Those of the paper's tables of perplexity that have a row which our runs share, with ours beside."""
    ours = pd.DataFrame([
        {"scale": of.scale.iloc[0], "method": of.method.iloc[0], "rank": of["rank"].iloc[0], "label": of.label.iloc[0],
         "PPL (convention)": final(of, "convention"), "PPL": final(of, "ppl"), "Our setting differs": marks(of.iloc[0])}
        for of in found.groups()
    ])  # fmt: skip
    for name, title, same in (("table1", "Table 1: perplexity on C4", ["scale", "method"]),
                              ("ablations", "Ablations: perplexity on C4", ["scale", "method", "rank"])):  # fmt: skip
        theirs = facts(name)
        merged = theirs.merge(ours.drop(columns={"rank"} - {*same}), how="left", on=same)
        merged = merged[merged.scale.isin(merged.scale[merged.label.notna()])]
        frame = pd.DataFrame({"Scale": merged.scale, "Method": merged.label.fillna(merged.method)})
        if name == "ablations":
            frame["Setting"] = merged.setting
        frame["PPL paper"] = [Spread(row.ppl, row.ppl_std) for row in merged.itertuples()]
        frame = frame.join(merged[["PPL (convention)", "PPL", "Our setting differs"]])
        if len(frame):
            yield Table(name, title, frame, [f"The paper's figures follow the convention. {CONVENTION}"])
    theirs = facts("table7b").melt("method", [f"ppl_{k}k" for k in (10, 40, 80, 120, 150)], "step", "ppl").dropna()
    theirs["step"] = 1000 * theirs.step.str.extract(r"(\d+)", expand=False).astype(int)
    own = found.runs[found.runs.scale == "7b"][["run", "label"]]
    names = {"step": "Step", "method": "Paper", "ppl": "PPL paper", "label": "Ours"}
    names |= {"eval/perplexity_galore": "PPL (convention)", "eval/perplexity": "PPL"}
    steps = theirs.merge(found.metrics, on="step").merge(own, on="run")[[*names]].rename(columns=names)
    if len(steps):
        yield Table("7b", "7B: perplexity by step", steps, [CONVENTION])
