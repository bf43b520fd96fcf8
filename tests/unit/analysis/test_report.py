"""scripts/report.py: its numbers are those of the runs, and it names what a mean would hide.

Run directories are written without training: invented numbers, by the trainer's own writers.
"""

import csv
import html
import io
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

from dlr_pretrain.analysis import figures
from dlr_pretrain.analysis.choice import comparisons, difference_table
from dlr_pretrain.analysis.report import no_formula, write_report, write_reports
from dlr_pretrain.analysis.runs import NONE, ended, read_runs, spread
from dlr_pretrain.analysis.tables import groups_table, run_tables, table
from dlr_pretrain.config.run_folder import read_record
from dlr_pretrain.train.record import record_state, update_record
from dlr_pretrain.util.files import read_metrics
from tests.conftest import ROOT, main_of
from tests.fake_runs import COLA, COLA_DLR, CONVENTION, PERPLEXITY, SHORT, a_run, logged, moment


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path, list[str]]:
    """Two pairs with two seeds each, a run of each difficult kind, and their report."""
    root = tmp_path_factory.mktemp("runs")
    for backbone, level in (("cola", 4.0), ("lowrank", 4.1)):
        for dlr, gain in (("off", 0.0), ("on", 0.1)):
            for seed in (41, 42):
                words = (*SHORT, f"backbone={backbone}", f"dlr={dlr}")
                a_run(root / f"{backbone}-{dlr}-s{seed}", *words, seed=seed, level=level - gain)
    a_run(root / "unfinished", *COLA_DLR, seed=43, step=30)
    shutil.copytree(root / "cola-on-s41", root / "copy")
    a_run(root / "fp32", *COLA_DLR, "precision=fp32", seed=41, level=3.0)
    a_run(root / "diverged", *SHORT, "backbone=lax", "dlr=on", seed=41, final=math.inf)
    a_run(root / "damaged", *SHORT, "backbone=lost", "dlr=off", code="def")
    lines = (root / "damaged/metrics.jsonl").read_text().splitlines()
    (root / "damaged/metrics.jsonl").write_text("\n".join([*lines[:9], '{"st', *lines[10:]]) + "\n")
    a_run(root / "unknown", *SHORT, "backbone=full", code="def")
    (root / "unknown/manifest.json").unlink()
    (root / "broken").mkdir()
    (root / "broken/config.yaml").write_text("seed: [1")
    output = tmp_path_factory.mktemp("report")
    return root, output, write_reports([str(root)], output, "python scripts/report.py")


def test_the_tables_have_the_numbers_of_the_runs(made):
    root, output, _ = made
    found = read_runs([root])
    groups = groups_table(found).frame.set_index("Method")
    for method, stem in {"cola": "cola-off", "lowrank+dlr": "lowrank-on"}.items():
        for header, name in (("PPL", PERPLEXITY), ("PPL (GaLore-style)", CONVENTION)):
            values = [logged(root / f"{stem}-s{seed}", name=name) for seed in (41, 42)]
            shown = f"{statistics.fmean(values):,.2f} ± {statistics.stdev(values):.2f} (2)"
            assert groups[header][method] == shown
    losses = [[logged(root / f"lowrank-{dlr}-s{seed}", name="eval/loss") for seed in (41, 42)] for dlr in ("off", "on")]
    first, second = (with_dlr - without for without, with_dlr in zip(*losses, strict=True))
    row = difference_table(list(comparisons(found))).frame.set_index("Method").loc["lowrank+dlr"]
    assert (row["Compared with"], row["Δ loss"]) == ("lowrank", f"{(first + second) / 2:+.4f} (2)")
    assert row["By seed"] == f"41: {first:+.4f}, 42: {second:+.4f}"
    assert pd.read_csv(output / "numbers.csv").set_index("name").ppl["cola-on-s42"] == logged(root / "cola-on-s42")


