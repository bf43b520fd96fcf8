"""scripts/compare.py: what differs and nothing else; differences seed by seed."""

from __future__ import annotations

import json
import statistics
import sys

import pytest
from run_folders import SHORT, a_run, pairs_of_runs

from dlr_pretrain.analysis.records import THINNED
from dlr_pretrain.train.record import update_record
from tests.conftest import script


@pytest.fixture
def compare(monkeypatch, capsys):
    def of(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, words)])
        code = script("compare").main()
        said = capsys.readouterr()
        return code, said.out, said.err

    return of


def losses(folder) -> dict[int, float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["eval/loss"] for record in records if "eval/loss" in record}


def test_differences_are_by_seed(tmp_path, compare):
    pairs_of_runs(tmp_path, "cola")
    code, text, _ = compare(*sorted(tmp_path.iterdir()), "--json")
    found = json.loads(text)
    assert code == 0 and found["warnings"] == []
    assert [(side["label"], side["seeds"]) for side in found["sides"]] == [
        ("tiny cola", [41, 42]), ("tiny cola+dlr", [41, 42])
    ]  # fmt: skip
    assert {entry["key"]: entry["values"] for entry in found["configuration"]} == {
        "dlr.name": [["off"], ["on"]], "dlr.enabled": [[False], [True]]
    }  # fmt: skip
    assert [row["step"] for row in found["evaluation"]] == [20, 40, 60]
    for row in found["evaluation"]:
        each = [[losses(tmp_path / f"cola-{dlr}-s{seed}")[row["step"]] for seed in (41, 42)] for dlr in ("off", "on")]
        gaps = [b - a for a, b in zip(*each, strict=True)]
        assert row["difference"] == [
            {"mean": statistics.fmean(gaps), "std": statistics.stdev(gaps), "n": 2, "diverged": 0, "paired": True}
        ]
        assert row["loss"][0] == {
            "mean": statistics.fmean(each[0]), "std": statistics.stdev(each[0]), "n": 2, "diverged": 0
        }  # fmt: skip
    assert [row["step"] for row in found["training"]] == [15, 30, 45, 60]


def test_the_text_fits_80_columns(tmp_path, compare):
    pairs_of_runs(tmp_path, "cola")
    a_run(tmp_path / "z-other", *SHORT, "backbone=lost", "train.lr=0.001", "eval.tokens=10000", seed=43, step=50)
    code, text, _ = compare(tmp_path)
    assert code == 0
    assert max(map(len, text.splitlines())) <= 80
    for words in ("A  tiny cola; seeds 41 42", "B  tiny cola+dlr; seeds 41 42", "C  tiny lost; seed 43",
                  "evaluations are not of the same text (eval.tokens)", "z-other is unfinished: step 50 of 60",
                  "train.lr                      A 0.005   B 0.005   C 0.001", "(means)", "absent"):  # fmt: skip
        assert words in text
    assert "scale.hidden_size" not in text and "run.dir" not in text


def test_seeds_of_one_configuration_are_compared_with_each_other(tmp_path, compare):
    pairs_of_runs(tmp_path, "cola", seeds=(41,))
    a_run(tmp_path / "second", *SHORT, "backbone=cola", "dlr=off", seed=42)
    code, text, _ = compare(tmp_path / "cola-off-s41", tmp_path / "second")
    assert code == 0
    assert "A  seed 41; seed 41" in text and "seed                          A 41   B 42" in text


def test_one_run_is_refused(tmp_path, compare):
    a_run(tmp_path / "a", *SHORT)
    code, _, said = compare(tmp_path / "a")
    assert code == 3 and "Name another" in said
    code, _, said = compare(tmp_path / "nowhere", tmp_path / "a")
    assert code == 3 and "nowhere: no run directory there" in said


def test_runs_without_a_common_step(tmp_path, compare):
    a_run(tmp_path / "a", *SHORT, "backbone=cola", step=15)
    a_run(tmp_path / "b", *SHORT, "backbone=lost")
    code, text, _ = compare(tmp_path)
    assert code == 0 and "there is no common step" in text


def diverges(folder, step: int, *words: str, seed: int) -> None:
    a_run(folder, *SHORT, *words, seed=seed, step=step)
    update_record(folder, {"diverged": f"step {step + 1}: loss nan"})


def test_a_diverged_seed_shortens_no_curve_and_is_left_out_of_no_mean(tmp_path, compare):
    pairs_of_runs(tmp_path, "cola", seeds=(41, 42))
    diverges(tmp_path / "on-43", 30, "backbone=cola", "dlr=on", seed=43)
    a_run(tmp_path / "off-43", *SHORT, "backbone=cola", "dlr=off", seed=43)
    _, text, _ = compare(tmp_path, "--json")
    found = json.loads(text)
    assert found["warnings"] == ["on-43 diverged after step 30: there is no mean with it beyond that"]
    for name, steps in (("evaluation", [20, 40, 60]), ("training", [15, 30, 45, 60])):
        assert [row["step"] for row in found[name]] == steps
        for row in found[name]:
            lost = int(row["step"] > 30)
            a, b = row["loss"]
            assert (a["n"], a["diverged"], a["mean"] is None) == (3, 0, False)
            for cell in (b, row["difference"][0]):
                assert (cell["n"], cell["diverged"], cell["mean"] is None) == (3, lost, bool(lost))
    _, text, _ = compare(tmp_path)
    rows = [line for line in text.splitlines() if line.split()[:1] == ["40"]]
    assert rows[0].count("1 of 3 diverged") == 2 and "unfinished" not in text and "not finite" not in text
    assert "± is the standard deviation over seeds; behind a difference, of the differences" in text
    assert max(map(len, text.splitlines())) <= 80


def test_both_sides_may_diverge(tmp_path, compare):
    """With seeds of their own and with one in common."""
    for dlr, seed in (("off", 41), ("on", 42)):
        diverges(tmp_path / f"{dlr}-{seed}", 30, "backbone=cola", f"dlr={dlr}", seed=seed)
        a_run(tmp_path / f"{dlr}-{83 - seed}", *SHORT, "backbone=cola", f"dlr={dlr}", seed=83 - seed)
    _, text, _ = compare(tmp_path)
    assert text.count("2 of 2 diverged") == 4 and "1 of 2 diverged" in text
    _, text, _ = compare(tmp_path / "off-41", tmp_path / "on-42")
    assert "\n        60" not in text and "(means)" in text
    _, text, _ = compare(tmp_path / "off-42", tmp_path / "on-42")
    assert "1 of 1 diverged" in text


def test_a_record_that_was_thinned_away_is_no_divergence(tmp_path, compare):
    pairs_of_runs(tmp_path, "cola", seeds=(41,))
    for folder in tmp_path.iterdir():
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["step"] in (1, 20, 25, 40, 50, 60)]
        (folder / "metrics.jsonl").write_text("".join(kept))
        update_record(folder, {THINNED: 25})
    _, text, _ = compare(tmp_path, "--json")
    found = json.loads(text)["training"]
    assert [row["step"] for row in found] == [20, 25, 40, 60]
    assert all(cell["mean"] for row in found for cell in row["loss"] + row["difference"])
