"""Fine-tune an exported folder on instructions."""

import argparse
import os
import shlex
import sys
from pathlib import Path

from dlr_pretrain.config.arguments import Parser, at_least_1, integers
from dlr_pretrain.config.run_folder import exported_folder
from dlr_pretrain.deploy.sft import DATASET, fine_tune, read_rows
from dlr_pretrain.util.errors import command, need


def main() -> int:
    parser = Parser(
        description=__doc__,
        epilog="example: torchrun sft.py runs/my-run --seeds 41 42",
        argument_default=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("folder", type=Path, help="a run, or what train.py or fold.py wrote")
    add("--data", default=DATASET, help="rows: a .json or .jsonl file, or a dataset on the hub (default: %(default)s)")
    add("--output", type=Path, default=Path("sft"), metavar="DIR", help="for a folder s<seed> per seed (default: sft)")
    add("--seeds", type=integers, default=[41, 42, 43], metavar="SEED", help="of the rows' order (default: 41 42 43)")
    add("--epochs", type=at_least_1, dest="num_train_epochs", help="(default: 3)")
    add("--batch", type=at_least_1, help="rows per update over all ranks (default: 64)")
    add("--micro-batch", type=at_least_1, dest="per_device_train_batch_size", help="rows per rank at once (default: 8)")
    add("--lr", type=float, dest="learning_rate", help="peak of the cosine (default: 2e-5)")
    add("--length", type=at_least_1, dest="max_length", help="the most tokens in a row (default: 512)")
    add("--fp32", action="store_true", help="forward pass in fp32, too (default: bf16, with fp32 weights)")
    given = parser.parse_args()
    return command(lambda: run(**vars(given)))


def run(folder: Path, data: str, output: Path, seeds: list[int], **recipe) -> None:
    folder = exported_folder(folder)
    need("trl", "sft")
    rows = read_rows(data)
    for seed in seeds:
        fine_tune(folder, output / f"s{seed}", rows, seed, **recipe)
    if os.environ.get("RANK", "0") == "0":
        written = " ".join(shlex.quote(str(output / f"s{seed}")) for seed in seeds)
        print(f"written     {written}\n\n    score them: python scripts/evaluate.py {written}")


if __name__ == "__main__":
    sys.exit(main())
