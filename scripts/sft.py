"""Fine-tune a deployed folder on instructions: ``torchrun scripts/sft.py runs/<name>/folded --output sft/cola``."""

import argparse
import sys
from pathlib import Path

from dlr_pretrain.deploy.export import need
from dlr_pretrain.deploy.sft import DATASET, fine_tune, read_rows
from dlr_pretrain.util.errors import Parser, at_least_1, command


def main() -> int:
    parser = Parser(description=__doc__, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    add = parser.add_argument
    add("folder", type=Path, help="what train.py or fold.py wrote")
    add("--data", default=DATASET, help="rows: a .json or .jsonl file, or a dataset on the hub (default: %(default)s)")
    add("--output", type=Path, default=Path("sft"), metavar="DIR", help="for a folder s<seed> per seed (default: sft)")
    add("--seeds", type=int, nargs="+", default=[41, 42, 43], help="seeds that order the rows (default: 41 42 43)")
    add("--epochs", type=at_least_1, dest="num_train_epochs", help="(default: 3)")
    add("--batch", type=at_least_1, help="rows per update over all ranks (default: 64)")
    add("--micro-batch", type=at_least_1, dest="per_device_train_batch_size", help="rows per rank at once (default: 8)")
    add("--lr", type=float, dest="learning_rate", help="peak of the cosine (default: 2e-5)")
    add("--length", type=at_least_1, dest="max_length", help="the most tokens in a row (default: 512)")
    add("--fp32", action="store_true", help="forward pass in fp32, too (default: bf16, with fp32 weights)")
    given = parser.parse_args()
    return command(lambda: run(**vars(given)))


def run(folder: Path, data: str, output: Path, seeds: list[int], **recipe) -> None:
    need("trl", "sft")
    rows = read_rows(data)
    for seed in seeds:
        fine_tune(folder, output / f"s{seed}", rows, seed, **recipe)


if __name__ == "__main__":
    sys.exit(main())
