"""Plan a run: ``python scripts/plan.py scale=1b backbone=cola dlr=on``, with the overrides of train.py."""

import json
import sys
from collections.abc import Collection

from dlr_pretrain.cli import load
from dlr_pretrain.config.arguments import Parser, at_least_1, share
from dlr_pretrain.util.errors import command


def main() -> int:
    parser = Parser(
        usage="plan.py [options] [key=value ...]",
        description="Parameters, FLOPs, memory, disk, batch, tokens and time of a run. Needs no data, GPU or network.",
        epilog="All other arguments are overrides of train.py.\n\n"
        "example: plan.py scale=1b backbone=cola dlr=on --gpus 8",
    )
    add, mfu = parser.add_argument, "model FLOPs utilisation (default: 0.11, and what CoLA has reached on an H100)"
    add("--gpus", type=at_least_1, metavar="N", help="GPUs of the run (default: 1)")
    add("--mfu", type=share, metavar="SHARE", help=mfu)
    add("--json", action="store_true", help="the same as JSON, in bytes and with stable keys")
    given, words = parser.parse_known_args()
    return command(lambda: print(one(words, given.gpus or 1, given.mfu, given.json, parser.flags)))


def one(words: list[str], gpus: int, mfu: float | None, as_json: bool, flags: Collection[str] = ()) -> str:
    cfg = load(words, gpus, machine=False, flags=flags)
    from dlr_pretrain.analysis.plan import plan, render  # torch, after the arguments are checked

    planned = plan(cfg, gpus, mfu)
    return json.dumps(planned, indent=2) if as_json else render(planned)


if __name__ == "__main__":
    sys.exit(main())
