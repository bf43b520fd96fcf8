"""What a method changes inside a model: ``dlr-geometry runs --output geometry``."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from dlr_pretrain.config.arguments import Parser, at_least_1, texts
from dlr_pretrain.config.problems import did_you_mean
from dlr_pretrain.util.errors import UserError, command, say
from dlr_pretrain.util.files import claim

PARTS = ("spectra", "residuals", "landscape", "interpolation", "activations")
EPILOG = """Results are kept below DIR: the same command continues, or adds new runs. docs/geometry.md has more.

example: dlr-geometry runs --output geometry"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("dlr-geometry", None, "What training has made of the weights of finished runs.", EPILOG)
    add = parser.add_argument
    add("places", nargs="+", metavar="place", help="a run directory, a folder of them, or a glob")
    add("--output", type=Path, required=True, metavar="DIR", help="for geometry.html, CSVs, tables and figures")
    add("--parts", type=texts, default=list(PARTS), metavar="PART", help=f"among {', '.join(PARTS)} (default: all)")
    add("--sequences", type=at_least_1, default=16, metavar="N", help="of the validation text (default: 16)")
    add("--directions", type=at_least_1, default=3, metavar="N", help="random directions (default: 3)")
    given = parser.parse_args(argv)
    return command(lambda: run(given))


def run(given: argparse.Namespace) -> None:
    if unknown := [part for part in given.parts if part not in PARTS]:
        fix = did_you_mean(unknown[0], PARTS, f"Choose from {', '.join(PARTS)}")
        raise UserError(f"--parts {unknown[0]}: no such part. {fix}")
    claim(given.output, "dlr-geometry")
    import torch

    from dlr_pretrain.analysis.runs import read_runs

    from . import page
    from .study import Study
    from .weights import Trained

    all_runs = read_runs(given.places)
    runs = []
    for _, row in all_runs.runs[all_runs.runs.state == "finished"].iterrows():
        try:
            runs.append(Trained(row))
        except UserError as error:
            all_runs.remarks.append(f"{row['name']} is left out: {error}")
    if not runs:
        raise UserError(f"no finished run has sound checkpoints. {' '.join(all_runs.remarks)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    frames = Study(runs, given.sequences, given.directions, given.output / "kept", device).measure(given.parts)
    page.write(frames, all_runs.remarks, shlex.join(["dlr-geometry", *sys.argv[1:]]), given.output)
    say(f"page        {given.output / 'geometry.html'}", sys.stdout)
    say(f"numbers     {given.output / 'numbers.csv'}", sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
