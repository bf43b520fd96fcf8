"""scripts/report.py: its numbers are those of the runs, and what no mean may hide is named."""

from __future__ import annotations

import csv
import html
import json
import math
import re
import shlex
import shutil
import statistics
import subprocess
import warnings
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from run_folders import SHORT, TINY, a_comparison, a_run, moment, pairs_of_runs

from dlr_pretrain.analysis import drawing, figures, layouts
from dlr_pretrain.analysis.compare import render, versus
from dlr_pretrain.analysis.costs import costs
from dlr_pretrain.analysis.groups import CONVENTION, PERPLEXITY, Spread, grouped, pairs
from dlr_pretrain.analysis.measured import zero_shot_table
from dlr_pretrain.analysis.paper import fact, facts, marks
from dlr_pretrain.analysis.records import THINNED, find_runs, read_run
from dlr_pretrain.analysis.reports import write_reports
from dlr_pretrain.analysis.tables import Figure, Table, comma_separated, latex, markdown
from dlr_pretrain.launch.runs import expand
from dlr_pretrain.train.record import update_record
from dlr_pretrain.util.errors import UserError
from tests.conftest import ROOT, script

COLA, COLA_DLR = (*SHORT, "backbone=cola", "dlr=off"), (*SHORT, "backbone=cola", "dlr=on")
PAPER = ("scale=60m", "experiment=table1/cola_dlr", "data=c4_local", "data.root=/c4", "train.steps=11000")


class Cells(HTMLParser):
    """Tables of a page by their headings' ids: rows of (text, exact value), the header among them."""

    def __init__(self, page: str):
        super().__init__()
        self.tables: dict[str, list[list[list]]] = {}
        self.name, self.cell = "", None
        self.links, self.images = [], []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        given = dict(attributes)
        self.links += [given[key] for key in ("src", "href") if key in given]
        if tag in ("h2", "details") and "id" in given:
            self.name = given["id"]
        elif tag == "tr":
            self.tables.setdefault(self.name, []).append([])
        elif tag in ("td", "th"):
            value = given.get("data-value")
            self.cell = ["", None if value is None else float(value)]
            self.tables[self.name][-1].append(self.cell)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.cell = None

    def handle_data(self, data: str) -> None:
        if self.cell is not None:
            self.cell[0] += data

    def rows(self, name: str) -> list[dict[str, list]]:
        header, *rows = self.tables[name]
        return [dict(zip((cell[0] for cell in header), row, strict=True)) for row in rows]


def last_line(folder: Path) -> dict:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path, list[str]]:
    """Two pairs of two seeds, one of each difficult kind, and the report of them."""
    root = tmp_path_factory.mktemp("runs")
    pairs_of_runs(root, "cola", "lowrank")
    a_run(root / "unfinished", *COLA_DLR, seed=43, step=30)
    shutil.copytree(root / "cola-on-s41", root / "copy")
    a_run(root / "fp32", *COLA_DLR, "precision=fp32", seed=41, level=3.0)
    a_run(root / "diverged", *SHORT, "backbone=lax", "dlr=on", seed=41, final=math.inf)
    a_run(root / "rank", *COLA_DLR, "backbone.rank=16", seed=41, level=4.5)
    a_run(root / "damaged", *SHORT, "backbone=lost", "dlr=off", code="def")
    lines = (root / "damaged/metrics.jsonl").read_text().splitlines()
    (root / "damaged/metrics.jsonl").write_text("\n".join([*lines[:9], '{"st', *lines[10:]]) + "\n")
    (root / "broken").mkdir()
    (root / "broken/config.yaml").write_text("seed: [1")
    output = tmp_path_factory.mktemp("report")
    remarks = write_reports([str(root)], output, "python scripts/report.py")
    return root, output, remarks


@pytest.fixture
def no_figures(monkeypatch):
    monkeypatch.setattr("dlr_pretrain.analysis.reports.draw", lambda *_: [])


# ----------------------------------------------------------------------------------------------------
# Numbers


