"""How the items of the paper are shown: our numbers beside the published ones, where both have the same setting.

A cell is a row at a scale. It shows the published number only if everything that decides the number is as published;
otherwise it says what differs, and a note gives the values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from dlr_pretrain.analysis.figures import COLOURS, Picture, axes, curves, save
from dlr_pretrain.analysis.paper import Item, Program, load_each
from dlr_pretrain.analysis.plan import Size, sizes
from dlr_pretrain.analysis.runs import NONE, Runs, differences_by_seed, differing_text, digits, ended, read_runs, spread
from dlr_pretrain.analysis.tables import Table, printed, table
from dlr_pretrain.config import Config, identity, parse
from dlr_pretrain.config.identity import describe_differences, differences
from dlr_pretrain.config.problems import as_typed
from dlr_pretrain.config.run_folder import read_config, read_record
from dlr_pretrain.launch.runs import PlannedRun
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import NUMBER, Shape, read_json

T5 = "d60acb128cf7b7f2536e8f38a5b18a05535c9e14c7a355904270e15b0945ea86"  # of google-t5/t5-base: its spiece.model
C4 = re.compile(r"1,024 files .*c4-train\.\d{5}-of-01024\.json\.gz")  # as a run lists its training text
GPU = "H100 80GB"  # of the paper's memory and speed
UNBIASED = " u"
SPEED: Shape = {"name": str, "tokens_per_second": NUMBER}
SCORE: Shape = {"acc?": NUMBER | None, "std?": NUMBER | None}
TASKS: Shape = {"tasks?": {"*": SCORE}, "average?": SCORE, "checkpoints?": list}
NO_RUNS = pd.DataFrame(columns=["run", "state", "seed", "ppl", "convention", "identity"], dtype=float)
CONVENTION = (
    "PPL follows the convention of the published tables: the loss of n batches is divided by n + 1. A number with"
    f"{UNBIASED} is unbiased, because the validation text is too short for the convention. Mean ± standard deviation "
    "(ended seeds)."
)


@dataclass(frozen=True)
class Cell:
    """A row at a scale: its configuration and its runs, the paper's numbers, and what differs from the paper's setting.

    ``differs`` maps a key of the setting, or another word, to our value and the published one.
    """

    cfg: Config
    runs: pd.DataFrame
    paper: dict
    differs: dict[str, tuple[str, str]]

    @property
    def values(self) -> pd.Series:
        """The perplexity of each ended seed, by the convention if all of them have it; the name says which."""
        scored = ended(self.runs).set_index("seed")
        return scored.ppl if scored.convention.isna().any() else scored.convention

    def ours(self) -> str:
        """Mean and deviation over seeds, or the keys by which the seeds' texts differ."""
        if keys := differing_text(self.runs):
            return f"seeds differ: {', '.join(keys)}"
        shown = spread(self.values)
        unmarked = self.values.name == "convention" or shown == NONE or "diverged" in shown
        return shown if unmarked else shown + UNBIASED

    @property
    def run(self) -> pd.Series | None:
        """The only run of a row that has one seed."""
        return self.runs.iloc[-1] if len(self.runs) else None


def beside(ours: str, published: str, differs: Iterable[str]) -> str:
    """``published``, or what ``differs`` if there is a number of ours to compare it with."""
    names = list(differs)
    if NONE in (ours, published) or not names:
        return published
    return f"differs: {', '.join(names)}" if len(names) <= 3 else f"differs in {len(names)} ways"


def columns(name: str, own: str, ours: str, published: str, differs: Iterable[str]) -> dict[tuple[str, str], str]:
    """Two columns below ``name``: ``own`` and the paper's."""
    return {(name, own): ours, (name, "paper"): beside(ours, published, differs)}


@dataclass(frozen=True)
class Results:
    """An item with everything that is shown for it. ``cells`` are by row and scale; ``folder`` is for pictures."""

    item: Item
    cells: dict[tuple[str, str], Cell]
    runs: Runs | None
    programs: list[Program]
    folder: Path
    notes: list[str]

    def table(self, rows: Sequence[dict], *notes: str) -> Table:
        return table(self.item.name, self.item.title, rows, notes)


