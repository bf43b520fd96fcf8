"""The items of the paper (``items.yaml``), the numbers that it prints (``published.csv``), and the items' runs."""

import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Literal

import pandas as pd
import yaml

from dlr_pretrain.config import identity
from dlr_pretrain.config.command_line import key_of
from dlr_pretrain.config.problems import did_you_mean
from dlr_pretrain.config.tree import CONFIG_DIR
from dlr_pretrain.launch.runs import Line, PlannedRun, combine, expand, load_runs
from dlr_pretrain.launch.status import shipped
from dlr_pretrain.util.errors import UserError

HERE = Path(__file__).parent
SELECTING = ("scale", "seed")  # overrides of these keys select runs
OF_A_ROW = ("backbone", "dlr", "experiment")  # overrides of these keys would turn a row into another one
SLURM = "--gpus-per-node=8 --cpus-per-gpu=8 --mem=0 --time=48:00:00"


@dataclass(frozen=True)
class Program:
    """A step without placeholders: the command, the file that says it is done, and the runs that it reads."""

    command: list[str]
    makes: Path
    reads: list[PlannedRun]

    def __str__(self) -> str:
        return shlex.join(["python", *self.command])


@dataclass(frozen=True)
class Step:
    """A program that follows the training. ``words``, and ``makes``, its output file, have placeholders in braces."""

    words: str
    makes: str
    each: Literal["run", "row", "once"] = "once"

    def command(self, values: Mapping[str, str | Sequence[str]]) -> list[str]:
        """The words with their placeholders filled; the placeholder of a list is replaced by all words of the list."""
        words: list[str] = []
        for word in shlex.split(self.words):
            value = values.get(word[1:-1])
            words += value if isinstance(value, list) else [word.format_map(values)]
        if words[0] != "-m":
            words[0] = str(shipped("scripts") / words[0])
        return words


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper; ``items.yaml`` describes the fields."""

    name: str
    title: str
    refuted: str
    scales: list[str]
    seeds: list[int]
    rows: dict[str, str]
    shows: list[str] = field(default_factory=list)
    pictures: list[str] = field(default_factory=list)
    index: list[str] = field(default_factory=lambda: ["row"])
    common: str = ""
    control: str = ""
    note: str = ""
    slurm: str = SLURM
    steps: list[Step] = field(default_factory=list)

    def words(self, row: str) -> list[str]:
        """The overrides of a row, without scale and seed."""
        return [*(shlex.split(self.rows[row]) or recipe(row)), *shlex.split(self.common)]

    def lines(self) -> list[Line]:
        """A line for each run. Its ``origin`` ends with the row."""
        return [
            Line(f"{self.name}: {row}", (f"scale={scale}", *self.words(row), f"seed={seed}"))
            for scale, row, seed in product(self.scales, self.rows, self.seeds)
        ]

    def row_of(self, run: PlannedRun) -> str:
        return run.line.origin.removeprefix(f"{self.name}: ")

    def published(self, row: str, scale: str) -> dict[str, str]:
        """What the paper prints for a row, by column, as text: in its Table 1, and in this item's table."""
        table = published_numbers()
        table = table[(table["row"] == row) & (table.scale == scale) & table["item"].isin(["table1", self.name])]
        return dict(zip(table.column, table.value, strict=True))

    def programs(self, runs: Sequence[PlannedRun], out: Path, sft_data: str, task_data: str) -> Iterator[Program]:
        """The steps on ``runs``, with results in ``out``, each after those that it depends on.

        What a step makes from a row, or from a run, lies in a folder named by its runs and data.
        """
        by_row = {row: [run for run in runs if self.row_of(run) == row] for row in self.rows}
        groups = {
            "run": [(self.row_of(run), [run]) for run in runs],
            "row": [(row, group) for row, group in by_row.items() if group],
            "once": [("", list(runs))],
        }
        data = {"sft_data": sft_data, "task_data": ["--data", task_data] if task_data else []}
        tuned_on = [sft_data for step in self.steps if "{sft_data}" in step.words]
        for step in self.steps:
            for row, group in groups[step.each]:
                sources = by_row[row] if "{row}" in step.words else group
                made_from = [[str(run.dir.resolve()), identity(run.cfg)] for run in sources] + tuned_on
                folder = out if step.each == "once" else out / digest(made_from)
                values = data | {"out": str(folder), "row": row.replace(" ", "_")}
                values["scores"] = str(folder / f"tasks-{digest(task_data)}")
                values["folded"] = [str(run.dir / "folded") for run in group]
                if step.each == "run":
                    last = group[0].dir / "checkpoints" / f"step_{group[0].cfg.train.steps:08d}"
                    values |= {"run": str(group[0].dir), "name": group[0].dir.name, "checkpoint": str(last)}
                yield Program(step.command(values), Path(step.makes.format_map(values)), group)


