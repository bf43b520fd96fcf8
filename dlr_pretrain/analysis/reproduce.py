"""Where the items of the paper stand, what they take, and the pages of them: their results, and their commands."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from string import Template

from dlr_pretrain.analysis import paper_views
from dlr_pretrain.analysis.paper import Item, Program, items, load_each, without_seed
from dlr_pretrain.analysis.plan import GPU, MFU
from dlr_pretrain.analysis.report import Part, Section, write_page, write_tables
from dlr_pretrain.analysis.tables import Table
from dlr_pretrain.config.written import read_record
from dlr_pretrain.launch.runs import Line, PlannedRun, load_runs
from dlr_pretrain.launch.state import DUE, STATES, Status
from dlr_pretrain.models.flops import PEAK_FLOPS
from dlr_pretrain.util.files import NUMBER, read_metrics
from dlr_pretrain.util.text import markdown_table, plural

SLURM = "-- --gpus-per-node=8 --cpus-per-gpu=8 --mem=0 --time=48:00:00"
GPUS = 8  # of which docs/reproduce.md gives days


@dataclass(frozen=True)
class Work:
    """An item with its runs, where they stand, and its programs."""

    item: Item
    runs: list[PlannedRun]
    stands: list[Status]
    programs: list[Program]

    @property
    def ready(self) -> list[Program]:
        """The programs that are due and have what they read, unless another program makes it."""
        done = {run.dir for run, at in zip(self.runs, self.stands, strict=True) if at.state == "complete"}
        return [one for one in self.programs if not one.makes.exists() and all(run.dir in done for run in one.reads)]

    def state(self) -> str:
        counts = Counter(at.state for at in self.stands)
        said = [f"{counts[state]} {state}" for state in STATES if counts[state]]
        if self.programs:
            done = sum(one.makes.exists() for one in self.programs)
            said.append(f"{done} of {plural(len(self.programs), 'program')} done")
        return ", ".join(said)

    def next_command(self, overrides: Sequence[str]) -> str:
        """What brings the item on, or that there is nothing to do."""
        base = shlex.join(["python", "scripts/reproduce.py", self.item.name, *overrides])
        if any(at.state in DUE for at in self.stands):
            return f"{base} --submit {SLURM}"
        if any(at.state in ("running", "pending") for at in self.stands):
            return "wait for its runs"
        return f"{base} --local" if self.ready else f"{base} --render"


# ----------------------------------------------------------------------------------------------------
# What it takes


def hours_of(works: Sequence[Work], gpu: str, mfu: Sequence[float]) -> dict[Path, tuple[float, ...]]:
    """GPU hours of each run, by its directory, at each utilisation, the least first, by FLOPs and the peak of ``gpu``.

    Runs that differ from one on that GPU in their seed alone have its measured speed instead.
    """
    runs = {run.dir: run for work in works for run in work.runs}
    cells = {without_seed(run.line): run for run in runs.values()}
    counted, hours = paper_views.sizes({key: run.cfg for key, run in cells.items()}), {}
    for key, run in cells.items():
        at_peak = counted[key].flops * positions(run) / PEAK_FLOPS[gpu] / 3600
        hours[key] = tuple(at_peak / share for share in sorted(mfu, reverse=True))
    for run in runs.values():
        if speed := measured_speed(run.dir, gpu):
            hours[without_seed(run.line)] = (positions(run) / speed / 3600,)
    return {folder: hours[without_seed(run.line)] for folder, run in runs.items()}


def positions(run: PlannedRun) -> int:
    """Positions of the whole run."""
    return run.cfg.train.steps * run.cfg.train.global_batch * run.cfg.train.seq_len


def measured_speed(folder: Path, gpu: str) -> float | None:
    """Tokens/s of one ``gpu`` in the last steps of a run; None if it was not trained on it."""
    start = (read_record(folder).get("starts") or [{}])[-1]
    lines = read_metrics(folder / "metrics.jsonl")[-100:] if start.get("device") == gpu else []
    speeds = [speed for line in lines if isinstance(speed := line.get("perf/tokens_per_second"), NUMBER)]
    return median(speeds) / start["world_size"] if speeds else None


def total(hours: Sequence[tuple[float, ...]], unit: float = 1) -> str:
    """The sum of hours in a unit of hours, from the least to the most."""
    sums = (sum(of[0] for of in hours) / unit, sum(of[-1] for of in hours) / unit)
    return " to ".join(dict.fromkeys(f"{time:,.0f}" if time >= 10 else f"{time:.2g}" for time in sums))


def disk_of(runs: Sequence[PlannedRun]) -> str:
    """The most that the runs keep on the disk."""
    counted = paper_views.sizes({without_seed(run.line): run.cfg for run in runs})
    return f"{sum(counted[without_seed(run.line)].disk for run in runs) / 1e9:,.0f} GB"


# ----------------------------------------------------------------------------------------------------
# Pages


def render(works: Sequence[Work], overrides: Sequence[str], output: Path, command: str, rehearsal: bool) -> None:
    """Write ``reproduce.html`` and ``.md``, tables and figures of the items into ``output``."""
    lines = {without_seed(line): line for work in works for line in work.item.lines()}
    defined = {without_seed(run.line): run.cfg for run in load_runs(list(lines.values()))}
    parts: list[Part] = []
    remarks = ["Rehearsal: tiny models, a few updates, made-up documents. No number means anything."] * rehearsal
    for work in works:
        item = work.item
        cells = {(item.row_of(line), scale_of(line)): defined[without_seed(line)] for line in item.lines()}
        found = paper_views.read(item, work.runs, cells, work.programs, output / "figures")
        made = list(paper_views.LAYOUTS[item.layout](found))
        told = [f"state: {work.state()}", f"refuted, if: {item.refuted}"]
        if not rehearsal:
            told = [f"next: {work.next_command(overrides)}", *told, *(f"due: {program}" for program in work.ready)]
        parts += [Section(item.name, f"{item.name}: {item.title}", [*told, *dict.fromkeys(found.notes)]), *made]
    write_tables([part for part in parts if isinstance(part, Table)], output / "tables")
    mark = "rehearsal" if rehearsal else ""
    write_page("The DLR paper, reproduced", remarks, parts, command, output, "reproduce", mark)


def scale_of(line: Line) -> str:
    return next(word.removeprefix("scale=") for word in line.words if word.startswith("scale="))


def documentation() -> str:
    """The text of docs/reproduce.md."""
    works = [Work(item, load_each(item.lines()), [], []) for item in items().values()]
    hours, seen, rows = hours_of(works, GPU, MFU), set(), []
    unique = {run.dir: run for work in works for run in work.runs}
    everything = Work(Item("all", "", "", "", [], [], {}), list(unique.values()), [], [])
    for work in [*works, everything]:
        name, own = work.item.name, {run.dir: hours[run.dir] for run in work.runs}
        fresh = [of for folder, of in own.items() if folder not in seen or work is everything]
        link = f"[`{name}`](#{name})" if work.item.title else "all"
        cells = [str(len(own)), str(len(own) - len(fresh)), total(fresh), total(fresh, GPUS * 24), disk_of(work.runs)]
        rows.append([link, work.item.title, *cells])
        seen.update(own)
    header = ["item", "", "runs", "shared with items above", "GPU hours", f"days on {GPUS} H100", "disk"]
    table = markdown_table(header, rows, right=range(2, len(header)))
    template = Template(Path(__file__).with_name("reproduce.md").read_text(encoding="utf-8"))
    sections = "\n\n".join(_section(work.item) for work in works)
    return template.substitute(table=table, gpu=GPU, low=max(MFU), high=min(MFU), sections=sections, slurm=SLURM)


def _section(item: Item) -> str:
    """An item's part of the page."""
    programs = [f"`{step.words.removeprefix('-m ').split()[0]}`" for step in item.steps]
    facts = {"Rows": item.rows, "Scales": item.scales, "Seeds": map(str, item.seeds), "Then": dict.fromkeys(programs)}
    told = " ".join(f"{what}: {', '.join(of)}." for what, of in facts.items() if of)
    control = f" Differences are to {item.control}." if item.control else ""
    base = f"python scripts/reproduce.py {item.name}"
    commands = "\n".join([base, f"{base} --submit {SLURM}", f"{base} --local", f"{base} --render"])
    refuted = f"It would be refuted if this holds: {item.refuted}"
    return f"## {item.name}\n\n{item.title}. {told}{control}\n\n```bash\n{commands}\n```\n\n{refuted}"