def test_all_formats_say_the_same(made):
    root, output, _ = made
    page, report = ((output / name).read_text() for name in ("report.html", "report.md"))
    tables = {table.name: table for table in run_tables(read_runs([root]))}
    assert list(tables) == ["groups", "settings", "runs"] and page.index("Differences in loss") < page.index("<figure")
    for shown in tables.values():
        assert shown.markdown().strip() in report and html.escape(shown.title) in page
        cells = [cell.replace("**", "") for cell in [*shown.frame, *shown.frame.to_numpy().flat]]
        assert all(f">{html.escape(cell)}<" in page for cell in cells)
        assert (output / f"tables/{shown.name}.tex").read_text().count(r"\\") == len(shown.frame) + 1
        assert len(pd.read_csv(output / f"tables/{shown.name}.csv")) == len(shown.frame)
    links = re.findall(r'(?:src|href)="(.*?)"', page)
    assert links and all(link.startswith("data:image/png;base64,") for link in links) and "<script" not in page
    for name in ("loss_tokens_tiny", "loss_flops_tiny", "perplexity_tiny", "gradient_norm_tiny"):
        for form, begins in {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}.items():
            assert (output / f"figures/{name}.{form}").read_bytes().startswith(begins)
        assert f'id="{name}"' in page
    found = table("t", "title", [{"Name": "a|b_c", "Δ x": "1.50 ± 0.25 (2)", "none": None}])
    assert r"| a\|b_c | 1.50 ± 0.25 (2) |" in found.markdown() and "none" not in found.markdown()
    assert r"a|b\_c & 1.50 ± 0.25 (2) \\" in found.latex() and r"$\Delta$ x" in found.latex()


def test_odd_runs_are_named_and_in_no_mean(made):
    root, output, remarks = made
    text = "\n".join(remarks)
    for words in ("unfinished is unfinished, step 30 of 60", "diverged diverged after step 60", "unknown is left out",
                  "damaged: 1 damaged line", "broken is left out", "same configuration and seed"):  # fmt: skip
        assert words in text and words in (output / "report.md").read_text()
        assert words in (output / "report.html").read_text()
    rows = groups_table(read_runs([root])).frame.set_index("Method")
    assert rows.Seeds["cola+dlr"] == "41, 42"
    assert rows.index[0] == "cola+dlr (precision=fp32)"  # the best
    assert rows.PPL["cola+dlr (precision=fp32)"] == f"{logged(root / 'fp32'):,.2f} (1)"
    assert rows.PPL["lax+dlr"] == "1 of 1 diverged"


def changed(file: str, old: str, new: str):
    """Damages a run: replaces the first ``old`` in a file by ``new``."""

    def act(run: Path) -> None:
        text = (run / file).read_text()
        assert old in text
        (run / file).write_text(text.replace(old, new, 1))

    return act


@pytest.mark.parametrize("damage", [
    changed("config.yaml", "name: tiny", "name: [tiny]"),
    changed("config.yaml", "steps: 60", "steps: many"),
    lambda run: (run / "config.yaml").write_text("{a: " * 10_000),
    changed("manifest.json", '"identity": {', '"identity": [], "a": {'),
    changed("manifest.json", f'"time": "{moment(0)}"', '"time": "yesterday"'),
    changed("manifest.json", '"parameters": 1000000', '"parameters": 1' + "0" * 400),
    lambda run: (run / "manifest.json").write_text("[" * 100_000),
    changed("metrics.jsonl", '"train/tokens": ', '"train/tokens": 1' + "0" * 400),
])  # fmt: skip
def test_one_damaged_run_is_named_and_the_others_are_shown(tmp_path, damage):
    a_run(tmp_path / "sound", *COLA)
    damage(a_run(tmp_path / "broken", *COLA_DLR, seed=42))
    found = read_runs([tmp_path])
    assert [table.name for table in run_tables(found)] == ["groups", "runs"]
    assert found.runs["name"].tolist() == ["sound"] and found.remarks[0].startswith("broken is left out: ")
    assert "damaged" in found.remarks[0] or "cannot be read" in found.remarks[0]


