"""scripts/compare.py: what differs and nothing else; differences seed by seed."""

from __future__ import annotations

import json
import statistics
import sys

import pytest
from run_folders import SHORT, a_run, pairs_of_runs

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
    assert found["configuration"] == {"dlr.name": [["off"], ["on"]], "dlr.enabled": [["False"], ["True"]]}
    assert [row["step"] for row in found["evaluation"]] == [20, 40, 60]
    for row in found["evaluation"]:
        each = [[losses(tmp_path / f"cola-{dlr}-s{seed}")[row["step"]] for seed in (41, 42)] for dlr in ("off", "on")]
        gaps = [b - a for a, b in zip(*each, strict=True)]
        for figure, values in ((row["loss"][0], each[0]), (row["loss"][1], each[1]), (row["difference"][0], gaps)):
            told = {"mean": statistics.fmean(values), "std": statistics.stdev(values), "n": 2, "diverged": 0}
            assert figure == pytest.approx(told)


def test_the_text_says_what_differs_and_what_does_not_compare(tmp_path, compare):
    pairs_of_runs(tmp_path, "cola")
    a_run(tmp_path / "z-other", *SHORT, "backbone=lost", "train.lr=0.001", "eval.tokens=10000", seed=43, step=50)
    code, text, _ = compare(tmp_path)
    assert code == 0
    for words in ("A  tiny cola (train.lr=0.005); seeds [41, 42]", "C  tiny lost (train.lr=0.001); seeds [43]",
                  "not all of the same text (eval.tokens)", "z-other is unfinished, step 50 of 60",
                  "C - A"):  # fmt: skip
        assert words in text
    (rate,) = (line.split() for line in text.splitlines() if line.startswith("train.lr "))
    assert rate == ["train.lr", "0.005", "0.005", "0.001"]
    assert "scale.hidden_size" not in text and "run.dir" not in text and "data.seed" not in text


def test_seeds_of_one_configuration_are_compared_with_each_other(tmp_path, compare):
    for seed in (41, 42):
        a_run(tmp_path / str(seed), *SHORT, "backbone=cola", "dlr=off", seed=seed)
    _, text, _ = compare(tmp_path, "--json")
    found = json.loads(text)
    assert found["configuration"] == {"seed": [["41"], ["42"]]}
    assert found["evaluation"][0]["difference"] == [None]  # they share no seed


def test_what_cannot_be_compared_is_refused(tmp_path, compare):
    a_run(tmp_path / "a", *SHORT, "backbone=cola", step=15)
    code, _, said = compare(tmp_path / "a")
    assert code == 3 and "Name another" in said
    code, _, said = compare(tmp_path / "nowhere", tmp_path / "a")
    assert code == 3 and "nowhere: no run directory there" in said
    a_run(tmp_path / "b", *SHORT, "backbone=lost")
    code, text, _ = compare(tmp_path)
    assert code == 0 and "there is no common step" in text


def test_a_diverged_seed_shortens_no_curve_and_is_left_out_of_no_mean(tmp_path, compare):
    pairs_of_runs(tmp_path, "cola", seeds=(41, 42))
    a_run(tmp_path / "off-43", *SHORT, "backbone=cola", "dlr=off", seed=43)
    a_run(tmp_path / "on-43", *SHORT, "backbone=cola", "dlr=on", seed=43, step=30)
    update_record(tmp_path / "on-43", {"state": {"name": "diverged"}})
    _, text, _ = compare(tmp_path, "--json")
    found = json.loads(text)
    assert found["warnings"] == ["on-43 diverged after step 30: it counts as infinite in means"]
    assert [row["step"] for row in found["evaluation"]] == [20, 40, 60]
    for row in found["evaluation"]:
        lost, (a, b), (gap,) = int(row["step"] > 30), row["loss"], row["difference"]
        assert (a["n"], a["diverged"]) == (3, 0)
        assert [(cell["n"], cell["diverged"], cell["mean"] is None) for cell in (b, gap)] == [(3, lost, bool(lost))] * 2
    _, text, _ = compare(tmp_path)
    (row,) = (line for line in text.splitlines() if line.split()[:1] == ["40"])
    assert row.count("1 of 3 diverged") == 2
