"""Pre-train a model: ``python train.py``, or ``torchrun --nproc-per-node 8 train.py scale=1b backbone=cola dlr=on``."""

import sys
from pathlib import Path

from dlr_pretrain.util import process

if __name__ == "__main__":
    process.prepare()

from dlr_pretrain.cli import main
from dlr_pretrain.config import Config


def train(cfg: Config) -> None:
    """Run one configuration. torch is imported only now, after the checks of the configuration."""
    from dlr_pretrain.analysis.memory import peak_bytes
    from dlr_pretrain.train.run import run

    run(cfg, report, peak_bytes)


def report(run_dir: Path) -> None:
    """Write the report of a run that has finished."""
    from dlr_pretrain.analysis.report import write_report

    write_report(run_dir)


if __name__ == "__main__":
    try:
        sys.exit(main(train))
    finally:
        process.deafen()
