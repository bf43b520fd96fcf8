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
from typing import TYPE_CHECKING

from dlr_pretrain.analysis import paper
from dlr_pretrain.analysis.paper import Item, Program
from dlr_pretrain.config import parse
from dlr_pretrain.config.run_folder import read_config, require_run_folder
from dlr_pretrain.config.tree import PACKAGE
from dlr_pretrain.launch.local import LOG
from dlr_pretrain.launch.runs import Line, PlannedRun
from dlr_pretrain.launch.state import queue, status_of
from dlr_pretrain.launch.submit import start
from dlr_pretrain.util.errors import EXIT_FAILED, Parser, UserError, at_least_1, command, share, write_to_stderr
from dlr_pretrain.util.files import claim, new_pool
from dlr_pretrain.util.process import cores

if TYPE_CHECKING:
    from dlr_pretrain.analysis.reproduce import Work  # imports torch

EPILOG = """examples:
  reproduce.py                                         every item, where it stands, and the next command
  reproduce.py table1 scale=60m                        what it would run, how long, how much disk
  reproduce.py table1 --submit --limit 8 -- --gpus-per-node=8 --cpus-per-gpu=8 --mem=0 --time=48:00:00
  reproduce.py fold run=runs/my-run --local            a run of your own instead of the item's
  reproduce.py all --rehearse                          all of it on a CPU, with tiny models

--rows, scale= and seed= select runs. Any other override applies to all runs that have its key. Options after -- are
those of sbatch. docs/reproduce.md describes all of it."""


