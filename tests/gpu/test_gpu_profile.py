"""Probe and profile on a GPU."""

from __future__ import annotations

import pytest
import torch

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
