"""Queue a table of runs as one job array, and see how it stands: ``python slurm/submit.py --help``."""

import sys

from dlr_pretrain.launch.submit import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
