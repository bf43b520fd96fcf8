"""The items of the paper: their states, the page of their results, and docs/reproduce.md."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from dlr_pretrain.analysis.plan import GPU, LEAST_MFU, MFU_AT_1B, MFU_AT_60M
from dlr_pretrain.analysis.report import Part, Section, write_page, write_tables
from dlr_pretrain.analysis.tables import Table
from dlr_pretrain.config.run_folder import read_record
from dlr_pretrain.launch.runs import PlannedRun
from dlr_pretrain.launch.status import DUE, Status
from dlr_pretrain.launch.submit import counted
from dlr_pretrain.util.text import markdown_table, plural

from . import extract
from .cost import disk_of, hours_of, total
from .items import HERE, SLURM, Item, Program, items, load_each

ONE_GPU = "srun --gpus=1 --cpus-per-task=8 --mem=64G --time=8:00:00"  # before a command that measures
GPUS = 8  # for the days in docs/reproduce.md
EXPERIMENTS = ("experiment", "what it is", "rows; scales; seeds", "the paper's claim fails if")


@dataclass(frozen=True)
class Work:
    """An item with its runs, their states, and its programs."""

    item: Item
    runs: list[PlannedRun]
    statuses: list[Status]
    programs: list[Program]

    @property
    def ready(self) -> list[Program]:
        """The programs that have yet to run and whose runs are complete."""
        done = {run.dir for run, status in zip(self.runs, self.statuses, strict=True) if status.state == "complete"}
        return [one for one in self.programs if not one.makes.exists() and all(run.dir in done for run in one.reads)]

    def state(self) -> str:
        runs = counted(self.statuses)
        if not self.programs:
            return runs
        done = sum(one.makes.exists() for one in self.programs)
        return f"{runs}, {done} of {plural(len(self.programs), 'program')} done"

    def next_command(self, words: Sequence[str]) -> str:
        """The next command for the item; ``words`` are the overrides and options that select its runs and data."""
        base = shlex.join(["dlr-reproduce", self.item.name, *words])
        if any(status.state in DUE for status in self.statuses):
            return f"{base} --submit -- {self.item.slurm}"
        if any(status.state in ("running", "pending") for status in self.statuses):
            return "wait for its runs"
        starts = [read_record(run.dir).get("starts") or [{}] for run in self.runs]
        on_cpu = all(each[-1].get("device", "").startswith("CPU") for each in starts)
        measures = base if on_cpu else f"{ONE_GPU} {base}"
        return f"{measures} --local" if self.ready else f"{base} --render"


def render(all_work: Sequence[Work], words: Sequence[str], output: Path, command: str) -> None:
    """Write ``reproduce.html`` and ``.md``, tables and figures of the items into ``output``.

    ``words`` are those of ``Work.next_command``.
    """
    parts: list[Part] = []
    for work in all_work:
        item, results = work.item, extract.read(work.item, work.runs, work.programs, output / "figures")
        shown = list(extract.show(results))
        lines = [f"next: {work.next_command(words)}", f"state: {work.state()}"]
        lines += [f"the paper's claim fails if: {item.refuted}"]
        lines += [f"still to run: {program}" for program in work.ready]
        parts += [Section(item.name, f"{item.name}: {item.title}", [*lines, *dict.fromkeys(results.notes)]), *shown]
    write_tables([part for part in parts if isinstance(part, Table)], output / "tables")
    write_page("The DLR paper, reproduced", [], parts, command, output, "reproduce")


def documentation() -> str:
    """The text of docs/reproduce.md."""
    runs = {name: load_each(item.lines()) for name, item in items().items()}
    hours = hours_of((run for planned in runs.values() for run in planned), GPU)

    def cells(name: str, planned: Sequence[PlannedRun]) -> list[str]:
        times = [hours[run.dir] for run in planned]
        return [name, str(len(times)), total(times), total(times, GPUS * 24), disk_of(planned)]

    rows = [cells(f"`{name}`", planned) for name, planned in runs.items()]
    rows.append(cells("all", list({run.dir: run for planned in runs.values() for run in planned}.values())))
    header = ["experiment", "runs", "GPU hours", f"days on {GPUS} H100", "disk"]
    template = Template((HERE / "reproduce.md").read_text(encoding="utf-8"))
    return template.substitute(
        table=markdown_table(header, rows, right=range(1, len(header))), gpu=GPU,
        small=f"{MFU_AT_60M:.2f}", large=f"{MFU_AT_1B:.2f}", paper=f"{LEAST_MFU:.2f}",
        experiments=markdown_table(EXPERIMENTS, map(_experiment, items().values())), slurm=SLURM, one_gpu=ONE_GPU,
    )  # fmt: skip


def _experiment(item: Item) -> list[str]:
    """An item's row in docs/reproduce.md, under ``EXPERIMENTS``."""
    programs = dict.fromkeys(f"`{step.words.removeprefix('-m ').split()[0]}`" for step in item.steps)
    then = f"Then {', '.join(programs)}." if programs else ""
    control = f"Differences are from {item.control}." if item.control else ""
    options = f"Options of sbatch: `{item.slurm}`." if item.slurm != SLURM else ""
    about = " ".join(filter(None, (f"{item.title}.", then, control, item.note, options)))
    return [f"`{item.name}`", about, "; ".join(", ".join(map(str, of)) for of in (item.rows, item.scales, item.seeds)),
            item.refuted]  # fmt: skip