def test_names_are_neither_code_nor_links_nor_formulas(tmp_path, monkeypatch):
    """Numbers that no figure can show, repeated steps, and names that attack HTML, Markdown, LaTeX, CSV and paths."""
    monkeypatch.setattr(figures, "IMAGES", ("png", "svg"))
    name = "</td><script>alert(1)</script> ![a](http://b) `c` $\\frac & % {\\ \x1b[31m **d"
    run = a_run(tmp_path / "runs" / "=cmd|' -c'!A1 <script>", *COLA)
    for old in ('"backbone.name": "cola"', '"precision.name": "bf16"', '"device": "CPU, 4 cores"', '"git": "abc"'):
        changed("manifest.json", old, f"{old.partition(':')[0]}: {json.dumps(name)}")(run)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["backbone"]["name"], config["scale"]["name"] = name, "../../@scale"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    lines = read_metrics(run / "metrics.jsonl")
    lines[30] |= {"train/loss": math.inf, "train/grad_norm": 1e308}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, lines[-1]]))
    a_run(tmp_path / "runs" / "other", *COLA_DLR, "scale.hidden_size=256")
    output = tmp_path / "a" / "report"
    write_reports([str(tmp_path / "runs")], output, "python scripts/report.py")
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "a"} and len(list(output.parent.iterdir())) == 1
    texts = {path: path.read_text() for path in output.rglob("*") if path.suffix in (".html", ".md", ".tex", ".csv")}
    for path, text in texts.items():
        assert "\x1b" not in text and "nan" not in re.sub(r"base64,[^\"]*", "", text)
        assert path.suffix in (".csv", ".tex") or "<script" not in text, path
        if path.suffix == ".md":
            assert "![a](" not in text and "`c`" not in text.replace(r"\`", "")
        if path.suffix == ".csv":
            cells = [cell for row in csv.reader(io.StringIO(text)) for cell in row]
            assert not [cell for cell in cells if re.match(r"[=@]|[+-](?!\d)", cell)], path
    assert r"\$" in texts[output / "tables/groups.tex"] and "'=cmd" in texts[output / "numbers.csv"]
    assert (output / "tables/groups.csv").exists() and "&lt;script&gt;" in texts[output / "report.md"]


@pytest.mark.parametrize("cell", ["=1", "@a", "+a", "-1+2", "-", "-1 ± =1"])
def test_a_cell_that_is_a_formula_is_quoted(cell):
    assert no_formula(cell) == f"'{cell}"
    for number in ("-0.12 ± 0.03 (2)", "+1,234.50 (1)", "-1e-05", "1.50 ± 0.25 (2)", -1.5, NONE):
        assert no_formula(number) == number


def test_a_report_ignores_the_backend_of_a_notebook(tmp_path):
    a_run(tmp_path / "run", *SHORT, step=20)
    command = [sys.executable, ROOT / "scripts/report.py", tmp_path / "run", "--output", tmp_path / "out"]
    environment = os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/report.html").exists()


def test_a_diverged_seed_is_counted_instead_of_a_mean(tmp_path):
    for seed in (41, 42, 43):
        a_run(tmp_path / str(seed), *COLA, seed=seed, step=30 if seed == 43 else None)
    assert spread(ended(read_runs([tmp_path]).runs).ppl).endswith("(2)")  # one is unfinished
    record_state(tmp_path / "43", "diverged")
    assert spread(ended(read_runs([tmp_path]).runs).ppl) == "1 of 3 diverged"
    assert spread([1.0, 2.0, 4.0], "+.3f") == f"+2.333 ± {math.sqrt(7 / 3):.3f} (3)" and spread([1.0]) == "1.00 (1)"
    assert spread([]) == spread([1.0, math.nan]) == NONE


