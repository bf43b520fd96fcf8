"""The paper's tables: a published number stands beside ours if both are of the same setting; else the cell says why.

Run directories are written without training, except in the rehearsal.
"""

import json
import re
import shlex
import statistics
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import pandas as pd
import pytest
import torch

from dlr_pretrain.analysis.report import Section, write_page
from dlr_pretrain.analysis.runs import NONE
from dlr_pretrain.analysis.tables import Table
from dlr_pretrain.config import ConfigError
from dlr_pretrain.config.command_line import key_of
from dlr_pretrain.config.run_folder import read_record
from dlr_pretrain.launch.local import LOG
from dlr_pretrain.launch.runs import PlannedRun, combine, expand, load_runs
from dlr_pretrain.launch.submit import ranges
from dlr_pretrain.train.record import update_record
from dlr_pretrain.train.run import run as train_run
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import new_pool
from dlr_pretrain.util.process import cores
from scripts.paper import extract
from scripts.paper import items as paper
from scripts.paper.__main__ import main
from scripts.paper.cost import sizes
from scripts.paper.items import Item, choose_rows, items, load_each, planned_lines, published_numbers, recipe
from scripts.paper.page import documentation
from tests.conftest import ROOT
from tests.fake_runs import CONVENTION, PAPER, a_run, configured, logged

C4 = {"training": "1,024 files (305GB): en/c4-train.00000-of-01024.json.gz, and 1,023 more"}
SHORT = replace(items()["variance"], scales=["60m"], seeds=[41, 42, 43], common="train.steps=60 eval.every=20")


def trained(run: PlannedRun, level: float = 4.0, files: dict = C4, **how) -> Path:
    """A finished run in the directory of ``run``, with T5's tokenizer, on C4 unless ``files`` name another text."""
    words = [word for word in run.line.words if not word.startswith("seed=")]
    folder = a_run(run.dir, *words, seed=run.cfg.seed, level=level, **how)
    record = read_record(folder)
    start = record["starts"][0] | {"files": files, "text": "some text"}
    identity = record["identity"] | {"tokenizer.pieces": extract.T5}
    update_record(folder, {"starts": [start], "identity": identity})
    return folder


def planned(item: Item, *words: str) -> dict[tuple[str, int], PlannedRun]:
    """The runs of an item by row and seed."""
    runs = load_each(planned_lines(item, words))
    return {(item.row_of(run), run.cfg.seed): run for run in runs}


def shown(item: Item, runs: dict, folder: Path) -> tuple[pd.DataFrame, str]:
    """The table of an item, a row for each method, and all notes."""
    results = extract.read(item, list(runs.values()), [], folder)
    (table,) = extract.show(results)
    frame = table.frame.set_axis(table.header, axis="columns").set_index("Method")
    return frame, "\n".join([*table.notes, *results.notes])


def test_a_published_number_stands_beside_runs_of_its_setting(tmp_path):
    runs = planned(SHORT, f"run.root={tmp_path}")
    for (row, seed), run in runs.items():
        if (row, seed) != ("without correction", 43):  # a seed that is missing
            trained(run, level=3.4 + 0.1 * (row == "without correction"))
    frame, notes = shown(SHORT, runs, tmp_path)
    values = [logged(runs["cola+dlr", seed].dir, name=CONVENTION) for seed in (41, 42, 43)]
    mean = statistics.fmean(values)
    row = frame.loc["cola+dlr"]
    assert row["60m PPL"] == f"{mean:,.2f} ± {statistics.stdev(values):.2f} (3)"
    assert (row["60m paper"], row["60m Δ paper"]) == ("32.96 ± 0.06", f"{mean - 32.96:+.2f}")
    assert row["60m Δ control"] == NONE
    row = frame.loc["without correction"]
    assert row["60m PPL"].endswith("(2)") and row["60m paper"] == "33.80 ± 0.14"
    assert row["60m Δ control"].startswith("+") and row["60m Δ control"].endswith("(2)")
    assert "differs" not in notes and "nan" not in frame.to_string()


