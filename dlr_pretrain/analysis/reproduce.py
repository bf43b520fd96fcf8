"""Where the items of the paper stand, what they take, and the pages of them: their results, and their commands."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from dlr_pretrain.analysis import paper_views
from dlr_pretrain.analysis.figures import Picture
from dlr_pretrain.analysis.paper import Item, Program, items, load_each, without_seed
from dlr_pretrain.analysis.plan import GPU, MFU
from dlr_pretrain.analysis.report import Part, Section, write_page, write_tables
from dlr_pretrain.analysis.tables import Table
from dlr_pretrain.config.written import read_record
from dlr_pretrain.launch.runs import Line, PlannedRun, load_runs
from dlr_pretrain.launch.state import DUE, STATES, Status
from dlr_pretrain.models.flops import PEAK_FLOPS
from dlr_pretrain.util.files import read_metrics
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
            said.append(
                f"{sum(one.makes.exists() for one in self.programs)} of {plural(len(self.programs), 'program')} done"
            )
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


def gpu_hours(configs: dict, gpu: str = GPU, mfu: Sequence[float] = MFU) -> dict[object, tuple[float, ...]]:
    """GPU hours of each configuration at each utilisation, from FLOPs and the peak of ``gpu``, the least first."""
    counted = paper_views.sizes(configs)
    hours = {}
    for name, cfg in configs.items():
        positions = cfg.train.steps * cfg.train.global_batch * cfg.train.seq_len
        hours[name] = tuple(
            counted[name].flops * positions / (PEAK_FLOPS[gpu] * share) / 3600 for share in sorted(mfu)[::-1]
        )
    return hours


def measured_hours(run: PlannedRun, gpu: str) -> float | None:
    """GPU hours of a run at its own speed on ``gpu``; None if it has none there."""
    start = (read_record(run.dir).get("starts") or [{}])[-1]
    speeds = [line.get("perf/tokens_per_second") for line in read_metrics(run.dir / "metrics.jsonl")[-100:]]
    known = sorted(speed for speed in speeds if speed)
    if start.get("device") != gpu or not known:
        return None
    train = run.cfg.train
    positions = train.steps * train.global_batch * train.seq_len
    return positions / known[len(known) // 2] * start["world_size"] / 3600


def hours_of(works: Sequence[Work], gpu: str, mfu: Sequence[float]) -> dict[Path, tuple[float, ...]]:
    """GPU hours of each run, by its directory: at the measured speed of its cell where there is one, else planned."""
    runs = {run.dir: run for work in works for run in work.runs}
    cells = {without_seed(run.line): run.cfg for run in runs.values()}
    planned = gpu_hours(cells, gpu, mfu)
    measured: dict[object, tuple[float, ...]] = {}
    for run in runs.values():
        if (run.dir / "metrics.jsonl").exists() and (hours := measured_hours(run, gpu)):
            measured[without_seed(run.line)] = (hours,)
    return {
        folder: measured.get(without_seed(run.line), planned[without_seed(run.line)]) for folder, run in runs.items()
    }


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


def render(
    works: Sequence[Work], overrides: Sequence[str], output: Path, command: str, rehearsal: bool
) -> list[Table | Picture]:
    """Write ``reproduce.html`` and ``.md``, tables and figures of the items into ``output``; returns what is on it."""
    lines = {without_seed(line): line for work in works for line in work.item.lines()}
    defined = {without_seed(run.line): run.cfg for run in load_runs(list(lines.values()))}
    parts: list[Part] = []
    remarks = (
        ["rehearsal: tiny models, a few updates, made-up documents. No number means anything"] if rehearsal else []
    )
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
    write_page(
        "The DLR paper, reproduced", remarks, parts, command, output, "reproduce", "rehearsal" if rehearsal else ""
    )
    return [part for part in parts if not isinstance(part, Section)]


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
