"""Plan a run: ``python scripts/plan.py scale=1b backbone=cola dlr=on``, with the overrides of train.py."""

import json
import sys

from dlr_pretrain.cli import load
from dlr_pretrain.util.errors import Parser, at_least_1, command, share


def main() -> int:
    parser = Parser(
        usage="plan.py [options] [key=value ...]",
        description="Parameters, FLOPs, memory, disk, batch, tokens and time of a run. Needs no data, GPU or network.",
        epilog="All other arguments are overrides of train.py.",
        allow_abbrev=False,
    )
    add, mfu = parser.add_argument, "model FLOPs utilisation (default: 0.11, and what CoLA has reached on an H100)"
    add("--gpus", type=at_least_1, metavar="N", help="GPUs of the run (default: 1)")
    add("--mfu", type=share, metavar="SHARE", help=mfu)
    add("--json", action="store_true", help="the same as JSON, in bytes and with stable keys")
    given, words = parser.parse_known_args()
    return command(lambda: print(one(words, given.gpus or 1, given.mfu, given.json)))


def one(words: list[str], gpus: int, mfu: float | None, as_json: bool) -> str:
    cfg = load(words, gpus, machine=False)
    from dlr_pretrain.analysis.plan import plan, render  # torch, after the arguments are checked

    planned = plan(cfg, gpus, mfu)
    return json.dumps(planned, indent=2) if as_json else render(planned)


if __name__ == "__main__":
    sys.exit(main())
