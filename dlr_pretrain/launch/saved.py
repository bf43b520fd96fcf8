"""What a run has saved, for ``slurm/train.sbatch``, which is told the run's words and not its directory:

python -m dlr_pretrain.launch.saved scale=1b dlr=on     the step of the last checkpoint; 0 where there is none
"""

from __future__ import annotations

import sys
from pathlib import Path

from dlr_pretrain.cli import load
from dlr_pretrain.errors import UserError
from dlr_pretrain.launch.trained import last_saved


def main(words: list[str]) -> int:
    try:
        cfg = load(words, ranks=None, machine=False)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(last_saved(Path(cfg.run.dir)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
