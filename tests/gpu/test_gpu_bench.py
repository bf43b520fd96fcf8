"""Benchmarks on a GPU: events, memory of one arm among several, clocks."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from tests.conftest import script


def test_arms_side_by_side_have_their_own_memory_and_agree_with_a_process_of_their_own(monkeypatch, tmp_path):
    words = ["scale=60m", "scale.num_layers=2", "backbone=cola", "dlr=on", "compile=false", "device=cuda"]
    words += ["train.global_batch=8", "train.micro_batch=4"]
    found = {}
    for part, more in (("step", ("--arm", "dlr=on", "--arm", "backbone=full dlr=off", "--rounds", "3")),
                       ("memory", ("--setting", "dlr=on"))):  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["benchmark.py", part, *words, *more, "--json", f"{tmp_path}/{part}.json"])
        assert script("benchmark").main() == 0
        found[part] = json.loads((tmp_path / f"{part}.json").read_text())
    low_rank, again, dense = (arm["memory"]["peak"] for arm in found["step"]["arms"])
    alone = found["memory"]["settings"][0]
    assert low_rank == pytest.approx(again, rel=0.02) and low_rank < dense
    assert low_rank == pytest.approx(alone["peak"], rel=0.05)
    assert alone["peak"] == pytest.approx(alone["estimate"], rel=0.05)
    assert found["step"]["peak_flops"]["measured"] > 1e13
    assert found["step"]["device"] == torch.cuda.get_device_name()