def digest(content: object) -> str:
    """A short name for ``content``."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


@cache
def items() -> dict[str, Item]:
    """All items by name, in the order of the page. Names that begin with an underscore are not items."""
    defined = yaml.safe_load((HERE / "items.yaml").read_text(encoding="utf-8"))
    return {
        name: Item(name, **fields | {"steps": [Step(**step) for step in fields.get("steps", [])]})
        for name, fields in defined.items() if not name.startswith("_")
    }  # fmt: skip


@cache
def published_numbers() -> pd.DataFrame:
    """All numbers that the paper prints, as text: a line for each item, row, scale and column."""
    return pd.read_csv(HERE / "published.csv", dtype=str)


def recipe(method: str) -> list[str]:
    """The overrides of our recipe for a method such as cola+dlr: its own experiment, or else ``experiment=paper``."""
    base, _, residual = method.partition("+")
    has_file = (CONFIG_DIR / "experiment" / "table1" / f"{base}.yaml").exists()
    words = [f"experiment=table1/{base}"] if has_file else ["experiment=paper", f"backbone={base}"]
    return [*words, f"dlr={'on' if residual == 'dlr' else residual}"] if residual else words


def choose_rows(chosen: Sequence[Item], names: Sequence[str] | None) -> list[Item]:
    """The items with only the rows in ``names``; an item without any of them is left out."""
    if names is None:
        return list(chosen)
    known = list(dict.fromkeys(row for item in chosen for row in item.rows))
    if unknown := [name for name in names if name not in known]:
        fix = did_you_mean(unknown[0], known, f"Choose from {', '.join(known)}")
        raise UserError(f"--rows {unknown[0]}: no such row. {fix}")
    reduced = [replace(item, rows={row: item.rows[row] for row in item.rows if row in names}) for item in chosen]
    return [item for item in reduced if item.rows]


def planned_lines(item: Item, overrides: Sequence[str]) -> list[Line]:
    """The lines of an item that the scale and seed in ``overrides`` select, each with the other overrides."""
    if of_a_row := next((word for word in overrides if key_of(word) in OF_A_ROW), None):
        raise UserError(f"{of_a_row}: each row has its own. Choose rows with --rows, such as --rows cola,cola+dlr")
    return combine(item.lines(), expand(list(overrides)), SELECTING)


def without_seed(line: Line) -> tuple[str, ...]:
    """The overrides of a line without its seed. They are the same for runs that differ only in the seed."""
    return tuple(word for word in line.words if not word.startswith("seed="))


def load_each(lines: Sequence[Line], machine: bool = False) -> list[PlannedRun]:
    """Like ``load_runs``, for lines that all have a seed: composes only one of those that differ in nothing else."""
    first: dict[tuple[str, ...], Line] = {}
    for line in lines:
        first.setdefault(without_seed(line), line)
    loaded = dict(zip(first, load_runs(list(first.values()), machine), strict=True))
    runs = []
    for number, line in enumerate(lines, 1):
        run = loaded[without_seed(line)]
        word = next(word for word in line.words if word.startswith("seed="))
        seed, words = int(word.removeprefix("seed=")), (*without_seed(run.line), word)
        name = re.sub(rf"-s{run.cfg.seed}(?=-|$)", f"-s{seed}", run.dir.name)
        cfg = replace(run.cfg, seed=seed, run=replace(run.cfg.run, dir=str(run.dir.with_name(name))))
        runs.append(PlannedRun(number, replace(line, words=words), cfg))
    by_seed = any("${seed}" in word for line in lines for word in line.words)
    return load_runs(list(lines), machine) if by_seed or len({run.dir for run in runs}) < len(runs) else runs
