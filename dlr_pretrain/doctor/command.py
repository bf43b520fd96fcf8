"""The command behind ``scripts/doctor.py``: a list of checks, of this machine first, then of all ranks together."""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from dlr_pretrain.cli import load, world_size
from dlr_pretrain.config import Config, ConfigError
from dlr_pretrain.doctor import machine, start
from dlr_pretrain.doctor.checks import FAIL, LEVELS, OK, Found, Line, in_child, perform
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.util.command import command
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.text import plural

SECONDS = 60.0  # that a check of this machine may take


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 1 if a check failed, or that of a UserError."""
    parser = argparse.ArgumentParser(
        prog="doctor.py",
        usage="%(prog)s [key=value ...]",
        description="Checks the machine and a run's configuration before GPU hours are spent; no run is touched.",
        epilog="The arguments are overrides, as train.py takes them. By torchrun, all ranks are checked.",
        allow_abbrev=False,
    )
    _, words = parser.parse_known_args(argv)
    return command(lambda: 0 if sound(*configuration(words)) else 1)


def configuration(words: list[str]) -> tuple[Config, Line]:
    """The configuration, and the line of its own check; raises ConfigError if it is invalid on every machine.

    If only this machine lacks something, such as a file, the line is a failure and the other checks still run.
    """
    ranks = world_size()
    try:
        cfg = load(words, ranks)
    except ConfigError as error:
        return load(words, ranks, machine=False), Line("config", FAIL, "; ".join(map(str, error.problems)))
    names = f"{cfg.scale.name}, {cfg.backbone.name}, dlr {cfg.dlr.name}, {cfg.optimizer.name}, {cfg.precision.name}"
    return cfg, Line("config", OK, f"{names} on {plural(ranks, 'rank')}; {cfg.run.dir}")


def sound(cfg: Config, configured: Line) -> bool:
    """Print the line of each check. Whether none has failed."""
    is_main, of_machine = (os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK"))
    failed = []

    def say(line: Line, by: str = "") -> None:
        failed.append(line.level == FAIL)
        if is_main or (of_machine and line.level != OK):
            print(replace(line, text=f"{by}{line.text}"), flush=True)

    say(configured)
    with in_scratch(cfg, is_main) as scratch:
        for name, act in checks_of_machine(cfg, is_main).items() if of_machine else ():
            say(perform(name, SECONDS, act), "" if is_main else f"{socket.gethostname()}: ")
        try:
            with Ranks(cfg) as ranks:
                folder = ranks.on_main(lambda: scratch)
                for name, (minutes, act) in checks_of_ranks(cfg, ranks, folder).items():
                    lines = ranks.gather(perform(name, 60 * minutes, act))
                    worst = max(lines, key=lambda line: LEVELS.index(line.level))
                    say(worst, f"rank {rank}: " if (rank := lines.index(worst)) else "")
                    if name == "collectives" and worst.level == FAIL:
                        break  # in the next ones ranks would wait for each other
                ranks.gather(None)  # when one ends with code 1, torchrun ends the others
        except UserError as error:
            say(Line("ranks", FAIL, str(error)))
    return not any(failed)


def checks_of_machine(cfg: Config, is_main: bool) -> dict[str, Callable[[], Found]]:
    """The checks of this machine by name; those of file systems, which may hang, in children that can be killed."""
    device = "cuda" if cfg.device != "cpu" and torch.cuda.is_available() else "cpu"
    checks: dict[str, Callable[[], Found]] = {
        "gpus": partial(machine.gpus, cfg),
        "caches": partial(in_child, partial(machine.caches, cfg, device), SECONDS / 2),
    }
    if is_main:
        checks["disk"] = partial(in_child, partial(start.disk_of_run, cfg), SECONDS / 2)
        checks["wandb"] = partial(machine.wandb, cfg)
    return checks


def checks_of_ranks(cfg: Config, ranks: Ranks, scratch: Path | None) -> dict[str, tuple[int, Callable[[], Found]]]:
    """The checks that all ranks make together, by name, with their time limits in minutes. A step may compile."""
    return {
        "collectives": (2, partial(start.collectives, ranks, 90.0)),
        "data": (5, partial(start.data, cfg, ranks)),
        "checkpoint": (5, partial(start.saved_and_read, cfg, ranks, scratch)),
        "step": (15, partial(start.step, cfg, ranks)),
    }


@contextmanager
def in_scratch(cfg: Config, is_main: bool) -> Iterator[Path | None]:
    """A temporary folder of rank 0 on the run's disk, outside the run directory; None if it cannot be made."""
    made = None
    if is_main:
        with suppress(OSError):
            made = Path(tempfile.mkdtemp(prefix=".doctor_", dir=machine.existing(Path(cfg.run.dir).absolute().parent)))
    try:
        yield made
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
