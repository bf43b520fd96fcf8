"""Tables, figures and one page from runs: ``python scripts/report.py runs --output report``."""

import argparse
import shlex
import sys
from importlib import import_module
from pathlib import Path

from dlr_pretrain.config.arguments import Parser
from dlr_pretrain.util.errors import command, say

EPILOG = """Means are over finished seeds of one configuration. Runs that are unfinished, damaged, duplicated or
different are named. dlr-reproduce shows the paper's tables.

example: report.py runs --output report"""


def main() -> int:
    parser = Parser(
        description="Tables and curves of runs, their numbers, and one self-contained page.",
        epilog=EPILOG,
    )
    output = "for report.html, report.md, numbers.csv, tables, figures"
    parser.add_argument("places", nargs="+", metavar="place", help="a run directory, a folder of them, or a glob")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help=output)
    about = "the validation set whose losses are compared: one of eval.sets, or a source of a mixture"
    parser.add_argument("--set", dest="of_set", default="", metavar="NAME", help=about)
    given = parser.parse_args()
    return command(lambda: report(given))


def report(given: argparse.Namespace) -> None:
    from dlr_pretrain.analysis.report import write_reports

    if not __package__:  # this program runs as a file
        sys.path.insert(0, str(Path(__file__).parent))
    scaling = import_module(f"{__package__}._scaling" if __package__ else "_scaling")
    made_by = shlex.join(["python", *sys.argv])
    for line in write_reports(given.places, given.output, made_by, given.of_set, scaling.parts):
        say(line, sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