def test_the_page_has_the_numbers_of_the_runs(made):
    root, output, _ = made
    found = Cells((output / "index.html").read_text())
    rows = {row["Method"][0]: row for row in found.rows("groups")}
    for method, stem in {"cola": "cola-off", "cola+dlr": "cola-on", "lowrank": "lowrank-off"}.items():
        records = [last_line(root / f"{stem}-s{seed}") for seed in (41, 42)]
        for header, name in (("PPL", PERPLEXITY), ("PPL, convention", CONVENTION)):
            values = [record[name] for record in records]
            text, exact = rows[method][header]
            assert exact == statistics.fmean(values)
            assert text == f"{exact:,.2f} ± {statistics.stdev(values):,.2f} (2)"
    gaps = {row["Backbone"][0]: row["Δ by seed"] for row in found.rows("pairs")}
    each = [
        last_line(root / f"cola-on-s{seed}")[PERPLEXITY] - last_line(root / f"cola-off-s{seed}")[PERPLEXITY]
        for seed in (41, 42)
    ]
    assert gaps["cola"][1] == statistics.fmean(each) < 0
    assert f"± {statistics.stdev(each):.2f} (2)" in gaps["cola"][0]
    for row in found.rows("runs"):
        records = [json.loads(line) for line in (root / row["Run"][0] / "metrics.jsonl").read_text().splitlines()
                   if line.endswith("}")]  # fmt: skip
        evaluated = [record["eval/loss"] for record in records if "eval/loss" in record]
        assert row["Last evaluation's loss"][1] == evaluated[-1]


def test_all_formats_say_the_same(made):
    _, output, _ = made
    page = Cells((output / "index.html").read_text())
    for name in ("groups", "pairs", "table1", "system", "rank"):
        texts = [[cell[0] for cell in row] for row in page.tables[name][1:]]
        marked = (output / f"tables/{name}.md").read_text()
        with (output / f"tables/{name}.csv").open() as file:
            exact = list(csv.reader(file))[1:]
        assert len(exact) == len(texts)
        for row, numbers, cells in zip(texts, exact, page.tables[name][1:], strict=True):
            assert "| " + " | ".join(row) + " |" in marked
            assert {repr(value) for _, value in cells if value is not None} <= set(numbers)
        assert (output / f"tables/{name}.tex").read_text().count(r"\\") == len(texts) + 1


