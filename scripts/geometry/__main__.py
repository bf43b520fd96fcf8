"""What a method changes inside a model: ``dlr-geometry runs --output geometry``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from dlr_pretrain.config.arguments import Parser, at_least_1, texts
from dlr_pretrain.config.problems import did_you_mean
from dlr_pretrain.util.errors import UserError, command, say
from dlr_pretrain.util.files import claim

PARTS = ("spectra", "landscape", "interpolation", "activations")
EPILOG = """spectra        singular values of weights and updates, and the share of DLR's residual
landscape      loss along random and principal directions, and its curvature
interpolation  loss between checkpoints, seeds and methods
activations    linear CKA by block, between two runs

Results are kept below DIR: the same command continues, or adds new runs. docs/geometry.md describes all of it.

example: dlr-geometry runs --output geometry"""


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "dlr-geometry", None, "Spectra, loss landscapes, interpolation and activations of finished runs.", EPILOG
    )
    add = made.add_argument
    add("places", nargs="+", metavar="place", help="a run directory, a folder of them, or a glob")
    add("--output", type=Path, required=True, metavar="DIR", help="for geometry.html, CSVs, tables and figures")
    add("--parts", type=texts, default=list(PARTS), metavar="PART", help=f"among {', '.join(PARTS)} (default: all)")
    add("--sequences", type=at_least_1, default=16, metavar="N", help="of the validation text (default: 16)")
    add("--directions", type=at_least_1, default=3, metavar="N", help="random directions (default: 3)")
    add("--points", type=at_least_1, default=11, metavar="N", help="losses on a line, an odd number (default: 11)")
    add("--checkpoints", type=at_least_1, default=8, metavar="N", help="at most, of each run (default: 8)")
    add("--first", type=at_least_1, default=8, metavar="K", help="singular values whose energy is shown (default: 8)")
    add("--device", default="", metavar="NAME", help="cpu or cuda (default: cuda if there is one)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    given = parser().parse_args(argv)
    return command(lambda: run(given))


def run(given: argparse.Namespace) -> None:
    if unknown := [part for part in given.parts if part not in PARTS]:
        fix = did_you_mean(unknown[0], PARTS, f"Choose from {', '.join(PARTS)}")
        raise UserError(f"--parts {unknown[0]}: no such part. {fix}")
    if given.points < 3 or given.points % 2 == 0:
        raise UserError(f"--points {given.points}: must be odd and at least 3, so that a line has its centre")
    claim(given.output, "dlr-geometry")
    import torch

    from dlr_pretrain.analysis.runs import read_runs

    from . import page
    from .study import Settings, Study, finished, pairs

    all_runs = read_runs(given.places)
    settings = Settings(given.sequences, given.directions, given.points, given.checkpoints, given.first)
    groups = finished(all_runs, given.checkpoints)
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    runs, compared = [run for group in groups for run in group], list(pairs(groups, all_runs))
    frames = Study(runs, compared, settings, given.output / "kept", device).measure(given.parts)
    page.write(frames, all_runs.remarks, shlex.join(["dlr-geometry", *sys.argv[1:]]), given.output)
    say(f"page        {given.output / 'geometry.html'}", sys.stdout)
    say(f"numbers     {given.output / 'numbers.csv'}", sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
