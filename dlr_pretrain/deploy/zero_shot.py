"""Zero-shot accuracy by lm-evaluation-harness: its prompts, its model class, its metrics.

The folder's tokenizer adds no special token. T5's, as published, ends every text with </s>, which gives BoolQ 37.83 and
MMLU 22.95 for each model of the DLR paper: where a choice is one token, </s> is scored in its place, all choices tie,
and the first of them wins. ``as_in_paper`` does the same.
"""

from __future__ import annotations

import logging
from pathlib import Path

import lm_eval.tasks
import pandas as pd
import torch
from lm_eval import evaluator
from lm_eval.models.huggingface import HFLM

from dlr_pretrain.deploy.export import open_folder
from dlr_pretrain.util.errors import UserError, first_line

# Task -> the folder of the harness that has it. Reading these alone saves the seconds that its 14,000 files take.
TASKS = {
    "arc_challenge": "arc",
    "boolq": "super_glue/boolq",
    "hellaswag": "hellaswag",
    "mmlu": "mmlu/default",
    "piqa": "piqa",
    "winogrande": "winogrande",
}


class EndsEachText(HFLM):
    """``HFLM`` with a tokenizer that ends prompts and choices with </s>, as T5's own does."""

    def tok_encode(self, string: str, *given, **named) -> list[int]:
        return [*super().tok_encode(string, *given, **named), self.tokenizer.eos_token_id]


def load_tasks(given: str, data: Path | None = None) -> dict[str, dict]:
    """By each name of a comma-separated list, or of "all": the harness's tasks, with documents of ``data`` or the hub.

    ``data`` has JSON lines with the hub's field names, <task>/<split>.jsonl and mmlu/<subject>/<split>.jsonl. No
    example precedes a question, so that only the split with the questions is read. Raises UserError for another name.
    """
    names = list(TASKS) if given == "all" else [name.strip() for name in given.split(",")]
    if unknown := [name for name in names if name not in TASKS]:
        raise UserError(f"--tasks: {unknown[0]!r} is no task. Choose from {', '.join(TASKS)}, or all")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    folders = [str(Path(lm_eval.tasks.__file__).parent / TASKS[name]) for name in names]
    manager = lm_eval.tasks.TaskManager(include_defaults=False, include_path=folders)
    tasks = {}
    for name in names:
        parts = [part for part in manager.all_subtasks if part.startswith("mmlu_")] if name == "mmlu" else [name]
        group: list[dict] = [{"task": part, "training_split": None, "fewshot_split": None} for part in parts]
        for part in group if data is not None else ():
            files = {"data_dir": str(data / part["task"].replace("mmlu_", "mmlu/", 1))}
            part |= {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": files}
        try:
            tasks[name] = manager.load([{"group": f"zero_shot_{name}", "task": group}])["tasks"]
            for task in tasks[name].values():
                len(task.eval_docs)  # is read when it is first asked for
        except Exception as error:  # of any type, from a document that the harness cannot read or from the hub
            rule = f"its documents cannot be read from {data or 'the hub'}: {type(error).__name__}: {first_line(error)}"
            fix = "Name a folder that has <task>/<split>.jsonl with the hub's field names with --data"
            raise UserError(f"{name}: {rule}. {fix}") from error
    return tasks


def evaluate(folder: Path, tasks: dict[str, dict], as_in_paper: bool, limit: int | None, **how) -> dict | None:
    """``context_length``, ``dtype`` and, by task, the ``measures`` of a folder; raises as ``open_folder`` does.

    ``how`` are settings of ``HFLM``. Under torchrun the GPUs share the documents, and ranks but the first get None.
    ``limit`` documents of each task, or of each subject of MMLU, are read.
    """
    open_folder(folder)  # the harness would not mind missing weights
    kind, device = EndsEachText if as_in_paper else HFLM, "cuda" if torch.cuda.is_available() else "cpu"
    model = kind(str(folder), softmax_dtype="float32", device=device, **how)  # sums rounded to bf16 would make ties
    parts = {name: task for of_task in tasks.values() for name, task in of_task.items()}
    found = evaluator.evaluate(model, {"tasks": parts, "groups": {}}, limit=limit, bootstrap_iters=0)
    if found is None:
        return None
    scored = {name: measures([found["samples"][part] for part in task]) for name, task in tasks.items()}
    return {"context_length": model.max_length, "dtype": str(model.model.dtype)[len("torch.") :], "tasks": scored}


def measures(parts: list[list[dict]]) -> dict[str, float | None]:
    """The measures of a task from the harness's samples of its parts; accuracies are between 0 and 1.

    acc, acc_norm       over all documents; acc_norm, with scores divided by the choices' characters, if the task has it
    stderr              of acc over documents; None for a single one
    n                   number of documents
    distinct_choices    number of choices that were ever picked; 1 if the answer is always the same
    """
    documents = pd.concat(map(pd.DataFrame, parts))
    scores = documents["filtered_resps"].map(lambda choices: [score for score, _ in choices])
    return {
        **{name: documents[name].mean() for name in ("acc", "acc_norm") if name in documents},
        "stderr": documents["acc"].sem() if len(documents) > 1 else None,
        "n": len(documents),
        "distinct_choices": scores.map(lambda each: each.index(max(each))).nunique(),
    }


def combine(checkpoints: list[dict[str, dict]]) -> tuple[dict[str, dict], dict]:
    """(measures by task, those of the average over tasks) of ``checkpoints``, such as the seeds of a method.

    One checkpoint keeps its own measures. Several have the mean of ``acc``, its standard deviation ``std`` over the
    checkpoints (n - 1 in the denominator), and the smallest ``distinct_choices``.
    """
    accs = pd.DataFrame([{name: task["acc"] for name, task in each.items()} for each in checkpoints])
    average = accs.mean(axis=1)
    if len(accs) == 1:
        return dict(checkpoints[0]), {"acc": average[0]}
    tasks = {}
    for name, acc in accs.items():
        least = min(each[name]["distinct_choices"] for each in checkpoints)
        tasks[name] = {"acc": acc.mean(), "std": acc.std(), "n": checkpoints[0][name]["n"], "distinct_choices": least}
    return tasks, {"acc": average.mean(), "std": average.std()}
