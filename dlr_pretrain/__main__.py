"""Pre-train a model: what ``dlr-train``, ``python train.py`` and ``torchrun -m dlr_pretrain`` run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlr_pretrain.config import Config


def main() -> int:
    """Run what ``sys.argv`` asks for; returns the exit code."""
    from dlr_pretrain.util import process

    process.prepare()  # before any import that takes seconds
    from dlr_pretrain import cli

    try:
        return cli.main(train)
    finally:
        process.ignore_stop_signals()


def train(cfg: Config) -> None:
    """Run one configuration. torch is imported only now, after the checks of the configuration."""
    from dlr_pretrain.analysis.memory import planned_memory
    from dlr_pretrain.train.run import run

    run(cfg, report, planned_memory)


def report(run_dir: Path) -> None:
    """Write the report of a run that has finished."""
    from dlr_pretrain.analysis.report import write_report

    write_report(run_dir)


if __name__ == "__main__":
    sys.exit(main())