def test_a_cell_says_what_differs_and_a_wrong_run_is_left_out(tmp_path):
    """Runs of another text, a run with a damaged record, and a directory that holds a run of half the rank."""
    runs = planned(SHORT, f"run.root={tmp_path}")
    for seed in (41, 42, 43):
        trained(runs["without correction", seed], files={"training": "2 files (1GB): prose.jsonl"})
    trained(runs["cola+dlr", 41])
    (trained(runs["cola+dlr", 42]) / "manifest.json").write_text("{")
    half = planned(SHORT, f"run.root={tmp_path}/half", "scale.rank=64", "seed=43")
    trained(half["cola+dlr", 43]).rename(runs["cola+dlr", 43].dir)
    frame, notes = shown(SHORT, runs, tmp_path)
    assert frame["60m paper"].to_dict() == {"cola+dlr": "32.96 ± 0.06", "without correction": "differs: text"}
    assert frame["60m PPL"]["cola+dlr"].endswith("(1)") and frame["60m PPL"]["without correction"].endswith("(3)")
    assert "differs: text some text, published all of C4 (without correction 60m)" in notes
    assert re.search(r"s42-[\w.-]+ is left out: .*manifest\.json is damaged", notes)
    assert re.search(r"s43-[\w.-]+ is left out because it holds another run: .*scale\.rank: 64 there, 128 here", notes)


def test_seeds_of_two_texts_have_no_mean(tmp_path):
    runs = planned(SHORT, f"run.root={tmp_path}")
    for seed in (41, 42):
        trained(runs["cola+dlr", seed])
    record = read_record(runs["cola+dlr", 42].dir)
    update_record(runs["cola+dlr", 42].dir, {"identity": record["identity"] | {"data.shards": "2" * 64}})
    frame, _ = shown(SHORT, runs, tmp_path)
    assert frame["60m PPL"]["cola+dlr"] == "seeds differ: data.shards"
    assert frame["60m paper"]["cola+dlr"] == "differs: seeds"


def test_half_the_rank_has_no_published_number(tmp_path):
    runs = planned(SHORT, f"run.root={tmp_path}", "scale.rank=64", "seed=41")
    trained(runs["cola+dlr", 41])
    frame, notes = shown(SHORT, runs, tmp_path)
    row = frame.loc["cola+dlr"]
    assert row["60m paper"] == "differs: scale.rank, backbone.rank" and row["60m PPL"].endswith("(1)")
    assert "differs: scale.rank 64, published 128 (all)" in notes
    assert frame["60m paper"]["without correction"] == "33.80 ± 0.14"  # no run of ours stands beside it


def test_the_published_size_counts_trained_parameters(tmp_path):
    """LoRA's matches the paper. SLTrain's, with its authors' sparsity, does not, so nothing stands beside it."""
    item = replace(items()["table1"], scales=["60m"], seeds=[41], common=SHORT.common, rows={"lora": "", "sltrain": ""})
    runs = planned(item, f"run.root={tmp_path}")
    for run in runs.values():
        trained(run)
    frame, notes = shown(item, runs, tmp_path)
    assert frame["60m paper"].to_dict() == {"lora": "35.30", "sltrain": "differs: parameters"}
    assert frame["60m Param M"].to_dict() == {"lora": "43", "sltrain": "44 (47)"}
    assert "differs: parameters 44M, published 47M (sltrain 60m)" in notes


def test_the_better_of_a_pair_is_bold_in_every_format(tmp_path):
    item = replace(
        items()["table1"], scales=["60m"], seeds=[41], common=SHORT.common, rows={"cola": "", "cola+dlr": ""}
    )
    runs = planned(item, f"run.root={tmp_path}")
    trained(runs["cola", 41], level=3.6)
    trained(runs["cola+dlr", 41], level=3.4)
    frame, _ = shown(item, runs, tmp_path)
    best = f"{logged(runs['cola+dlr', 41].dir, name=CONVENTION):,.2f} (1)"
    assert frame["60m PPL"]["cola+dlr"] == f"**{best}**" and "*" not in frame["60m PPL"]["cola"]
    assert frame["60m Param M"].tolist() == ["43", "43"] and frame["60m Mem GB"].tolist() == ["0.26 (0.24)"] * 2
    columns = pd.MultiIndex.from_tuples([("", "Method"), ("60m", "PPL"), ("60m", "Δ paper")])
    table = Table("t", "T", pd.DataFrame([["cola_lax", f"**{best}**", "+0.10"]], columns=columns))
    assert rf"\textbf{{{best}}}" in table.latex() and r"cola\_lax" in table.latex()
    assert r"\multicolumn{2}{c}{60m}" in table.latex() and table.latex().count("{") == table.latex().count("}")
    assert f"<strong>{best}</strong>" in table.html() and "| Method | 60m PPL | 60m Δ paper |" in table.markdown()