def test_the_page_needs_nothing_else(made):
    _, output, _ = made
    page = (output / "index.html").read_text()
    assert all(link.startswith(("data:image/svg+xml;base64,", "#")) for link in Cells(page).links)
    assert "default-src 'none'" in page
    for name in (
        "pairs",
        "loss_tokens",
        "loss_time",
        "loss_flops",
        "perplexity",
        "throughput",
        "rank",
        "gradient_norm",
    ):
        assert (output / f"figures/{name}_tiny.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (output / f"figures/{name}_tiny.svg").read_text()
        assert f'id="{name}_tiny"' in page


# ----------------------------------------------------------------------------------------------------
# What no mean may hide


def test_what_is_odd_is_named_and_in_no_mean(made):
    root, output, remarks = made
    text = "\n".join(remarks)
    for words in (
        "unfinished is unfinished, step 30 of 60", "same configuration and seed", "diverged diverged",
        "cola+dlr at tiny with precision=fp32 is a group of its own", "with backbone.rank=16 is a group of its own",
        "damaged: damaged lines of metrics.jsonl are left out", "damaged: metrics.jsonl lacks 1 updates",
        "broken is left out",
    ):  # fmt: skip
        assert words in text
        assert html.escape(words) in (output / "index.html").read_text()
        assert words in (output / "report.md").read_text()
    rows = {row["Method"][0]: row for row in Cells((output / "index.html").read_text()).rows("groups")}
    assert rows["cola+dlr"]["Seeds"][0] == "41, 42"
    assert rows["cola+dlr (precision=fp32)"]["PPL"][1] == last_line(root / "fp32")[PERPLEXITY]
    assert rows["lax+dlr"]["PPL"] == ["1 of 1 diverged", None]


def test_a_diverged_seed_is_not_left_out_of_a_mean(tmp_path):
    a_run(tmp_path / "a", *COLA, seed=41)
    a_run(tmp_path / "b", *COLA, seed=42, final=math.inf)
    (group,), _ = grouped(find_runs([tmp_path])[0])
    assert not group.final(PERPLEXITY).finite
    assert layouts.groups_table([group], [None]).rows[0][3].text == "1 of 2 diverged"


def test_seeds_of_different_code_are_named(tmp_path, no_figures):
    a_run(tmp_path / "a", *COLA, seed=41)
    a_run(tmp_path / "b", *COLA, seed=42, code="def")
    assert any("different code: abc, def" in remark for remark in write_reports([str(tmp_path)], tmp_path / "out", ""))


def test_data_of_another_text_are_a_group_of_their_own(tmp_path):
    a_run(tmp_path / "a", *COLA, seed=41)
    a_run(tmp_path / "b", *COLA, seed=42, fingerprints={"data.shards": "2" * 64})
    groups, _ = grouped(find_runs([tmp_path])[0])
    assert [len(group.runs) for group in groups] == [1, 1]
    assert "data.shards=22222222…" in groups[1].variant


def test_orders_of_the_data_may_follow_the_seed(tmp_path):
    """Then runs that differ in both are seeds of one group; an order that other seeds have too is a fixed one."""
    for seed in (41, 42):
        for dlr in ("off", "on"):
            words = (*SHORT, "backbone=cola", f"dlr={dlr}", f"data.seed={seed}")
            a_run(tmp_path / f"{dlr}-{seed}", *words, seed=seed)
    found, _ = grouped(find_runs([tmp_path])[0])
    assert [len(group.runs) for group in found] == [2, 2] and len(pairs(found)) == 1
    assert "data.seed" not in render(versus(find_runs([tmp_path])[0]))
    a_run(tmp_path / "fixed", *SHORT, "backbone=cola", "dlr=on", "data.seed=42", seed=43)
    found, _ = grouped(find_runs([tmp_path])[0])
    assert sorted([run.seed for run in group.runs] for group in found) == [[41], [41], [42], [42, 43]]


def test_places(tmp_path):
    a_run(tmp_path / "sweep/a", *COLA)
    for place in ("sweep/a", "sweep", "sweep/*", "."):
        runs, _ = find_runs([tmp_path / place, tmp_path / "sweep/a"])
        assert [run.name for run in runs] == ["a"]
    (tmp_path / "sweep" / "arrays").mkdir()
    runs, remarks = find_runs([tmp_path / "sweep" / "a", tmp_path / "sweep" / "arrays"])  # as a shell expands sweep/*
    assert [run.name for run in runs] == ["a"] and "arrays: no run directory there" in remarks[0]
    for nowhere in (
        [tmp_path / "nowhere"],
        [tmp_path / "sweep" / "a", tmp_path / "nowhere"],
        [tmp_path / "sweep/arrays"],
    ):
        with pytest.raises(UserError, match=r"(nowhere|arrays): no run directory there"):
            find_runs(nowhere)


def test_machines_are_not_averaged(tmp_path, no_figures):
    a_run(tmp_path / "a", *COLA, seed=41)
    a_run(tmp_path / "b", *COLA, seed=42, device="NVIDIA H100 80GB HBM3")
    out = tmp_path / "out"
    write_reports([str(tmp_path)], out, "")
    rows = [row for row in Cells((out / "index.html").read_text()).rows("system") if row["Scale"][0] == "tiny"]
    assert [row["Machine"][0] for row in rows] == ["1 x CPU, 4 cores", "1 x NVIDIA H100 80GB HBM3"]
    records = [json.loads(line) for line in (tmp_path / "b/metrics.jsonl").read_text().splitlines()]
    rates = [record["perf/tokens_per_second"] for record in records[10:]]
    assert rows[1]["Positions a second"][1] == statistics.median(rates)
    assert rows[1]["Hours"][1] == pytest.approx(30 / 3600)


def test_the_machine_of_a_run_is_the_last_that_trained_it(tmp_path):
    run = read_run(a_run(tmp_path / "a", *COLA))
    first = run.starts[0]
    run.starts[:] = [first | {"time": moment(10 * i), "device": device} for i, device in enumerate(("A", "B", "A"))]
    assert run.machines == ["1 x A", "1 x B"] and run.machine == "1 x A"


def test_hours_leave_out_the_pause_between_starts(tmp_path):
    run = read_run(a_run(tmp_path / "a", *COLA))
    for record in run.metrics[30:]:
        record["time"] += 3600
    run.starts.append(run.starts[0] | {"time": moment(3600)})
    assert run.hours()[-1] * 3600 == pytest.approx(30)  # 60 steps of half a second
    assert np.diff(run.hours()).min() > 0


def test_hours_of_a_run_that_was_cut_down_are_those_of_all_its_updates(tmp_path):
    run = read_run(a_run(tmp_path / "a", *COLA))
    run.metrics[:] = [record for record in run.metrics if record["step"] == 1 or record["step"] % 20 == 0]
    assert run.hours()[-1] * 3600 == pytest.approx(30)


def test_hours_of_a_fork_leave_out_the_pauses_of_its_origin(tmp_path):
    run = read_run(a_run(tmp_path / "a", *COLA))
    for record in run.metrics[30:]:
        record["time"] += 3600
    run.manifest["forked"] = {"starts": [moment(0), moment(3600)]}
    run.starts[0]["time"] = moment(3620)
    assert run.hours()[-1] * 3600 == pytest.approx(30)


def test_a_seed_that_diverged_is_in_the_mean_of_its_method(tmp_path, no_figures):
    for seed in (41, 42, 43):
        a_run(tmp_path / f"runs/{seed}", *COLA, seed=seed, step=30 if seed == 43 else None)
    update_record(tmp_path / "runs/43", {"state": {"name": "diverged"}})
    write_reports([str(tmp_path / "runs")], tmp_path / "out", "")
    page = (tmp_path / "out/report.md").read_text()
    assert "1 of 3 diverged" in page and "diverged after step 30: it counts as infinite in means" in page


def test_spread_is_of_the_sample():
    assert Spread((1.0, 2.0, 4.0)).std == pytest.approx(math.sqrt(7 / 3))
    assert Spread((1.0,)).std is None


# ----------------------------------------------------------------------------------------------------
# The paper beside


def test_paper_and_ours_stand_side_by_side(tmp_path):
    a_run(tmp_path / "a", *PAPER, step=None, seed=41, level=3.4)
    (group,), _ = grouped(find_runs([tmp_path])[0])
    assert marks(group) == []
    table = layouts.table_1([group])
    row = next(row for row in table.rows if row[0] == "cola+dlr")
    assert (row[1].text, row[3].text, row[4]) == ("32.96 ± 0.06", "23.80 ± 0.40", None)
    assert row[2].value == last_line(tmp_path / "a")[CONVENTION]
    assert "[a]" not in row[2].text
    assert len(table.rows) == 16 and len(facts("table1")) == 64
    assert "table1/cola_dlr" not in table.fill[0] and "table1/cola," in table.fill[0]


def test_a_setting_that_is_not_the_papers_is_marked(tmp_path):
    words = (*PAPER[:-1], "train.steps=5500", "precision=bf16_mixed", "data.packing=packed", "eval.tokens=1000000")
    a_run(tmp_path / "a", *words, "train.lr=0.001", seed=41, judged=1_000_000)
    (group,), _ = grouped(find_runs([tmp_path])[0])
    found = "; ".join(marks(group))
    for words in ("bf16_mixed, not bf16", "packed, not pad", "0.721B tokens, not 1.4B", "1,000,000, not 10,000,000"):
        assert words in found
    assert "lr 0.001, not 0.01" in found
    table = layouts.table_1([group])
    assert next(row for row in table.rows if row[0] == "cola+dlr")[2] == "too little text [a]"
    assert any(
        note.startswith("[a] not the paper's setting: ") and "precision bf16_mixed" in note for note in table.notes
    )


def test_a_pair_beside_the_papers_is_marked_as_table_1_is(tmp_path):
    """A run of another text and length; one of a scale that the paper has not stands beside nothing."""
    words = ("scale=60m", "experiment=table1/cola", "data=sample", "train.steps=30", "eval.every=10")
    for dlr in ("off", "on"):
        a_run(tmp_path / dlr, *words, f"dlr={dlr}", "eval.tokens=10000000")
    pairs_of_runs(tmp_path / "tiny", "cola", seeds=(41,))
    table = layouts.pairs_table(grouped(find_runs([tmp_path / "on", tmp_path / "off", tmp_path / "tiny"])[0])[0])
    ours, tiny = sorted(table.rows, key=lambda row: row[0])
    assert all(cell.text.endswith(" (1) [a]") for cell in ours[2:4]) and ours[6].text == "-1.14"
    assert not any("[" in cell.text for cell in tiny[2:4]) and tiny[6] == ""
    (note,) = (note for note in table.notes if note.startswith("[a] not the paper's setting: "))
    assert "text of sample, not C4" in note and "tokens, not 1.4B" in note


def test_commands_that_fill_missing_cells_are_commands(tmp_path):
    pairs_of_runs(tmp_path, "cola", seeds=(41,))
    shutil.rmtree(tmp_path / "cola-off-s41")
    groups, _ = grouped(find_runs([tmp_path])[0])
    tables = [layouts.table_1(groups), layouts.rank_table(groups), layouts.milestones(groups)]
    tables += [layouts.ablation(groups, name) for name in layouts.ABLATIONS]
    recipes = {r for table in tables for line in table.fill for r in re.findall(r"(?:table1|ablation|7b)/\w+", line)}
    assert len(recipes) > 20
    assert all((ROOT / f"configs/experiment/{recipe}.yaml").exists() for recipe in recipes)
    words = shlex.split(tables[0].fill[0])
    assert len(expand(words[2 : words.index("--")])) == 16 * 5
    (command,) = layouts.pairs_table(groups).fill
    assert shlex.split(command)[-2:] == ["dlr=off", "seed=41"] and "dlr=on" not in command
    a_run(tmp_path / "made", *(word for word in shlex.split(command)[2:] if not word.startswith("seed=")))
    found, _ = grouped(find_runs([tmp_path])[0])
    assert len(pairs(found)) == 1


def test_ranks_and_ablations_of_our_own(tmp_path):
    base = a_run(tmp_path / "on", *COLA_DLR, level=4.0)
    a_run(tmp_path / "rank", *COLA_DLR, "backbone.rank=16", level=4.4)
    a_run(tmp_path / "uncorrected", *SHORT, "backbone=cola", "dlr=uncorrected", level=4.2)
    a_run(tmp_path / "offset", *SHORT, "backbone=cola", "dlr=init_offset", level=4.1)
    groups, _ = grouped(find_runs([tmp_path])[0])
    value = last_line(base)[PERPLEXITY]
    ranks = [row for row in layouts.rank_table(groups).rows if row[0] == "tiny"]
    assert [row[2] for row in ranks] == ["16", "32"] and ranks[1][5].value == value
    for name, settings in (("variance_correction", ["with", "without"]), ("init_offset", list("pif"))):
        rows = [row for row in layouts.ablation(groups, name).rows if row[0] == "tiny"]
        assert [row[2][: len(s)] for row, s in zip(rows, settings, strict=True)] == settings
    assert rows[0][5] is None and rows[2][5].value == value
    assert fact("ablations", "ppl", ablation="init_offset", setting="init-offset") == 14.79


def test_milestones_of_a_run_on_its_way(tmp_path):
    words = ("scale=7b", "experiment=7b/cola_dlr", "data=c4_local", "data.root=/c4", "eval.every=2", "train.steps=10")
    a_run(tmp_path / "a", *words, step=4)
    (group,), _ = grouped(find_runs([tmp_path])[0])
    assert group.final(PERPLEXITY) is None and group.at(4, PERPLEXITY).n == 1
    rows = layouts.milestones([group]).rows
    assert rows[0][4] == "oom" and rows[3][5].text == "12.08"
    assert rows[-1][0] == "cola+dlr, ours [a]" and rows[-1][1:6] == [None] * 5 and rows[-1][6].text == "1.25"


def test_accuracies(tmp_path, no_figures):
    a_run(tmp_path / "runs/a", *COLA_DLR)
    (tmp_path / "runs/a/folded").mkdir()
    task = {"acc": 0.25, "stderr": 0.01, "n": 100, "distinct_choices": 1}
    report = {
        "tasks": {"boolq": task}, "average": {"acc": 0.25}, "convention": "plain", "context_length": 256,
        "dtype": "float32", "data": "hub", "limit": None, "checkpoints": [{"folder": str(tmp_path / "runs/a/folded")}],
    }  # fmt: skip
    (tmp_path / "z.json").write_text(json.dumps(report))
    (tmp_path / "sft").mkdir()
    columns = {"boolq": {"mean": 40.0, "std": 1.5}, "average": {"mean": 41.0, "std": None}}
    tuned = {"models": {"cola": {"seeds": [1, 2], "columns": columns}}, "setting": {"epochs": 3, "lr": 2e-5}}
    (tmp_path / "sft/table.json").write_text(json.dumps(tuned))
    out = tmp_path / "out"
    write_reports([str(tmp_path / place) for place in ("runs", "z.json", "sft")], out, "")
    page = Cells((out / "index.html").read_text())
    ours = page.rows("zero_shot")[-1]
    assert ours["Method"][0] == "cola+dlr tiny, ours" and ours["piqa"][0] == "–" and ours["average"][0] == "–"
    assert ours["boolq"] == ["25.00 (1) always the same choice", 25.0]
    tuned = page.rows("sft")[-1]
    assert tuned["boolq"] == ["40.00 ± 1.50 (2)", 40.0] and tuned["average"][0] == "–"  # of one task, beside six
    assert page.rows("zero_shot")[3]["boolq"][1] == 37.83
    assert "z.json: not trained in the paper's setting: not a scale of the paper" in (out / "report.md").read_text()
    (tmp_path / "z.json").write_text("{}")
    with pytest.raises(UserError, match=r"z\.json cannot be read as a file of scripts/evaluate\.py"):
        write_reports([str(tmp_path / "z.json")], out, "")


def accuracies_of(folders: list[Path]) -> dict:
    """What evaluate.py writes of several checkpoints."""
    return {
        "tasks": {"boolq": {"acc": 0.25, "std": 0.01}}, "average": {"acc": 0.25}, "convention": "as_in_paper",
        "context_length": 256, "dtype": "float32", "data": "hub", "limit": None,
        "checkpoints": [{"folder": str(folder)} for folder in folders],
    }  # fmt: skip


def test_a_mean_over_checkpoints_of_different_methods_says_so(tmp_path):
    folders = [a_run(tmp_path / dlr, *words) / "folded" for dlr, words in (("off", COLA), ("on", COLA_DLR))]
    table = zero_shot_table([(tmp_path / "z.json", accuracies_of(folders))])
    assert table.rows[-1][0] == "cola tiny and cola+dlr tiny, ours"
    assert "z.json: a mean over checkpoints that differ in more than the seed" in table.notes


def test_checkpoints_on_the_way_are_not_those_of_the_end(tmp_path):
    run = a_run(tmp_path / "on", *COLA_DLR)
    folders = [run / f"folded_step_{step}" for step in (20, 40)]
    for folder, step in zip(folders, (20, 40), strict=True):
        folder.mkdir()
        (folder / "fold.json").write_text(json.dumps({"step": step}))
    table = zero_shot_table([(tmp_path / "z.json", accuracies_of(folders))])
    assert table.rows[-1][0] == "cola+dlr tiny at step 20 of 60, 40 of 60, ours"
    assert "z.json: a mean over checkpoints of one run, which are no seeds" in table.notes


# ----------------------------------------------------------------------------------------------------
# Formats, figures, the command


def test_every_sign_survives_the_formats():
    table = Table("t", "50 % of a_b & {c}", ["Name", "x^2"], [["a|b_c~", Figure(1.5, 0.25, 2)], ["–", None]], ["n"])
    assert r"a\|b_c~ | 1.50 ± 0.25 (2) |" in markdown(table)
    assert comma_separated(table).splitlines() == ["Name,x^2,x^2: std,x^2: n", "a|b_c~,1.5,0.25,2", "–,,,"]
    text = latex(table)
    assert r"\caption{50 \% of a\_b \& \{c\}}" in text and r"x\textasciicircum{}2" in text
    assert r"a|b\_c\textasciitilde{} & 1.50 $\pm$ 0.25 (2) \\" in text


def test_csv_has_what_stands_behind_a_figure():
    """Nothing of it is lost: a note, a published spread, a spread of nought."""
    lost, ours, theirs = Figure(math.inf, n=2, note="1 of 2 diverged [a]"), Figure(1.5, 0.0, 3), Figure(2.5, 0.1)
    table = Table("t", "T", ["Name", "ours", "paper"], [["a", lost, theirs], ["b", ours, None]])
    assert comma_separated(table).splitlines() == [
        "Name,ours,ours: std,ours: n,ours: note,paper,paper: std",
        "a,inf,,2,1 of 2 diverged [a],2.5,0.1",
        "b,1.5,0.0,3,,,",
    ]


def test_tokens_are_those_that_were_seen(tmp_path):
    """Of runs that stopped or diverged, too: not those that were planned."""
    for seed, step in ((41, None), (42, 30), (43, 15)):
        a_run(tmp_path / str(seed), *COLA, seed=seed, step=step)
    groups, _ = grouped(find_runs([tmp_path])[0])
    columns = dict(zip((table := layouts.groups_table(groups, [None])).header, table.rows[0], strict=True))
    seen = [last_line(tmp_path / str(seed))["train/tokens"] / 1e6 for seed in (43, 41)]
    assert columns["M tokens"] == f"{seen[0]:.3g} to {seen[1]:.3g}" and seen[1] == 4 * seen[0]
    shutil.rmtree(tmp_path / "41")
    shutil.rmtree(tmp_path / "42")
    groups, found = (of := grouped(find_runs([tmp_path])[0])[0]), costs(of)[0]
    row = layouts.groups_table(groups, found).rows[0]
    assert row[5].value == seen[0] and row[7].value == found[0].flops * seen[0] / 1e9


def test_colours_of_a_panel_are_always_the_same(tmp_path):
    pairs_of_runs(tmp_path, "cola", seeds=(41,))
    a_run(tmp_path / "full", *SHORT, "backbone=full")
    groups, _ = grouped(find_runs([tmp_path])[0])
    ((name, members),) = figures.panels(groups)
    assert name == "cola"
    found = {group.label: style["color"] for group, style in zip(members, figures.look(members), strict=True)}
    assert found == {"cola": figures.PLAIN, "cola+dlr": figures.DLR, "full": figures.BLACK}


@pytest.mark.parametrize("panels", [1, 2, 5])
def test_a_long_legend_is_whole_and_leaves_its_panel_room(panels):
    figure, axes = drawing.subplots(panels)
    for ax in axes:
        for i in range(40):
            ax.plot([0, 1], [0, 1], label=f"cola+dlr (optimizer.b_lr={i})")
        drawing.legend_beside(ax)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib's, where a panel has no room
        figure.canvas.draw()
    for ax in axes:
        legend, panel = ax.get_legend().get_window_extent(), ax.get_window_extent()
        assert legend.x0 >= 0 and legend.x1 <= figure.bbox.x1 and legend.y0 >= 0 and legend.y1 <= figure.bbox.y1
        assert panel.width / figure.dpi > 1.5 and panel.height > 0.7 * legend.height


def test_an_unfinished_seed_is_drawn_and_in_no_mean(tmp_path):
    """The mean over seeds is of the same ones at every step."""
    for seed, level, step in ((41, 4.0, None), (42, 4.1, None), (43, 9.0, 30), (44, 4.0, 30)):
        a_run(tmp_path / f"runs/{seed}", *COLA, seed=seed, level=level, step=step)
    (group,), _ = grouped(find_runs([tmp_path / "runs"])[0])
    steps, means = figures.mean_curve(group)
    assert steps == [20, 40, 60] and [at.n for at in means] == [2, 2, 2]
    (picture,) = (picture for picture in figures.draw([group], [None], tmp_path) if picture.name == "perplexity_tiny")
    assert "over the finished seeds (their number behind each name" in picture.caption
    assert "<!-- cola (2) -->" in (tmp_path / "perplexity_tiny.svg").read_text()
    update_record(tmp_path / "runs/44", {"state": {"name": "diverged"}})
    (group,), _ = grouped(find_runs([tmp_path / "runs"])[0])
    means = figures.mean_curve(group)[1]
    assert [(at.n, at.finite) for at in means] == [(3, True), (3, False), (3, False)]


def test_what_was_thinned_is_not_called_each_step(tmp_path):
    update_record(a_run(tmp_path / "runs/a", *COLA), {THINNED: 25})
    groups, _ = grouped(find_runs([tmp_path / "runs"])[0])
    captions = {picture.name: picture.caption for picture in figures.draw(groups, [None], tmp_path)}
    assert "the steps that were kept (faint)" in captions["gradient_norm_tiny"]


def test_figures_are_the_same_files_twice(tmp_path, monkeypatch):
    pairs_of_runs(tmp_path, "cola", seeds=(41,))
    groups, _ = grouped(find_runs([tmp_path])[0])
    monkeypatch.setattr(figures, "AXES", ())
    first, second = ([*figures.draw(groups, [None, None], tmp_path / name)] for name in "ab")
    assert first == second
    for picture in first:
        for suffix in ("png", "svg"):
            a, b = ((tmp_path / name / f"{picture.name}.{suffix}").read_bytes() for name in "ab")
            assert a == b


def test_what_an_earlier_report_had_does_not_stay(tmp_path, no_figures):
    a_run(tmp_path / "cola", *COLA)
    a_comparison(tmp_path / "tune", tmp_path / "compared")
    out = tmp_path / "out"
    write_reports([str(tmp_path / "tune"), str(tmp_path / "cola")], out, "")
    (out / "tables" / "mine.md").touch()
    with open(out / ".report_files", "a") as listed:  # names that no report gives are not touched
        listed.write(f"{tmp_path}/cola/metrics.jsonl\n../cola/config.yaml\n\n")
    assert (out / "tables" / "tune.csv").exists()
    write_reports([str(tmp_path / "cola")], out, "")
    assert not list(out.glob("tables/tune*")) and (out / "tables" / "runs.csv").exists()
    assert (out / "tables" / "mine.md").exists()
    assert (tmp_path / "cola/metrics.jsonl").exists() and (tmp_path / "cola/config.yaml").exists()


@pytest.mark.filterwarnings("error")
def test_runs_that_have_just_begun(tmp_path):
    for backbone, step in (("cola", 1), ("lost", 2), ("lax", 25)):
        a_run(tmp_path / backbone, *TINY, f"backbone={backbone}", step=step)
    (tmp_path / "b").mkdir()
    shutil.copy(tmp_path / "cola/config.yaml", tmp_path / "b")
    remarks = write_reports([str(tmp_path)], tmp_path / "out", "")
    assert "b has not taken a step" in remarks


def test_a_real_pair(tmp_path, train, no_export, no_figures, monkeypatch, capsys):
    for dlr in ("off", "on"):
        train(tmp_path / f"runs/{dlr}", "backbone=cola", f"dlr={dlr}")
    monkeypatch.setattr("sys.argv", ["report.py", str(tmp_path / "runs/*"), "--output", str(tmp_path / "out")])
    assert script("report").main() == 0
    assert "index.html" in capsys.readouterr().out
    (row,) = Cells((tmp_path / "out/index.html").read_text()).rows("pairs")
    values = [last_line(tmp_path / f"runs/{dlr}")[PERPLEXITY] for dlr in ("off", "on")]
    assert [row[name][1] for name in ("plain", "with DLR")] == values
    assert row["Δ by seed"][1] == values[1] - values[0]


def test_nothing_to_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["report.py", str(tmp_path), "--output", str(tmp_path / "out")])
    assert script("report").main() == 3
    assert "no run directory there" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------
