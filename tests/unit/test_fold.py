"""A saved checkpoint folds to what the run itself writes at its end."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from dlr_pretrain.deploy.fold import fold_checkpoint
from dlr_pretrain.errors import EXIT_FAILED
from tests.conftest import ROOT

pytestmark = pytest.mark.usefixtures("no_export")
FILE = "model.safetensors"


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_mixed"])
def test_the_last_checkpoint_folds_to_the_runs_own_folder(train, tmp_path, precision):
    run = train(tmp_path / "run", "backbone=cola", "dlr=on", f"precision={precision}", "train.steps=4")
    checkpoint = run / "checkpoints" / "step_00000004"
    script = [sys.executable, ROOT / "scripts" / "fold.py", checkpoint]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    assert "folded 14 layers" in done.stdout
    own, again = load_file(run / "folded" / FILE), load_file(run / "folded_step_00000004" / FILE)
    assert own.keys() == again.keys() and all(torch.equal(own[n], again[n]) for n in own)
    assert own["lm_head.weight"].dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
    if precision == "bf16_mixed":
        fold_checkpoint(checkpoint, tmp_path / "bf16", torch.bfloat16)
        cast = load_file(tmp_path / "bf16" / FILE)
        assert all(torch.equal(cast[n], own[n].to(torch.bfloat16)) for n in own)


def fold(*words) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, ROOT / "scripts" / "fold.py", *words], capture_output=True, text=True)


def test_what_is_no_sound_checkpoint_is_named_and_nothing_is_overwritten(train, tmp_path):
    run = train(tmp_path / "run", "train.steps=2")
    checkpoint, precious = run / "checkpoints" / "step_00000002", tmp_path / "thesis"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years")
    for words, reason in (
        ([run], "name one as"),
        ([checkpoint.with_name("step_00000009")], "was not finished"),
        ([checkpoint, "--output", precious], "is in the way"),
        ([checkpoint, "--output", run], "is in the way"),
    ):
        refused = fold(*words)
        assert refused.returncode == EXIT_FAILED and refused.stderr.startswith("error: ") and reason in refused.stderr
    assert (precious / "thesis.txt").read_text() == "years"
    weights = bytearray((checkpoint / FILE).read_bytes())
    weights[-50] ^= 1
    (checkpoint / FILE).write_bytes(weights)
    assert "fails its checksum" in fold(checkpoint).stderr
