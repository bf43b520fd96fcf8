"""Zero-shot accuracy of exported folders: ``python scripts/evaluate.py runs/<name>/folded --data DIR``.

Several folders, such as the seeds of one method, give mean and standard deviation. Under torchrun GPUs share the work.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from dlr_pretrain.deploy.folder import check_folder, device_of, need
from dlr_pretrain.util.command import at_least_1, command
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import write_durably
from dlr_pretrain.util.text import table


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Zero-shot accuracy by lm-evaluation-harness; mean and std of several folders.", allow_abbrev=False
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="folder", help="exported, as runs/<name>/folded")
    parser.add_argument("--tasks", default="all", help="a comma-separated list (default: all six)")
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
    os.environ.setdefault("TQDM_DISABLE", "1")  # the harness draws a bar for each subject of MMLU
    report = {"harness": need("lm-eval", "eval"), "convention": "as_in_paper" if given.as_in_paper else "plain"}
    from dlr_pretrain.deploy import zero_shot

    for folder in given.folders:
        check_folder(folder)
    if given.output:
        given.output.parent.mkdir(parents=True, exist_ok=True)
    tasks = zero_shot.load_tasks(zero_shot.named(given.tasks), given.data)
    how = (given.context, given.as_in_paper, given.limit, given.batch_size, given.dtype, str(device_of(given.device)))
    checkpoints: list[dict] = []
    for folder in given.folders:
        found = zero_shot.evaluate(folder, tasks, *how)
        if found is None:  # another rank than the first
            continue
        checkpoints.append({"folder": str(folder), **found})
        for name in ("context_length", "dtype"):
            if found[name] != checkpoints[0][name]:
                fix = "Set --context and --dtype, or evaluate it by itself"
                raise UserError(f"{folder}: its {name} differs from that of {given.folders[0]}. {fix}")
            report[name] = found[name]
        report |= {"data": str(given.data or "hub"), "limit": given.limit, "checkpoints": checkpoints}
        report["tasks"], report["average"] = zero_shot.combine([each["tasks"] for each in checkpoints])
        if given.output:  # after each folder, because a later one may fail
            write_durably(given.output, json.dumps(report, indent=2) + "\n")
    if checkpoints:
        print(shown(report), flush=True)


def shown(report: dict) -> str:
    """The report as a table in percent, and how it was measured."""
    columns = ("acc", "stderr", "std", "acc_norm", "n", "distinct_choices")

    def row(name: str, task: dict) -> list[str]:
        cells = [task.get(column) for column in columns]
        text = ["" if c is None else f"{100 * c:.2f}" if isinstance(c, float) else f"{c:,}" for c in cells]
        return [name, *text, "always the same choice" if task.get("distinct_choices") == 1 < task["n"] else ""]

    rows = [row(name, task) for name, task in (report["tasks"] | {"average": report["average"]}).items()]
    ends = "ends" if report["convention"] == "as_in_paper" else "does not end"
    lines = [
        table(["%", *columns, ""], rows),
        f"convention {report['convention']}: </s> {ends} prompts and choices",
        f"context {report['context_length']:,} tokens, {report['dtype']}, data: {report['data']}"
        + (f", the first {report['limit']:,} documents" if report["limit"] else "")
        + f", by lm-evaluation-harness {report['harness']}",
        *(each["folder"] for each in report["checkpoints"]),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