def read(item: Item, runs: Sequence[PlannedRun], programs: list[Program], folder: Path) -> Results:
    """Read the ``runs`` of an item, and compare them with the item as it is defined, without overrides."""
    found, notes = _read_trained(runs)
    defined = {item.cell_of(run): run.cfg for run in load_each(item.lines())}
    papers = {key: item.numbers(*key) for key in defined}
    printed_size = [key for key, paper in papers.items() if found and "params_m" in paper]
    size = dict(zip(printed_size, sizes(defined[key] for key in printed_size), strict=True))
    frame, cells = found.runs if found else NO_RUNS, {}
    for key, cfg in defined.items():
        own = frame[frame.run.isin([str(run.dir) for run in runs if item.cell_of(run) == key])]
        cells[key] = Cell(cfg, own, papers[key], what_differs(cfg, ended(own), papers[key], size.get(key)))
    return Results(item, cells, found, programs, folder, notes)


def _read_trained(runs: Sequence[PlannedRun]) -> tuple[Runs | None, list[str]]:
    """The trained ones among ``runs`` (None if nothing can be read), and notes on what is left out or odd."""
    places, notes = [], []
    for run in runs:
        record = {}
        with suppress(UserError):  # read_runs names a damaged one
            record = read_record(run.dir)
        if changed := differences(record.get("identity", {}), identity(run.cfg)):
            notes.append(f"{run.dir.name} is left out because it holds another run: {describe_differences(changed)}")
        elif (run.dir / "config.yaml").exists():
            places.append(run.dir)
    try:
        found = read_runs(places) if places else None
    except UserError as error:
        return None, [*notes, str(error)]
    return found, notes + (found.remarks if found else [])


def what_differs(cfg: Config, runs: pd.DataFrame, paper: dict, size: Size | None) -> dict[str, tuple[str, str]]:
    """How the ended ``runs`` differ from the published ones: settings, text, tokenizer, convention, ``size``."""
    if runs.empty:
        return {}
    run, found = runs.iloc[0], {}
    if keys := differing_text(runs):
        found["seeds"] = ", ".join(keys), "one text"
    for key, (theirs, ours) in differences(identity(cfg), run.identity).items():
        if key not in ("seed", "data.seed", "data.streams"):
            found[key] = as_typed(ours), as_typed(theirs)
    if size is not None and round(size.trained) != round(paper["params_m"]):
        found["parameters"] = f"{size.trained:.0f}M", f"{paper['params_m']:.0f}M"
    if not C4.search(run.start.get("files", {}).get("training", "")):
        found["text"] = str(run.start.get("text", "unknown")), "all of C4"
    if run.identity.get("tokenizer.pieces") != T5:
        found["tokenizer"] = "another", "T5's"
    if runs.convention.isna().any():
        found["convention"] = "none, because the validation text is short", "n / (n + 1)"
    return found


def remarks_on(found: Results) -> list[str]:
    """A note for each key that differs, with its values and cells."""
    cells = {f"{row} {scale}": cell.differs for (row, scale), cell in found.cells.items() if len(ended(cell.runs))}
    notes = []
    for key in dict.fromkeys(key for differs in cells.values() for key in differs):
        at = {name: differs[key] for name, differs in cells.items() if key in differs}
        ours, theirs = (" or ".join(dict.fromkeys(values)) for values in zip(*dict.fromkeys(at.values()), strict=True))
        where = "all" if len(at) == len(cells) else ", ".join(at)
        notes.append(f"differs: {key} {ours}, published {theirs} ({where})")
    return notes


# ----------------------------------------------------------------------------------------------------
# Perplexity by scale


