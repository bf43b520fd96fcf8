"""Compare methods fairly, each at its best learning rate of the same grid: ``python scripts/tune.py --help``."""

import sys

from dlr_pretrain.analysis.tune import main

if __name__ == "__main__":
    sys.exit(main())
