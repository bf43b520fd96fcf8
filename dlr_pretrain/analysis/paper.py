"""The DLR paper as items, one for each of its tables and figures: what is trained, and what is published of it.

The items stand in ``slurm/paper.yaml``, whose first lines describe them. How they are shown is in ``paper_views.py``.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Literal

import yaml

from dlr_pretrain.analysis.tables import printed, recipe
from dlr_pretrain.config.command_line import key_of
from dlr_pretrain.config.tree import PACKAGE
from dlr_pretrain.launch.runs import Line, PlannedRun, combine, expand, load_runs
from dlr_pretrain.launch.state import JOBS
from dlr_pretrain.util.errors import UserError

SCRIPTS = next(folder for folder in (PACKAGE / "scripts", PACKAGE.parent / "scripts") if folder.is_dir())
AXES = ("scale", "seed")  # overrides of these select runs
OF_A_ROW = ("backbone", "dlr", "experiment")  # overrides of these would make one row of another
SLURM = "--gpus-per-node=8 --cpus-per-gpu=8 --mem=0 --time=48:00:00"
DATA = {"sft_data": "yahma/alpaca-cleaned", "task_data": ""}  # "": of the hub
# A model of half a million parameters on the sample text, for a few updates. By these keys a row is rehearsed.
RANK = 8
REHEARSAL = (
    *("data=sample", "logger=jsonl", "compile=false", "device=cpu", "scale.hidden_size=32", "scale.num_layers=2"),
    *("scale.intermediate_size=91", "scale.num_heads=2", f"scale.rank={RANK}", "scale.vocab_size=null"),
    *("train.steps=15", "train.warmup_steps=2", "train.global_batch=4", "train.micro_batch=4", "train.seq_len=32"),
    *("eval.every=1", "eval.tokens=600", "checkpoint.every=5", "checkpoint.keep_every=5"),
)
LORO = ("optimizer.exact_every=5", "optimizer.shift=null")  # its schedule would not fit into a rehearsal


@dataclass(frozen=True)
class Step:
    """A program on what was trained. ``words`` and the file that it ``makes`` have places in braces: see ``filled``."""

    words: str
    makes: str
    each: Literal["run", "row", "once"] = "once"
    rehearsed: str = ""  # more words, in a rehearsal


@dataclass(frozen=True)
class Program:
    """A step with its places filled: the command, the file that says it is done, and the runs that it reads."""

    command: tuple[str, ...]
    makes: Path
    reads: tuple[PlannedRun, ...]

    def __str__(self) -> str:
        return shlex.join(["python", *self.command])


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper; see ``slurm/paper.yaml``."""

    name: str
    title: str
    refuted: str
    layout: str
    scales: list[str]
    seeds: list[int]
    rows: dict[str, str]
    common: str = ""
    control: str = ""
    note: str = ""
    slurm: str = SLURM
    milestones: list[int] = field(default_factory=list)
    published: dict[str, dict] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def words(self, row: str) -> list[str]:
        """The overrides of a row, without scale and seed."""
        return [*(shlex.split(self.rows[row]) or recipe(row)), *shlex.split(self.common)]

    def lines(self, rehearsal: bool = False) -> list[Line]:
        """A line for each run; ``origin`` ends with the row. A rehearsal has two seeds at the first scale, else one."""
        found = []
        for scale in self.scales:
            seeds = self.seeds[: 1 + (scale == self.scales[0])] if rehearsal else self.seeds
            for row in self.rows:
                words = [f"scale={scale}", *self.words(row)]
                if rehearsal:
                    given = {key_of(word) for word in REHEARSAL}
                    words = [word for word in words if key_of(word) not in given]
                    words = [word.replace("${scale.rank}", str(RANK)) for word in words]
                    words += LORO if row == "loro" else ()
                found += [Line(f"{self.name}: {row}", (*words, f"seed={seed}")) for seed in seeds]
        return found

    def row_of(self, line: Line) -> str:
        return line.origin.removeprefix(f"{self.name}: ")

    def numbers(self, row: str, scale: str) -> dict:
        """What is published of a row: by the columns of Table 1, and of the item's own kind under ``own``."""
        own, table = self.published.get(row, {}).get(scale), printed("table1", row, scale) or {}
        if self.layout != "scales":
            return table | {"own": own}
        if own is None:
            return table
        return {"ppl": own[0], "ppl_std": own[1]}

    def programs(
        self, runs: Sequence[PlannedRun], out: Path, data: dict[str, str], rehearsal: bool = False
    ) -> Iterator[Program]:
        """The steps on ``runs``, with results in ``out``, in the order in which they need each other."""
        rows = {row: [run for run in runs if self.row_of(run.line) == row] for row in self.rows}
        for step in self.steps:
            groups = {
                "run": [(self.row_of(run.line), [run]) for run in runs],
                "row": rows.items(),
                "once": [("", runs)],
            }
            for row, of in groups[step.each]:
                if of or step.each == "once":
                    yield self._program(step, row, of, out, data, rehearsal)

    def _program(
        self, step: Step, row: str, of: Sequence[PlannedRun], out: Path, data: dict[str, str], rehearsal: bool
    ) -> Program:
        several = {
            "{folded}": [str(run.dir / "folded") for run in of],
            "{task_data}": ["--data", data["task_data"]] if data["task_data"] else [],
        }
        places = {"out": str(out), "row": row.replace(" ", "_"), "sft_data": data["sft_data"]}
        if step.each == "run":
            (run,) = of
            last = run.dir / "checkpoints" / f"step_{run.cfg.train.steps:08d}"
            places |= {"run": str(run.dir), "name": run.dir.name, "checkpoint": str(last)}
        words = []
        for word in shlex.split(step.words):
            words += several[word] if word in several else [word.format_map(places)]
        if words[0] != "-m":
            here = Path.cwd()
            words[0] = str((SCRIPTS.relative_to(here) if SCRIPTS.is_relative_to(here) else SCRIPTS) / words[0])
        if rehearsal:
            more = shlex.split(step.rehearsed)
            replaced = {key_of(word) for word in more if "=" in word}
            words = [word for word in words if "=" not in word or key_of(word) not in replaced] + more
        return Program(tuple(words), Path(step.makes.format_map(places)), tuple(of))


