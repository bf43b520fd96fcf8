"""How the items of the paper are shown: ours beside the published, where both are of the same setting.

A cell is a row at a scale. What is published stands in it only where all that decides the number is the published one;
else the cell says what differs, and a note by how much.
"""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from dlr_pretrain.analysis.figures import COLOURS, Picture, axes, curves, save
from dlr_pretrain.analysis.paper import Item, Program
from dlr_pretrain.analysis.plan import disk_bytes, parameters, state_and_moments
from dlr_pretrain.analysis.runs import NONE, Runs, cell, differences_by_seed, differing_text, ended, read_runs, spread
from dlr_pretrain.analysis.tables import Table, printed, table
from dlr_pretrain.config import Config, identity, parse
from dlr_pretrain.config.problems import as_typed
from dlr_pretrain.config.written import describe_differences, differences, read_config, read_record
from dlr_pretrain.launch.runs import PlannedRun
from dlr_pretrain.models.flops import flops_per_token
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import NUMBER, Shape, read_json
from dlr_pretrain.util.process import cores

T5 = "d60acb128cf7b7f2536e8f38a5b18a05535c9e14c7a355904270e15b0945ea86"  # of google-t5/t5-base: its spiece.model
C4 = re.compile(r"1,024 files .*c4-train\.\d{5}-of-01024\.json\.gz")  # as a run lists what it trains on
GPU = "H100 80GB"  # of the paper's memory and speed
BEST = "**{}**"  # the better of a pair, in Markdown; Table makes HTML and LaTeX of it
UNBIASED = " u"
SPEED: Shape = {"name": str, "tokens_per_second": NUMBER}
SCORE: Shape = {"acc?": NUMBER | None, "std?": NUMBER | None}
TASKS: Shape = {"tasks?": {"*": SCORE}, "average?": SCORE, "checkpoints?": list}
NO_RUN = ["run", "state", "seed", "ppl", "convention"]  # the columns of a cell without a run
CONVENTION = (
    "PPL is by the convention of the published tables: the loss of n batches is divided by n + 1. A number with"
    f"{UNBIASED} is unbiased, because the validation text is too short for it. Mean ± standard deviation (ended seeds)."
)


@dataclass(frozen=True)
class Cell:
    """A row at a scale: the runs that were meant by it, its numbers in the paper, and what differs from the paper's.

    ``differs`` has, by key of the setting or another word, our value and the published one.
    """

    cfg: Config
    of: pd.DataFrame
    paper: dict
    differs: dict[str, tuple[str, str]]

    @property
    def convention(self) -> bool:
        return bool(len(ended(self.of))) and ended(self.of).convention.notna().all()

    @property
    def values(self) -> pd.Series:
        """The perplexity of each seed that has ended; by the convention if it is there."""
        return ended(self.of).set_index("seed")["convention" if self.convention else "ppl"]

    def ours(self) -> str:
        """Mean and deviation over seeds; what stands in the way, if the seeds do not belong together."""
        if keys := differing_text(self.of) if len(self.of) else []:
            return f"seeds differ: {', '.join(keys)}"
        shown = spread(self.values)
        return shown if shown == NONE or self.convention or "diverged" in shown else shown + UNBIASED

    @property
    def run(self) -> pd.Series | None:
        """The run of a row that has one."""
        return self.of.iloc[-1] if len(self.of) else None


def beside(ours: str, published: str, differs: Iterable[str]) -> str:
    """``published``, or what ``differs`` if one of ours stands beside it."""
    names = list(differs)
    if NONE in (ours, published) or not names:
        return published
    return f"differs: {', '.join(names)}" if len(names) <= 3 else f"differs in {len(names)} ways"


@dataclass(frozen=True)
class Size:
    """What a run takes: FLOPs of a position, millions of trained parameters, GB of weights and optimizer state without
    padding, and bytes on the disk."""

    flops: float
    trained: float
    state: float
    disk: int


_SIZES: dict[str, Size] = {}


