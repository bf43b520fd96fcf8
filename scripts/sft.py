"""Fine-tune deployed folders on instructions: ``python scripts/sft.py runs/<run>/folded``.

torchrun --nproc-per-node 8 scripts/sft.py full=runs/1b-full-dlr_off-s42/folded cola=runs/1b-cola-dlr_off-s42/folded
"""

import argparse
import sys
from pathlib import Path

from dlr_pretrain.config import ConfigError, Problem
from dlr_pretrain.deploy.extras import need
from dlr_pretrain.deploy.job import command, decided, device_of, joined, rank
from dlr_pretrain.deploy.recipe import DATASET, PRECISIONS, Recipe
from dlr_pretrain.deploy.tasks import OLDEST_HARNESS, TASKS, names
from dlr_pretrain.util.command import at_least_1, refuse
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.process import die_with_agent


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Fine-tune every folder with every seed; the same command again completes what is missing.",
        allow_abbrev=False,
    )
    add, default = parser.add_argument, Recipe()
    add("folders", nargs="+", metavar="[NAME=]FOLDER", help="what train.py or fold.py wrote; its name in the table")
    add("--data", default=DATASET, help="rows: a .json or .jsonl file, or a dataset of the hub (default: %(default)s)")
    add("--validation", help="rows that are held out, for the loss on their responses")
    add(
        "--output",
        type=Path,
        default=Path("sft"),
        metavar="DIR",
        help="for <name>/s<seed> and tables (default: sft)",
    )
    add("--seeds", type=int, nargs="+", default=[41, 42, 43], help="of the order of the rows (default: 41 42 43)")
    add("--epochs", type=int, default=default.epochs, help="(default: %(default)s)")
    add("--batch", type=int, default=default.batch, help="rows of an update, over all ranks (default: %(default)s)")
    add(
        "--micro-batch", type=int, help="rows that a rank takes at once (default: as many as divide its share, up to 8)"
    )
    add("--lr", type=float, default=default.lr, help="peak of the cosine (default: %(default)s)")
    add("--length", type=int, default=default.length, help="most tokens of a row (default: %(default)s)")
    add(
        "--precision",
        choices=PRECISIONS,
        default=default.precision,
        help="weights are fp32 in both (default: %(default)s)",
    )
    add("--tasks", type=names, help=f"of {','.join(TASKS)}, or all: of every tuned folder (default: none)")
    add("--eval-data", type=Path, metavar="DIR", help="the tasks' local <task>/<split>.jsonl (default: the hub)")
    add("--limit", type=at_least_1, metavar="N", help="documents of each task, or subject of MMLU")
    add("--context", type=at_least_1, metavar="TOKENS", help="longest input of a task (default: the model's)")
    add("--as-in-paper", action="store_true", help="end prompts and choices with </s>, as scripts/evaluate.py")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    return parser


def named(folders: list[str]) -> dict[str, Path]:
    """Folders by name: the given name, or that of the run. Raises UserError for an unusable name."""
    found: dict[str, Path] = {}
    for word in folders:
        name, equals, path = word.partition("=")
        folder = Path(path if equals else word).resolve()
        name = name if equals else (folder.parent if folder.name.startswith("folded") else folder).name
        if found.setdefault(name, folder) != folder or not name or "/" in name:
            raise UserError(f"{word}: every folder needs a name of its own. Write NAME={folder}")
    return found


def main() -> int:
    die_with_agent()
    parser = arguments()
    given = parser.parse_args()
    if not given.tasks:
        refuse(parser, given, ("--eval-data", "--limit", "--context", "--as-in-paper"), "is of the tasks: add --tasks")
    return command(lambda: run(given))


def run(given: argparse.Namespace) -> None:
    need("accelerate", "sft", (1, 1))
    if given.tasks:
        need("lm-eval", "eval", OLDEST_HARNESS)
    device = device_of(given.device)
    with joined(device.type):
        tune_and_measure(given, device)


def tune_and_measure(given: argparse.Namespace, device) -> None:
    from dlr_pretrain.deploy.alpaca import read_rows
    from dlr_pretrain.deploy.sft import tune
    from dlr_pretrain.deploy.sft_table import measure, write_table

    seeds = list(dict.fromkeys(given.seeds))

    def read() -> tuple:
        if wrong := [seed for seed in seeds if not 0 <= seed < 2**32]:
            raise ConfigError([Problem("--seeds", wrong, "must be at least 0 and below 2^32")])
        share = given.epochs, given.batch, given.lr, given.length
        recipe = Recipe(*share, micro_batch=given.micro_batch, precision=given.precision)
        folders = named(given.folders)
        return recipe, folders, read_rows(given.data), read_rows(given.validation) if given.validation else []

    recipe, folders, rows, held_out = decided(read)
    evaluate = evaluation(given, device) if given.tasks else None
    records = tune(folders, rows, held_out, recipe, seeds, given.output, device.type, say)
    if evaluate:
        setting = {
            "convention": "as_in_paper" if given.as_in_paper else "plain",
            "context": given.context or "the model's",
            "documents": given.limit or "all",
            "data": str(given.eval_data or "hub"),
            "tasks": ",".join(given.tasks),
        }
        for record in records:
            folder = given.output / record["name"] / f"s{record['seed']}"
            say(f"zero-shot   {folder}")
            measure(folder, record, evaluate, setting, not rank())
    if not rank():
        print(write_table(given.output, records))


def say(line: str) -> None:
    if not rank():
        print(line, flush=True)


def evaluation(given: argparse.Namespace, device):
    """A function (model, tokenizer) that returns the measures of scripts/evaluate.py, computed on ``device``."""
    from dlr_pretrain.deploy import zero_shot

    tasks = zero_shot.load_tasks(given.tasks, given.eval_data)

    def evaluate(model, tokenizer):
        positions = given.context or model.config.max_position_embeddings
        how_much = (given.as_in_paper, given.limit, 64, zero_shot.Progress("zero-shot"))
        return zero_shot.evaluate(model.to(device), tokenizer, tasks, positions, *how_much)

    return evaluate


if __name__ == "__main__":
    sys.exit(main())
