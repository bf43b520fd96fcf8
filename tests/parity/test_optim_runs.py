"""Whole runs with each optimizer: they learn, and where they are interrupted they end as if they had not been."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from dlr_pretrain.train.checkpoint import load, newest
from dlr_pretrain.util.errors import Stopped
from dlr_pretrain.util.history import read_metrics

pytestmark = pytest.mark.usefixtures("no_export")

FULL = pytest.mark.full


@pytest.mark.parametrize("choice", [
    ("backbone=full", "optimizer=galore", "optimizer.rank=8", "optimizer.refresh_every=3"),
    ("backbone=cola", "dlr=on", "optimizer=muon", "precision=bf16"),
    ("backbone=full", "optimizer=adamw_8bit", "scale.hidden_size=64", "precision=bf16"),
    pytest.param(("backbone=full", "optimizer=fira", "optimizer.rank=8", "precision=bf16_mixed"), marks=FULL),
    pytest.param(("backbone=lowrank", "optimizer=loro", "optimizer.exact_every=6"), marks=FULL),
], ids=lambda choice: choice[1])  # fmt: skip
def test_interrupted_equals_undisturbed(train, tmp_path, choice):
    eight_bit = "optimizer=adamw_8bit" in choice
    if eight_bit:
        pytest.importorskip("torchao")
    with torch.compiler.set_stance("force_eager"):
        whole = train(tmp_path / "whole", *choice)
        with pytest.raises(Stopped, match="after step 8 of 20"):
            train(tmp_path / "parts", *choice, "train.stop_after=8")
        state = load(newest(tmp_path / "parts" / "checkpoints")[0]).optimizer
        parts = train(tmp_path / "parts", *choice)
    a, b = (load_file(folder / "folded" / "model.safetensors") for folder in (whole, parts))
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    one, two = ([record["train/loss"] for record in read_metrics(f / "metrics.jsonl")] for f in (whole, parts))
    assert one == two
    assert sum(one[-3:]) < sum(one[:3]) - 0.1
    assert any(".codes" in name for name in state) == eight_bit
