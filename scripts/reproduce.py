"""The paper, table by table and figure by figure: ``python scripts/reproduce.py`` lists them with the next command."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from dlr_pretrain.analysis import paper
from dlr_pretrain.analysis.paper import Item, Program
from dlr_pretrain.config import parse
from dlr_pretrain.config.tree import PACKAGE
from dlr_pretrain.config.written import read_config
from dlr_pretrain.launch.local import LOG
from dlr_pretrain.launch.runs import Line, PlannedRun
from dlr_pretrain.launch.state import queue, status_of
from dlr_pretrain.launch.submit import start
from dlr_pretrain.util.errors import EXIT_FAILED, Parser, UserError, at_least_1, command, write_to_stderr
from dlr_pretrain.util.process import cores

EPILOG = """examples:
  reproduce.py                                         every item, where it stands, and the next command
  reproduce.py table1 scale=60m                        what it would run, how long, how much disk
  reproduce.py table1 --submit --limit 8 -- --gpus-per-node=8 --cpus-per-gpu=8 --mem=0 --time=48:00:00
  reproduce.py fold run=runs/my-run --local            an own run instead of the item's
  reproduce.py all --rehearse                          all of it on a CPU, with tiny models

--rows, scale= and seed= select runs. Other overrides are given to all runs that have their key. Options after -- are
those of sbatch. All is described in docs/reproduce.md."""


def parser() -> argparse.ArgumentParser:
    made = Parser(
        usage="reproduce.py [ITEM | all] [key=value ...] [options] [-- options of sbatch]",
        description="Train, measure and show the tables and figures of the DLR paper.", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add = made.add_argument
    add(
        "what", nargs="*", metavar="ITEM", help=f"all, or one of {', '.join(paper.items())}; then overrides of train.py"
    )
    does = made.add_mutually_exclusive_group()
    does.add_argument("--submit", action="store_true", help="queue the runs that are due as a SLURM array")
    does.add_argument("--local", action="store_true", help="train and measure on this machine, then render")
    does.add_argument("--render", action="store_true", help="tables, figures and the page of what there is")
    does.add_argument("--rehearse", action="store_true", help="everything with tiny models on this CPU, marked as such")
    does.add_argument("--documentation", action="store_true", help="print docs/reproduce.md")
    add("--rows", metavar="ROW,ROW", help="of the table, such as cola,cola+dlr (default: all)")
    add("--dry-run", dest="status", action="store_true", help="with --submit: show what would be queued")
    add("--limit", type=at_least_1, metavar="N", help="runs at once (default: SLURM's; 1 if local)")
    add("--output", type=Path, metavar="DIR", help="of the page (default: <run.root>/paper)")
    add(
        "--sft-data",
        default=paper.DATA["sft_data"],
        metavar="FILE",
        help="instructions (default: %(default)s, of the hub)",
    )
    add("--task-data", default="", metavar="DIR", help="documents of the tasks (default: of the hub)")
    add("--gpu", default="NVIDIA H100 80GB HBM3", metavar="NAME", help="for the hours (default: %(default)s)")
    add("--mfu", type=float, metavar="SHARE", help="utilisation for the hours (default: from 0.35 to 0.11)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0; EXIT_FAILED if a run or a program has failed here; or that of a UserError."""
    argv = sys.argv[1:] if argv is None else argv
    cut = argv.index("--") if "--" in argv else len(argv)
    form = parser()
    given = form.parse_intermixed_args(argv[:cut])
    given.for_sbatch = list(argv[cut + 1 :])
    if given.for_sbatch and not given.submit:
        form.error("options after -- are for --submit")
    return command(lambda: act(given))


def act(given: argparse.Namespace) -> int:
    names = [word for word in given.what if "=" not in word]
    overrides = [word for word in given.what if "=" in word]
    known = paper.items()
    if unknown := [name for name in names if name not in (*known, "all")]:
        raise UserError(f"{unknown[0]}: is no item. Choose from {', '.join(known)}, or all")
    asked = list(known.values()) if not names or "all" in names else [known[name] for name in names]
    chosen = paper.chosen(asked, given.rows)

    from dlr_pretrain.analysis.reproduce import documentation, render  # torch, after the arguments are checked

    if given.documentation:
        print(documentation(), end="")
        return 0
    if given.rehearse:
        return rehearse(chosen, given, overrides)
    root = next((word.partition("=")[2] for word in overrides if word.startswith("run.root=")), "runs")
    output = given.output or Path(root, "paper")
    works = [work_of(item, overrides, given, output) for item in chosen]
    if not names or not (given.submit or given.local or given.render):
        listing(works, overrides, given, briefly=not names)
        return 0
    failed = False
    for work in works if given.submit or given.local else []:
        if not any(word.startswith("run=") for word in overrides):
            given.what = [work.item.name]
            start(work.runs, given, given.for_sbatch)
    works = [work_of(item, overrides, given, output) for item in chosen]
    if given.local:
        failed = any(at.state not in ("complete", "diverged") for work in works for at in work.stands)
        for work in works:
            failed |= not measure(work.ready)
    if not given.submit:
        render(works, overrides, output, shlex.join(["python", *sys.argv]), rehearsal=False)
        print(f"page        {output / 'reproduce.html'}")
    return EXIT_FAILED if failed else 0


