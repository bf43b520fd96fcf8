"""All items of the paper with tiny models on this CPU: every run, every program, every table."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import pandas as pd
import pytest
import torch

from dlr_pretrain.analysis.runs import NONE
from dlr_pretrain.config.command_line import key_of
from dlr_pretrain.launch.local import LOG
from dlr_pretrain.launch.runs import PlannedRun
from dlr_pretrain.train.run import run as train_run
from dlr_pretrain.util.files import new_pool
from dlr_pretrain.util.process import cores
from scripts.paper import items as paper
from scripts.paper.__main__ import main

IMPORTED = [__name__, "dlr_pretrain.analysis.report", "dlr_pretrain.deploy.export", "transformers.models.llama"]
SCALE = {"hidden_size": 32, "intermediate_size": 91, "num_heads": 2, "num_layers": 2, "rank": 8}
SHAPE = [f"scale.{key}={value}" for key, value in SCALE.items()]
BATCH = ("train.global_batch=4", "train.micro_batch=4", "train.seq_len=32", "compile=false", "device=cpu")
WORDS = (
    *("data=sample", "logger=jsonl", "scale.vocab_size=null", "train.steps=15", "train.warmup_steps=2"),
    *("eval.every=5", "eval.tokens=600", "checkpoint.every=5", "checkpoint.keep_every=5", *SHAPE, *BATCH),
)
LORO = ("optimizer.exact_every=5", "optimizer.shift=null")  # its own schedule is longer
MORE = {  # words of a program
    "benchmarks": [*SHAPE, *BATCH, "scale.vocab_size=1000", "--rounds", "6", "--warmup", "1"],
    "fold.py": ["--tokens", "400"],
    "sft.py": shlex.split("--epochs 1 --batch 4 --micro-batch 4 --length 64"),
    "evaluate.py": ["--limit", "2"],
}
DOCUMENTS = {
    "arc_challenge": {"id": "1", "question": "What is it?", "answerKey": "B",
                      "choices": {"text": ["one", "two", "three", "four"], "label": ["A", "B", "C", "D"]}},
    "boolq": {"passage": "A file is open.", "question": "is it open", "label": 1},
    "hellaswag": {"ind": 1, "activity_label": "Files", "ctx_a": "Open it.", "ctx_b": "then", "ctx": "Open it. then",
                  "label": "1", "endings": ["one", "two", "three", "four"]},
    "mmlu": {"question": "Which?", "subject": "files", "choices": ["one", "two", "three", "four"], "answer": 1},
    "piqa": {"goal": "Open it.", "sol1": "It is a file.", "sol2": "It is a list.", "label": 0},
    "winogrande": {"sentence": "The file and the list, _ is open.", "option1": "file", "option2": "list",
                   "answer": "1"},
}  # fmt: skip
INSTRUCTION = {"instruction": "Say what it is.", "input": "", "output": "It is a file."}


def small(item: paper.Item) -> paper.Item:
    """The item with two scales or two seeds, and with rows and programs that suit the models of ``WORDS``."""
    rows = {}
    for row in item.rows:  # scale.rank does not reach a row that computes its own rank from it
        words = [word.replace("${scale.rank}", str(SCALE["rank"])) for word in item.words(row)]
        rows[row] = shlex.join([*words, *(LORO if row == "loro" else ())])
    steps = []
    for step in item.steps:
        words = shlex.split(step.words.removeprefix("-m "))
        more = MORE.get(words[0], [])
        replaced = {key_of(word) for word in more if "=" in word}
        words = [word for word in shlex.split(step.words) if "=" not in word or key_of(word) not in replaced]
        steps.append(replace(step, words=shlex.join([*words, *more])))
    seeds = item.seeds[: 2 if len(item.scales) == 1 else 1]
    return replace(item, rows=rows, common="", steps=steps, seeds=seeds, scales=item.scales[:2])


def write_documents(folder: Path) -> tuple[str, str]:
    """Write invented instructions and task documents, in the formats of sft.py and evaluate.py; returns both places."""
    lm_eval = pytest.importorskip("lm_eval", reason='needs pip install -e ".[eval]"')
    subjects = (Path(lm_eval.__file__).parent / "tasks" / "mmlu" / "default").glob("mmlu_*.yaml")
    names = {name: name for name in DOCUMENTS}
    names |= {f"mmlu/{path.stem.removeprefix('mmlu_')}": "mmlu" for path in subjects}
    for (name, document), split in product(names.items(), ("validation", "test")):
        path = folder / "tasks" / name / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{json.dumps(DOCUMENTS[document])}\n" * 2)
    (folder / "instructions.json").write_text(json.dumps([INSTRUCTION] * 8))
    return str(folder / "instructions.json"), str(folder / "tasks")


def train(run: PlannedRun) -> None:
    torch.set_num_threads(1)
    run.dir.mkdir(parents=True, exist_ok=True)
    with open(run.dir / LOG, "w") as log, redirect_stdout(log), redirect_stderr(log):
        train_run(run.cfg)


def train_all(runs, _at_once) -> None:
    """Replaces ``launch.local.train_here``: in processes that need not import torch, which start faster.

    They are forks of a process without threads. A fork of this one may wait for ever for a lock of one of its threads.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with new_pool(context.Pool, cores()) as pool:
        pool.map(train, runs, chunksize=1)


@pytest.mark.full
def test_a_rehearsal_fills_every_cell(tmp_path, monkeypatch):
    items = {name: small(item) for name, item in paper.items().items()}
    monkeypatch.setattr(paper, "items", lambda: items)
    monkeypatch.setattr("dlr_pretrain.launch.submit.train_here", train_all)
    instructions, documents = write_documents(tmp_path / "documents")
    data = ("--sft-data", instructions, "--task-data", documents)
    assert main(["all", *WORDS, f"run.root={tmp_path}/runs", *data, "--local", "--output", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out/reproduce.html").read_text()
    for name, item in items.items():
        assert f'<h1 id="{name}">{name}: ' in page
        if item.shows:
            table = pd.read_csv(tmp_path / f"out/tables/{name}.csv")
            filled = [column for column in table if not re.search("paper|Δ", column)]
            assert len(table) >= len(item.rows) and not (table[filled] == NONE).any().any(), name
            assert not table.isna().any().any(), name
        for stem in {"loss_curves": ["loss"], "map_speed": ["speed"], "gradient_paths": ["rho"]}.items():
            if stem[0] in item.pictures:
                assert (tmp_path / f"out/figures/{name}_{stem[1][0]}.svg").exists()
