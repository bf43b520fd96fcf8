"""Train, measure and show the tables and figures of the paper: ``python -m scripts.paper`` lists them."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dlr_pretrain.config import parse
from dlr_pretrain.config.arguments import OVERRIDES, Parser, at_least_1, share, texts
from dlr_pretrain.config.problems import did_you_mean
from dlr_pretrain.config.run_folder import read_config
from dlr_pretrain.config.tree import PACKAGE
from dlr_pretrain.launch.runs import Line, PlannedRun
from dlr_pretrain.launch.status import queue, status_of
from dlr_pretrain.launch.submit import start
from dlr_pretrain.util.errors import EXIT_FAILED, UserError, command, write_to_stderr
from dlr_pretrain.util.files import claim

from . import items as paper

if TYPE_CHECKING:
    from .page import Work  # imports torch

SFT_DATA = "yahma/alpaca-cleaned"
EPILOG = """examples:
  dlr-reproduce                                        every experiment, its state, and the next command
  dlr-reproduce table1 scale=60m                       what it would run, how long, how much disk
  dlr-reproduce table1 --submit --limit 8 -- --gpus-per-node=8 --cpus-per-gpu=8 --mem=0 --time=48:00:00
  dlr-reproduce fold run=runs/my-run --local           a run of your own instead of the experiment's

--rows, scale= and seed= select runs. Any other override applies to all runs that have its key. Options after -- are
those of sbatch. docs/reproduce.md describes all of it. In a checkout it is also python -m scripts.paper."""


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "dlr-reproduce", "%(prog)s [EXPERIMENT | all] [key=value ...] [options] [-- options of sbatch]",
        "Train, measure and show the tables and figures of the DLR paper.", EPILOG, keys=OVERRIDES,
    )  # fmt: skip
    add, names = made.add_argument, ", ".join(paper.items())
    add("what", nargs="*", metavar="EXPERIMENT", help=f"all, or one of {names}; then overrides of train.py")
    does = made.add_mutually_exclusive_group()
    does.add_argument("--submit", action="store_true", help="queue the runs that are due as a SLURM array")
    does.add_argument("--local", action="store_true", help="train and measure on this machine, then render")
    does.add_argument("--render", action="store_true", help="write tables, figures and the page from what exists")
    does.add_argument("--documentation", action="store_true", help="print docs/reproduce.md")
    add("--rows", type=texts, metavar="ROW", help="rows of the table, such as cola cola+dlr (default: all)")
    add("--dry-run", dest="status", action="store_true", help="with --submit: show what would be queued")
    add("--limit", type=at_least_1, metavar="N", help="runs at once (default: SLURM's; 1 if local)")
    add("--output", type=Path, metavar="DIR", help="for the page (default: <run.root>/paper)")
    add("--sft-data", default=SFT_DATA, metavar="FILE", help="instructions (default: %(default)s, on the hub)")
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
        fix = did_you_mean(unknown[0], known, f"Choose from {', '.join(known)}, or all")
        raise UserError(f"{unknown[0]}: no table or figure of this name. {fix}")
    asked = list(known.values()) if not names or "all" in names else [known[name] for name in names]
    given.items = paper.choose_rows(asked, given.rows)

    from .page import documentation, render  # torch, after the arguments are checked

    if given.documentation:
        print(documentation(), end="")
        return 0
    words, default = [*given.overrides], parser().get_default  # that the next command repeats
    for name in ("rows", "sft_data", "task_data", "output"):
        if (value := getattr(given, name)) != default(name):
            words += [f"--{name.replace('_', '-')}", ",".join(value) if isinstance(value, list) else str(value)]
    root = next((word.partition("=")[2] for word in given.overrides if word.startswith("run.root=")), "runs")
    given.output = given.output or Path(root, "paper")
    all_work = read_works(given)
    if not names or not (given.submit or given.local or given.render):
        show(all_work, given, words, briefly=not names)
        return 0
    if not given.status:
        claim(given.output, "reproduce.py")
    if (given.submit or given.local) and not any(word.startswith("run=") for word in given.overrides):
        for work in all_work:
            given.what = [work.item.name]
            start(work.runs, given)
        all_work = read_works(given)
    sound = True
    if given.local:
        sound = all(status.state in ("complete", "diverged") for work in all_work for status in work.statuses)
        sound = all([*(run_program(one) for work in all_work for one in work.ready), sound])
    if not given.submit:
        render(all_work, words, given.output, shlex.join(["dlr-reproduce", *sys.argv[1:]]))
        print(f"page        {given.output / 'reproduce.html'}")
    return 0 if sound else EXIT_FAILED


def read_works(given: argparse.Namespace) -> list[Work]:
    """The chosen items with their runs and the runs' present states."""
    from .cost import remembered
    from .page import Work

    write_to_stderr("reading the runs and counting what they take (kept for the next time) ...")
    jobs: dict[str, str] = {}
    with suppress(UserError):  # no SLURM here, or none that answers: only --submit needs it
        jobs = {} if given.local else queue()
    all_work = []
    fixed = not given.local and not any(word.startswith("run=") for word in given.overrides)

    def read(chosen: Sequence[paper.Item]) -> list[list[PlannedRun]]:
        return [runs_of(item, given) for item in chosen]

    for item in given.items:
        given_by = {repr((item, given.overrides)): item}
        (runs,) = remembered(given_by, read) if fixed else read([item])
        chosen = replace(item, scales=list(dict.fromkeys(run.cfg.scale.name for run in runs)))
        programs = chosen.programs(runs, given.output / item.name, given.sft_data, given.task_data)
        all_work.append(Work(chosen, runs, [status_of(run, jobs) for run in runs], list(programs)))
    return all_work