def parser() -> argparse.ArgumentParser:
    made = Parser(
        usage="reproduce.py [ITEM | all] [key=value ...] [options] [-- options of sbatch]",
        description="Train, measure and show the tables and figures of the DLR paper.", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add, names = made.add_argument, ", ".join(paper.items())
    add("what", nargs="*", metavar="ITEM", help=f"all, or one of {names}; then overrides of train.py")
    does = made.add_mutually_exclusive_group()
    does.add_argument("--submit", action="store_true", help="queue the runs that are due as a SLURM array")
    does.add_argument("--local", action="store_true", help="train and measure on this machine, then render")
    does.add_argument("--render", action="store_true", help="write tables, figures and the page from what exists")
    does.add_argument("--rehearse", action="store_true", help="everything with tiny models on this CPU, marked as such")
    does.add_argument("--documentation", action="store_true", help="print docs/reproduce.md")
    add("--rows", metavar="ROW,ROW", help="rows of the table, such as cola,cola+dlr (default: all)")
    add("--dry-run", dest="status", action="store_true", help="with --submit: show what would be queued")
    add("--limit", type=at_least_1, metavar="N", help="runs at once (default: SLURM's; 1 if local)")
    add("--output", type=Path, metavar="DIR", help="for the page (default: <run.root>/paper)")
    add("--sft-data", default=paper.SFT_DATA, metavar="FILE", help="instructions (default: %(default)s, on the hub)")
    add("--task-data", default="", metavar="DIR", help="documents of the tasks (default: the hub's)")
    add("--gpu", default="NVIDIA H100 80GB HBM3", metavar="NAME", help="hours on this GPU (default: %(default)s)")
    add("--mfu", type=share, metavar="SHARE", help="utilisation assumed for the hours (default: see scripts/plan.py)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0; EXIT_FAILED if a run or a program has failed here; or that of a UserError."""
    argv = sys.argv[1:] if argv is None else argv
    cut = argv.index("--") if "--" in argv else len(argv)
    form = parser()
    given = form.parse_intermixed_args(argv[:cut])
    given.for_sbatch = argv[cut + 1 :]
    if given.for_sbatch and not given.submit:
        form.error("options after -- are for --submit")
    return command(lambda: act(given))


def act(given: argparse.Namespace) -> int:
    names = [word for word in given.what if "=" not in word]
    given.overrides = [word for word in given.what if "=" in word]
    known = paper.items()
    if unknown := [name for name in names if name not in (*known, "all")]:
        raise UserError(f"{unknown[0]}: not an item. Choose from {', '.join(known)}, or all")
    asked = list(known.values()) if not names or "all" in names else [known[name] for name in names]
    given.items = paper.choose_rows(asked, given.rows)

    from dlr_pretrain.analysis.reproduce import documentation, render  # torch, after the arguments are checked

    if given.documentation:
        print(documentation(), end="")
        return 0
    if given.rehearse:
        return rehearse(given)
    given.again, default = [*given.overrides], parser().get_default  # the words that the next command repeats
    for name in ("rows", "sft_data", "task_data", "output"):
        if (value := getattr(given, name)) != default(name):
            given.again += [f"--{name.replace('_', '-')}", str(value)]
    root = next((word.partition("=")[2] for word in given.overrides if word.startswith("run.root=")), "runs")
    given.output = given.output or Path(root, "paper")
    works = read_works(given, given.overrides, given.output)
    if not names or not (given.submit or given.local or given.render):
        show(works, given, briefly=not names)
        return 0
    if not given.status:
        claim(given.output, "reproduce.py")
    if (given.submit or given.local) and not any(word.startswith("run=") for word in given.overrides):
        for work in works:
            given.what = [work.item.name]
            start(work.runs, given)
        works = read_works(given, given.overrides, given.output)
    sound = True
    if given.local:
        sound = all(at.state in ("complete", "diverged") for work in works for at in work.stands)
        for work in works:
            sound &= measure(work.ready)
    if not given.submit:
        render(works, given.again, given.output, shlex.join(["python", *sys.argv]), rehearsal=False)
        print(f"page        {given.output / 'reproduce.html'}")
    return 0 if sound else EXIT_FAILED


def read_works(given: argparse.Namespace, overrides: Sequence[str], output: Path) -> list[Work]:
    """The chosen items with their runs under ``overrides`` and the runs' present states."""
    from dlr_pretrain.analysis.reproduce import Work

    jobs: dict[str, str] = {}
    with suppress(UserError):  # no SLURM here, or none that answers: only --submit needs it
        jobs = queue() if not (given.local or given.rehearse) else {}
    works = []
    for item in given.items:
        runs = runs_of(item, overrides, given)
        chosen = replace(item, scales=list(dict.fromkeys(run.cfg.scale.name for run in runs)))
        programs = chosen.programs(runs, output / item.name, given.sft_data, given.task_data)
        works.append(Work(chosen, runs, [status_of(run, jobs) for run in runs], list(programs)))
    return works


def runs_of(item: Item, overrides: Sequence[str], given: argparse.Namespace) -> list[PlannedRun]:
    """The runs of an item, or the user's own run that ``run=`` names, as a run of its first row."""
    if own := [word.removeprefix("run=") for word in overrides if word.startswith("run=")]:
        cfg = parse(read_config(Path(own[0])))
        cfg.run.dir = own[0]
        return [PlannedRun(1, Line(f"{item.name}: {next(iter(item.rows))}", ()), cfg)]
    lines = paper.planned_lines(item, overrides)
    return paper.load_each(lines, machine=given.local or given.rehearse)


def show(works: Sequence[Work], given: argparse.Namespace, briefly: bool) -> None:
    """Print the states of the items, what they take, and the next command of each."""
    from dlr_pretrain.analysis.reproduce import disk_of, hours_of, total
    from dlr_pretrain.models.flops import PEAK_FLOPS

    named = [given.gpu] if given.gpu in PEAK_FLOPS else [name for name in PEAK_FLOPS if given.gpu in name]
    if len(named) != 1:
        raise UserError(f"--gpu={given.gpu}: names {len(named)} GPUs. Choose from {', '.join(named or PEAK_FLOPS)}")
    write_to_stderr("counting what the runs take ...")
    hours = hours_of(works, named[0], given.mfu)
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
        print(f"{'':11}next       {work.next_command(given.again)}")
    assumed = "between the MFU of our step and the paper's" if given.mfu is None else f"at an MFU of {given.mfu:g}"
    print(f"\nGPU hours are of {named[0]}, at a measured speed or {assumed}. Items share runs.")


def measure(programs: Sequence[Program], quiet: bool = False) -> bool:
    """Run the programs one after another; returns whether all have succeeded."""
    environment = os.environ | {"PYTHONPATH": f"{PACKAGE.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    sound = True
    for one in programs:
        write_to_stderr(str(one))
        arguments = [sys.executable, *one.command]
        done = subprocess.run(arguments, env=environment, capture_output=quiet, text=True, check=False)
        if done.returncode or not one.makes.exists():
            sound = False
            write_to_stderr(f"failed with exit code {done.returncode}: {one}\n{(done.stderr or '')[-2000:]}")
    return sound


# ----------------------------------------------------------------------------------------------------
# Rehearsal


def rehearse(given: argparse.Namespace) -> int:
    """Train every run of the items with a tiny model, run every program, and render all of it."""
    from dlr_pretrain.analysis.reproduce import render

    output, given.items = given.output or Path("rehearsal"), [paper.rehearsed(item) for item in given.items]
    claim(output, "reproduce.py")
    given.sft_data, given.task_data = paper.write_documents(output / "documents")
    overrides = [*paper.REHEARSAL, f"run.root={output / 'runs'}", *given.overrides]
    works = read_works(given, overrides, output / "results")
    due = {
        run.dir: run for work in works for run, at in zip(work.runs, work.stands, strict=True) if at.state != "complete"
    }
    write_to_stderr(f"{len(due)} runs")
    with new_pool(get_context("fork").Pool, cores()) as pool:
        for number, problem in enumerate(pool.imap_unordered(train, due.values()), 1):
            write_to_stderr(f"{number}/{len(due)} {problem}")
    works = read_works(given, overrides, output / "results")
    sound = all(at.state == "complete" for work in works for at in work.stands)
    for work in works:
        sound &= measure(work.ready, quiet=True)
    render(works, given.overrides, output, shlex.join(["python", *sys.argv]), rehearsal=True)
    print(f"page        {output / 'reproduce.html'}")
    return 0 if sound else EXIT_FAILED


def train(run: PlannedRun) -> str:
    """Train a run in this process, with a log in its directory; returns how it has ended."""
    import torch

    from dlr_pretrain.train.run import run as train_run

    require_run_folder(run.dir, run.cfg.data.cache)
    torch.set_num_threads(1)
    run.dir.mkdir(parents=True, exist_ok=True)
    with open(run.dir / LOG, "w", encoding="utf-8") as log, redirect_stdout(log), redirect_stderr(log):
        try:
            train_run(run.cfg)
        except Exception as error:
            return f"{run.dir.name}: {error}"
    return f"{run.dir.name}: complete"


if __name__ == "__main__":
    sys.exit(main())