def test_a_group_is_named_by_what_sets_it_apart(tmp_path):
    a_run(tmp_path / "a", *COLA)
    a_run(tmp_path / "b", *COLA, "scale.hidden_size=256")
    a_run(tmp_path / "c", *SHORT, "backbone=lost", "dlr=off", "train.lr=0.001")
    a_run(tmp_path / "d", *SHORT, "backbone=lost", "dlr=off", "train.lr=0.001", "data.seed=7")
    found = read_runs([tmp_path]).runs
    assert found.label.tolist() == ["cola", "cola (hidden_size=256)", "lost", "lost"]
    assert found.seed.tolist() == ["41", "41", "41", "41/7"]
    both, one = (a_run(tmp_path / name, *COLA, *words) for name, words in
                 {"e": ["scale.rank=64"], "f": ["backbone.rank=64"]}.items())  # fmt: skip
    labels = dict(zip((runs := read_runs([tmp_path]).runs)["name"], runs.label, strict=True))
    assert (
        labels[both.name] == "cola (scale.rank=64, backbone.rank=64)" and labels[one.name] == "cola (backbone.rank=64)"
    )
    text = {"data.shards": "2" * 64, "data.root": "/texts/books"}
    record = json.loads((tmp_path / "b/manifest.json").read_text())
    (tmp_path / "b/manifest.json").write_text(json.dumps(record | {"identity": record["identity"] | text}))
    assert "2" * 9 not in (label := read_runs([tmp_path / "a", tmp_path / "b"]).runs.label[1]) and "books" in label


def test_each_partner_of_a_plain_group_has_its_row(tmp_path):
    a_run(tmp_path / "plain", *COLA)
    for alpha, seed in ((0.5, 41), (4, 42)):
        a_run(tmp_path / f"alpha{alpha}", *COLA_DLR, f"dlr.alpha={alpha}", seed=seed)
    a_run(tmp_path / "zzz", *SHORT, "backbone=lost", "dlr=off")
    table = difference_table(list(comparisons(read_runs([tmp_path]))))
    rows = table.frame.set_index("Method")
    against = {"cola+dlr": "cola", "cola+dlr (alpha=4.0)": "cola", "lost": "cola", "cola": NONE}
    assert rows["Compared with"].to_dict() == against
    assert rows["Δ loss"]["cola+dlr"].endswith("(1)") and rows["Δ loss"]["cola+dlr (alpha=4.0)"] == NONE
    assert "its rates or seeds are not those of cola" in rows.Better["cola+dlr (alpha=4.0)"]
    a_run(tmp_path / "more", *COLA, seed=43)
    notes = difference_table(list(comparisons(read_runs([tmp_path])))).notes
    assert "cola+dlr at tiny: without a partner, not in the difference: seed 43" in notes
    assert not list(comparisons(read_runs([tmp_path / "plain"])))


def test_runs_of_different_code_or_text_are_named(tmp_path):
    a_run(tmp_path / "a", *COLA)
    a_run(tmp_path / "b", *COLA, seed=42, code="def")
    assert "cola at tiny was trained by different code: abc, def" in read_runs([tmp_path]).remarks
    padded = "eval.packing=pad"  # evaluations of which are the same, masked or not
    for name, words in {"c": ["backbone=lowrank"], "masked": ["backbone=lost", "data.mask_documents=true"]}.items():
        a_run(tmp_path / "padded" / name, *SHORT, *words, padded)
    assert not any("same text" in remark for remark in read_runs([tmp_path / "padded"]).remarks)
    a_run(tmp_path / "longer", *SHORT, "backbone=lax", "train.seq_len=32")
    found = read_runs([tmp_path / "a", tmp_path / "longer"])
    assert any("not all of the same text (train.seq_len)" in remark for remark in found.remarks)


