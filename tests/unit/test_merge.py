"""Factors that are merged into dense weights at the end of a run are held against the model that trained."""

from __future__ import annotations

import importlib

import pytest

from dlr_pretrain.util.errors import UserError


@pytest.mark.parametrize("backbone", ["lora", pytest.param("sltrain", marks=pytest.mark.full)])
def test_a_merge_is_held_against_what_was_trained(train, tmp_path, monkeypatch, backbone):
    given = (f"backbone={backbone}", "precision=bf16", "train.steps=4", "train.lr=1e-2", "train.warmup_steps=0")
    train(tmp_path / "right", *given)
    layer = importlib.import_module(f"dlr_pretrain.models.{backbone}").BACKBONE
    dense = layer.dense
    monkeypatch.setattr(layer, "dense", lambda *own: 2 * dense(*own))
    with pytest.raises(UserError, match="differ from the trained model's"):
        train(tmp_path / "wrong", *given)
    assert not (tmp_path / "wrong" / "folded").exists()
