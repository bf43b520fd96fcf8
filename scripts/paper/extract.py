"""What an item shows: functions from a cell (a row at a scale, with its runs) to columns, and the item's pictures.

A column is named by a heading and a label. "paper" beside it has the published number only if everything that decides
the number is as published; otherwise it says what differs, and a note gives the values.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from dlr_pretrain.analysis.figures import COLOURS, Picture, axes, curves, save
from dlr_pretrain.analysis.runs import NONE, Runs, differing_text, digits, ended, read_runs, spread
from dlr_pretrain.analysis.tables import Table, table
from dlr_pretrain.config import Config, identity, parse
from dlr_pretrain.config.identity import describe_differences, differences
from dlr_pretrain.config.problems import as_typed
from dlr_pretrain.config.run_folder import read_config, read_record
from dlr_pretrain.launch.runs import PlannedRun
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import NUMBER, Shape, read_json

from .cost import Size, sizes
from .items import Item, Program, load_each, published_numbers

T5 = "d60acb128cf7b7f2536e8f38a5b18a05535c9e14c7a355904270e15b0945ea86"  # of google-t5/t5-base: its spiece.model
C4 = re.compile(r"1,024 files .*c4-train\.\d{5}-of-01024\.json\.gz")  # as a run lists its training text
GPU = "H100 80GB"  # of the paper's memory and speed
GPUS = 32  # of the paper's speed
UNBIASED = " u"
OF_TEXT = ("seeds", "text", "tokenizer", "convention", "parameters")  # differences that change neither memory nor speed
SPEED: Shape = {"name": str, "tokens_per_second": NUMBER}
SCORE: Shape = {"acc?": NUMBER | None, "std?": NUMBER | None}
TASKS: Shape = {"tasks?": {"*": SCORE}, "average?": SCORE, "checkpoints?": list}
NO_RUNS = pd.DataFrame(columns=["run", "state", "seed", "ppl", "convention", "identity"], dtype=float)
Columns = dict[tuple[str, str], str]  # text by heading and label


@dataclass(frozen=True, eq=False)
class Cell:
    """A row at a scale: its configuration, runs and programs, the paper's numbers, and what differs from its setting.

    ``differs`` maps a key of the setting, or another word, to our value and the published one.
    """

    row: str
    scale: str
    cfg: Config
    size: Size
    runs: pd.DataFrame
    metrics: pd.DataFrame
    programs: list[Program]
    published: dict[str, str]
    differs: dict[str, tuple[str, str]]

    @property
    def values(self) -> pd.Series:
        """The perplexity of each ended seed, GaLore-style if all of them have it; the name says which."""
        scored = ended(self.runs).set_index("seed")
        return scored.ppl if scored.convention.isna().any() else scored.convention

    @property
    def is_finite(self) -> bool:
        """Whether the seeds have a mean."""
        return len(self.values) > 0 and not differing_text(self.runs) and bool(np.isfinite(self.values).all())

    @property
    def run(self) -> pd.Series | None:
        """The only run of a row that has one seed."""
        return self.runs.iloc[-1] if len(self.runs) else None

    def but(self, *keys: str) -> list[str]:
        """What differs, without ``keys``."""
        return [key for key in self.differs if key not in keys]


@dataclass(frozen=True)
class Results:
    """An item with everything that is shown for it. ``cells`` are by row and scale; ``folder`` is for pictures."""

    item: Item
    cells: dict[tuple[str, str], Cell]
    runs: Runs | None
    programs: list[Program]
    folder: Path
    notes: list[str]

    @property
    def published_columns(self) -> list[str]:
        """The columns of this item's table in the paper."""
        table = published_numbers()
        return list(dict.fromkeys(table.column[table["item"] == self.item.name]))


