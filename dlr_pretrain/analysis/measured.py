"""Tables of measurements: speed and memory of runs, and accuracies that evaluate.py and sft.py have written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dlr_pretrain.analysis.groups import Group, Spread, grouped
from dlr_pretrain.analysis.paper import TASKS, facts, marks
from dlr_pretrain.analysis.records import RunRecord, read_run
from dlr_pretrain.analysis.tables import Cell, Figure, Table, figure, published
from dlr_pretrain.analysis.tuning import Design, Trial, compare
from dlr_pretrain.util.errors import UserError

if TYPE_CHECKING:
    from dlr_pretrain.analysis.costs import Cost  # imports torch, which code that only reads runs does not need


def system(groups: Sequence[Group], costs: Sequence[Cost | None]) -> Table:
    """Speed and memory: a row for each group and machine (no mean is taken over machines), then the paper's rows."""
    rows: list[list[Cell]] = []
    for group, cost in zip(groups, costs, strict=True):
        for machine in dict.fromkeys(run.machine for run in group.runs):
            on_it = [run for run in group.runs if run.machine == machine and run.metrics]
            rows.append([group.scale, group.label, machine, published(cost.parameters / 1e6) if cost else None])
            rows[-1] += [
                figure(measured(on_it, name, over), digits)
                for name, over, digits in (
                    ("perf/max_memory_gb", np.max, 2),
                    ("perf/tokens_per_second", np.median, 0),
                    ("perf/mfu", np.median, 3),
                )
            ]
            alone = [run for run in on_it if run.step >= run.planned and run.machines == [machine]]
            hours = tuple(float(run.hours()[-1]) for run in alone)
            rows[-1].append(figure(Spread(hours), 2) if hours else None)
    for row in facts("system_1b"):
        cells = [published(float(row[name]), digits=d) for name, d in (("memory_gb", 2), ("tokens_per_s_32xh100", 0))]
        rows.append(["1b", f"{row['method']}, paper", "32 x H100", published(float(row["params_m"])), *cells, "", ""])
    notes = [
        "Throughput is the median since the last start of each run, of means over 20 steps without evaluation and "
        "saving; a position may be padding. Memory is the peak of a rank. Hours are those of a whole run on that "
        "machine, with evaluations and saves, without the pauses between its starts. Compare only within a machine."
    ]
    header = ["Scale", "Method", "Machine", "M parameters", "GB a rank", "Positions a second", "MFU", "Hours"]
    return Table("system", "Speed and memory", header, rows, notes)


def measured(runs: Sequence[RunRecord], name: str, over) -> Spread | None:
    """The median or peak (``over``) of a metric since each run's last start, over runs; None if no run has it."""
    values = [run.since_last_start(name) for run in runs]
    found = tuple(float(over(v)) for v in values if len(v))
    return Spread(found) if found else None


# ----------------------------------------------------------------------------------------------------
# Accuracies


@dataclass(frozen=True)
class OtherResults:
    """Results of other commands that were among the places of a report, each with its file or folder."""

    zero_shot: tuple[tuple[Path, dict], ...] = ()
    tuned: tuple[tuple[Path, dict], ...] = ()
    compared: tuple[tuple[Path, dict], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.zero_shot or self.tuned or self.compared)


def take_measured(places: Sequence[str]) -> tuple[list[str], OtherResults]:
    """The places that hold runs, and the results that were read from the other places, each file once.

    Results are JSON of ``evaluate.py --output``, folders of ``sft.py --output`` and of ``tune.py``, or the JSON in
    these folders. A glob may match both runs and results.
    """
    runs, files = [], {}
    for place in places:
        paths = sorted(map(Path, glob(place))) if has_magic(place) and not Path(place).exists() else [Path(place)]
        found = [_files(path) for path in paths]
        files |= {file.resolve(): file for file in chain(*found)}
        if not all(found) or not paths:
            runs.append(place)
    kinds: dict[str, list[tuple[Path, dict]]] = {name: [] for name in ("zero_shot", "tuned", "compared")}
    for file in files.values():
        if file.name == COMPARED:
            kinds["compared"].append((file.parent, _comparison(file)))
        elif file.name == TUNED:
            kinds["tuned"].append((file.parent, _read(file, "models", "scripts/sft.py")))
        else:
            kinds["zero_shot"].append((file, _read(file, "checkpoints", "scripts/evaluate.py --output")))
    return runs, OtherResults(**{name: tuple(found) for name, found in kinds.items()})


COMPARED, TUNED = "tune.json", "table.json"  # written by tune.py and sft.py; any other JSON is evaluate.py's


def _files(path: Path) -> list[Path]:
    """The files with results in a place; none if it can only hold runs."""
    if path.suffix == ".json":
        return [path]
    beneath = [*path.glob(TUNED), *path.glob(COMPARED)]
    return beneath or (sorted(path.glob(f"*/{COMPARED}")) if path.name == "tune" else [])


def _comparison(path: Path) -> dict:
    """The results of tune.py, with the verdicts computed again from its trials by the current rules."""
    found = _read(path, "trials", "scripts/tune.py")
    try:
        design, trials = Design(**found["design"]), [Trial(**trial) for trial in found["trials"]]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} cannot be read as a file of scripts/tune.py: {error}") from None
    return found | compare(design, trials)


