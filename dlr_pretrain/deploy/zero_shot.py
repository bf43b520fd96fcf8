"""Zero-shot accuracy by lm-evaluation-harness: its prompts, its model class, its metrics.

The folder's tokenizer adds no special token. T5's, as published, ends every text with </s>, which gives BoolQ 37.83 and
MMLU 22.95 for each model of the DLR paper: where a choice is one token, </s> is scored in its place, all choices tie,
and the first of them wins. ``as_in_paper`` does the same.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import chain
from pathlib import Path

import datasets
import lm_eval.tasks
import torch
from lm_eval import evaluator
from lm_eval.models.huggingface import HFLM

from dlr_pretrain.deploy.folder import check_folder
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
Tasks = dict[str, dict[str, object]]  # name -> the harness's tasks that it consists of, by their names


class EndsEachText(HFLM):
    """``HFLM`` with a tokenizer that ends prompts and choices with </s>, as T5's own does."""

    def tok_encode(self, string: str, *given, **named) -> list[int]:
        return [*super().tok_encode(string, *given, **named), self.tokenizer.eos_token_id]


def named(text: str) -> list[str]:
    """Tasks from a comma-separated list, or "all", in the order of TASKS; UserError for another name."""
    given = set(TASKS) if text == "all" else {name.strip() for name in text.split(",")}
    for name in sorted(given.difference(TASKS)):
        near = get_close_matches(name, TASKS, 1)
        fix = f"did you mean {near[0]}?" if near else f"choose from {', '.join(TASKS)}, or all"
        raise UserError(f"--tasks: {name!r} is no task: {fix}")
    return [name for name in TASKS if name in given]


def load_tasks(names: Sequence[str], data: Path | None = None) -> Tasks:
    """The harness's tasks, with their documents: from the hub, or from ``data``.

    ``data`` has JSON lines with the hub's field names, <task>/<split>.jsonl and mmlu/<subject>/<split>.jsonl. No
    example precedes a question, so that only the split with the questions is read.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    home = Path(lm_eval.tasks.__file__).parent
    folders = [str(home / TASKS[name]) for name in names]
    manager = lm_eval.tasks.TaskManager(include_defaults=False, include_path=folders)
    tasks = {}
    for name in names:
        parts = [part for part in manager.all_subtasks if part.startswith("mmlu_")] if name == "mmlu" else [name]
        group: list[dict] = [{"task": part, "training_split": None, "fewshot_split": None} for part in parts]
        try:
            for part in [] if data is None else group:
                splits = _splits(data / part["task"].replace("mmlu_", "mmlu/", 1))
                part["custom_dataset"] = lambda splits=splits, **_: splits
            tasks[name] = manager.load([{"group": f"zero_shot_{name}", "task": group}])["tasks"]
        except Exception as error:  # of any type, from a document that the harness cannot read or from the hub
            rule = f"its documents cannot be read from {data or 'the hub'}: {type(error).__name__}: {first_line(error)}"
            fix = "Name a folder that has <split>.jsonl with the hub's field names with --data"
            raise UserError(f"{name}: {rule}. {fix}") from error
    return tasks


def _splits(folder: Path) -> dict[str, datasets.Dataset]:
    splits = {}
    for file in folder.glob("*.jsonl"):
        with file.open(encoding="utf-8") as lines:  # str.splitlines would cut at Unicode's separators too
            splits[file.stem] = datasets.Dataset.from_list([json.loads(line) for line in lines if line.strip()])
    if not splits:
        raise FileNotFoundError(f"{folder} has no .jsonl file")
    return splits


def evaluate(
    folder: Path,
    tasks: Tasks,
    context: int | None = None,
    as_in_paper: bool = False,
    limit: int | None = None,
    batch_size: int = 64,
    dtype: str = "auto",
    device: str = "cpu",
) -> dict[str, object] | None:
    """``context_length``, ``dtype`` and, by task, the ``measures`` of a folder; raises as ``check_folder`` does.

    Longer texts than ``context`` tokens (None: the model's) lose their beginning. Under torchrun the GPUs share the
    documents, and ranks but the first get None. ``limit`` documents of each task, or of each subject of MMLU, are read.
    """
    check_folder(folder)
    kind = EndsEachText if as_in_paper else HFLM
    # softmax in fp32: sums rounded to bf16 would make choices tie
    how = {"dtype": dtype, "softmax_dtype": "float32", "device": device, "batch_size": batch_size}
    model = kind(str(folder), max_length=context, **how)
    parts = {name: task for of_task in tasks.values() for name, task in of_task.items()}
    try:
        found = evaluator.evaluate(model, {"tasks": parts, "groups": {}}, limit=limit, bootstrap_iters=0)
    except AssertionError as error:
        raise UserError(f"{folder}: a choice does not fit into {model.max_length:,} tokens: raise --context") from error
    except torch.OutOfMemoryError as error:
        raise UserError(f"{folder}: out of GPU memory at --batch-size {batch_size}: give a smaller one") from error
    if found is None:
        return None
    scored = {name: measures([found["samples"][part] for part in task]) for name, task in tasks.items()}
    kind_of_number = str(model.model.dtype).removeprefix("torch.")
    return {"context_length": model.max_length, "dtype": kind_of_number, "tasks": scored}


def measures(parts: list[list[dict]]) -> dict[str, float | None]:
    """The measures of a task from the harness's samples of its parts; accuracies are between 0 and 1.

    acc, acc_norm       over all documents; acc_norm, with scores divided by the choices' characters, if the task has it
    stderr              of acc over documents; None for a single one
    n                   number of documents
    distinct_choices    number of choices that were ever picked; 1 if the answer is always the same
    """
    documents = list(chain.from_iterable(parts))
    scores = [[score for score, _ in document["filtered_resps"]] for document in documents]
    found = {name: [doc[name] for doc in documents] for name in ("acc", "acc_norm") if name in documents[0]}
    n = len(documents)
    return {name: statistics.fmean(values) for name, values in found.items()} | {
        "stderr": statistics.stdev(found["acc"]) / n**0.5 if n > 1 else None,
        "n": n,
        "distinct_choices": len({each.index(max(each)) for each in scores}),
    }


def combine(checkpoints: Sequence[dict[str, dict[str, float]]]) -> tuple[dict[str, dict[str, float]], dict]:
    """(measures by task, those of the average over tasks) of ``checkpoints``, such as the seeds of a method.

    One checkpoint keeps its own measures. Several have the mean of ``acc``, its standard deviation ``std`` over the
    checkpoints (n - 1 in the denominator), and the smallest ``distinct_choices``.
    """
    averages = [statistics.fmean(task["acc"] for task in each.values()) for each in checkpoints]
    if len(checkpoints) == 1:
        return dict(checkpoints[0]), {"acc": averages[0]}

    def spread(values: list[float]) -> dict[str, float]:
        return {"acc": statistics.fmean(values), "std": statistics.stdev(values)}

    tasks = {}
    for name, first in checkpoints[0].items():
        each = [checkpoint[name] for checkpoint in checkpoints]
        least = {"n": first["n"], "distinct_choices": min(task["distinct_choices"] for task in each)}
        tasks[name] = spread([task["acc"] for task in each]) | least
    return tasks, spread(averages)
