"""Send runs to W&B from their metrics.jsonl: ``python scripts/replay_wandb.py runs/<run> ...``."""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from dlr_pretrain.train.wandb_replay import replay
from dlr_pretrain.util.command import command
from dlr_pretrain.util.errors import EXIT_INTERRUPTED


def main() -> int:
    parser = argparse.ArgumentParser(
        description="One clean W&B run for each run directory; a run that W&B knows is sent what it lacks.",
        epilog="WANDB_MODE=offline writes files for `wandb sync` instead.",
    )
    parser.add_argument("run", type=Path, nargs="+", help="a run directory")
    parser.add_argument("--partial", action="store_true", help="also runs that have not reached their last step")
    parser.add_argument("--new-id", action="store_true", help="a new W&B run, such as where the old one was deleted")
    parser.add_argument("--project", help="W&B project (default: the run's)")
    parser.add_argument("--entity", help="W&B entity (default: the run's)")
    given = parser.parse_args()
    sys.stdin = open(os.devnull)  # noqa: SIM115 - or wandb would ask for a key, unseen
    where, code = {"project": given.project, "entity": given.entity}, 0
    for run_dir in given.run:
        ended = command(partial(replay, run_dir, print, given.partial, given.new_id, **where))
        if ended == EXIT_INTERRUPTED:
            return ended
        code = code or ended
    return code


if __name__ == "__main__":
    sys.exit(main())