def _read(path: Path, key: str, maker: str) -> dict:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        report[key]
    except FileNotFoundError:
        raise UserError(f"{path}: no such file. Name one of {maker}") from None
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path} cannot be read as a file of {maker}: it has no {key!r}") from None
    return report


HEADER = ("Method", *TASKS, "average")


def zero_shot_table(reports: Sequence[tuple[Path, dict]]) -> Table:
    """Accuracies in percent: the paper's rows, which are by its own convention, and a row for each file."""
    rows, notes = _published("zero_shot"), []
    for path, report in reports:
        n = len(report["checkpoints"])
        cells: list[Cell] = [_accuracy(report["tasks"].get(task), n) for task in TASKS]
        same = set(report["tasks"]) == set(TASKS)
        rows.append([f"{_methods(report)}, ours", *cells, _accuracy(report["average"], n) if same else None])
        notes.append(
            f"{path.name}: convention {report['convention']}, contexts of {report['context_length']:,} tokens, "
            f"{report['dtype']}, data: {report['data']}"
            + (f", the first {report['limit']:,} documents" if report["limit"] else "")
            + ("" if report["convention"] == "as_in_paper" else "; the paper's is as_in_paper")
        )
        trained = list(_trained(report))
        groups = grouped([run for run, _ in trained])[0]
        if len(groups) > 1:
            notes.append(f"{path.name}: a mean over checkpoints that differ in more than the seed")
        if len({run.folder for run, _ in trained}) < len(trained):
            notes.append(f"{path.name}: a mean over checkpoints of one run, which are no seeds")
        other = dict.fromkeys(mark for group in groups for mark in marks(group))
        if other:
            notes.append(f"{path.name}: not trained in the paper's setting: {'; '.join(other)}")
    fill = ["python scripts/evaluate.py runs/1b-cola-dlr_on-s4?/folded --as-in-paper --output cola_dlr.json"]
    title = "Zero-shot accuracy, %"
    return Table("zero_shot", title, HEADER, rows, notes, [] if reports else fill, bool(reports))


def sft_table(reports: Sequence[tuple[Path, dict]]) -> Table:
    """Accuracies in percent after fine-tuning: the paper's, and a row for each model of each folder."""
    rows, notes = _published("sft"), []
    for path, report in reports:
        for name, model in report["models"].items():
            n, found = len(model["seeds"]), model["columns"]
            average = found.get("average") if set(TASKS) <= set(found) else None
            columns = [*(found.get(task) for task in TASKS), average]
            rows.append([f"{name}, ours", *(Figure(c["mean"], c["std"], n) if c else None for c in columns)])
        setting = report["setting"]
        words = ", ".join(f"{key}={setting[key]}" for key in ("epochs", "batch", "lr", "length") if key in setting)
        notes.append(
            f"{path}: {words}; zero-shot {report.get('zero_shot', 'not measured (--tasks)')}; it does not record how "
            "its models were pre-trained, nor of what scale they are"
        )
    fill = [
        "torchrun --nproc-per-node 8 scripts/sft.py full=runs/1b-full-dlr_off-s42/folded "
        "cola=runs/1b-cola-dlr_off-s42/folded cola_dlr=runs/1b-cola-dlr_on-s42/folded --output sft --tasks all"
    ]
    title = "Zero-shot accuracy after fine-tuning, %"
    return Table("sft", title, HEADER, rows, notes, [] if reports else fill, bool(reports))


def _published(stage: str) -> list[list[Cell]]:
    rows = [row for row in facts("downstream_1b") if row["stage"] == stage]
    return [[f"{r['method']} 1b, paper", *(published(float(r[name])) for name in (*TASKS, "average"))] for r in rows]


def _accuracy(task: dict | None, n: int) -> Figure | None:
    if task is None:
        return None
    spread = task.get("std")
    always = "always the same choice" if task.get("distinct_choices") == 1 < task.get("n", 0) else ""
    return Figure(100 * task["acc"], None if spread is None else 100 * spread, n, note=always)


def _methods(report: dict) -> str:
    """The methods and scales of the runs of the checkpoints; the first checkpoint's folder if no run is found."""
    found = list(_trained(report))
    names = dict.fromkeys(f"{group.method} {group.scale}" for group in grouped([run for run, _ in found])[0])
    steps = dict.fromkeys(f"{step:,} of {run.planned:,}" for run, step in found)
    at = f" at step {', '.join(steps)}" if any(step < run.planned for run, step in found) else ""
    return " and ".join(names) + at if names else report["checkpoints"][0]["folder"]


def _trained(report: dict) -> Iterator[tuple[RunRecord, int]]:
    """The run of each checkpoint in a file of evaluate.py, and the step that was folded.

    A checkpoint is left out unless its folder, or one of the two folders above, is a run directory.
    """
    for folder in (Path(checkpoint["folder"]).resolve() for checkpoint in report["checkpoints"]):
        for above in (folder, *folder.parents[:2]):
            if (above / "config.yaml").exists():
                run = read_run(above)
                yield run, _folded_step(folder, run.planned)
                break


def _folded_step(folder: Path, planned: int) -> int:
    """The step whose weights ``folder`` holds; ``planned`` if its fold.json is missing or damaged."""
    try:
        return int(json.loads((folder / "fold.json").read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, LookupError, TypeError):
        return planned
