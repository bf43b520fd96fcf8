"""What is no export, or no longer one, is refused by name before anything is computed with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlr_pretrain.deploy.export import need, open_folder
from dlr_pretrain.models import attach_dlr
from dlr_pretrain.util.errors import UserError
from tests.deploy.models import exported, of_kind, tokenizer_of

TEXTS = ["the house stands on a hill above the river", "what was copied is folded in the end"] * 3
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def spiece(tmp_path_factory) -> Path:
    return tokenizer_of(tmp_path_factory.mktemp("spiece"), TEXTS, pieces=40)


@pytest.fixture
def folder(tmp_path, spiece) -> Path:
    return exported(tmp_path / "folded", spiece, of_kind("cola"), rows=48)


def test_tensors_that_do_not_fit_are_named(folder):
    sound = load_file(folder / WEIGHTS)
    for change, message in (
        ({"model.layers.1.mlp.up_proj.a.weight": None}, r"model\.layers\.1\.mlp\.up_proj\.a\.weight: missing"),
        ({"extra": torch.ones(2)}, "extra: not a tensor of this model"),
        ({"model.norm.weight": torch.ones(31)}, r"norm\.weight: has shape \[31\] instead of \[32\]"),
    ):
        tensors = {name: tensor for name, tensor in (sound | change).items() if tensor is not None}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        with pytest.raises(UserError, match=message):
            open_folder(folder)


def test_a_state_whose_residual_was_not_folded_is_refused(folder):
    """As it is saved in the middle of somebody's loop: the shapes are right, and the model is not."""
    model, _ = open_folder(folder)
    attach_dlr(model)
    model.save_pretrained(folder)
    with pytest.raises(UserError, match=r"_proj\.b\.dlr_mark: not a tensor of this model"):
        open_folder(folder)


def test_what_is_no_export_or_not_installed_says_what_to_name(folder, tmp_path):
    with pytest.raises(UserError, match=r'needs absent-one, which is not installed. .* pip install -e "\.\[eval\]"'):
        need("absent-one", "eval")
    with pytest.raises(UserError, match=r"has no config\.json.*Name a folder that an export wrote.*for a checkpoint"):
        open_folder(folder.parent)
    config = json.loads((folder / "config.json").read_text())
    for content in (json.dumps(config | {"backbone": "colla"}), json.dumps(config | {"model_type": "cola"}), "{"):
        (folder / "config.json").write_text(content)
        with pytest.raises(UserError, match=r"is not what an export wrote: "):
            open_folder(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:500])
    with pytest.raises(UserError, match=r"is not what an export wrote: .*Export it again"):
        open_folder(folder)
