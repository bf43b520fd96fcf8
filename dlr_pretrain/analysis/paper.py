"""The DLR paper as items, one for each of its tables and figures: what is trained for each, and what the paper prints.

``slurm/paper.yaml`` defines the items, and its first lines describe their fields. ``paper_views.py`` shows them.
"""

from __future__ import annotations

import hashlib
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
from dlr_pretrain.config import identity
from dlr_pretrain.config.command_line import key_of
from dlr_pretrain.launch.runs import Line, PlannedRun, combine, expand, load_runs
from dlr_pretrain.launch.state import shipped
from dlr_pretrain.util.errors import UserError

SELECTING = ("scale", "seed")  # overrides of these keys select runs
OF_A_ROW = ("backbone", "dlr", "experiment")  # overrides of these keys would turn a row into another one
SLURM = "--gpus-per-node=8 --cpus-per-gpu=8 --mem=0 --time=48:00:00"
SFT_DATA = "yahma/alpaca-cleaned"
# Overrides for a rehearsal: half a million parameters on the sample text, for a few updates.
RANK = 8
REHEARSAL = (
    *("data=sample", "logger=jsonl", "compile=false", "device=cpu", "scale.hidden_size=32", "scale.num_layers=2"),
    *("scale.intermediate_size=91", "scale.num_heads=2", f"scale.rank={RANK}", "scale.vocab_size=null"),
    *("train.steps=15", "train.warmup_steps=2", "train.global_batch=4", "train.micro_batch=4", "train.seq_len=32"),
    *("eval.every=1", "eval.tokens=600", "checkpoint.every=5", "checkpoint.keep_every=5"),
)
LORO = ("optimizer.exact_every=5", "optimizer.shift=null")  # its own schedule is longer than a rehearsal


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
    rehearsed: str = ""  # further words, in a rehearsal

    def command(self, places: dict[str, str | list[str]]) -> list[str]:
        """The words with their placeholders filled; the placeholder of a list is replaced by all words of the list."""
        words: list[str] = []
        for word in shlex.split(self.words):
            value = places.get(word[1:-1])
            words += value if isinstance(value, list) else [word.format_map(places)]
        if words[0] != "-m":
            words[0] = str(shipped("scripts") / words[0])
        return words


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper; ``slurm/paper.yaml`` describes the fields."""

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

    def lines(self) -> list[Line]:
        """A line for each run. Its ``origin`` ends with the row."""
        return [
            Line(f"{self.name}: {row}", (f"scale={scale}", *self.words(row), f"seed={seed}"))
            for scale, row, seed in product(self.scales, self.rows, self.seeds)
        ]

    def row_of(self, line: Line) -> str:
        return line.origin.removeprefix(f"{self.name}: ")

    def cell_of(self, run: PlannedRun) -> tuple[str, str]:
        """The row and the scale of a run."""
        return self.row_of(run.line), run.cfg.scale.name

    def numbers(self, row: str, scale: str) -> dict:
        """What the paper prints for a row: the columns of its Table 1, and the item's own numbers under ``own``.

        For the layout "scales", own numbers are perplexities, which take the place of Table 1's row.
        """
        own, table = self.published.get(row, {}).get(scale), printed("table1", row, scale) or {}
        if self.layout != "scales":
            return table | {"own": own}
        return table if own is None else {"ppl": own[0], "ppl_std": own[1]}

    def programs(self, runs: Sequence[PlannedRun], out: Path, sft_data: str, task_data: str) -> Iterator[Program]:
        """The steps on ``runs``, with results in ``out``, each after those that it depends on.

        What a step makes from a row, or from a run, lies in a folder named by its runs and data.
        """
        of_rows = [(row, [run for run in runs if self.row_of(run.line) == row]) for row in self.rows]
        groups = {
            "run": [(self.row_of(run.line), [run]) for run in runs],
            "row": [(row, of) for row, of in of_rows if of],
            "once": [("", list(runs))],
        }
        data = {"sft_data": sft_data, "task_data": ["--data", task_data] if task_data else []}
        tuned_on = [sft_data for step in self.steps if "{sft_data}" in step.words]
        for step in self.steps:
            for row, of in groups[step.each]:
                rows = dict(of_rows)[row] if "{row}" in step.words else of
                made_from = [[str(run.dir.resolve()), identity(run.cfg)] for run in rows] + tuned_on
                own = out if step.each == "once" else out / digest(made_from)
                places = data | {"out": str(own), "row": row.replace(" ", "_")}
                places["scores"] = str(own / f"tasks-{digest(task_data)}")
                places["folded"] = [str(run.dir / "folded") for run in of]
                if step.each == "run":
                    last = of[0].dir / "checkpoints" / f"step_{of[0].cfg.train.steps:08d}"
                    places |= {"run": str(of[0].dir), "name": of[0].dir.name, "checkpoint": str(last)}
                yield Program(step.command(places), Path(step.makes.format_map(places)), of)


def digest(content: object) -> str:
    """A short name for ``content``."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def definitions() -> dict:
    """What slurm/paper.yaml holds. Names that begin with an underscore are not items."""
    return yaml.safe_load((shipped("slurm") / "paper.yaml").read_text(encoding="utf-8"))