def work_of(item: Item, overrides: Sequence[str], given: argparse.Namespace, output: Path, rehearsal: bool = False):
    """The runs of an item with ``overrides``, as they stand."""
    from dlr_pretrain.analysis.reproduce import Work

    own = [word.removeprefix("run=") for word in overrides if word.startswith("run=")]
    words = [word for word in overrides if not word.startswith("run=")]
    if own:
        row = next(iter(item.rows))
        runs = [PlannedRun(1, Line(f"{item.name}: {row}", ()), parse(read_config(Path(own[0]))))]
        runs[0].cfg.run.dir = own[0]
    else:
        runs = paper.load_each(paper.planned_lines(item, words, rehearsal), machine=given.local or rehearsal)
    jobs: dict[str, str] = {}
    with suppress(UserError):  # no SLURM here, or none that answers: only --submit needs it
        jobs = {} if given.local or rehearsal else queue()
    data = {"sft_data": given.sft_data, "task_data": given.task_data}
    programs = list(item.programs(runs, output / item.name, data, rehearsal))
    return Work(item, runs, [status_of(run, jobs) for run in runs], programs)


def listing(works: list, overrides: Sequence[str], given: argparse.Namespace, briefly: bool) -> None:
    """Print how the items stand, what they take, and the next command."""
    from dlr_pretrain.analysis.plan import MFU
    from dlr_pretrain.analysis.reproduce import disk_of, hours_of, total
    from dlr_pretrain.models.flops import PEAK_FLOPS

    named = [name for name in PEAK_FLOPS if given.gpu in name]
    named = [given.gpu] if given.gpu in named else named
    if len(named) != 1:
        raise UserError(f"--gpu={given.gpu}: names {len(named)} GPUs. Choose from {', '.join(named or PEAK_FLOPS)}")
    (given.gpu,) = named
    write_to_stderr("counting what the runs take ...")
    hours = hours_of(works, given.gpu, [given.mfu] if given.mfu else MFU)
    for work in works:
        print(f"{work.item.name:<10} {work.item.title}")
        if not briefly:
            for run, at in zip(work.runs, work.stands, strict=True):
                print(f"{run.number:>12}  {run.dir}: {at}")
            for one in work.programs:
                print(f"{'done' if one.makes.exists() else 'to run':>12}  {one}")
            print(f"{'':11}disk       {disk_of(work.runs)} at most")
        print(f"{'':11}state      {work.state()}")
        print(f"{'':11}GPU hours  {total([hours[run.dir] for run in work.runs])}")
        print(f"{'':11}next       {work.next_command(overrides)}")
    told = f"{given.mfu}" if given.mfu else " to ".join(f"{share:g}" for share in sorted(MFU)[::-1])
    print(f"\nGPU hours are of {given.gpu}, at a measured speed or an assumed MFU of {told}. Items share runs.")


def measure(programs: Sequence[Program], quiet: bool = False) -> bool:
    """Start the programs one after another; returns whether all have done their work."""
    environment = os.environ | {"PYTHONPATH": f"{PACKAGE.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    good = True
    for one in programs:
        write_to_stderr(str(one))
        done = subprocess.run(
            [sys.executable, *one.command], env=environment, capture_output=quiet, text=True, check=False
        )
        if done.returncode or not one.makes.exists():
            good = False
            write_to_stderr(f"failed with exit code {done.returncode}: {one}\n{(done.stderr or '')[-2000:]}")
    return good


# ----------------------------------------------------------------------------------------------------
# Rehearsal


def rehearse(chosen: Sequence[Item], given: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Train every run of the items with a tiny model, start every program, and render all of it."""
    from dlr_pretrain.analysis.reproduce import render

    output = given.output or Path("rehearsal")
    made = paper.made_up(output / "documents")
    given.sft_data, given.task_data = made["sft_data"], made["task_data"]
    words = [*paper.REHEARSAL, f"run.root={output / 'runs'}", *overrides]
    works = [work_of(item, words, given, output / "results", rehearsal=True) for item in chosen]
    due = {
        run.dir: run for work in works for run, at in zip(work.runs, work.stands, strict=True) if at.state != "complete"
    }
    write_to_stderr(f"{len(due)} runs")
    with get_context("fork").Pool(cores()) as pool:
        for number, problem in enumerate(pool.imap_unordered(train, due.values()), 1):
            write_to_stderr(f"{number}/{len(due)} {problem}")
    good = True
    for item in chosen:
        good &= measure(work_of(item, words, given, output / "results", rehearsal=True).ready, quiet=True)
    works = [work_of(item, words, given, output / "results", rehearsal=True) for item in chosen]
    render(works, overrides, output, shlex.join(["python", *sys.argv]), rehearsal=True)
    print(f"page        {output / 'reproduce.html'}")
    return 0 if good and all(at.state == "complete" for work in works for at in work.stands) else EXIT_FAILED


def train(run: PlannedRun) -> str:
    """Train a run in this process, with a log in its directory; returns how it has ended."""
    import torch

    from dlr_pretrain.train.run import run as train_run

    torch.set_num_threads(1)
    run.dir.mkdir(parents=True, exist_ok=True)
    with open(run.dir / LOG, "w", encoding="utf-8") as log, redirect_stdout(log), redirect_stderr(log):
        try:
            train_run(replace(run.cfg))
        except Exception as error:
            return f"{run.dir.name}: {error}"
    return f"{run.dir.name}: complete"


if __name__ == "__main__":
    sys.exit(main())