def sizes(configs: dict) -> dict:
    """The size of each configuration. Equal models are counted once, on all cores."""
    kept = ("scale.", "backbone.", "optimizer.", "precision.", "train.s", "dlr.learn_alpha", "dlr.train_b")
    keys = {}
    for name, cfg in configs.items():
        model = {key: value for key, value in identity(cfg).items() if key.startswith(kept)}
        keys[name] = json.dumps([model, cfg.micro_batch(1), vars(cfg.checkpoint)])
    due = {key: configs[name] for name, key in keys.items() if key not in _SIZES}
    if len(due) < 4:
        _SIZES.update(zip(due, map(_size, due.values()), strict=True))
    else:
        with ProcessPoolExecutor(min(16, cores()), multiprocessing.get_context("fork")) as pool:
            _SIZES.update(zip(due, pool.map(_size, due.values()), strict=True))
    return {name: _SIZES[key] for name, key in keys.items()}


def _size(cfg: Config) -> Size:
    vocabulary = cfg.planned_vocab_size
    return Size(
        flops_per_token(cfg, vocabulary, cfg.micro_batch(1)),
        parameters(cfg, vocabulary)["trainable"] / 1e6,
        state_and_moments(cfg, vocabulary, alignment=1) / 1e9,
        disk_bytes(cfg, vocabulary)["run"],
    )


@dataclass(frozen=True)
class Found:
    """An item with everything that is shown of it."""

    item: Item
    cells: dict[tuple[str, str], Cell]
    runs: Runs | None
    programs: list[Program]
    folder: Path  # of the pictures
    notes: list[str]


def read(
    item: Item, runs: Sequence[PlannedRun], defined: dict[tuple[str, str], Config], programs: list[Program],
    folder: Path,
) -> Found:  # fmt: skip
    """Read the ``runs`` of an item; ``defined`` are the configurations of its cells as the item has them."""
    there, notes = {}, []
    for run in runs:
        try:
            record = read_record(run.dir) if (run.dir / "config.yaml").exists() else {}
        except UserError as error:
            notes.append(f"{run.dir.name} is left out: {error}")
            continue
        if changed := differences(record.get("identity", {}), identity(run.cfg)):
            notes.append(f"{run.dir.name} is left out, it holds another run: {describe_differences(changed)}")
        elif record:
            there[str(run.dir)] = run
    try:
        found = read_runs(list(there)) if there else None
    except UserError as error:
        found, notes = None, [*notes, str(error)]
    if found:
        notes += found.remarks
    cells, shown = {}, {run.cfg.scale.name for run in runs}
    printed_size = {
        key: cfg for key, cfg in defined.items() if found and key[1] in shown and "params_m" in item.numbers(*key)
    }
    counted = sizes(printed_size)
    for (row, scale), cfg in defined.items():
        own = {str(run.dir): run for run in runs if item.row_of(run.line) == row and run.cfg.scale.name == scale}
        if scale in shown:
            of = found.runs[found.runs.run.isin(own)] if found else pd.DataFrame(columns=NO_RUN, dtype=float)
            paper = item.numbers(row, scale)
            cells[row, scale] = Cell(cfg, of, paper, what_differs(cfg, of, paper, counted.get((row, scale))))
    return Found(item, cells, found, programs, folder, notes)


def what_differs(cfg: Config, of: pd.DataFrame, paper: dict, size: Size | None = None) -> dict[str, tuple[str, str]]:
    """What of the runs ``of`` is not as published: settings, text, tokenizer, convention, and the size of ``cfg``."""
    if not len(ended(of)):
        return {}
    run = ended(of).iloc[0]
    found = {}
    if keys := differing_text(of):
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
    if not ended(of).convention.notna().all():
        found["convention"] = "none, because the validation text is short", "n / (n + 1)"
    return found


def remarks_on(found: Found) -> list[str]:
    """A note for each key that differs, with all values and cells."""
    cells = {f"{row} {scale}": of.differs for (row, scale), of in found.cells.items() if len(ended(of.of))}
    notes = []
    for key in dict.fromkeys(key for differs in cells.values() for key in differs):
        pairs = dict.fromkeys(differs[key] for differs in cells.values() if key in differs)
        ours, theirs = (" or ".join(dict.fromkeys(values)) for values in zip(*pairs, strict=True))
        at = [name for name, differs in cells.items() if key in differs]
        where = "all" if len(at) == len(cells) else ", ".join(at)
        notes.append(f"differs: {key} {ours}, published {theirs} ({where})")
    return notes


