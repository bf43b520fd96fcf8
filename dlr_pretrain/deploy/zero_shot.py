"""Zero-shot accuracy by lm-evaluation-harness: its prompts and its metrics, on log-likelihoods of ``likelihood``.

The harness's own model class encodes prompts with the folder's tokenizer, special tokens included. T5's tokenizer, as
published, ends every text with </s>. That gives BoolQ 37.83 and MMLU 22.95 for each model, as in the DLR paper.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import datasets
import lm_eval.tasks
from lm_eval import evaluator
from lm_eval.api.model import LM

from dlr_pretrain.data.tokenizer import Tokenizer
from dlr_pretrain.deploy.job import rank
from dlr_pretrain.deploy.likelihood import encode_pairs, log_likelihoods
from dlr_pretrain.deploy.tasks import TASKS
from dlr_pretrain.util.errors import UserError, first_line

LINE_SECONDS = 10.0
WITH_DATA = "--data (of sft.py: --eval-data)"
Tasks = dict[str, dict[str, object]]  # name -> the harness's tasks that it consists of, by their names


def load_tasks(names: Sequence[str], data: Path | None = None) -> Tasks:
    """The harness's tasks, with their documents: from the hub, or from ``data``.

    ``data`` has JSON lines with the hub's field names, <task>/<split>.jsonl and mmlu/<subject>/<split>.jsonl.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    home = Path(lm_eval.tasks.__file__).parent
    folders = [str(home / TASKS[name]) for name in names]
    manager = lm_eval.tasks.TaskManager(include_defaults=False, include_path=folders)
    subjects = [name for name in manager.all_subtasks if name.startswith("mmlu_")]
    return {name: _load(manager, name, subjects if name == "mmlu" else [name], data) for name in names}


def _load(manager, name: str, parts: list[str], data: Path | None) -> dict[str, object]:
    """The parts of one task. No example precedes a question, so only the split with the questions is read."""
    where = {part: data / part.replace("mmlu_", "mmlu/", 1) for part in parts} if data else {}
    local = {part: {"custom_dataset": _reader(folder)} for part, folder in where.items()}
    unread = {"training_split": None, "fewshot_split": None}
    group = [{"task": part, **unread, **local.get(part, {})} for part in parts]
    try:
        return manager.load([{"group": f"zero_shot_{name}", "task": group}])["tasks"]
    except UserError:
        raise
    except Exception as error:  # of any type, from a document that the harness cannot read or from the hub
        if data:
            rule = f"not the splits and fields that lm-evaluation-harness reads ({type(error).__name__}: {error})"
            raise UserError(f"{data}: its files of {name} have {rule}") from error
        fix = f"Name a folder that has them with {WITH_DATA}"
        raise UserError(f"the documents of {name} do not come from the hub: {first_line(error)}. {fix}") from error


