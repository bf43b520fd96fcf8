"""Compare runs, their configurations and their curves: ``python scripts/compare.py runs/a runs/b``."""

import argparse
import json
import sys

from dlr_pretrain.util.command import command


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Configurations (what differs, nothing else) and curves at common steps of two runs or more.",
        epilog="Runs that differ in their seed alone are taken together: mean and standard deviation over seeds, and "
        "differences seed by seed.",
    )
    parser.add_argument("run", nargs="+", help="run directory, folder of them, or glob")
    parser.add_argument("--json", action="store_true", help="all of it as JSON: every common evaluation, all digits")
    given = parser.parse_args()
    return command(lambda: compare(given))


def compare(given: argparse.Namespace) -> None:
    from dlr_pretrain.analysis import compare as differences
    from dlr_pretrain.analysis.runs import read_runs

    found = differences.compare(read_runs(given.run))
    print(json.dumps(found, indent=2) if given.json else differences.render(found))


if __name__ == "__main__":
    sys.exit(main())
