"""The evidence: its runs become tables, its page shows what these say, and its commands are ones that can be given."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.evidence import collect, report
from dlr_pretrain.launch.grid import read_grid
from dlr_pretrain.launch.runs import load_runs
from tests.conftest import ROOT


def test_the_page_shows_what_its_tables_of_runs_say():
    text = report.PAGE.read_text()
    assert report.insert(text, report.HERE) == text
    links = re.findall(r"\((evidence/\w+/\w+\.png)\)", text)
    assert len(links) == 8 and all((report.PAGE.parent / link).is_file() for link in links)


def test_every_kept_run_names_its_commit_command_and_text_and_no_place_of_a_machine():
    runs = [run for name in report.PIECES for run in report.read(report.HERE / f"{name}.jsonl.gz").runs.values()]
    assert len(runs) == 358
    for run in runs:
        assert all(re.fullmatch(r"[0-9a-f]{40}", commit) for commit in run["commits"]) and run["commits"]
        assert run["starts"][0]["command"][0] == "train.py" and all(run["fingerprints"].values())
        assert not re.search(r'[" ]/\w', json.dumps(run)) and "host" not in run["starts"][0]


@pytest.fixture
def trained(tmp_path, monkeypatch) -> Path:
    """A comparison of two methods with two seeds in the present folder, whose first run was continued after a day."""
    monkeypatch.chdir(tmp_path)
    trials = []
    for method, seed in (("cola", 42), ("cola", 43), ("cola+dlr", 42), ("cola+dlr", 43)):
        run, loss = Path(f"runs/{method}-{seed}"), 4.0 - 0.1 * (method == "cola+dlr") * seed / 42
        began = {"time": "2026-09-21T14:13:20Z", "git": "a" * 40, "host": "secret", "command": ["/secret/train.py"]}
        starts = [began, began | {"time": "2026-09-22T14:43:30Z", "git": "b" * 40}][: 1 if trials else 2]
        records = [{"step": i, "train/loss": 5 - i / 100, "perf/mfu": 0.3, "time": 1_790_000_000.0 + 36 * i
                    + 86400 * (i > 50 and not trials)} for i in range(1, 61)]  # fmt: skip
        records[-1] |= dict.fromkeys(("eval/loss", "eval/loss_a", "eval/loss_b"), loss)
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(f"seed: {seed}\n")
        identity = {"data.shards": "d", "tokenizer.pieces": "t", "seed": seed}
        (run / "manifest.json").write_text(json.dumps({"starts": starts, "identity": identity}))
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        about = {"method": method, "lr": 0.01, "seed": seed}
        trials.append(about | {"state": "finished", "run": str(run), "loss": loss})
    folder = Path("tune/cola")
    folder.mkdir(parents=True)
    design = {"methods": ["cola", "cola+dlr"], "rates": [0.01], "seeds": [42, 43], "fresh": []}
    found = {"design": design, "trials": trials, "shared": "lr=0.01", "command": "tune.py"}
    (folder / "tune.json").write_text(json.dumps(found))
    return folder


def test_runs_are_packed_with_what_the_page_needs(trained):
    for name in ("a", "b"):
        collect.main("tune", f"{name}.jsonl.gz")
    assert Path("a.jsonl.gz").read_bytes() == Path("b.jsonl.gz").read_bytes()
    piece = report.Piece(Path("a.jsonl.gz"))
    first, other = piece.runs["cola-42"], piece.runs["cola-43"]
    assert first["metrics"]["step"] == [1, 25, 50, 60] and first["metrics"]["eval/loss"][:3] == [None] * 3
    assert set(first["metrics"]) == {"step", "train/loss", "eval/loss", "eval/loss_a", "eval/loss_b"}
    assert first["commits"] == ["a" * 40, "b" * 40] and other["commits"] == ["a" * 40]
    assert first["hours"] == pytest.approx(0.6) and other["hours"] == pytest.approx(0.6)  # 60 updates of 36 s
    assert "secret" not in json.dumps(piece.lines)
    (comparison,) = piece.comparisons
    effect = comparison.effects["cola+dlr"]["difference"]
    mean, half = -0.1 * 85 / 84, 0.1 / 84
    reach = math.tan(0.95 * math.pi / 2) * half  # Student's t with one degree of freedom is Cauchy's distribution
    assert (effect["low"], effect["high"]) == pytest.approx((mean - reach, mean + reach))


@pytest.mark.parametrize(
    ("change", "message"), [({"state": "stopped"}, "has not finished"), ({"loss": 1.0}, "loss of")]
)
def test_runs_that_do_not_fit_their_comparison_are_not_packed(trained, change, message):
    path = trained / "tune.json"
    found = json.loads(path.read_text())
    found["trials"][1] |= change
    path.write_text(json.dumps(found))
    with pytest.raises(SystemExit, match=f"cola-43.*{message}"):
        collect.main("tune", "a.jsonl.gz")
    assert not Path("a.jsonl.gz").exists()


@pytest.mark.full
def test_every_comparison_of_the_programme_can_be_trained(tmp_path):
    """Each command is written to a file in place of being run."""
    stub, said = tmp_path / "python", tmp_path / "said"
    stub.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word"; done >> "$SAID"; echo >> "$SAID"\n')
    stub.chmod(0o755)
    environment = os.environ | {"PYTHON": str(stub), "SAID": str(said), "TEXT": "texts"}
    subprocess.run([ROOT / "benchmarks" / "evidence" / "train.sh"], env=environment, check=True, timeout=60)
    commands = [line.split("\0")[:-1] for line in said.read_text().splitlines()]
    tuned = [command for command in commands if command[0] == "scripts/tune.py"]
    assert len(tuned) == 33 and len({command[command.index("--output") + 1] for command in tuned}) == 33
    for command in tuned:
        grid = read_grid([word for word in command[1:] if "=" in word])
        load_runs([grid.line(*grid.cells()[-1])], 1)
