"""Fine-tune deployed folders on instructions: ``python scripts/sft.py runs/<run>/folded``.

torchrun --nproc-per-node 8 scripts/sft.py full=runs/1b-full-dlr_off-s42/folded cola=runs/1b-cola-dlr_off-s42/folded
"""

import argparse
import os
import sys
from pathlib import Path

from dlr_pretrain.deploy.folder import check_folder, device_of, need
from dlr_pretrain.deploy.sft import DATASET, Recipe, fine_tune, read_rows, write_table
from dlr_pretrain.util.command import at_least_1, command


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Fine-tune every folder with every seed; the same command again completes what is missing.",
        allow_abbrev=False,
    )
    add, default = parser.add_argument, Recipe()
    add("folders", nargs="+", metavar="[NAME=]FOLDER", help="what train.py or fold.py wrote; its name in the table")
    add("--data", default=DATASET, help="rows: a .json or .jsonl file, or a dataset of the hub (default: %(default)s)")
    add("--validation", help="rows that are held out, for the loss on their responses")
    add("--output", type=Path, default=Path("sft"), metavar="DIR", help="for <name>/s<seed> and tables (default: sft)")
    add("--seeds", type=int, nargs="+", default=[41, 42, 43], help="of the order of the rows (default: 41 42 43)")
    add("--epochs", type=at_least_1, default=default.epochs, help="(default: %(default)s)")
    add("--batch", type=at_least_1, default=default.batch, help="rows of an update, all ranks (default: %(default)s)")
    add("--micro-batch", type=at_least_1, default=default.micro_batch, help="of a rank at once (default: %(default)s)")
    add("--lr", type=float, default=default.lr, help="peak of the cosine (default: %(default)s)")
    add("--length", type=at_least_1, default=default.length, help="most tokens of a row (default: %(default)s)")
    add("--fp32", action="store_true", help="the forward pass, too (default: bf16, with fp32 weights)")
    add("--tasks", help="zero-shot tasks of every tuned folder, or all (default: none)")
    add("--eval-data", type=Path, metavar="DIR", help="the tasks' local <task>/<split>.jsonl (default: the hub)")
    add("--limit", type=at_least_1, metavar="N", help="documents of each task, or subject of MMLU")
    add("--as-in-paper", action="store_true", help="end prompts and choices with </s>, as scripts/evaluate.py")
    add("--device", help="default: a GPU where there is one")
    given = parser.parse_args()
    return command(lambda: run(given))


def run(given: argparse.Namespace) -> None:
    need("trl", "sft")
    named = dict(
        word.split("=", 1) if "=" in word else (Path(word).resolve().parent.name, word) for word in given.folders
    )
    folders = {name: Path(path) for name, path in named.items()}
    for folder in folders.values():
        check_folder(folder)
    if given.tasks:
        need("lm-eval", "eval")
        from dlr_pretrain.deploy import zero_shot

        tasks = zero_shot.load_tasks(zero_shot.named(given.tasks), given.eval_data)
    recipe = Recipe(given.epochs, given.batch, given.micro_batch, given.lr, given.length, not given.fp32)
    rows, held_out = read_rows(given.data), read_rows(given.validation) if given.validation else None
    device, models = str(device_of(given.device)), {name: [] for name in folders}
    for name, folder in folders.items():
        for seed in dict.fromkeys(given.seeds):
            output = given.output / name / f"s{seed}"
            record = fine_tune(folder, output, rows, held_out, recipe, seed, device)
            if given.tasks:
                how = {"as_in_paper": given.as_in_paper, "limit": given.limit, "device": device}
                record |= zero_shot.evaluate(output, tasks, **how) or {}
            models[name].append(record)
    if int(os.environ.get("RANK", 0)) == 0:
        way = f"{'as_in_paper' if given.as_in_paper else 'plain'}, documents: {given.limit or 'all'}"
        print(write_table(given.output, models, way if given.tasks else "not measured (--tasks)"))


if __name__ == "__main__":
    sys.exit(main())
