"""Pre-train a model: ``python train.py``, or ``torchrun --nproc-per-node 8 train.py scale=1b backbone=cola dlr=on``."""

import sys

from dlr_pretrain.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
