"""Probe, profile and snapshot on a GPU."""

from __future__ import annotations

import pickle

import pytest
import torch

from dlr_pretrain.train.update import Update
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.history import read_metrics
from tests.conftest import saved

pytestmark = pytest.mark.usefixtures("no_export")
COMMON = ("backbone=cola", "dlr=on", "device=cuda", "train.steps=8", "checkpoint.every=100")


@pytest.fixture
def kernels_that_repeat():
    """Those that add in one order, as far as torch has them; what it has none for, it warns of."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("default::UserWarning")
@pytest.mark.usefixtures("kernels_that_repeat")
@pytest.mark.parametrize("how", [("precision=bf16",), ("precision=bf16_mixed", "compile=true")], ids=" ".join)
def test_training_notices_neither_probe_nor_profile(train, tmp_path, how):
    plain = train(tmp_path / "plain", *COMMON, *how)
    looked = train(tmp_path / "looked", *COMMON, *how, "probe=on", "profile=on", "profile.start=3")
    a, b = (saved(folder / "checkpoints" / "step_00000008") for folder in (plain, looked))
    assert all(torch.equal(value, b[name]) for name, value in a.items())
    assert read_metrics(looked / "metrics.jsonl")[0]["probe/0.self_attn.q_proj/rho"] > 0
    table = (looked / "profile" / "profile.txt").read_text()
    assert all(part in table for part in ("with_residual", "forward", "backward", "optimizer", "Self CUDA time total"))


def test_running_out_of_memory_leaves_a_snapshot(train, tmp_path, monkeypatch):
    def fails(self, batch, index, lr, failed):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")

    monkeypatch.setattr(Update, "__call__", fails)
    with pytest.raises(UserError, match=r"were asked for, .* GB were allocated at the peak"):
        train(tmp_path / "run", *COMMON, "profile=on", "profile.start=3")
    snapshot = pickle.loads((tmp_path / "run" / "profile" / "out_of_memory_rank0.pickle").read_bytes())
    assert snapshot["segments"] and any(snapshot["device_traces"])