def test_an_override_applies_to_rows_with_its_key(tmp_path):
    rows = dict.fromkeys(("full", "cola+dlr", "galore"), "")
    lines = replace(items()["table1"], scales=["60m"], seeds=[41], rows=rows).lines()
    runs = load_runs(combine(lines, expand(["scale.rank=16"])))
    ranks = {run.line.origin: run.cfg.scale.rank for run in runs}
    assert ranks["table1: full"] == 128 and ranks["table1: cola+dlr"] == ranks["table1: galore"] == 16
    assert not any("scale.rank" in word for run in runs if run.line.origin == "table1: full" for word in run.line.words)
    with pytest.raises(ConfigError, match=r"table1: full: backbone\.gama=1: no such key"):
        load_runs(combine(lines, expand(["backbone.gama=1"])))
    with pytest.raises(ConfigError, match=r"scale\.rank=-1: must be"):  # an invalid value is a problem in every row
        load_runs(combine(lines, expand(["scale.rank=-1"])))
    assert ranges([1, 2, 3, 5, 7, 8]) == "1-3,5,7-8"


def test_rows_scale_and_seed_select_and_other_keys_replace():
    table1, system, horizon = (items()[name] for name in ("table1", "system", "horizon"))
    (own,) = choose_rows([table1, horizon], ["cola", "cola+dlr"])
    lines = planned_lines(own, ["scale=60m", "seed=41,42", "train.lr=0.01"])
    assert [line.origin for line in lines] == ["table1: cola"] * 2 + ["table1: cola+dlr"] * 2
    assert all({"scale=60m", "train.lr=0.01"} < {*line.words} for line in lines)
    for line in planned_lines(horizon, ["train.steps=100"]):
        assert "train.steps=100" in line.words and "train.steps=198364" not in line.words
    for word in ("backbone=cola", "dlr=on", "experiment=paper"):
        with pytest.raises(UserError, match="Choose rows with --rows"):
            planned_lines(system, [word])
    with pytest.raises(UserError, match=r"--rows colla: no such row\. Did you mean cola"):
        choose_rows([table1], ["cola", "colla"])
    with pytest.raises(UserError, match="no run of the table has scale=7b"):
        planned_lines(table1, ["scale=7b", "train.lr=0.01"])


def test_seeds_have_the_directories_that_train_py_gives_them():
    lines = replace(SHORT, rows={"cola+dlr": ""}).lines()
    assert [(run.dir, run.cfg) for run in load_each(lines)] == [(run.dir, run.cfg) for run in load_runs(lines)]


def test_an_item_says_what_it_would_run_and_the_next_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["dynamics", "seed=41", "--gpu", "NVIDIA A100-SXM4-80GB", "--mfu", "0.2"]) == 0
    said = capsys.readouterr().out
    assert said.count("not started") == 4 + 1 and "state      4 not started, 0 of 1 program done" in said
    assert "to run  python -m benchmarks step scale=60m" in said and re.search(r"GPU hours  \d", said)
    assert "next       dlr-reproduce dynamics seed=41 --submit -- --gpus-per-node=8" in said
    assert main(["dynamics", "--rows", "cola", "cola+dlr", "--task-data", "d"]) == 0
    said = capsys.readouterr().out
    assert "dynamics --rows cola,cola+dlr --task-data d --submit" in said and said.count("not started") == 2 + 1
    assert main(["tabel1"]) == 3 and "Did you mean table1?" in capsys.readouterr().err
    assert main(["dynamics", "--gpu", "H100"]) == 3 and "Choose from NVIDIA" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["dynamics", "--", "--mem=0"])


