"""Zero-shot accuracy of exported folders: ``python scripts/evaluate.py runs/<name>/folded --data DIR``.

Several folders, such as the seeds of one method, give mean and standard deviation. Under torchrun the ranks, with one
GPU each, share the work.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from dlr_pretrain.deploy.extras import need
from dlr_pretrain.deploy.job import command, device_of, joined, rank
from dlr_pretrain.deploy.tasks import OLDEST_HARNESS, TASKS, names
from dlr_pretrain.util.command import at_least_1
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import write_durably
from dlr_pretrain.util.process import die_with_agent

CONVENTIONS = {
    "plain": "prompts and choices as the model was trained to read them, no </s> added (--as-in-paper adds it)",
    "as_in_paper": "as in the paper: </s> ends prompts and choices, so that of choices of one token (BoolQ, MMLU) the "
    "first one always wins (plain, the default, adds none)",
}


def main() -> int:
    die_with_agent()
    parser = argparse.ArgumentParser(
        description="Zero-shot accuracy by lm-evaluation-harness; mean and std of several folders.", allow_abbrev=False
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="folder", help="exported, as runs/<name>/folded")
    parser.add_argument("--tasks", type=names, default=list(TASKS), help=f"of {','.join(TASKS)} (default: all)")
    parser.add_argument("--data", type=Path, help="local <task>/<split>.jsonl instead of the hub")
    parser.add_argument("--limit", type=at_least_1, metavar="N", help="documents of each task, or subject of MMLU")
    parser.add_argument("--as-in-paper", action="store_true", help="end prompts and choices with </s>")
    parser.add_argument("--context", type=at_least_1, metavar="TOKENS", help="longest input (default: the model's)")
    parser.add_argument("--batch-size", type=at_least_1, default=64, metavar="N", help="sequences (default: 64)")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="default: the file's")
    parser.add_argument("--device", help="default: a GPU where there is one")
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the results as JSON as well")
    given = parser.parse_args()
    return command(lambda: run(given))


def run(given: argparse.Namespace) -> None:
    harness = need("lm-eval", "eval", OLDEST_HARNESS)
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        if given.output.is_dir():
            raise UserError(f"--output {given.output}: is a folder. Name a file")
    with joined("cpu"):  # gloo: ranks exchange scores alone, when all of a model's are there
        for report in evaluate(given):
            report["harness"] = harness
            if given.output and not rank():
                write_durably(given.output, json.dumps(report, indent=2) + "\n")
    if not rank():
        print(table(report), flush=True)


def evaluate(given: argparse.Namespace) -> Iterator[dict]:
    """Yield, after each folder, the report of all folders so far, because a later one may fail."""
    import torch

    from dlr_pretrain.deploy import zero_shot
    from dlr_pretrain.deploy.folder import check_folder, open_folder

    for folder in given.folders:
        check_folder(folder)
    device, checkpoints = device_of(given.device), []
    tasks = zero_shot.load_tasks(given.tasks, given.data)
    for folder in given.folders:
        model, tokenizer = open_folder(folder, "auto" if given.dtype == "auto" else getattr(torch, given.dtype))
        positions = given.context or model.config.max_position_embeddings
        how = {"context_length": positions, "dtype": str(model.dtype).removeprefix("torch.")}
        if checkpoints and not how.items() <= checkpoints[0].items():
            rule = f"{how} differs from that of {given.folders[0]}"
            raise UserError(f"{folder}: {rule}. Set --context and --dtype, or evaluate it by itself")
        how_much = (given.as_in_paper, given.limit, given.batch_size, zero_shot.Progress(folder))
        try:
            found = zero_shot.evaluate(model.to(device), tokenizer, tasks, positions, *how_much)
        except torch.OutOfMemoryError as error:
            rule = f"out of GPU memory at --batch-size {given.batch_size}"
            raise UserError(f"{folder}: {rule}: give a smaller one") from error
        checkpoints.append({"folder": str(folder), **how, "tasks": found})
        means, average = zero_shot.combine([each["tasks"] for each in checkpoints])
        yield {
            "tasks": means,
            "average": average,
            "convention": "as_in_paper" if given.as_in_paper else "plain",
            **how,
            "data": str(given.data or "hub"),
            "limit": given.limit,
            "checkpoints": checkpoints,
        }


def table(report: dict) -> str:
    """The report as text, with a table in percent."""
    several = len(report["checkpoints"]) > 1

    def percent(value: float | None) -> str:
        return f"{100 * value:8.2f}" if value is not None else " " * 8

    def row(name: str, task: dict, remark: str = "") -> str:
        counts = f"{task.get('n', ''):>8}{task.get('distinct_choices', ''):>8}"
        spread = percent(task.get("std")) if several else percent(task.get("acc_norm"))
        return f"{name:15}{percent(task['acc'])}{percent(task.get('stderr'))}{spread}{counts}{remark}".rstrip()

    columns = ("acc", "stderr", "std" if several else "norm", "n", "picked")
    lines = ["zero-shot, %    " + "".join(f"{column:>8}" for column in columns)[1:]]
    for name, task in report["tasks"].items():
        lines.append(row(name, task, "  always the same choice" if task["distinct_choices"] == 1 < task["n"] else ""))
    cut = max(sum(task["cut"] for task in each["tasks"].values()) for each in report["checkpoints"])
    lines += [
        row("average", report["average"]),
        "",
        f"convention      {report['convention']}: {CONVENTIONS[report['convention']]}",
        f"context length  {report['context_length']:,} tokens; documents whose beginning does not fit: {cut:,}",
        f"scored by       lm-evaluation-harness {report['harness']}, {report['dtype']} weights, data: {report['data']}"
        + (f", first {report['limit']} documents" if report["limit"] else ""),
        *(f"checkpoint      {each['folder']}" for each in report["checkpoints"]),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
