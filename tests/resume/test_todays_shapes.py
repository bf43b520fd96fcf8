"""Runs with today's shapes: they resume bit for bit, fold, load in transformers and generate."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dlr_pretrain.util.errors import Stopped
from tests.conftest import main_of
from tests.parity.reference import TODAYS
from tests.resume.test_resume import assert_same, final


@pytest.mark.parametrize("choice", [
    ("backbone=cola", "dlr=on", "precision=bf16_mixed"),
    pytest.param(("backbone=full",), marks=pytest.mark.full),
    pytest.param(("backbone=lax", "dlr=learnable_alpha"), marks=pytest.mark.full),
    pytest.param(("backbone=lost", "dlr=on", "optimizer=muon"), marks=pytest.mark.full),
])  # fmt: skip
def test_a_grouped_tied_run_resumes_folds_and_generates(train, tmp_path, capsys, choice):
    given = (*choice, *TODAYS, "train.steps=10")
    whole = final(train(tmp_path / "whole", *given))
    assert "its logits differ by at most" in capsys.readouterr().out
    with pytest.raises(Stopped):
        train(tmp_path / "parts", *given, "train.stop_after=4")
    assert_same(final(train(tmp_path / "parts", *given)), whole)
    assert main_of("fold", tmp_path / "parts/checkpoints/step_00000010") == 0
    stored = load_file(tmp_path / "parts/folded_step_00000010/model.safetensors")
    assert "lm_head.weight" not in stored
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "parts/folded_step_00000010", trust_remote_code=True)
    model.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs/model.safetensors")
    assert theirs.keys() == stored.keys() and all(torch.equal(theirs[name], stored[name]) for name in stored)
    k = model.model.layers[0].self_attn.k_proj
    assert (k if "backbone=full" in choice else k.b).out_features == 12
    greedy, ids = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}, torch.arange(3, 11)[None]
    assert torch.equal(*(model.generate(ids, use_cache=use, **greedy) for use in (True, False)))