def _reader(folder: Path) -> Callable[..., dict[str, datasets.Dataset]]:
    """The function that the harness calls for the splits of ``folder``."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise UserError(f"{folder}: has no <split>.jsonl. Name the folder that has it with {WITH_DATA}")

    def rows(file: Path) -> list[dict]:
        try:
            with file.open(encoding="utf-8") as lines:  # str.splitlines would cut at Unicode's separators too
                return [json.loads(line) for line in lines if line.strip()]
        except ValueError as error:
            raise UserError(f"{file}: not JSON lines: {error}") from error

    return lambda **_: {file.stem: datasets.Dataset.from_list(rows(file)) for file in files}


class Progress:
    """Prints the progress of ``what`` on standard error, on the first rank, every ``LINE_SECONDS`` at most."""

    def __init__(self, what: object):
        self.what, self.shown = what, time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        now = time.monotonic()
        if rank() == 0 and now - self.shown > LINE_SECONDS:
            self.shown = now
            print(f"{self.what}: {done:,} of {of:,} batches", file=sys.stderr, flush=True)


class Scorer(LM):
    """A model with the interface of the harness; ``cut`` has the pairs of texts whose beginning did not fit."""

    def __init__(self, score: Callable[[list], list[float]], encode: Callable[[list], list], positions: int):
        super().__init__()
        self.score, self.encode, self.positions = score, encode, positions
        self.cut: set[tuple[str, str]] = set()

    def loglikelihood(self, requests, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        texts = [request.args for request in requests]
        pairs = self.encode(texts)
        choices = [(len(after), request.task_name) for (_, after), request in zip(pairs, requests, strict=True)]
        choice, task = max(choices)
        if choice > self.positions:
            rule = f"a choice of {choice:,} tokens does not fit into a context of {self.positions:,}"
            raise UserError(f"{task}: {rule}. Give --context {choice} or more")
        lengths = [len(before) + len(after) for before, after in pairs]
        self.cut = {text for text, length in zip(texts, lengths, strict=True) if length > self.positions + 1}
        return [(score, False) for score in self.score(pairs)]  # no metric here asks whether a choice is greedy

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False):
        raise NotImplementedError("the tasks here are multiple choice")

    generate_until = loglikelihood_rolling


def evaluate(
    model,
    tokenizer: Tokenizer,
    tasks: Tasks,
    positions: int,
    as_in_paper: bool = False,
    limit: int | None = None,
    batch_size: int = 64,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, dict[str, float]]:
    """``measures`` of each task, on its first ``limit`` documents (for MMLU, those of each of its 57 subjects)."""
    scorer = Scorer(
        lambda pairs: log_likelihoods(model, pairs, positions, batch_size, progress),
        lambda texts: encode_pairs(tokenizer, texts, as_in_paper),
        positions,
    )
    parts = {name: task for of_task in tasks.values() for name, task in of_task.items()}
    answers = evaluator.evaluate(scorer, {"tasks": parts, "groups": {}}, limit=limit, bootstrap_iters=0)["samples"]
    return {name: measures([answers[part] for part in task], scorer.cut) for name, task in tasks.items()}


def measures(parts: list[list[dict]], cut: set[tuple[str, str]] = frozenset()) -> dict[str, float]:
    """The measures of a task from the harness's samples of its parts; accuracies are between 0 and 1.

    acc, acc_norm       over all documents; acc_norm, with scores divided by the choices' characters, if the task has it
    stderr              of acc over documents, pooled over parts as in the harness; None if each part has one document
    n                   number of documents
    distinct_choices    number of choices that were ever picked; 1 if the answer is always the same
    tied                number of documents in which several choices share the best score; the first of them counts
    cut                 number of documents of which a beginning did not fit
    """
    documents = list(chain.from_iterable(parts))
    scores = [[score for score, _ in document["filtered_resps"]] for document in documents]
    squares = sum(len(part) * statistics.pvariance(document["acc"] for document in part) for part in parts)
    n, free = len(documents), len(documents) - len(parts)
    found = {
        "acc": statistics.fmean(document["acc"] for document in documents),
        "stderr": math.sqrt(squares / free / n) if free else None,
        "n": n,
        "distinct_choices": len({each.index(max(each)) for each in scores}),
        "tied": sum(each.count(max(each)) > 1 for each in scores),
        "cut": sum(any(tuple(text) in cut for text in document["arguments"]) for document in documents),
    }
    if "acc_norm" in documents[0]:
        found["acc_norm"] = statistics.fmean(document["acc_norm"] for document in documents)
    return found


def combine(checkpoints: Sequence[dict[str, dict[str, float]]]) -> tuple[dict[str, dict[str, float]], dict]:
    """(measures by task, measures of the average over tasks) of ``checkpoints``, such as the seeds of a method.

    One checkpoint keeps its own measures. Several have the mean of ``acc``, its standard deviation ``std`` over the
    checkpoints (n - 1 in the denominator), the mean of ``stderr``, and the smallest ``distinct_choices``.
    """
    averages = [statistics.fmean(task["acc"] for task in each.values()) for each in checkpoints]
    if len(checkpoints) == 1:
        return dict(checkpoints[0]), {"acc": averages[0]}

    def spread(values: list[float]) -> dict[str, float]:
        return {"acc": statistics.fmean(values), "std": statistics.stdev(values)}

    tasks = {}
    for name, first in checkpoints[0].items():
        each = [checkpoint[name] for checkpoint in checkpoints]
        errors = [task["stderr"] for task in each]
        tasks[name] = spread([task["acc"] for task in each]) | {
            "stderr": None if None in errors else statistics.fmean(errors),
            "n": first["n"],
            "distinct_choices": min(task["distinct_choices"] for task in each),
        }
    return tasks, spread(averages)