def test_places_are_runs_folders_or_globs(tmp_path, capsys):
    a_run(tmp_path / "sweep/a", *COLA)
    for place in ("sweep/a", "sweep", "sweep/*", "."):
        assert read_runs([tmp_path / place, tmp_path / "sweep/a"]).runs["name"].tolist() == ["a"]
    (tmp_path / "sweep" / "arrays").mkdir()
    found = read_runs([tmp_path / "sweep" / "a", tmp_path / "sweep" / "arrays"])  # as a shell expands sweep/*
    assert "arrays: no run directory there" in found.remarks[0]
    assert main_of("report", tmp_path / "nowhere", "--output", tmp_path / "out") == 3
    assert "no run directory there" in capsys.readouterr().err


def test_speed_and_machine_are_of_the_last_start_that_trained(tmp_path):
    other = a_run(tmp_path / "b", *COLA)
    (first,) = read_record(other)["starts"]
    later = [first | {"time": moment(at), "device": device} for at, device in ((20, "H100"), (3600, "exported"))]
    update_record(other, {"starts": [first, *later]})
    assert read_runs([tmp_path]).runs.hours[0] * 3600 == pytest.approx(29.5)
    (row,) = run_tables(read_runs([tmp_path]))[-1].frame.to_dict("records")
    rates = [logged(other, step, "perf/tokens_per_second") for step in range(39, 60)]  # two steps a second
    assert (row["Machine"], row["tokens/s"]) == ("1 x H100", f"{statistics.median(rates):,.0f}")


def test_a_mean_is_over_the_same_seeds_at_every_step(tmp_path):
    """It ends where a seed has diverged. An unfinished seed has its own thin line."""
    for seed, level, step in ((41, 4.0, None), (42, 4.1, None), (43, 9.0, 30), (44, 4.0, 30)):
        a_run(tmp_path / f"{seed}", *COLA, seed=seed, level=level, step=step)
    record_state(tmp_path / "44", "diverged")
    found = read_runs([tmp_path])
    ax = figures.axes()
    figures.draw_group(ax, found.runs, found.metrics, "eval/perplexity", "train/tokens", figures.COLOURS[0])
    mean, thin = ax.get_lines()
    first = [logged(tmp_path / str(seed), 19) for seed in (41, 42, 44)]
    assert mean.get_ydata() == pytest.approx([statistics.fmean(first)])
    assert thin.get_ydata() == pytest.approx([logged(tmp_path / "43", 19)])


@pytest.mark.parametrize(("steps", "lost"), [(0, ()), (1, ()), (60, ("train/loss", "eval/loss", "eval/perplexity"))])
@pytest.mark.filterwarnings("error")
def test_a_run_has_a_report_whatever_it_has_logged(tmp_path, lost, steps):
    """No step, an incomplete last line, a metric of the user's, and numbers that are not finite and therefore null."""
    run = a_run(tmp_path / "run", *COLA)
    lines = read_metrics(run / "metrics.jsonl")[:steps]
    lines = [line | {"mine": "text"} | {name: None for name in lost if name in line} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 70, "train/lo')
    write_report(run)
    text = (run / "report.md").read_text()
    assert f"{steps} of 60" in text and "train.py scale=tiny" in text and (run / "report.html").exists()
    assert "| left out | LICENSE.txt |" in text
    assert (run / "plots/loss.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_that_a_user_types_is_markup_in_a_figure(tmp_path):
    ax = figures.axes()
    ax.plot([1, 2], [3, 4], label=r"costs $5 or \$ and $\nothing$")
    ax.barh(["$x_", r"$\frac$"], [1, 2])
    ax.set(title=r"$a_{b$ and $\q$", xlabel="$^$", ylabel="$_$")
    assert figures.save(ax, tmp_path, "f", "").path.exists()


def test_a_name_that_begins_with_an_underscore_is_in_the_legend(tmp_path):
    found = read_runs([a_run(tmp_path / "a", *COLA)])
    ax = figures.axes()
    of = found.runs.assign(label="_mine")
    figures.draw_group(ax, of, found.metrics, "train/loss", "train/tokens", figures.COLOURS[0])
    assert any("_mine" in name for name in ax.get_legend_handles_labels()[1])