# ----------------------------------------------------------------------------------------------------
# Perplexity by scale


def scales(found: Found) -> Iterator[Table | Picture]:
    """A row for each method, scales side by side; with a control, the difference to it, else size and memory."""
    item, best = found.item, _better(found)
    counted = {} if item.control else sizes({key: of.cfg for key, of in found.cells.items()})
    rows = []
    for row in item.rows:
        shown: dict[tuple[str, str], str] = {("", "Method"): row}
        for scale in dict.fromkeys(scale for name, scale in found.cells if name == row):
            of = found.cells[row, scale]
            ours, ppl = of.ours(), of.paper.get("ppl", np.nan)
            deviation = cell(of.paper.get("ppl_std", np.nan), ".2f")
            theirs = cell(ppl, ".2f") + ("" if deviation == NONE else f" ± {deviation}")
            shown[scale, "PPL"] = BEST.format(ours) if (row, scale) in best else ours
            shown[scale, "paper"] = beside(ours, theirs, of.differs)
            plain = ours != NONE and not of.differs and np.isfinite(of.values).all()
            shown[scale, "Δ paper"] = cell(of.values.mean() - ppl, "+.2f") if plain else NONE
            if item.control:
                shown[scale, "Δ control"] = NONE if row == item.control else _to_control(found, row, scale)
            else:
                size, paper = counted[row, scale], of.paper
                shown[scale, "Param M"] = _beside(f"{size.trained:.0f}", cell(paper.get("params_m", np.nan), ".0f"))
                shown[scale, "Mem GB"] = _beside(f"{size.state:.2f}", cell(paper.get("mem_gb", np.nan), ".2f"))
        rows.append(shown)
    notes = [CONVENTION]
    if item.control:
        notes.append(f"Δ control is the difference to {item.control} between runs with the same seed.")
    else:
        notes.append(
            "Param and Mem are ours, counted: trained parameters, and weights with optimizer state; in brackets what "
            "the paper prints, where it differs. The better of a pair without and with DLR is bold. Published rows "
            "that come from other papers may have another n, and so another bias."
        )
    yield table(item.name, item.title, rows, [*notes, *remarks_on(found)])


def _beside(ours: str, theirs: str) -> str:
    return ours if theirs in (ours, NONE) else f"{ours} ({theirs})"


def _better(found: Found) -> set[tuple[str, str]]:
    """The cell with the lower mean of each pair, without and with DLR, that has ended."""
    best = set()
    for row, scale in found.cells:
        pair = {name: found.cells.get((name, scale)) for name in (row, f"{row}+dlr")}
        if all(each and each.ours()[0].isdigit() and np.isfinite(each.values).all() for each in pair.values()):
            best.add((min(pair, key=lambda name: pair[name].values.mean()), scale))
    return best


def _to_control(found: Found, row: str, scale: str) -> str:
    of, control = found.cells[row, scale], found.cells.get((found.item.control, scale))
    if control is None or not len(of.of) or not len(control.of):
        return NONE
    keys = differing_text(pd.concat([of.of, control.of]))
    return beside("", spread(differences_by_seed(control.values, of.values), "+.2f"), keys)


# ----------------------------------------------------------------------------------------------------
# One run a row


def milestones(found: Found) -> Iterator[Table | Picture]:
    """Perplexity of one schedule at each milestone, and the memory of a GPU."""
    rows, last = [], found.item.milestones[-1]
    for (row, scale), of in found.cells.items():
        shown: dict[tuple[str, str], str] = {("", "Method"): row}
        for at, theirs in zip(found.item.milestones, of.paper["own"], strict=True):
            ours = NONE if of.run is None else _at(found, of.run, round(at / last * of.run.planned))
            shown[f"{at // 1000}K steps", "PPL"] = ours
            shown[f"{at // 1000}K steps", "paper"] = beside(ours, str(theirs), of.differs)
        shown |= _memory(of, printed("measured", row, scale) or {})
        rows.append(shown)
    note = "Milestones are of one schedule; of one of other steps, at the same share. oom: out of the paper's memory."
    yield table(found.item.name, found.item.title, rows, [CONVENTION, note, *remarks_on(found)])