def scales(found: Results) -> Iterator[Table | Picture]:
    """A row for each method, scales side by side; with a control, the difference from it, else size and memory."""
    item, better = found.item, _better(found)
    counted = {} if item.control else dict(zip(found.cells, sizes(c.cfg for c in found.cells.values()), strict=True))
    rows = {row: {("", "Method"): row} for row in item.rows}
    for (row, scale), cell in found.cells.items():
        ours, paper, shown = cell.ours(), cell.paper, rows[row]
        theirs = digits(paper.get("ppl"), ".2f") + (f" ± {paper['ppl_std']:.2f}" if "ppl_std" in paper else "")
        shown |= columns(scale, "PPL", ours, theirs, cell.differs)
        if (row, scale) in better:
            shown[scale, "PPL"] = f"**{ours}**"
        same = "ppl" in paper and ours != NONE and not cell.differs and np.isfinite(cell.values).all()
        shown[scale, "Δ paper"] = f"{cell.values.mean() - paper['ppl']:+.2f}" if same else NONE
        if item.control:
            shown[scale, "Δ control"] = NONE if row == item.control else _to_control(found, row, scale)
        else:
            size = counted[row, scale]
            shown[scale, "Param M"] = _with_printed(f"{size.trained:.0f}", digits(paper.get("params_m"), ".0f"))
            shown[scale, "Mem GB"] = _with_printed(f"{size.state:.2f}", digits(paper.get("mem_gb"), ".2f"))
    note = (
        "Param and Mem are our own counts: trained parameters, and weights with optimizer state. The paper's value "
        "follows in brackets where it differs. The better of a pair with and without DLR is bold. Published rows that "
        "come from other papers may have another n, and so another bias."
    )
    if item.control:
        note = f"Δ control is the difference from {item.control} between runs with the same seed."
    yield found.table(list(rows.values()), CONVENTION, note, *remarks_on(found))


def _with_printed(ours: str, theirs: str) -> str:
    return ours if theirs in (ours, NONE) else f"{ours} ({theirs})"


def _better(found: Results) -> set[tuple[str, str]]:
    """The cell with the lower mean in each pair, with and without DLR, whose runs have ended."""
    better = set()
    for row, scale in found.cells:
        pair = {name: found.cells.get((name, scale)) for name in (row, f"{row}+dlr")}
        if all(each and each.ours()[0].isdigit() and np.isfinite(each.values).all() for each in pair.values()):
            better.add((min(pair, key=lambda name: pair[name].values.mean()), scale))
    return better


def _to_control(found: Results, row: str, scale: str) -> str:
    cell, control = found.cells[row, scale], found.cells.get((found.item.control, scale))
    if control is None or cell.runs.empty or control.runs.empty:
        return NONE
    keys = differing_text(pd.concat([cell.runs, control.runs]))
    return beside("", spread(differences_by_seed(control.values, cell.values), "+.2f"), keys)


# ----------------------------------------------------------------------------------------------------
# One run per row


def milestones(found: Results) -> Iterator[Table | Picture]:
    """Perplexity of one schedule at each milestone, and the memory of a GPU."""
    rows, last = [], found.item.milestones[-1]
    for (row, scale), cell in found.cells.items():
        shown: dict[tuple[str, str], str] = {("", "Method"): row}
        for at, theirs in zip(found.item.milestones, cell.paper["own"], strict=True):
            ours = NONE if cell.run is None else _after(found, cell.run, round(at / last * cell.run.planned))
            shown |= columns(f"{at // 1000}K steps", "PPL", ours, str(theirs), cell.differs)
        rows.append(shown | _memory(cell, printed("measured", row, scale) or {}))
    note = "The milestones belong to one schedule. A shorter or longer one shows them at the same shares of its steps."
    yield found.table(rows, CONVENTION, f"{note} oom: out of memory, in the paper.", *remarks_on(found))


def _after(found: Results, run: pd.Series, step: int) -> str:
    """The perplexity of a run after ``step``, by the convention if the run has it."""
    metrics = found.runs.metrics
    at = metrics[(metrics.run == run.run) & (metrics.step == step)]
    for name, mark in (("eval/perplexity_galore", ""), ("eval/perplexity", UNBIASED)):
        if name in at and at[name].notna().any():
            return f"{at[name].iloc[-1]:,.2f}{mark}"
    return NONE


