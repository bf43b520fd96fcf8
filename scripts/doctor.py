"""Find in a minute what would fail after hours: ``python scripts/doctor.py``, or under torchrun, like train.py."""

import sys

from dlr_pretrain.util import process

if __name__ == "__main__":
    process.die_with_agent()

from dlr_pretrain.doctor import main

if __name__ == "__main__":
    sys.exit(main())
