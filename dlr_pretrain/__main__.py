"""Pre-train a model: what ``dlr-train``, ``python train.py`` and ``torchrun -m dlr_pretrain`` run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dlr_pretrain.util.errors import UserError, say

if TYPE_CHECKING:
    from dlr_pretrain.config import Config


def main() -> int:
    """Run what ``sys.argv`` asks for; returns the exit code."""
    from dlr_pretrain.util import process

    process.prepare()  # before any import that takes seconds
    from dlr_pretrain import cli

    try:
        return cli.main(run_and_report)
    finally:
        process.ignore_stop_signals()


def run_and_report(cfg: Config) -> float | None:
    """Run one configuration; returns its last ``eval/loss``, which a sweeper such as Optuna's minimises."""
    from dlr_pretrain.deploy.hub import push
    from dlr_pretrain.train.run import run
    from dlr_pretrain.util.files import read_metrics

    run_dir = Path(str(cfg.run.dir))
    trained, report = run(cfg), run_dir / "report.html"
    if os.environ.get("RANK", "0") == "0":
        if trained or not report.with_suffix(".md").exists():  # the report's last file, which a kill may have prevented
            write_report(run_dir)
        if report.exists():
            say(f"report      {linked(report)}", sys.stdout)
        if cfg.run.push:
            try:
                say(f"pushed      {push(run_dir / 'folded', report, cfg.run.push)}", sys.stdout)
            except UserError as error:  # the run stays complete
                say(f"warning: {error}", sys.stdout)
    records = read_metrics(run_dir / "metrics.jsonl")
    return next((record["eval/loss"] for record in reversed(records) if "eval/loss" in record), None)


def linked(path: Path) -> str:
    """``path`` as text; on a terminal, a link (OSC 8) that opens the file."""
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "linux"):
        return str(path)
    return f"\x1b]8;;{path.resolve().as_uri()}\x1b\\{path}\x1b]8;;\x1b\\"


def write_report(run_dir: Path) -> None:
    """Write the report of a complete run. If that fails, a line says so, and the run stays complete."""
    from dlr_pretrain.analysis import report

    try:
        report.write_report(run_dir)
    except Exception as error:
        fix = f"Try python scripts/report.py {run_dir} --output DIR"
        say(f"warning: no report, {type(error).__name__}: {error}. {fix}", sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