def read(item: Item, runs: Sequence[PlannedRun], programs: list[Program], folder: Path) -> Results:
    """Read the ``runs`` of an item, and compare them with the item as it is defined, without overrides."""
    trained, notes = _read_trained(runs)
    places: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        places.setdefault((item.row_of(run), run.cfg.scale.name), []).append(str(run.dir))
    defined = {(item.row_of(run), run.cfg.scale.name): run.cfg for run in load_each(item.lines())}
    cells = {}
    for (key, cfg), size in zip(defined.items(), sizes(defined.values()), strict=True):
        here = places.get(key, [])
        rows = trained.runs[trained.runs.run.isin(here)] if trained else NO_RUNS
        metrics = trained.metrics[trained.metrics.run.isin(here)] if trained else pd.DataFrame()
        programs_here = [one for one in programs if {str(run.dir) for run in one.reads} <= {*here}]
        published = item.published(*key)
        differs = what_differs(cfg, ended(rows), published, size)
        cells[key] = Cell(*key, cfg, size, rows, metrics, programs_here, published, differs)
    return Results(item, cells, trained, programs, folder, notes)


def _read_trained(runs: Sequence[PlannedRun]) -> tuple[Runs | None, list[str]]:
    """The trained ones among ``runs`` (None if nothing can be read), and notes on what is left out or odd."""
    folders, notes = [], []
    for run in runs:
        record = {}
        with suppress(UserError):  # read_runs names a damaged one
            record = read_record(run.dir)
        if changed := differences(record.get("identity", {}), identity(run.cfg)):
            notes.append(f"{run.dir.name} is left out because it holds another run: {describe_differences(changed)}")
        elif (run.dir / "config.yaml").exists():
            folders.append(run.dir)
    try:
        trained = read_runs(folders) if folders else None
    except UserError as error:
        return None, [*notes, str(error)]
    return trained, notes + (trained.remarks if trained else [])


def what_differs(cfg: Config, runs: pd.DataFrame, published: dict[str, str], size: Size) -> dict[str, tuple[str, str]]:
    """How the ended ``runs`` differ from the published ones: settings, text, tokenizer, convention, ``size``."""
    if runs.empty:
        return {}
    run, differs = runs.iloc[0], {}
    if keys := differing_text(runs):
        differs["seeds"] = ", ".join(keys), "one text"
    for key, (theirs, ours) in differences(identity(cfg), run.identity).items():
        if key not in ("seed", "data.seed", "data.streams"):
            differs[key] = as_typed(ours), as_typed(theirs)
    if f"{size.trained:.0f}" != published.get("params_m", f"{size.trained:.0f}"):
        differs["parameters"] = f"{size.trained:.0f}M", f"{published['params_m']}M"
    if not C4.search(run.start.get("files", {}).get("training", "")):
        differs["text"] = str(run.start.get("text", "unknown")), "all of C4"
    if run.identity.get("tokenizer.pieces") != T5:
        differs["tokenizer"] = "another", "T5's"
    if runs.convention.isna().any():
        differs["convention"] = "none, because the validation text is short", "n / (n + 1)"
    return differs


def remarks_on(results: Results) -> list[str]:
    """A note for each key that differs, with its values and cells."""
    cells = {f"{row} {scale}": cell.differs for (row, scale), cell in results.cells.items() if len(ended(cell.runs))}
    notes = []
    for key in dict.fromkeys(key for differs in cells.values() for key in differs):
        values = {name: differs[key] for name, differs in cells.items() if key in differs}
        ours, theirs = (" or ".join(dict.fromkeys(side)) for side in zip(*dict.fromkeys(values.values()), strict=True))
        where = "all" if len(values) == len(cells) else ", ".join(values)
        notes.append(f"differs: {key} {ours}, published {theirs} ({where})")
    return notes


def differences_by_seed(a: pd.Series, b: pd.Series) -> list[float]:
    """b - a for each seed that both have; infinite where one of the two has diverged."""
    pairs = pd.concat([a, b], axis=1, join="inner").to_numpy(dtype=float)
    return [np.inf if np.isinf(pair).any() else pair[1] - pair[0] for pair in pairs]


def show(results: Results) -> Iterator[Table | Picture]:
    """The table of an item, if it has one, and its pictures."""
    item = results.item
    lines: dict[tuple, dict] = {}
    for (row, _), cell in results.cells.items():
        for name in item.shows:
            for (heading, label), text in COLUMNS[name](cell, results).items():
                names = {"row": row, "heading": heading, "label": label}
                line = lines.setdefault(tuple(names[key] for key in item.index), {})
                column = tuple(name for key, name in names.items() if key not in item.index)
                line[column if len(column) > 1 else column[0]] = text
    if lines:
        titles = [{"row": "Method", "heading": "Quantity", "label": "Tokenizer"}[key] for key in item.index]
        first = [("", title) if len(item.index) == 1 else title for title in titles]
        rows = [dict(zip(first, names, strict=True)) | line for names, line in lines.items()]
        notes = [NOTES[name].format(control=item.control) for name in item.shows if name in NOTES]
        yield table(item.name, item.title, rows, [*notes, *remarks_on(results)])
    for name in item.pictures:
        yield from PICTURES[name](results)


