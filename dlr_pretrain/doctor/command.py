"""The command behind ``scripts/doctor.py``."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from dlr_pretrain.cli import load, world_size
from dlr_pretrain.config import Config, ConfigError, identity
from dlr_pretrain.config.identity import differences, told
from dlr_pretrain.config.written import read_record
from dlr_pretrain.doctor import machine, start
from dlr_pretrain.doctor.checks import FAIL, OK, Check, Outcome, Ranks, line, run
from dlr_pretrain.util.command import command
from dlr_pretrain.util.errors import UserError


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code: 0, 1 if a check failed, or that of a UserError."""
    parser = argparse.ArgumentParser(
        prog="doctor.py",
        usage="%(prog)s [options] [key=value ...]",
        description="Checks the machine and a run's configuration before GPU hours are spent; no run is touched.",
        epilog="Everything else is an override, as train.py takes them. By torchrun, all ranks are checked.",
        allow_abbrev=False,
    )
    parser.add_argument("--patience", type=_factor, default=1.0, metavar="X", help="times the time of each check")
    given, words = parser.parse_known_args(argv)
    return command(lambda: _examine(*configuration(words), Ranks(), given.patience))


def _factor(text: str) -> float:
    if not (0 < (number := float(text)) < 1e6):
        raise argparse.ArgumentTypeError(f"{text}: must be a number above 0")
    return number


def _examine(cfg: Config, configured: Outcome, ranks: Ranks, patience: float) -> int:
    if ranks.rank == 0:
        print(line("config", configured))
    with_scratch = Scratch(cfg, ranks)
    try:
        asked = [replace(check, limit=patience * check.limit) for check in checks(cfg, ranks, with_scratch.path)]
        sound = run(asked, ranks, partial(print, flush=True)) and configured.level != FAIL
    finally:
        with_scratch.remove()
    return 0 if sound else 1


def checks(cfg: Config, ranks: Ranks, scratch: Path | None) -> list[Check]:
    """The checks in the order in which they run: quick ones first."""
    first = int(os.environ.get("LOCAL_RANK", 0)) == 0  # rank of its machine

    def of_a_machine(act) -> Outcome:
        return act() if first else Outcome(OK, "as its machine's first rank says")

    return [
        Check("software", 20, partial(of_a_machine, machine.software), everywhere=True),
        Check("gpus", 30, partial(machine.gpus, cfg), everywhere=True),
        Check("disk", 30, partial(start.disk_of_the_run, cfg, scratch)),
        Check("caches", 10, partial(of_a_machine, partial(machine.caches, cfg)), everywhere=True),
        Check("wandb", 15, partial(machine.wandb, cfg)),
        Check("slurm", 15, machine.slurm),
        Check("data", 120, partial(start.data, cfg, ranks.rank, ranks.count), everywhere=True),
        Check("collectives", 60, partial(start.collectives, cfg), everywhere=True, together=True),
        Check("checkpoint", 90, partial(start.saved_and_read, cfg, scratch), everywhere=True, together=True),
        Check("step", 180, partial(start.step, cfg), everywhere=True, together=True),
    ]


def configuration(words: list[str]) -> tuple[Config, Outcome]:
    """The configuration, and the outcome of its own check; raises ConfigError if it is invalid on every machine.

    If only this machine lacks something, such as a file, this outcome is a failure and the other checks still run.
    """
    ranks = world_size()
    try:
        cfg = load(words, ranks)
    except ConfigError as error:
        return load(words, ranks, machine=False), Outcome(FAIL, "; ".join(map(str, error.problems)))
    found = directory(cfg)
    names = f"{cfg.scale.name}, {cfg.backbone.name}, dlr {cfg.dlr.name}, {cfg.optimizer.name}, {cfg.precision.name}"
    return cfg, replace(found, text=f"{names} on {ranks} rank{'s' * (ranks > 1)}; {found.text}")


def directory(cfg: Config) -> Outcome:
    """What the run directory holds; a failure if train.py would refuse to continue in it."""
    there = Path(cfg.run.dir)
    try:
        record = read_record(there)
    except UserError as error:
        return Outcome(FAIL, str(error))
    if "saved" not in record:
        return Outcome(OK, f"{there}, a new run")
    if changed := differences(record["identity"], identity(cfg)):
        return Outcome(
            FAIL, f"{there} holds another run: {told(changed)}", "Restore these keys, or choose another run.dir"
        )
    if record["saved"] == cfg.train.steps and (there / "folded" / "README.md").exists():
        return Outcome(OK, f"{there}, which has finished")
    return Outcome(OK, f"{there}, which goes on from its last checkpoint")


class Scratch:
    """A temporary folder on the run's disk, outside the run directory, for the checks; the same on all ranks.

    ``path`` is None if the folder cannot be made.
    """

    def __init__(self, cfg: Config, ranks: Ranks):
        self.ranks, self.path = ranks, None
        if ranks.rank == 0:
            try:
                self.path = Path(tempfile.mkdtemp(prefix=".doctor_", dir=start.room_of(cfg)))
            except OSError:
                self.path = None
            ranks.tell("scratch", str(self.path) if self.path else "")
        else:
            told = ranks.ask("scratch", 60)
            self.path = Path(told) if told else None

    def remove(self) -> None:
        if self.path is not None and self.ranks.rank == 0:
            shutil.rmtree(self.path, ignore_errors=True)
