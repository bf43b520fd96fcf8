"""The programme of scripts/evidence.sh: its commands, what is kept of its runs, and the page that shows them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from dlr_pretrain.analysis.insert import insert, main
from dlr_pretrain.analysis.keep import keep
from dlr_pretrain.analysis.records import THINNED, VOCABULARY, find_runs
from dlr_pretrain.analysis.reports import write_reports
from dlr_pretrain.analysis.spent import by_piece
from dlr_pretrain.analysis.tables import markdown
from dlr_pretrain.bench.cost import by_backbone
from dlr_pretrain.cli import load
from dlr_pretrain.launch.grid import read_grid, require_comparable
from dlr_pretrain.launch.runs import load_runs
from dlr_pretrain.launch.tune import read
from dlr_pretrain.util.errors import UserError
from tests.conftest import ROOT
from tests.unit.run_folders import a_comparison

PIECES = ("pairs", "paper", "mechanism", "ablations", "longer", "paths")


# ----------------------------------------------------------------------------------------------------
# The commands


def said_by(tmp_path: Path, *pieces: str, **environment: str) -> list[list[str]]:
    """The words of each command of the pieces."""
    stub = tmp_path / "python"
    stub.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done >> "$SAID"; echo >> "$SAID"\n')
    stub.chmod(0o755)
    said = tmp_path / "said"
    variables = {"PYTHON": str(stub), "SAID": str(said), "TEXT": "texts", **environment}
    subprocess.run([ROOT / "scripts" / "evidence.sh", *pieces], env=os.environ | variables, check=True, timeout=60)
    return [line.split("\0")[:-1] for line in said.read_text().splitlines()] if said.exists() else []


@pytest.mark.slow
@pytest.mark.parametrize("piece", PIECES)
def test_every_comparison_is_one_that_tune_would_train(piece, tmp_path):
    outputs = []
    said = said_by(tmp_path, piece)
    for command, then in zip(said[::2], said[1::2], strict=True):
        assert command[0] == "scripts/tune.py" and then[:2] == ["-m", "dlr_pretrain.analysis.keep"]
        given, for_sbatch = read(command[1:])
        grid = read_grid(given.words)
        assert not for_sbatch and given.output.parent == Path("runs/evidence", piece, "tune")
        assert then[2:] == [str(given.output), f"benchmarks/evidence/{piece}"]
        outputs.append(given.output)
        seed, lr = grid.design.seeds[0], grid.design.rates[0]
        runs = load_runs([grid.line(method, lr, seed) for method in grid.design.methods], 1)
        require_comparable({method: run.cfg for method, run in zip(grid.design.methods, runs, strict=True)})
        root = "runs/evidence/probed" if piece == "paths" else "runs/evidence"  # where pairs has trained its runs
        assert all(run.cfg.data.seed == seed and run.cfg.run.root == root for run in runs)
    assert outputs and len(set(outputs)) == len(outputs)


@pytest.mark.parametrize("experiment", ["evidence_cpu", "evidence_60m"])
def test_the_cost_of_each_pair_is_measured_on_steps_that_can_be(experiment, tmp_path):
    found = []
    for command in said_by(tmp_path, "cost", EXPERIMENT=experiment):
        assert command[:2] == ["scripts/benchmark.py", "step"]
        words, options = command[2:5], command[5:]
        assert options[:4] == ["--arm", "dlr=off", "--arm", "dlr=on"]
        cfg = load([*words, "dlr=on"], machine=False)
        assert words[0] == f"experiment={experiment}" and cfg.train.micro_batch != "auto"
        assert Path(options[-1]).stem == cfg.backbone.name
        found.append(cfg.backbone.name)
    assert found == ["cola", "lowrank", "lost", "lax", "cola_lax"]


@pytest.mark.parametrize("experiment", ["evidence_cpu", "evidence_60m"])
def test_the_ranks_are_half_and_three_quarters_of_the_scale_s(experiment, tmp_path):
    words = " ".join(word for command in said_by(tmp_path, "ablations", EXPERIMENT=experiment) for word in command)
    full = load([f"experiment={experiment}", "backbone=cola"], machine=False).backbone.knobs["rank"]
    assert re.findall(r"\bcola:backbone\.rank=(\d+)", words) == 2 * [str(full // 2), str(3 * full // 4)]


def test_what_another_experiment_has_no_text_for_is_left_out(tmp_path):
    assert said_by(tmp_path, "longer", EXPERIMENT="evidence_60m") == []


def test_what_is_kept_is_not_trained_again_where_only_the_missing_is_asked_for(tmp_path):
    def trained(**environment: str) -> list[str]:
        return [command[5] for command in said_by(tmp_path, "paper", **environment) if command[0] == "scripts/tune.py"]

    kept = {path.name for path in (ROOT / "benchmarks" / "evidence" / "paper" / "tune").iterdir()}
    of_all = {Path(output).name for output in trained()}
    (tmp_path / "said").unlink()
    assert {Path(output).name for output in trained(MISSING="1")} == of_all - kept < of_all


@pytest.mark.parametrize("experiment", ["evidence_cpu", "evidence_60m"])
def test_the_text_is_tokenised_with_the_tokenizer_of_the_experiment(experiment, tmp_path):
    (command,) = said_by(tmp_path, "tokens", EXPERIMENT=experiment, SPIECE="spiece.model")
    assert command[:3] == ["scripts/prepare_data.py", "data=c4_local", "data.root=texts"]
    own = experiment == "evidence_cpu"
    assert (command[5:7] == ["--train-tokenizer", "4096"]) == own
    assert ("tokenizer.path=spiece.model" in command) != own


# ----------------------------------------------------------------------------------------------------
# What is kept, and shown


@pytest.fixture
def trained(tmp_path, monkeypatch) -> Path:
    """A comparison of two methods with two seeds, in the present folder, as tune.py leaves it; its folder."""
    monkeypatch.chdir(tmp_path)
    a_comparison(Path("tune/cola"), Path("runs"))
    for path in Path("runs").glob("*/manifest.json"):
        manifest = json.loads(path.read_text())
        manifest["starts"][0]["host"] = "a-secret-name"
        manifest["starts"][0]["command"][0] = "/home/a-secret-name/train.py"
        manifest["starts"][0]["text"] = "runs/tokens: 2 train shards, made from /home/a-secret-name/web: 2 train shards"
        path.write_text(json.dumps(manifest))
        path.with_name("folded").mkdir()
        (path.with_name("folded") / "config.json").write_text('{"vocab_size": 8192}')
    return Path("tune/cola")


def test_kept_runs_are_small_and_reported_as_the_whole_ones(trained):
    assert keep([trained], Path("kept"), every=25) == 4
    whole, kept = (find_runs([place])[0] for place in ("runs", "kept/runs"))
    assert len(whole) == len(kept) == 4
    for a, b in zip(whole, kept, strict=True):
        assert [record["step"] for record in b.metrics] == [1, 20, 25, 40, 50, 60]
        assert (b.final, b.evaluations, b.identity) == (a.final, a.evaluations, a.identity)
        assert not b.remarks and (b.manifest[THINNED], b.manifest[VOCABULARY]) == (25, 8192)
    assert "a-secret-name" not in "".join(path.read_text() for path in Path("kept").rglob("*") if path.is_file())
    assert kept[0].starts[0]["text"] == "runs/tokens: 2 train shards, made from web: 2 train shards"
    write_reports(["tune", "runs"], Path("of_whole"), "")
    write_reports(["kept/tune", "kept/runs"], Path("of_kept"), "")
    for name in ("tune", "pairs", "groups"):
        same = [(Path(of) / "tables" / f"{name}.csv").read_text() for of in ("of_whole", "of_kept")]
        assert same[0] == same[1]


def test_what_is_kept_stays_whole_where_a_run_cannot_be_read(trained, tmp_path):
    kept = Path("kept")
    keep([trained], kept)
    before = {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()}
    Path("runs/cola+dlr-42").rename("elsewhere")
    with pytest.raises(OSError, match=r"cola\+dlr-42"):
        keep([trained], kept)
    assert {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()} == before
    Path("elsewhere").rename("runs/cola+dlr-42")
    Path("kept/runs/of-an-earlier-grid").mkdir()
    assert keep([trained], kept) == 4 and len(list(Path("kept/runs").iterdir())) == 4
    Path("kept/mine").touch()
    with pytest.raises(UserError, match="kept is in the way"):
        keep([trained], kept)


def test_a_comparison_is_kept_beside_others_and_with_them_where_they_share_a_run(trained):
    kept = Path("kept")
    keep([trained], kept)
    a_comparison(Path("tune/later"), Path("later"))
    assert keep([Path("tune/later")], kept) == 4
    assert sorted(path.name for path in kept.glob("tune/*")) == ["cola", "later"]
    assert len(list(Path("kept/runs").iterdir())) == 4
    before = {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()}
    metrics = Path("later/cola-42/metrics.jsonl")
    *records, last = metrics.read_text().splitlines()
    of_another_training = json.dumps(json.loads(last) | {"eval/loss": 3.25})
    metrics.write_text("\n".join([*records, of_another_training]) + "\n")
    with pytest.raises(UserError, match=r"cola-42: its loss is 3\.25, and cola was compared with \d\.\d+\. Train cola"):
        keep([Path("tune/later")], kept)
    assert {path: path.read_bytes() for path in kept.rglob("*") if path.is_file()} == before


def test_what_has_not_ended_is_not_kept(trained):
    path = trained / "tune.json"
    found = json.loads(path.read_text())
    found["trials"][1]["state"] = "stopped"
    path.write_text(json.dumps(found))
    with pytest.raises(UserError, match=r"runs/cola-42 has not ended. Give its command again first"):
        keep([trained], Path("kept"))
    assert not Path("kept").exists()
    with pytest.raises(UserError, match=r"two of tune/cola, elsewhere/cola have one name"):
        keep([trained, Path("elsewhere/cola")], Path("kept"))
    with pytest.raises(UserError, match=r"runs/tune\.json: no such file"):
        keep([Path("runs")], Path("kept"))


def test_a_page_says_what_its_runs_took(trained):
    keep([trained], Path("kept"))
    (row,) = by_piece([Path("kept")]).rows
    piece, runs, seeds, precision, tokens, hours, minutes, commits = row
    assert (piece, runs.value, seeds, precision, commits) == ("kept", 4, "41, 42", "bf16", "abc")
    assert tokens == "123k"  # 60 updates of 8 sequences of 256
    assert hours.value == pytest.approx(4 * 60 * 0.5 / 3600) and minutes == "0.5, 0.5, 0.5"
    with pytest.raises(UserError, match="elsewhere/runs: no run directory there"):
        by_piece([Path("elsewhere")])


PAGE = """# A page