def beside(ours: str, published: str, differs: Iterable[str]) -> str:
    """``published``, or what ``differs`` if there is a number of ours to compare it with."""
    names = list(differs)
    if NONE in (ours, published) or not names:
        return published
    return f"differs: {', '.join(names)}" if len(names) <= 3 else f"differs in {len(names)} ways"


def pair(heading: str, label: str, ours: str, published: str, differs: Iterable[str]) -> Columns:
    """Our number as ``label``, and the paper's."""
    return {(heading, label): ours, (heading, "paper"): beside(ours, published, differs)}


# ----------------------------------------------------------------------------------------------------
# Columns: functions from a cell (and all results of its item) to text by heading and label


def perplexity(cell: Cell, results: Results) -> Columns:
    """Mean and deviation over seeds, bold for the better of a pair with and without DLR, beside the published ones."""
    published, keys = cell.published.get("ppl", NONE), differing_text(cell.runs)
    ours = f"seeds differ: {', '.join(keys)}" if keys else spread(cell.values)
    marked = ours + UNBIASED if cell.is_finite and cell.values.name == "ppl" else ours
    deviation = f" ± {cell.published['ppl_std']}" if "ppl_std" in cell.published else ""
    columns = pair(cell.scale, "PPL", marked, published + deviation, cell.differs)
    if _is_better(cell, results):
        columns[cell.scale, "PPL"] = f"**{marked}**"
    same = published != NONE and cell.is_finite and not cell.differs
    change = f"{cell.values.mean() - float(published):+.2f}" if same else NONE
    return columns | {(cell.scale, "Δ paper"): change}


def _is_better(cell: Cell, results: Results) -> bool:
    """Whether its row is the better one of a pair with and without DLR whose runs have ended."""
    base = cell.row.removesuffix("+dlr")
    both = [one for row in (base, f"{base}+dlr") if (one := results.cells.get((row, cell.scale))) and one.is_finite]
    return len(both) == 2 and min(both, key=lambda one: one.values.mean()) is cell


def difference(cell: Cell, results: Results) -> Columns:
    """The difference from the item's control."""
    control, text = results.cells.get((results.item.control, cell.scale)), NONE
    if control is not None and control is not cell and len(cell.runs) and len(control.runs):
        keys = differing_text(pd.concat([cell.runs, control.runs]))
        text = beside("", spread(differences_by_seed(control.values, cell.values), "+.2f"), keys)
    return {(cell.scale, "Δ control"): text}


def size(cell: Cell, _: Results) -> Columns:
    """Trained parameters, and weights with optimizer state, as counted; the paper's in brackets where they differ."""
    counts = {"Param M": (f"{cell.size.trained:.0f}", "params_m"), "Mem GB": (f"{cell.size.state:.2f}", "mem_gb")}
    theirs = {label: cell.published.get(column, ours) for label, (ours, column) in counts.items()}
    return {
        (cell.scale, label): ours if theirs[label] == ours else f"{ours} ({theirs[label]})"
        for label, (ours, _) in counts.items()
    }


def milestones(cell: Cell, results: Results) -> Columns:
    """Perplexity of one schedule after each number of steps for which the item has a published one."""
    marks = sorted(int(name[4:-1]) for name in results.published_columns if name.startswith("ppl_"))
    columns: Columns = {}
    for mark in marks:
        ours = NONE if cell.run is None else _after(cell, round(mark / marks[-1] * cell.run.planned))
        theirs = cell.published.get(f"ppl_{mark}k", NONE)
        columns |= pair(f"{mark}K steps", "PPL", ours, theirs, cell.differs)
    return columns


