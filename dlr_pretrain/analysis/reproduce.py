"""The items of the paper: their states, what they take, the page of their results, and docs/reproduce.md."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from string import Template

from dlr_pretrain.analysis import paper_views
from dlr_pretrain.analysis.paper import SLURM, Item, Program, items, load_each, without_seed
from dlr_pretrain.analysis.plan import GPU, LEAST_MFU, MFU_AT_1B, MFU_AT_60M, sizes, utilisations
from dlr_pretrain.analysis.report import Part, Section, write_page, write_tables
from dlr_pretrain.analysis.tables import Table
from dlr_pretrain.config.run_folder import read_record
from dlr_pretrain.launch.runs import PlannedRun
from dlr_pretrain.launch.state import DUE, Status
from dlr_pretrain.launch.submit import counted
from dlr_pretrain.models.flops import PEAK_FLOPS
from dlr_pretrain.util.files import NUMBER, read_metrics
from dlr_pretrain.util.text import markdown_table, plural

ONE_GPU = "srun --gpus=1 --cpus-per-task=8 --mem=64G --time=8:00:00"  # before a command that measures
GPUS = 8  # for the days in docs/reproduce.md


@dataclass(frozen=True)
class Work:
    """An item with its runs, their states, and its programs."""

    item: Item
    runs: list[PlannedRun]
    stands: list[Status]
    programs: list[Program]

    @property
    def ready(self) -> list[Program]:
        """The programs that have yet to run and whose runs are complete."""
        done = {run.dir for run, at in zip(self.runs, self.stands, strict=True) if at.state == "complete"}
        return [one for one in self.programs if not one.makes.exists() and all(run.dir in done for run in one.reads)]

    def state(self) -> str:
        runs = counted(self.stands)
        if not self.programs:
            return runs
        done = sum(one.makes.exists() for one in self.programs)
        return f"{runs}, {done} of {plural(len(self.programs), 'program')} done"

    def next_command(self, words: Sequence[str]) -> str:
        """The next command for the item; ``words`` are the overrides and options that select its runs and data."""
        base = shlex.join(["python", "scripts/reproduce.py", self.item.name, *words])
        if any(at.state in DUE for at in self.stands):
            return f"{base} --submit -- {self.item.slurm}"
        if any(at.state in ("running", "pending") for at in self.stands):
            return "wait for its runs"
        return f"{ONE_GPU} {base} --local" if self.ready else f"{base} --render"


# ----------------------------------------------------------------------------------------------------
# What it takes


def hours_of(works: Sequence[Work], gpu: str, mfu: float | None = None) -> dict[Path, tuple[float, ...]]:
    """GPU hours of each run by its directory, from FLOPs and the peak of ``gpu`` at ``mfu`` or at the plan's
    ``utilisations``; ascending.

    If a run was trained on that GPU, the runs that differ from it only in the seed have its measured speed instead.
    """
    runs = {run.dir: run for work in works for run in work.runs}
    speeds = {without_seed(run.line): speed for run in runs.values() if (speed := measured_speed(run.dir, gpu))}
    hours = {}
    for run, size in zip(runs.values(), sizes(run.cfg for run in runs.values()), strict=True):
        positions = run.cfg.train.steps * run.cfg.train.global_batch * run.cfg.train.seq_len
        shares = reversed(utilisations(run.cfg, size.flops)) if mfu is None else [mfu]
        rates = [PEAK_FLOPS[gpu] * share / size.flops for share in shares]
        if speed := speeds.get(without_seed(run.line)):
            rates = [speed]
        hours[run.dir] = tuple(positions / rate / 3600 for rate in rates)
    return hours


def measured_speed(folder: Path, gpu: str) -> float | None:
    """Tokens/s of one ``gpu`` in the last steps of a run; None if the run was not trained on it."""
    start = (read_record(folder).get("starts") or [{}])[-1]
    lines = read_metrics(folder / "metrics.jsonl")[-100:] if start.get("device") == gpu else []
    speeds = [speed for line in lines if isinstance(speed := line.get("perf/tokens_per_second"), NUMBER)]
    return median(speeds) / start["world_size"] if speeds else None


def total(hours: Sequence[tuple[float, ...]], unit: float = 1) -> str:
    """The sum of hours, as a range from the least to the most. ``unit`` is the shown unit in hours."""
    sums = (sum(of[0] for of in hours) / unit, sum(of[-1] for of in hours) / unit)
    return " to ".join(dict.fromkeys(f"{time:,.0f}" if time >= 10 else f"{time:.2g}" for time in sums))


def disk_of(runs: Sequence[PlannedRun]) -> str:
    """The most that the runs keep on the disk."""
    return f"{sum(size.disk for size in sizes(run.cfg for run in runs)) / 1e9:,.0f} GB"


# ----------------------------------------------------------------------------------------------------
# Pages


def render(works: Sequence[Work], words: Sequence[str], output: Path, command: str, rehearsal: bool) -> None:
    """Write ``reproduce.html`` and ``.md``, tables and figures of the items into ``output``.

    ``words`` are those of ``Work.next_command``.
    """
    parts: list[Part] = []
    for work in works:
        item, found = work.item, paper_views.read(work.item, work.runs, work.programs, output / "figures")
        made = list(paper_views.LAYOUTS[item.layout](found))
        told = [f"state: {work.state()}", f"the paper's claim fails if: {item.refuted}"]
        if not rehearsal:
            due = [f"still to run: {program}" for program in work.ready]
            told = [f"next: {work.next_command(words)}", *told, *due]
        parts += [Section(item.name, f"{item.name}: {item.title}", [*told, *dict.fromkeys(found.notes)]), *made]
    write_tables([part for part in parts if isinstance(part, Table)], output / "tables")
    remarks = ["Rehearsal: tiny models, a few updates, invented documents. No number means anything."] * rehearsal
    mark = "rehearsal" if rehearsal else ""
    write_page("The DLR paper, reproduced", remarks, parts, command, output, "reproduce", mark)


def documentation() -> str:
    """The text of docs/reproduce.md."""
    works = [Work(item, load_each(item.lines()), [], []) for item in items().values()]
    hours, seen = hours_of(works, GPU), set()

    def cells(runs: Sequence[PlannedRun]) -> list[str]:
        own, new = [hours[run.dir] for run in runs], [hours[run.dir] for run in runs if run.dir not in seen]
        return [str(len(own)), total(own), total(own, GPUS * 24), disk_of(runs), str(len(new)), total(new)]

    rows = []
    for work in works:
        rows.append([f"[`{work.item.name}`](#{work.item.name})", work.item.title, *cells(work.runs)])
        seen.update(run.dir for run in work.runs)
    seen.clear()
    rows.append(["all", "", *cells(list({run.dir: run for work in works for run in work.runs}.values()))])
    days = f"days on {GPUS} H100"
    header = ["item", "", "runs", "GPU hours", days, "disk", "not in items above", "GPU hours of these"]
    template = Template(Path(__file__).with_name("reproduce.md").read_text(encoding="utf-8"))
    return template.substitute(
        table=markdown_table(header, rows, right=range(2, len(header))), gpu=GPU,
        small=f"{MFU_AT_60M:.2f}", large=f"{MFU_AT_1B:.2f}", paper=f"{LEAST_MFU:.2f}",
        sections="\n\n".join(map(_section, items().values())), slurm=SLURM, one_gpu=ONE_GPU,
    )  # fmt: skip


def _section(item: Item) -> str:
    """An item's part of docs/reproduce.md."""
    programs = [f"`{step.words.removeprefix('-m ').split()[0]}`" for step in item.steps]
    facts = {"Rows": item.rows, "Scales": item.scales, "Seeds": map(str, item.seeds), "Then": dict.fromkeys(programs)}
    told = " ".join(f"{what}: {', '.join(of)}." for what, of in facts.items() if of)
    control = f" Differences are from {item.control}." if item.control else ""
    base = f"python scripts/reproduce.py {item.name}"
    measure = [f"{ONE_GPU} {base} --local"] if item.steps else []
    commands = "\n".join([base, f"{base} --submit -- {item.slurm}", *measure, f"{base} --render"])
    about = "".join(f"{part}\n\n" for part in (f"{item.title}. {told}{control}", item.note) if part)
    return f"## {item.name}\n\n{about}```bash\n{commands}\n```\n\nThe paper's claim fails if: {item.refuted}"
