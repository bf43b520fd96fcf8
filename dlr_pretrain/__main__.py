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


def train(cfg: Config) -> float | None:
    """Run one configuration; returns its last ``eval/loss``, by which a sweeper such as Optuna's chooses."""
    from dlr_pretrain.analysis.memory import planned_memory
    from dlr_pretrain.train.run import run
    from dlr_pretrain.util.files import read_metrics

    run(cfg, report, planned_memory)
    records = read_metrics(Path(str(cfg.run.dir), "metrics.jsonl"))
    return next((record["eval/loss"] for record in reversed(records) if "eval/loss" in record), None)


def report(run_dir: Path) -> None:
    """Write the report of a run that has finished."""
    from dlr_pretrain.analysis.report import write_report

    write_report(run_dir)


if __name__ == "__main__":
    sys.exit(main())