def _after(cell: Cell, step: int) -> str:
    """The perplexity of a run after ``step``, GaLore-style if the run has it."""
    records = cell.metrics[cell.metrics.step == step] if len(cell.metrics) else cell.metrics
    for name, mark in (("eval/perplexity_galore", ""), ("eval/perplexity", UNBIASED)):
        if name in records and records[name].notna().any():
            return f"{records[name].iloc[-1]:,.2f}{mark}"
    return NONE


def memory(cell: Cell, _: Results) -> Columns:
    """Peak memory of a GPU, beside the published one if machine and micro-batch are the paper's."""
    ours = NONE if cell.run is None else digits(cell.run.memory, ".2f")
    return pair("Memory GB", "peak", ours, cell.published.get("memory_gb", NONE), _machine_differs(cell))


def machine(cell: Cell, _: Results) -> Columns:
    """Trained parameters, machine and micro-batch."""
    run = cell.run
    values = (NONE,) * 3 if run is None else (digits(run.parameters / 1e6, ",.4g"), run.machine, str(_micro_batch(run)))
    return {("", label): text for label, text in zip(("Param M", "Machine", "Micro-batch"), values, strict=True)}


def speed(cell: Cell, _: Results) -> Columns:
    """Tokens/s of a GPU."""
    run, theirs = cell.run, cell.published.get("tokens_per_s_32_gpus")
    ours = NONE if run is None else digits(run.speed / run.start.get("world_size", 1), ",.0f")
    paper = f"{float(theirs) / GPUS:,.0f}" if theirs else NONE
    return pair("Tokens/s per GPU", "ours", ours, paper, _machine_differs(cell))


def _machine_differs(cell: Cell) -> list[str]:
    """How model and machine differ from those of the paper's measurement. Text and size do not matter."""
    if cell.run is None:
        return []
    differs = cell.but(*OF_TEXT) + ([] if GPU in cell.run.machine else ["GPU"])
    return differs + ([] if str(_micro_batch(cell.run)) == cell.published.get("micro_batch") else ["micro-batch"])


def _micro_batch(run: pd.Series) -> int:
    """Sequences in a micro-batch of a rank."""
    folder, ranks = Path(run.run), run.start.get("world_size", 1)
    return read_record(folder).get("micro_batch", {}).get(str(ranks)) or parse(read_config(folder)).micro_batch(ranks)


def fold(cell: Cell, results: Results) -> Columns:
    """Each number of the fold beside the published one."""
    columns: Columns = {}
    names = results.published_columns
    shape: dict[str, Shape] = {**{f"fold/{name}": NUMBER for name in names}, "fold/shape": str}
    record = read_result(cell.programs[0].makes, shape) if cell.programs else {}
    differs = cell.but("convention") + ([] if GPU in record.get("fold/shape", GPU) else ["GPU"])
    for name in names:
        theirs = cell.published.get(name, NONE)
        theirs = _exact(int(theirs) if theirs.isdigit() else theirs)
        columns |= pair(name.replace("_", " "), "ours", _exact(record.get(f"fold/{name}", NONE)), theirs, differs)
    return columns | {("latency is of", "ours"): record.get("fold/shape", NONE)}


