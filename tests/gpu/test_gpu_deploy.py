"""Exported models on a GPU."""

from __future__ import annotations

import pytest
import torch

from dlr_pretrain.deploy.folder import open_folder
from tests.deploy.models import exported, of_kind, tokenizer_of


@pytest.mark.parametrize("backbone", ["lowrank", "cola_lax"])
def test_logits_are_those_of_the_cpu(tmp_path, backbone):
    spiece = tokenizer_of(tmp_path / "tokenizer", ["a few words of one text, in two lines"] * 20, pieces=40)
    folder = exported(tmp_path / "folded", spiece, of_kind(backbone))
    model, _ = open_folder(folder, torch.float32)
    ids = torch.randint(3, 90, (20, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        found = model.cuda()(input_ids=ids.cuda()).logits.cpu()
    assert (found - wanted).abs().max() < 1e-3 * wanted.std()
