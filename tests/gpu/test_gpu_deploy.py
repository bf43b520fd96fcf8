"""Exported models on a GPU."""

from __future__ import annotations

import pytest
import torch

from dlr_pretrain.deploy.folder import open_folder
from dlr_pretrain.deploy.likelihood import log_likelihoods
from tests.deploy.models import exported, tokenizer_of


@pytest.mark.parametrize("backbone", ["lowrank", "cola_lax"])
def test_scores_are_those_of_the_cpu(tmp_path, backbone):
    spiece = tokenizer_of(tmp_path / "tokenizer", ["a few words of one text, in two lines"] * 20, pieces=40)
    folder = exported(tmp_path / "folded", spiece, f"backbone={backbone}", "scale.rank=8")
    model, _ = open_folder(folder, torch.float32)
    ids = torch.randint(3, 90, (20, 40), generator=torch.Generator().manual_seed(0)).tolist()
    pairs = [(row[: 5 + i], row[5 + i : 6 + 2 * i]) for i, row in enumerate(ids[:17])]
    wanted = log_likelihoods(model, pairs, 100, batch_size=4)
    assert log_likelihoods(model.cuda(), pairs, 100, batch_size=7) == pytest.approx(wanted, rel=1e-4)