def runs_of(item: paper.Item, given: argparse.Namespace) -> list[PlannedRun]:
    """The runs of an item, or the user's own run that ``run=`` names, as a run of its first row."""
    if folders := [word.removeprefix("run=") for word in given.overrides if word.startswith("run=")]:
        cfg = parse(read_config(Path(folders[0])))
        cfg.run.dir = folders[0]
        return [PlannedRun(1, Line(f"{item.name}: {next(iter(item.rows))}", ()), cfg)]
    return paper.load_each(paper.planned_lines(item, given.overrides), machine=given.local)


def show(all_work: Sequence[Work], given: argparse.Namespace, words: Sequence[str], briefly: bool) -> None:
    """Print the states of the items, what they take, and the next command of each."""
    from dlr_pretrain.models.flops import PEAK_FLOPS

    from .cost import disk_of, hours_of, total

    named = [given.gpu] if given.gpu in PEAK_FLOPS else [name for name in PEAK_FLOPS if given.gpu in name]
    if len(named) != 1:
        raise UserError(f"--gpu={given.gpu}: names {len(named)} GPUs. Choose from {', '.join(named or PEAK_FLOPS)}")
    hours = hours_of((run for work in all_work for run in work.runs), named[0], given.mfu)
    for work in all_work:
        print(f"{work.item.name:<10} {work.item.title}")
        if not briefly:
            for run, status in zip(work.runs, work.statuses, strict=True):
                print(f"{run.number:>12}  {run.dir}: {status}")
            for one in work.programs:
                print(f"{'done' if one.makes.exists() else 'to run':>12}  {one}")
            print(f"{'':11}disk       {disk_of(work.runs)} at most")
        print(f"{'':11}state      {work.state()}")
        print(f"{'':11}GPU hours  {total([hours[run.dir] for run in work.runs])}")
        print(f"{'':11}next       {work.next_command(words)}")
    assumed = "between the MFU of our step and the paper's" if given.mfu is None else f"at an MFU of {given.mfu:g}"
    print(f"\nGPU hours are of {named[0]}, at a measured speed or {assumed}. Experiments share runs.")


def run_program(program: paper.Program) -> bool:
    """Run a program that follows the training; returns whether it has succeeded."""
    environment = os.environ | {"PYTHONPATH": f"{PACKAGE.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    write_to_stderr(str(program))
    code = subprocess.run([sys.executable, *program.command], env=environment, check=False).returncode
    if sound := code == 0 and program.makes.exists():
        return sound
    write_to_stderr(f"failed with exit code {code}: {program}")
    return False


if __name__ == "__main__":
    sys.exit(main())
