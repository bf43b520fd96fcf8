"""Zero-shot accuracy by lm-evaluation-harness, with its prompts, model class and metrics.

The exported tokenizer adds no special token. T5's, as published, ends every text with </s>, and gives BoolQ 37.83 and
MMLU 22.95 for each model of the DLR paper: if a choice is one token, </s> is scored in its place, all choices tie, and
the first one wins. ``as_in_paper`` reproduces this.
"""

import logging
from pathlib import Path

import lm_eval.tasks
import pandas as pd
import torch
from lm_eval import evaluator
from lm_eval.models.huggingface import HFLM

from dlr_pretrain.deploy.export import open_folder
from dlr_pretrain.util.errors import UserError, first_line

# Task -> its folder in the harness. Reading only these folders saves seconds: the harness has 14,000 files.
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


def load_tasks(given: list[str], data: Path | None = None) -> dict[str, dict]:
    """The harness's tasks for each name in a list (or "all"), with documents from ``data`` or the hub.

    ``data`` has JSON lines with the hub's field names, <task>/<split>.jsonl and mmlu/<subject>/<split>.jsonl. Only the
    split with the questions is read, because no example precedes a question. Raises UserError for an unknown name.
    """
    names = list(TASKS) if given == ["all"] else given
    if unknown := [name for name in names if name not in TASKS]:
        raise UserError(f"--tasks: {unknown[0]!r} is not a task. Choose from {', '.join(TASKS)}, or all")
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
                len(task.eval_docs)  # reads the documents
        except Exception as error:  # the hub, and a document that the harness cannot read, raise errors of many types
            raise UserError(
                name,
                f"its documents cannot be read from {data or 'the hub'}: {type(error).__name__}: {first_line(error)}",
                "Name with --data a folder that has <task>/<split>.jsonl with the hub's field names",
            ) from error
    return tasks


def evaluate(folder: Path, tasks: dict[str, dict], as_in_paper: bool, limit: int | None, **how) -> dict | None:
    """A folder's ``context_length``, ``dtype`` and, by task, ``measures``. Raises UserError as ``open_folder`` does.

    ``limit`` documents of each task, or of each subject of MMLU, are read. ``how`` are settings of ``HFLM``. Under
    torchrun the GPUs share the documents, and every rank but the first returns None.
    """
    open_folder(folder)  # the harness does not refuse missing weights
    kind, device = EndsEachText if as_in_paper else HFLM, "cuda" if torch.cuda.is_available() else "cpu"
    model = kind(str(folder), softmax_dtype="float32", device=device, **how)  # scores rounded to bf16 would tie
    parts = {name: task for of_task in tasks.values() for name, task in of_task.items()}
    results = evaluator.evaluate(model, {"tasks": parts, "groups": {}}, limit=limit, bootstrap_iters=0)
    if results is None:
        return None
    scored = {name: measures([results["samples"][part] for part in task]) for name, task in tasks.items()}
    return {"context_length": model.max_length, "dtype": str(model.model.dtype)[len("torch.") :], "tasks": scored}


def measures(parts: list[list[dict]]) -> dict[str, float | None]:
    """The measures of a task from the harness's samples of its parts; accuracies are between 0 and 1.

    acc, acc_norm       over all documents; acc_norm divides scores by the choices' characters, if the task has it
    stderr              of acc over the documents; None for a single document
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
    """The measures by task of several ``checkpoints``, such as a method's seeds, and those of the average over tasks.

    A single checkpoint keeps its own measures. For several, ``acc`` is the mean, ``std`` its standard deviation over
    the checkpoints (n - 1 in the denominator), and ``distinct_choices`` the smallest.
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