def test_the_runs_that_are_due_are_one_array(tmp_path, monkeypatch):
    for name, does in {"sbatch": f"printf '%s\\n' \"$@\" > {tmp_path}/asked; echo 70", "squeue": ":"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    assert main(["dynamics", "--submit", "--dry-run"]) == 0 and not (tmp_path / "asked").exists()
    assert main(["dynamics", "--submit", "--limit", "2", "--", "--mem=4G"]) == 0
    asked = (tmp_path / "asked").read_text().splitlines()
    assert {"--array=1-4%2", "--mem=4G", "--job-name=dynamics"} < set(asked)
    lines = Path(asked[-1]).read_text().splitlines()
    assert len(lines) == 4 and lines[1] == "scale=60m experiment=paper backbone=cola dlr=on seed=41"


def test_an_own_run_replaces_the_items_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = a_run(tmp_path / "mine", *PAPER, "dlr=on", "train.steps=60")
    update_record(run, {"saved": 60, "state": {"name": "complete", "step": 60, "reason": "", "time": 1.0}})
    assert main(["fold", "run=mine"]) == 0
    said = capsys.readouterr().out
    fold = r"fold.py mine/checkpoints/step_00000060 --output runs/paper/fold/\w{8}/mine\n"
    assert "mine: complete" in said and re.search(fold, said)
    assert "dlr-reproduce fold run=mine --local" in said
    assert main(["fold", "run=mine", "--render"]) == 0
    page = (tmp_path / "runs/paper/reproduce.md").read_text()
    assert "| perplexity before |" in page


def test_the_seeds_of_an_item_share_a_root_whatever_its_name():
    runs = load_each(planned_lines(SHORT, ["run.root=kept-s41-of-may"]))
    assert {run.cfg.seed for run in runs} == {41, 42, 43} and len({run.dir for run in runs}) == len(runs)
    assert {str(run.dir.parent) for run in runs} == {"kept-s41-of-may"}
    assert all(f"-s{run.cfg.seed}" in run.dir.name for run in runs)


@pytest.mark.full
def test_results_of_other_runs_or_data_are_other_files(tmp_path):
    """Another rate, seed, text or set of documents: nothing that was made for the first counts for the second."""

    def makes(name: str, *words: str, sft_data: str = "a.json", task_data: str = "b") -> list[Path]:
        item = replace(items()[name], scales=["60m"])
        item = replace(item, rows=dict([*item.rows.items()][:2]))
        runs = load_each(planned_lines(item, [f"run.root={tmp_path}", *words]))
        return [program.makes for program in item.programs(runs, tmp_path, sft_data, task_data)]

    for name in ("sft", "zeroshot", "fold"):
        cases = [makes(name), makes(name, "train.lr=0.5"), makes(name, "data=sample")]
        cases += [makes(name, sft_data="c.json")] if name == "sft" else []
        cases += [makes(name, "seed=42"), makes(name, "seed=43")] if name == "zeroshot" else []
        assert len({path for paths in cases for path in paths}) == sum(map(len, cases)), name
        assert makes(name) == cases[0]
    tuned, *scores = makes("sft")[:1] + makes("sft")[3:]
    again, *others = makes("sft", task_data="d")[:1] + makes("sft", task_data="d")[3:]
    assert tuned == again and not {*scores} & {*others}, "fine-tuned once, scored twice"


def test_a_page_without_runs_shows_what_is_published(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["offset", "--render"]) == 0
    page = (tmp_path / "runs/paper/reproduce.md").read_text()
    assert "| initial offset | 14.79 ± 0.04 |" in page and "state: 15 not started" in page and "nan" not in page
    assert (tmp_path / "runs/paper/tables/offset.tex").exists() and (tmp_path / "runs/paper/tables/tables.tex").exists()


def test_a_page_of_sections_has_contents(tmp_path):
    write_page("T", [], [Section("one", "The <first>", ["a line"])], "made", tmp_path, "page")
    assert '<a href="#one">The &lt;first&gt;</a>' in (tmp_path / "page.html").read_text()


@pytest.mark.full
def test_the_papers_sizes_are_those_of_our_recipes():
    """For methods with one setting, parameters and memory are the paper's, which rounds memory part by part."""
    table1 = published_numbers().query("item == 'table1'")
    paper = table1.pivot(index=["row", "scale"], columns="column", values="value")
    counted = sizes(configured(f"scale={scale}", "data=sample", *recipe(row)) for row, scale in paper.index)
    other = paper.index[[f"{size.trained:.0f}" for size in counted] != paper.params_m]
    assert len(paper) == 64 and {row for row, scale in other if scale != "1b"} == {"sltrain"}
    assert {row for row, _ in other} == {"sltrain", "lax", "lax+dlr", "cola_lax", "cola_lax+dlr"}
    memory = pd.Series([round(size.state, 2) for size in counted], paper.index) - paper.mem_gb.astype(float)
    for row in ("full", "lowrank", "cola", "cola+dlr", "lost+dlr"):
        assert memory[row].drop("60m").abs().max() < 0.0101


@pytest.mark.full
def test_the_documentation_is_generated_without_a_difference():
    """python -m scripts.paper --documentation > docs/reproduce.md"""
    assert (ROOT / "docs/reproduce.md").read_text() == documentation()


# ----------------------------------------------------------------------------------------------------
# The rehearsal: all items with tiny models on this CPU, every run, every program, every table


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
