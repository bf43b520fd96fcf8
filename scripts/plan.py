"""What a run will take: ``python scripts/plan.py scale=1b backbone=cola dlr=on``, the overrides of train.py."""

import argparse
import json
import sys
from dataclasses import asdict

from dlr_pretrain.cli import load
from dlr_pretrain.config import Config
from dlr_pretrain.errors import UserError


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Parameters, arithmetic, memory, batch, tokens and schedule of a run; needs no data, GPU, network.",
        epilog="Everything else is an override, as train.py takes them.",
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", type=at_least_1, metavar="N", default=1, help="GPUs of the run (default: 1)")
    parser.add_argument("--json", action="store_true", help="the same as JSON, in bytes and with stable keys")
    parser.add_argument("--table1", action="store_true", help="the paper's parameters and memory beside ours")
    given, words = parser.parse_known_args()
    if given.table1 and words:
        parser.error(f"--table1 is of the recipes as they stand: {' '.join(words)} has no place beside it")
    try:
        print(table1(given.json) if given.table1 else one(words, given.ranks, given.json))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def at_least_1(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number}: must be at least 1")
    return number


def one(words: list[str], ranks: int, as_json: bool) -> str:
    cfg = load(words, ranks, machine=False)
    from dlr_pretrain.analysis.plan import plan, render  # torch is imported only now, when nothing is left to refuse

    found = plan(cfg, ranks)
    return json.dumps(found, indent=2) if as_json else render(found)


def table1(as_json: bool) -> str:
    from dlr_pretrain.analysis.table1 import compare, render

    def configure(recipe: str, scale: str) -> Config:
        return load([f"scale={scale}", f"experiment={recipe}"], machine=False)

    cells = list(compare(configure))
    if as_json:
        return json.dumps([asdict(c) | {"agrees": c.agrees, "reason": c.reason} for c in cells], indent=2)
    return render(cells)


if __name__ == "__main__":
    sys.exit(main())