def definitions() -> dict:
    """What slurm/paper.yaml holds; names with an underscore are no items."""
    return yaml.safe_load((JOBS / "paper.yaml").read_text(encoding="utf-8"))


@cache
def items() -> dict[str, Item]:
    """All items by name, in the order of the page."""
    found = {name: of for name, of in definitions().items() if not name.startswith("_")}
    steps = {name: [Step(**step) for step in of.pop("steps", [])] for name, of in found.items()}
    return {name: Item(name=name, **of, steps=steps[name]) for name, of in found.items()}


def chosen(given: Sequence[Item], rows: str | None) -> list[Item]:
    """The items, with the rows of a list such as ``cola,cola+dlr`` alone; those without any are left out."""
    if rows is None:
        return list(given)
    names, known = rows.split(","), list(dict.fromkeys(row for item in given for row in item.rows))
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"--rows={rows}: {unknown[0]} is no row. Choose from {', '.join(known)}")
    left = ({row: words for row, words in item.rows.items() if row in names} for item in given)
    return [replace(item, rows=own) for item, own in zip(given, left, strict=True) if own]


def planned_lines(item: Item, overrides: Sequence[str], rehearsal: bool = False) -> list[Line]:
    """The lines of an item that scale and seed among ``overrides`` select, each with the other ones."""
    if of_a_row := next((word for word in overrides if key_of(word) in OF_A_ROW), None):
        raise UserError(f"{of_a_row}: each row has its own. Choose rows by --rows, such as --rows cola,cola+dlr")
    return combine(item.lines(rehearsal), expand(list(overrides)), AXES)


def without_seed(line: Line) -> tuple[str, ...]:
    """The overrides that runs which differ in their seed alone have in common."""
    return tuple(word for word in line.words if not word.startswith("seed="))


def load_each(lines: Sequence[Line], machine: bool = False) -> list[PlannedRun]:
    """As ``load_runs``, of lines with a seed each. Of those that differ in it alone only the first is composed."""
    first: dict[tuple[str, ...], Line] = {}
    for line in lines:
        first.setdefault(without_seed(line), line)
    loaded = dict(zip(first, load_runs(list(first.values()), machine), strict=True))
    runs = []
    for number, line in enumerate(lines, 1):
        run = loaded[without_seed(line)]
        word = next(word for word in line.words if word.startswith("seed="))
        seed, words = int(word.removeprefix("seed=")), (*without_seed(run.line), word)
        folder = re.sub(rf"-s{run.cfg.seed}(?=-|$)", f"-s{seed}", str(run.cfg.run.dir))
        cfg = replace(run.cfg, seed=seed, run=replace(run.cfg.run, dir=folder))
        runs.append(PlannedRun(number, replace(line, words=words), cfg))
    by_seed = any("${seed}" in word for line in lines for word in line.words)
    return load_runs(list(lines), machine) if by_seed or len({run.dir for run in runs}) < len(runs) else runs


def made_up(folder: Path) -> dict[str, str]:
    """Write task documents and instructions for a rehearsal, in the formats of evaluate.py and sft.py; their places."""
    import lm_eval.tasks

    documents, rows = definitions()["_documents"], [definitions()["_instructions"]] * 8
    subjects = (Path(lm_eval.tasks.__file__).parent / "mmlu" / "default").glob("mmlu_*.yaml")
    documents |= {f"mmlu/{path.stem.removeprefix('mmlu_')}": documents["mmlu"] for path in subjects}
    for name, split in product(documents, ("validation", "test")):
        path = folder / "tasks" / name / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{json.dumps(documents[name])}\n" * 2, encoding="utf-8")
    (folder / "instructions.json").write_text(json.dumps(rows), encoding="utf-8")
    return {"sft_data": str(folder / "instructions.json"), "task_data": str(folder / "tasks")}
