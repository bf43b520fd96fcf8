"""Fold a saved checkpoint: ``python scripts/fold.py runs/<run>/checkpoints/step_00001000``."""

import argparse
import re
import sys
from pathlib import Path

import torch

from dlr_pretrain.deploy.fold import fold_checkpoint
from dlr_pretrain.errors import EXIT_FAILED, UserError
from dlr_pretrain.train.checkpoint import fault


def main() -> int:
    parser = argparse.ArgumentParser(description="Write a checkpoint's folded weights as a transformers folder.")
    parser.add_argument("checkpoint", type=Path, help="<run>/checkpoints/step_*")
    parser.add_argument("--output", type=Path, help="the folder to write (default: <run>/folded_<step>)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="cast the folded weights")
    parser.add_argument("--merge", action="store_true", help="multiply linear low-rank layers out into a plain LLaMA")
    given = parser.parse_args()
    output = given.output or given.checkpoint.parent.parent / f"folded_{given.checkpoint.name}"
    try:
        if not re.fullmatch(r"step_\d+", given.checkpoint.name):
            raise UserError(f"{given.checkpoint} is no checkpoint: name one as <run>/checkpoints/step_00001000")
        if damage := fault(given.checkpoint):
            raise UserError(f"{given.checkpoint}: {damage}. Name another checkpoint")
        dtype = getattr(torch, given.dtype or "", None)
        layers, merged = fold_checkpoint(given.checkpoint, output, dtype, given.merge)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", EXIT_FAILED)
    print(f"folded {layers} layers{', merged into dense weights,' if merged else ''} into {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