def _memory(cell: Cell, theirs: dict) -> dict[tuple[str, str], str]:
    """Peak memory of a GPU, beside the published one if machine and micro-batch are the paper's."""
    ours = NONE if cell.run is None else digits(cell.run.memory, ".2f")
    return columns("Memory GB", "peak", ours, digits(theirs.get("memory_gb"), ".2f"), _machine_differs(cell, theirs))


def _machine_differs(cell: Cell, theirs: dict) -> list[str]:
    """How model and machine differ from those of the paper's measurement. Text and size do not matter."""
    if cell.run is None:
        return []
    found = [key for key in cell.differs if key not in ("seeds", "text", "tokenizer", "convention", "parameters")]
    found += [] if GPU in cell.run.machine else ["GPU"]
    return found + ([] if _micro_batch(cell.run) == theirs.get("micro_batch") else ["micro-batch"])


def _micro_batch(run: pd.Series) -> int:
    """Sequences in a micro-batch of a rank."""
    folder, ranks = Path(run.run), run.start.get("world_size", 1)
    return read_record(folder).get("micro_batch", {}).get(str(ranks)) or parse(read_config(folder)).micro_batch(ranks)


def system(found: Results) -> Iterator[Table | Picture]:
    """Memory and speed of a GPU beside the published ones, with the machine."""
    rows = []
    for (row, scale), cell in found.cells.items():
        theirs, ours, run = printed("measured", row, scale) or {}, NONE, cell.run
        shown = {("", "Method"): row} | _memory(cell, theirs)
        if run is not None:
            ours = digits(run.speed / run.start.get("world_size", 1), ",.0f")
            shown |= {("", "Param M"): digits(run.parameters / 1e6, ",.4g"), ("", "Machine"): run.machine}
            shown |= {("", "Micro-batch"): str(_micro_batch(run))}
        paper = digits(theirs.get("tokens_per_s_32xh100", np.nan) / 32, ",.0f")
        rows.append(shown | columns("Tokens/s per GPU", "ours", ours, paper, _machine_differs(cell, theirs)))
    note = (
        "Memory is the peak of what torch allocates. Tokens include padding; the paper's are for 32 H100s, divided "
        "by 32."
    )
    yield found.table(rows, f"{note} The perplexities of these rows are in table1.")


# ----------------------------------------------------------------------------------------------------
# Figures


def curve(found: Results) -> Iterator[Table | Picture]:
    """Loss and perplexity against tokens."""
    if found.runs is None or not found.runs.runs.step.max():
        return
    name, title = found.item.name, found.item.title
    labels = {run: row for (row, _), cell in found.cells.items() for run in cell.runs.run}
    runs = replace(found.runs, runs=found.runs.runs.assign(label=found.runs.runs.run.map(labels)))
    yield curves(runs, found.folder, f"{name}_loss", "train/loss", "train/tokens", f"{title}: training loss")
    yield curves(runs, found.folder, f"{name}_ppl", "eval/perplexity", "train/tokens", f"{title}: unbiased perplexity")


def dynamics(found: Results) -> Iterator[Table | Picture]:
    """Perplexities, curves, and the speed of maps in the weights and by branch."""
    yield from scales(replace(found, item=replace(found.item, title=f"{found.item.title}: perplexity")))
    yield from curve(found)
    for program in found.programs:
        if result := read_result(program.makes, {"variants": [SPEED], "device": str}):
            ax, variants = axes(), result["variants"]
            ax.barh([one["name"] for one in variants], [one["tokens_per_second"] for one in variants], color=COLOURS[0])
            ax.invert_yaxis()
            ax.set(xlabel="tokens/s")
            caption = (
                f"Speed of a training step at 60M on {result['device']}: contiguous (dlr=on) and random maps, in the "
                "weights and by branch. The paper has 1,445,134 (contiguous) and 507,186 (random) by branch on 8 A100s."
            )
            yield save(ax, found.folder, f"{found.item.name}_speed", caption)


