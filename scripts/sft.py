"""Fine-tune deployed folders on instructions: ``python scripts/sft.py runs/<run>/folded``.

torchrun --nproc-per-node 8 scripts/sft.py full=runs/1b-full-dlr_off-s42/folded cola=runs/1b-cola-dlr_off-s42/folded
"""

import argparse
import os
import sys
from pathlib import Path

from dlr_pretrain.config import ConfigError, Problem
from dlr_pretrain.deploy.alpaca import DATASET, read_rows
from dlr_pretrain.deploy.extras import need
from dlr_pretrain.deploy.sft import PRECISIONS, Recipe, tune
from dlr_pretrain.deploy.sft_table import measure, write_table
from dlr_pretrain.errors import EXIT_FAILED, UserError
from dlr_pretrain.process import die_with_agent

FIRST = int(os.environ.get("RANK", 0)) == 0


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Fine-tune every folder with every seed; the same command again makes what is missing.",
        allow_abbrev=False,
    )
    add, default = parser.add_argument, Recipe()
    add("folders", nargs="+", metavar="[NAME=]FOLDER", help="what train.py or fold.py wrote; its name in the table")
    add("--data", default=DATASET, help="rows: a .json or .jsonl file, or a dataset of the hub")
    add("--validation", help="rows that are held out, for the loss on their responses")
    add("--output", type=Path, default=Path("sft"), help="writes <output>/<name>/s<seed>, table.md and table.json")
    add("--seeds", type=int, nargs="+", default=[41, 42, 43], help="of the order of the rows")
    add("--epochs", type=int, default=default.epochs)
    add("--batch", type=int, default=default.batch, help="rows of an update, over all ranks")
    add("--micro-batch", type=int, help="rows that a rank takes at once (default: 8, or what the ranks leave)")
    add("--lr", type=float, default=default.lr, help="peak of the cosine")
    add("--length", type=int, default=default.length, help="tokens a row at most")
    add("--precision", choices=PRECISIONS, default=default.precision, help="weights and moments are fp32 in both")
    add("--tasks", help="zero-shot tasks of every tuned folder, with commas, or all (default: none)")
    add("--eval-data", type=Path, metavar="DIR", help="the tasks' local <task>/<split>.jsonl (default: the hub)")
    add("--limit", type=int, metavar="N", help="documents of each task, or subject of MMLU")
    add("--context", type=int, metavar="TOKENS", help="longest input of a task (default: the model's)")
    add("--as-in-paper", action="store_true", help="end prompts and choices with </s>, as scripts/evaluate.py")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    return parser


def named(folders: list[str]) -> dict[str, Path]:
    """Folders by name: the given one, or that of the run."""
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
    given = arguments().parse_args()
    try:
        run(given)
    except (UserError, OSError) as error:
        if FIRST:
            print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", EXIT_FAILED)
    return 0


def run(given: argparse.Namespace) -> None:
    recipe = Recipe(
        given.epochs, given.batch, given.lr, given.length, micro_batch=given.micro_batch, precision=given.precision
    )
    folders, evaluate = named(given.folders), evaluation(given) if given.tasks else None
    rows, held_out = read_rows(given.data), read_rows(given.validation) if given.validation else []
    records = tune(folders, rows, held_out, recipe, given.seeds, given.output, given.device, say)
    if evaluate:
        setting = {
            "convention": "as_in_paper" if given.as_in_paper else "plain",
            "context": given.context or "the model's",
            "documents": given.limit or "all",
            "data": str(given.eval_data or "hub"),
            "tasks": given.tasks,
        }
        for record in records:
            folder = given.output / record["name"] / f"s{record['seed']}"
            say(f"zero-shot   {folder}")
            measure(folder, record, evaluate, setting, FIRST)
    if FIRST:
        print(write_table(given.output, records))


def say(line: str) -> None:
    if FIRST:
        print(line, flush=True)


def evaluation(given: argparse.Namespace):
    """(model, tokenizer) -> the measures of scripts/evaluate.py, on the device that the model was tuned on."""
    need("lm-eval", "eval", (0, 4, 13))
    os.environ["TQDM_DISABLE"] = "1"  # before the harness is imported
    import torch

    from dlr_pretrain.deploy import zero_shot

    names = list(zero_shot.TASKS) if given.tasks == "all" else given.tasks.split(",")
    if unknown := set(names) - set(zero_shot.TASKS):
        problem = f"must be among {', '.join(zero_shot.TASKS)}, or all"
        raise ConfigError([Problem("--tasks", ",".join(sorted(unknown)), problem)])
    tasks = zero_shot.load_tasks(names, given.eval_data)
    gpu = torch.cuda.is_available() and given.device != "cpu"
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if gpu else "cpu"

    def evaluate(model, tokenizer):
        positions = given.context or model.config.max_position_embeddings
        return zero_shot.evaluate(model.to(device), tokenizer, tasks, positions, given.as_in_paper, given.limit)

    return evaluate


if __name__ == "__main__":
    sys.exit(main())