def _at(found: Found, run: pd.Series, step: int) -> str:
    """The perplexity of a run after ``step``; by the convention if it is there."""
    of = found.runs.metrics
    at = of[(of.run == run.run) & (of.step == step)]
    for name, mark in (("eval/perplexity_galore", ""), ("eval/perplexity", UNBIASED)):
        if name in at and at[name].notna().any():
            return f"{at[name].iloc[-1]:,.2f}{mark}"
    return NONE


def _memory(of: Cell, theirs: dict) -> dict[tuple[str, str], str]:
    """Peak of a GPU, beside the published one if the machine and the micro-batch are its."""
    ours = NONE if of.run is None else cell(of.run.memory, ".2f")
    paper = beside(ours, cell(theirs.get("memory_gb", np.nan), ".2f"), _machine_differs(of, theirs))
    return {("Memory GB", "peak"): ours, ("Memory GB", "paper"): paper}


def _machine_differs(of: Cell, theirs: dict) -> list[str]:
    """What of the machine and of the model is not as in the paper's measurement; text and size do not matter."""
    if of.run is None:
        return []
    found = [key for key in of.differs if key not in ("seeds", "text", "tokenizer", "convention", "parameters")]
    found += [] if GPU in of.run.machine else ["GPU"]
    return found + ([] if _micro_batch(of.run) == theirs.get("micro_batch") else ["micro-batch"])


def _micro_batch(run: pd.Series) -> int:
    """Sequences that a rank took at once."""
    folder, ranks = Path(run.run), _ranks(run)
    return read_record(folder).get("micro_batch", {}).get(str(ranks)) or parse(read_config(folder)).micro_batch(ranks)


def _ranks(run: pd.Series) -> int:
    return int(run.machine.split(" ")[0]) if run.machine[0].isdigit() else 1


def system(found: Found) -> Iterator[Table | Picture]:
    """Memory and speed of a GPU beside the published ones, with the machine."""
    rows = []
    for (row, scale), of in found.cells.items():
        theirs, ours, run = printed("measured", row, scale) or {}, NONE, of.run
        shown = {("", "Method"): row} | _memory(of, theirs)
        if run is not None:
            ours = cell(run.speed / _ranks(run), ",.0f")
            shown |= {("", "Param M"): cell(run.parameters / 1e6, ",.4g"), ("", "Machine"): run.machine}
            shown |= {("", "Micro-batch"): str(_micro_batch(run))}
        paper = cell(theirs.get("tokens_per_s_32xh100", np.nan) / 32, ",.0f")
        paper = beside(ours, paper, _machine_differs(of, theirs))
        rows.append(shown | {("Tokens/s of a GPU", "ours"): ours, ("Tokens/s of a GPU", "paper"): paper})
    notes = [
        "Memory is the peak of what torch allocates. Tokens count padding; the paper's are of 32 H100, divided by 32. "
        "The perplexities of these rows are in table1."
    ]
    yield table(found.item.name, found.item.title, rows, notes)


# ----------------------------------------------------------------------------------------------------
# Figures


def curve(found: Found) -> Iterator[Table | Picture]:
    """Loss and perplexity against tokens."""
    if found.runs is None or not found.runs.runs.step.max():
        return
    name, title = found.item.name, found.item.title
    labels = {run: row for (row, _), of in found.cells.items() for run in of.of.run}
    runs = replace(found.runs, runs=found.runs.runs.assign(label=found.runs.runs.run.map(labels)))
    yield curves(runs, found.folder, f"{name}_loss", "train/loss", "train/tokens", f"{title}: training loss")
    yield curves(runs, found.folder, f"{name}_ppl", "eval/perplexity", "train/tokens", f"{title}: unbiased perplexity")


def dynamics(found: Found) -> Iterator[Table | Picture]:
    """Curves, and the speed of maps by weight and by branch."""
    yield from scales(replace(found, item=replace(found.item, title=f"{found.item.title}: perplexity")))
    yield from curve(found)
    for program in found.programs:
        if result := _result(program.makes, {"variants": [SPEED], "device": str}):
            ax, of = axes(), result["variants"]
            ax.barh([one["name"] for one in of], [one["tokens_per_second"] for one in of], color=COLOURS[0])
            ax.invert_yaxis()
            ax.set(xlabel="tokens/s")
            caption = (
                f"Speed of a training step at 60M on {result['device']}: contiguous (dlr=on) and random maps, in the "
                "weights and by branch. The paper's by branch, on 8 A100: 1,445,134 contiguous, 507,186 random."
            )
            yield save(ax, found.folder, f"{found.item.name}_speed", caption)


