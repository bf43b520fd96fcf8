"""Prints how far a run has saved, for ``slurm/train.sbatch``, which knows the run's words but not its directory.

python -m dlr_pretrain.launch.saved scale=1b dlr=on     the step of the last checkpoint; 0 if there is none
"""

from __future__ import annotations

import sys
from pathlib import Path

from dlr_pretrain.cli import load
from dlr_pretrain.launch.trained import last_saved
from dlr_pretrain.util.command import command


def main(words: list[str]) -> int:
    return command(lambda: print(last_saved(Path(load(words, ranks=None, machine=False).run.dir))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
