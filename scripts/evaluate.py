"""Zero-shot accuracy of exported folders. Several, such as a method's seeds, give a mean and standard deviation.

Under torchrun, GPUs share the work.
"""

import argparse
import json
import sys
from pathlib import Path

from dlr_pretrain.config.arguments import Parser, at_least_1, texts
from dlr_pretrain.config.run_folder import exported_folder
from dlr_pretrain.util.errors import UserError, command, need
from dlr_pretrain.util.files import read_json, write_durably


def main() -> int:
    parser = Parser(description=__doc__, epilog="example: evaluate.py runs/my-run --tasks piqa boolq")
    add = parser.add_argument
    add("folders", type=Path, nargs="+", metavar="folder", help="a run, or an exported folder")
    add("--tasks", type=texts, default=["all"], metavar="TASK", help="such as piqa boolq (default: all six)")
    add("--data", type=Path, help="local <task>/<split>.jsonl instead of the hub")
    add("--limit", type=at_least_1, metavar="N", help="documents to read of each task, or of each subject of MMLU")
    add("--as-in-paper", action="store_true", help="end prompts and choices with </s>")
    add("--context", type=at_least_1, metavar="TOKENS", help="longest input (default: the model's)")
    add("--batch-size", type=at_least_1, default=64, metavar="N", help="sequences per batch (default: 64)")
    add("--output", type=Path, metavar="FILE.json", help="write the results as JSON as well")
    given = parser.parse_args()
    return command(lambda: run(given))


def run(given: argparse.Namespace) -> None:
    if given.output and given.output.exists():
        try:
            read_json(given.output, {"harness": str, "checkpoints": list})
        except ValueError:
            raise UserError(
                f"--output={given.output}", "exists, and is not what this command wrote", "Name another file"
            ) from None
    folders = [exported_folder(folder) for folder in given.folders]
    report: dict = {"harness": need("lm-eval", "eval"), "convention": "as_in_paper" if given.as_in_paper else "plain"}
    report |= {"data": str(given.data or "hub"), "limit": given.limit, "checkpoints": []}
    import pandas as pd

    from dlr_pretrain.deploy import zero_shot

    tasks = zero_shot.load_tasks(given.tasks, given.data)
    how = {"max_length": given.context, "batch_size": given.batch_size}
    for folder in folders:
        scores = zero_shot.evaluate(folder, tasks, given.as_in_paper, given.limit, **how)
        if scores is None:  # a rank other than the first
            continue
        report["checkpoints"].append({"folder": str(folder), **scores})
        report |= {"context_length": scores["context_length"], "dtype": scores["dtype"]}
        report["tasks"], report["average"] = zero_shot.combine([each["tasks"] for each in report["checkpoints"]])
        if given.output:  # after each folder, because a later one may fail
            given.output.parent.mkdir(parents=True, exist_ok=True)
            write_durably(given.output, json.dumps(report, indent=2) + "\n")
    if report["checkpoints"]:
        rows = pd.DataFrame(report["tasks"] | {"average": report["average"]}).T
        print(rows.to_string(na_rep="", float_format="%.4g"))
        print(*(f"{name} {value}" for name, value in report.items() if isinstance(value, str | int)), sep=", ")


if __name__ == "__main__":
    sys.exit(main())