@cache
def items() -> dict[str, Item]:
    """All items by name, in the order of the page."""
    found = {}
    for name, given in definitions().items():
        if not name.startswith("_"):
            steps = [Step(**step) for step in given.pop("steps", [])]
            found[name] = Item(name=name, **given, steps=steps)
    return found


def choose_rows(given: Sequence[Item], rows: str | None) -> list[Item]:
    """The items with only the rows of a list such as ``cola,cola+dlr``; an item without any of them is left out."""
    if rows is None:
        return list(given)
    names, known = rows.split(","), list(dict.fromkeys(row for item in given for row in item.rows))
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"--rows={rows}: {unknown[0]} is not a row. Choose from {', '.join(known)}")
    chosen = [replace(item, rows={row: item.rows[row] for row in item.rows if row in names}) for item in given]
    return [item for item in chosen if item.rows]


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


# ----------------------------------------------------------------------------------------------------
# Rehearsal


def rehearsed(item: Item) -> Item:
    """The item with fewer seeds, and with rows and steps that suit the models of ``REHEARSAL``.

    An item of one scale keeps two seeds, to show deviations. An item of several scales keeps one seed.
    """
    rows = {}
    for row in item.rows:  # REHEARSAL's scale.rank does not reach a row that computes its own rank from it
        words = [word.replace("${scale.rank}", str(RANK)) for word in item.words(row)]
        rows[row] = shlex.join([*words, *(LORO if row == "loro" else ())])
    steps = []
    for step in item.steps:
        more = shlex.split(step.rehearsed)
        replaced = {key_of(word) for word in more if "=" in word}
        kept = [word for word in shlex.split(step.words) if "=" not in word or key_of(word) not in replaced]
        steps.append(replace(step, words=shlex.join([*kept, *more])))
    return replace(item, rows=rows, common="", steps=steps, seeds=item.seeds[: 2 if len(item.scales) == 1 else 1])


def write_documents(folder: Path) -> tuple[str, str]:
    """Write invented instructions and task documents for a rehearsal, in the formats of sft.py and evaluate.py.

    Returns the file of instructions and the folder of documents.
    """
    import lm_eval.tasks

    documents, rows = definitions()["_documents"], [definitions()["_instructions"]] * 8
    subjects = (Path(lm_eval.tasks.__file__).parent / "mmlu" / "default").glob("mmlu_*.yaml")
    documents |= {f"mmlu/{path.stem.removeprefix('mmlu_')}": documents["mmlu"] for path in subjects}
    for name, split in product(documents, ("validation", "test")):
        path = folder / "tasks" / name / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{json.dumps(documents[name])}\n" * 2, encoding="utf-8")
    (folder / "instructions.json").write_text(json.dumps(rows), encoding="utf-8")
    return str(folder / "instructions.json"), str(folder / "tasks")