def _exact(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def tasks(cell: Cell, results: Results) -> Columns:
    """Accuracy in percent: plain, with the published tokenizer's </s>, and as the paper prints it."""
    differs, names = cell.but("convention"), results.published_columns
    columns: Columns = {}
    last: dict[str, str] = {}
    files = [one.makes for one in cell.programs if "evaluate.py" in one.command[0]]
    for label, file in zip(("plain", "as published"), files or (None, None), strict=True):
        result = read_result(file, TASKS) if file else {}
        scores = result.get("tasks", {}) | {"average": result.get("average", {})}
        last = {name: _percent(scores.get(name, {}), result) for name in names}
        columns |= {(name, label): text for name, text in last.items()}
        differs += ["documents"] if result.get("limit") else []
    differs = list(dict.fromkeys(differs))
    return columns | {(name, "paper"): beside(last[name], cell.published.get(name, NONE), differs) for name in names}


def _percent(score: dict, result: dict) -> str:
    if score.get("acc") is None:
        return NONE
    deviation = f" ± {100 * score['std']:.2f}" if score.get("std") is not None else ""
    return f"{100 * score['acc']:.2f}{deviation} ({len(result['checkpoints'])})"


def read_result(file: Path, shape: Shape) -> dict:
    """What a program has written; empty if it has not run. Raises UserError if the file is damaged."""
    try:
        return read_json(file, shape)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{file}: damaged ({error}). Delete it, and its program will run again") from error


# ----------------------------------------------------------------------------------------------------
# Pictures


def loss_curves(results: Results) -> Iterator[Picture]:
    """Loss and perplexity against tokens."""
    if results.runs is None or not results.runs.runs.step.max():
        return
    name, title = results.item.name, results.item.title
    labels = {run: row for (row, _), cell in results.cells.items() for run in cell.runs.run}
    runs = replace(results.runs, runs=results.runs.runs.assign(label=results.runs.runs.run.map(labels)))
    for file, column, caption in (
        ("loss", "train/loss", "training loss"),
        ("ppl", "eval/perplexity", "unbiased perplexity"),
    ):
        yield curves(runs, results.folder, f"{name}_{file}", column, "train/tokens", f"{title}: {caption}")


def map_speed(results: Results) -> Iterator[Picture]:
    """The speed of maps in the weights and by branch."""
    for program in results.programs:
        if result := read_result(program.makes, {"variants": [SPEED], "device": str}):
            ax, variants = axes(), result["variants"]
            ax.barh([one["name"] for one in variants], [one["tokens_per_second"] for one in variants], color=COLOURS[0])
            ax.invert_yaxis()
            ax.set(xlabel="tokens/s")
            caption = (
                f"Speed of a training step at 60M on {result['device']}: contiguous (dlr=on) and random maps, in the "
                "weights and by branch. The paper has 1,445,134 (contiguous) and 507,186 (random) by branch on 8 A100s."
            )
            yield save(ax, results.folder, f"{results.item.name}_speed", caption)


def gradient_paths(results: Results) -> Iterator[Picture]:
    """rho and cosine of the gradient's two paths, by projection."""
    for program in results.programs:
        if not program.makes.exists():
            continue
        frame = pd.read_csv(program.makes)
        for column, label, line, claim in (
            ("rho", "rho = |beta R g| / |B^T g|", 1, "starts above 1 and falls below it"),
            ("cosine", "cos(B^T g, beta R g)", 0, "stays near 0"),
        ):
            ax = axes()
            for i, (projection, rows) in enumerate(frame.groupby("projection", sort=False)):
                ax.plot(rows.step, rows[column], marker="o", markersize=4, color=COLOURS[i], label=projection)
            ax.axhline(line, color="grey", linewidth=0.8)
            ax.set(xlabel="step", ylabel=label)
            caption = f"{results.item.title}: {label}, at each kept checkpoint. In the paper it {claim}."
            yield save(ax, results.folder, f"{results.item.name}_{column}", caption)


def _named(*functions: Callable) -> dict[str, Callable]:
    return {function.__name__: function for function in functions}


COLUMNS: dict[str, Callable[[Cell, Results], Columns]] = _named(
    perplexity, difference, size, milestones, memory, machine, speed, fold, tasks
)
PICTURES: dict[str, Callable[[Results], Iterator[Picture]]] = _named(loss_curves, map_speed, gradient_paths)
CONVENTION = (
    "PPL is GaLore-style, as in the published tables: the loss of n batches is divided by n + 1. A number with"
    f"{UNBIASED} is unbiased, because the validation text is too short for that."
)
NOTES = {
    "perplexity": f"{CONVENTION} Mean ± standard deviation (ended seeds).",
    "difference": "Δ control is the difference from {control} between runs with the same seed.",
    "size": "Param and Mem are our own counts: trained parameters, and weights with optimizer state. The paper's value "
    "follows in brackets where it differs. The better of a pair with and without DLR is bold. Published rows that come "
    "from other papers may have another n, and so another bias.",
    "milestones": f"{CONVENTION} The milestones belong to one schedule. A shorter or longer one shows them at the same "
    "shares of its steps. oom: out of memory, in the paper.",
    "memory": "Memory is the peak of what torch allocates.",
    "speed": "Tokens include padding; the paper's are for 32 H100s, divided by 32. Their perplexities are in table1.",
    "tasks": "Accuracy in %, mean ± standard deviation (checkpoints). As published: every text ends with </s>, so the "
    "first choice always wins in tasks whose choices are one token.",
}