def paths(found: Results) -> Iterator[Table | Picture]:
    """rho and cosine of the gradient's two paths, by projection."""
    for program in found.programs:
        if not program.makes.exists():
            continue
        frame = pd.read_csv(program.makes)
        for column, label, line, said in (
            ("rho", "rho = |beta R g| / |B^T g|", 1, "starts above 1 and falls below it"),
            ("cosine", "cos(B^T g, beta R g)", 0, "stays near 0"),
        ):
            ax = axes()
            for i, (projection, of) in enumerate(frame.groupby("projection", sort=False)):
                ax.plot(of.step, of[column], marker="o", markersize=4, color=COLOURS[i], label=projection)
            ax.axhline(line, color="grey", linewidth=0.8)
            ax.set(xlabel="step", ylabel=label)
            caption = f"{found.item.title}: {label}, at each kept checkpoint. In the paper it {said}."
            yield save(ax, found.folder, f"{found.item.name}_{column}", caption)


# ----------------------------------------------------------------------------------------------------
# What other programs have measured


def read_result(file: Path, shape: Shape) -> dict:
    """What a program has written; empty if it has not run. Raises UserError if the file is damaged."""
    try:
        return read_json(file, shape)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{file}: damaged ({error}). Delete it, and its program will run again") from error


def fold(found: Results) -> Iterator[Table | Picture]:
    """Each number of the fold beside the published one, which exists at one scale."""
    for program, ((row, _), cell) in zip(found.programs, found.cells.items(), strict=False):
        (quantities,) = found.item.published[row].values()
        names = [f"fold/{name}" for name in quantities]
        record, rows = read_result(program.makes, dict.fromkeys(names, NUMBER) | {"fold/shape": str}), []
        machine = str(record.get("fold/shape"))
        differs = [key for key in cell.differs if key != "convention"] + ([] if GPU in machine else ["GPU"])
        for name in quantities:
            ours = _exact(record[f"fold/{name}"]) if record else NONE
            paper = beside(ours, _exact(cell.paper["own"][name]) if cell.paper["own"] else NONE, differs)
            rows.append({"Quantity": name.replace("_", " "), "Ours": ours, "Paper": paper})
        notes = [f"Latency of a forward pass of {machine}."] if record else []
        yield found.table(rows, *notes, *remarks_on(found))


def _exact(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def tasks(found: Results) -> Iterator[Table | Picture]:
    """Accuracy in percent of each method: plain, with the published tokenizer's </s>, and as the paper prints it."""
    rows, files = [], {program.makes.name: program.makes for program in found.programs}
    for (row, _), cell in found.cells.items():
        differs, told, published = [key for key in cell.differs if key != "convention"], {}, cell.paper["own"]
        for kind, name in (("plain", f"{row}.json"), ("as published", f"{row}-published.json")):
            result = read_result(files[name], TASKS) if name in files else {}
            scored = result.get("tasks", {}) | {"average": result.get("average", {})}
            told = {task: _percent(scored.get(task, {}), result) for task in published}
            rows.append({"Method": row, "Tokenizer": kind} | told)
            differs += ["documents"] if result.get("limit") else []
        differs = list(dict.fromkeys(differs))
        paper = {task: beside(told[task], f"{accuracy:.2f}", differs) for task, accuracy in published.items()}
        rows.append({"Method": row, "Tokenizer": "paper"} | paper)
    note = (
        "Accuracy in %, mean ± standard deviation (checkpoints). As published: every text ends with </s>, so the first "
        "choice always wins in tasks whose choices are one token."
    )
    yield found.table(rows, note, *remarks_on(found))


def _percent(score: dict, result: dict) -> str:
    if score.get("acc") is None:
        return NONE
    deviation = f" ± {100 * score['std']:.2f}" if score.get("std") is not None else ""
    return f"{100 * score['acc']:.2f}{deviation} ({len(result['checkpoints'])})"


LAYOUTS: dict[str, Callable[[Results], Iterator[Table | Picture]]] = {
    view.__name__: view for view in (scales, milestones, system, curve, dynamics, paths, fold, tasks)
}