<!-- pairs/tune -->
what was there
<!-- end -->

Between. ![curves](page/pairs/tune_differences.png)
"""


def test_a_page_gets_the_tables_and_figures_of_reports(trained):
    write_reports([str(trained)], Path("reports/pairs"), "")
    Path("page.md").write_text(PAGE)
    for _ in range(2):  # the second time changes nothing
        insert(Path("page.md"), Path("reports"))
        text = Path("page.md").read_text()
        table = Path("reports/pairs/tables/tune.md").read_text().partition("\n\n")[2].strip()
        assert text == PAGE.replace("what was there", f"\n{table}\n")
    assert Path("page/pairs/tune_differences.png").read_bytes().startswith(b"\x89PNG")


def test_a_table_that_no_report_has_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("page.md").write_text(PAGE)
    assert main("page.md", "reports") == UserError.exit_code
    assert "reports/pairs/tables/tune.md: no such file" in capsys.readouterr().err
    assert Path("page.md").read_text() == PAGE


# ----------------------------------------------------------------------------------------------------
# What stands in the repository

KEPT = sorted((ROOT / "benchmarks" / "evidence").iterdir())


@pytest.mark.parametrize("piece", KEPT, ids=lambda piece: piece.name)
def test_verdicts_are_of_the_losses_that_are_kept(piece):
    for path in piece.glob("tune/*/tune.json"):
        for trial in json.loads(path.read_text())["trials"]:
            if trial["state"] == "diverged":
                continue
            last = json.loads((piece / "runs" / Path(trial["run"]).name / "metrics.jsonl").read_text().splitlines()[-1])
            assert [trial[f"loss{half}"] for half in ("_a", "_b", "")] == [
                last[f"eval/loss{half}"] for half in ("_a", "_b", "")
            ]


def test_the_page_says_what_the_kept_runs_say(tmp_path, monkeypatch):
    for drawing in ("draw", "draw_comparisons", "draw_probed"):
        monkeypatch.setattr(f"dlr_pretrain.analysis.reports.{drawing}", lambda *_: [])
    page = tmp_path / "evidence.md"
    lines = (ROOT / "docs" / "evidence.md").read_text().splitlines(keepends=True)
    page.write_text("".join(line for line in lines if not line.startswith("![")))
    before = page.read_text()
    for piece in KEPT:
        report = tmp_path / "report" / piece.name
        if (piece / "tune").is_dir():
            write_reports([str(piece / "tune"), str(piece / "runs")], report, "")
        else:  # what benchmark.py has measured, as evidence.sh report takes it
            (report / "tables").mkdir(parents=True)
            (report / "tables" / "cost.md").write_text(by_backbone(sorted(piece.glob("*.json"))))
    (tmp_path / "report" / "all" / "tables").mkdir(parents=True)
    trained = [ROOT / "benchmarks" / "evidence" / name for name in PIECES]
    (tmp_path / "report" / "all" / "tables" / "spent.md").write_text(markdown(by_piece(trained)))
    insert(page, tmp_path / "report")
    assert page.read_text() == before and all(f"<!-- {piece.name}/" in before for piece in KEPT)