# In a browser

ASK = """<script>
const click = (name, i) => document.querySelector(`#${name} + .scroll`).querySelectorAll('th button')[i].click();
const texts = name => [...document.querySelector(`#${name} + .scroll`).querySelectorAll('tbody tr')]
  .map(row => row.cells[3].textContent);
const answer = {images: [...document.images].map(image => image.naturalWidth),
  wide: document.documentElement.scrollWidth - document.documentElement.clientWidth};
click('groups', 3); answer.up = texts('groups');
click('groups', 3); answer.down = texts('groups');
document.body.innerHTML = '<pre id=answer>' + JSON.stringify(answer) + '</pre>';
</script>"""


@pytest.mark.parametrize("width", [1200, 500])
def test_the_page_in_a_browser(made, tmp_path, width):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    page = (made[1] / "index.html").read_text().replace("</body>", ASK + "</body>")
    (tmp_path / "page.html").write_text(page)
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    shown = subprocess.run(
        [browser, *options, f"--window-size={width},900", "--virtual-time-budget=5000", "--dump-dom",
         (tmp_path / "page.html").as_uri()], capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip
    answer = json.loads(html.unescape(re.search(r'<pre id="answer">(.*?)</pre>', shown)[1]))
    assert len(answer["images"]) == 8 and min(answer["images"]) > 300
    assert answer["wide"] <= 0  # tables and figures scroll, the page does not
    numbers = [float(text.split()[0].replace(",", "")) for text in answer["up"] if "diverged" not in text]
    assert numbers == sorted(numbers) and len(numbers) == 7
    assert [text for text in answer["down"] if "diverged" not in text] == [
        text for text in reversed(answer["up"]) if "diverged" not in text
    ]
