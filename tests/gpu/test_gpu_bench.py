"""Benchmarks on a GPU: times by events, and the memory of a process of its own beside the plan's."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.__main__ import main


@pytest.mark.parametrize("part", ["step", "memory"])
def test_a_step_is_measured_on_the_gpu(part, tmp_path):
    given = ["scale=60m", "scale.num_layers=2", "backbone=cola", "dlr=on", "compile=false", "device=cuda"]
    given += ["train.global_batch=8", "train.micro_batch=4", "--variant", "dlr=on", "--rounds", "6"]
    assert main([part, *given, "--json", f"{tmp_path}/found.json"]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    if part == "memory":
        assert found["variants"][0]["peak"] == pytest.approx(found["variants"][0]["plan"], rel=0.05)
    else:
        assert found["variants"][0]["peak_flops"]["measured"] > 1e13
        assert found["device"] == torch.cuda.get_device_name()