def paths(found: Found) -> Iterator[Table | Picture]:
    """rho and cosine of the gradient's two ways, by projection."""
    for program in found.programs:
        if not program.makes.exists():
            continue
        frame = pd.read_csv(program.makes)
        for column, label in (("rho", "rho = |beta R g| / |B^T g|"), ("cosine", "cos(B^T g, beta R g)")):
            ax = axes()
            for i, (projection, of) in enumerate(frame.groupby("projection", sort=False)):
                ax.plot(of.step, of[column], marker="o", markersize=4, color=COLOURS[i], label=projection)
            ax.axhline(1 if column == "rho" else 0, color="grey", linewidth=0.8)
            ax.set(xlabel="step", ylabel=label)
            said = "starts above 1 and falls below it" if column == "rho" else "stays near 0"
            caption = f"{found.item.title}: {label}, at each kept checkpoint. In the paper it {said}."
            yield save(ax, found.folder, f"{found.item.name}_{column}", caption)


# ----------------------------------------------------------------------------------------------------
# What other programs have measured


def fold(found: Found) -> Iterator[Table | Picture]:
    """Each number of the fold beside the published one."""
    for program, of in zip(found.programs, found.cells.values(), strict=False):
        names = [f"fold/{name}" for name in of.paper["own"]]
        record, rows = _result(program.makes, dict.fromkeys(names, NUMBER) | {"fold/shape": str}), []
        machine = str(record.get("fold/shape"))
        differs = [key for key in of.differs if key != "convention"] + ([] if GPU in machine else ["GPU"])
        for name, theirs in of.paper["own"].items():
            ours = _digits(record[f"fold/{name}"]) if record else NONE
            paper = beside(ours, _digits(theirs), differs)
            rows.append({"Quantity": name.replace("_", " "), "Ours": ours, "Paper": paper})
        notes = [f"Latency of a forward pass of {machine}."] if record else []
        yield table(found.item.name, found.item.title, rows, [*notes, *remarks_on(found)])


def _digits(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def _result(file: Path, shape: Shape) -> dict:
    """What a program has written; empty if it has not run. Raises UserError if it is damaged."""
    try:
        return read_json(file, shape)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UserError(f"{file}: damaged ({error}). Delete it, and its program is due again") from error


def tasks(found: Found) -> Iterator[Table | Picture]:
    """Accuracy in percent of each method: plainly, with the tokenizer as published, and the published one."""
    rows, files = [], {program.makes.name: program.makes for program in found.programs}
    for (row, _), of in found.cells.items():
        differs, told = [key for key in of.differs if key != "convention"], {}
        for kind, name in (("plain", f"{row}.json"), ("as published", f"{row}-published.json")):
            result = _result(files[name], TASKS) if name in files else {}
            scored = result.get("tasks", {}) | {"average": result.get("average", {})}
            told = {task: _percent(scored.get(task, {}), result) for task in of.paper["own"]}
            rows.append({"Method": row, "Tokenizer": kind} | told)
            differs += ["documents"] if result.get("limit") else []
        paper = {
            task: beside(told[task], f"{acc:.2f}", dict.fromkeys(differs)) for task, acc in of.paper["own"].items()
        }
        rows.append({"Method": row, "Tokenizer": "paper"} | paper)
    notes = [
        "Accuracy in %, mean ± standard deviation (checkpoints). As published: every text ends with </s>, so that "
        "tasks whose choices are one token always pick the first one."
    ]
    yield table(found.item.name, found.item.title, rows, [*notes, *remarks_on(found)])


def _percent(of: dict, result: dict) -> str:
    if of.get("acc") is None:
        return NONE
    deviation = f" ± {100 * of['std']:.2f}" if of.get("std") is not None else ""
    return f"{100 * of['acc']:.2f}{deviation} ({len(result['checkpoints'])})"


LAYOUTS: dict[str, Callable[[Found], Iterator[Table | Picture]]] = {
    view.__name__: view for view in (scales, milestones, system, curve, dynamics, paths, fold, tasks)
}
