"""The command behind ``scripts/doctor.py``: a list of checks, of this machine first, then of all ranks together.

A check is a function that returns what it ``Found``, or raises a UserError that says what is wrong and how to mend it.
Each has a time limit, and none stops another. What signals may not end (NCCL, a disk) is done in a child, and killed.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
from collections.abc import Callable
from functools import partial

from dlr_pretrain.cli import load, world_size
from dlr_pretrain.config import Config, ConfigError
from dlr_pretrain.doctor.checks import Found, RankChecks, disk, gpus, wandb
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.util.errors import UserError, command, first_line
from dlr_pretrain.util.text import fill, plural

OK, WARN, FAIL = LEVELS = ("ok", "warn", "FAIL")
SECONDS = 60.0  # that a check of this machine may take
MINUTES = {"collectives": 2, "data": 5, "step": 15}  # of the checks of all ranks; a step may compile


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, 1 if a check failed, or that of a UserError."""
    about = "Checks a machine, or under torchrun all ranks, for the run of these overrides, which is not touched."
    parser = argparse.ArgumentParser("doctor.py", "%(prog)s [key=value ...]", about, allow_abbrev=False)
    _, words = parser.parse_known_args(argv)
    return command(lambda: 0 if sound(words) else 1)


def sound(words: list[str]) -> bool:
    """Make all checks and print a line of each. Whether none has failed; raises ConfigError as ``configuration``."""
    cfg, level, text = configuration(words)
    is_main, of_machine = (os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK"))
    levels = []

    def say(name: str, level: str, text: str) -> None:
        levels.append(level)
        if is_main or (of_machine and level != OK):
            print(fill(f"{level:<6}{name:<12}{text}", indent=18), flush=True)

    say("config", level, text)
    for name, act in {"gpus": gpus, "disk": disk, "wandb": wandb}.items() if of_machine else ():
        level, text = perform(SECONDS, partial(act, cfg))
        say(name, level, text if is_main else f"{socket.gethostname()}: {text}")
    try:
        with Ranks(cfg) as ranks:
            checks = RankChecks(cfg, ranks)
            for name, minutes in MINUTES.items():
                answers = ranks.gather(perform(60.0 * minutes, getattr(checks, name)))
                worst = max(range(len(answers)), key=lambda rank: LEVELS.index(answers[rank][0]))
                level, text = answers[worst]
                say(name, level, f"rank {worst}: {text}" if worst else text)
                if name == "collectives" and level == FAIL:
                    break  # in the next ones ranks would wait for each other
            ranks.gather(None)  # when one ends with code 1, torchrun ends the others
    except UserError as error:
        say("ranks", FAIL, str(error))
    return FAIL not in levels


def configuration(words: list[str]) -> tuple[Config, str, str]:
    """The configuration, and level and text of its own check; raises ConfigError if it is invalid on every machine.

    If only this machine lacks something, such as a file, that is a failure, and the other checks still run.
    """
    ranks = world_size()
    try:
        cfg = load(words, ranks)
    except ConfigError as error:
        return load(words, ranks, machine=False), FAIL, "; ".join(map(str, error.problems))
    names = f"{cfg.scale.name}, {cfg.backbone.name}, dlr {cfg.dlr.name}, {cfg.optimizer.name}, {cfg.precision.name}"
    return cfg, OK, f"{names} on {plural(ranks, 'rank')}; {cfg.run.dir}"


def perform(seconds: float, act: Callable[[], Found]) -> tuple[str, str]:
    """Level and text of a check that may take so many ``seconds``, whatever it raises."""

    def late(_number: int, _frame: object) -> None:
        raise UserError(f"no answer within {seconds:g} s. Look at what it waits for")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        found = act()
    except UserError as error:
        return FAIL, str(error)
    except Exception as error:
        return FAIL, f"{type(error).__name__}: {first_line(error)}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return (WARN if found.warning else OK), ". ".join(filter(None, found))
