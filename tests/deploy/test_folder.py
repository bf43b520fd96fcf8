"""What is no export, or no longer one, is refused by name before anything is computed with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dlr_pretrain.deploy import sft
from dlr_pretrain.deploy.folder import open_folder
from dlr_pretrain.models import attach_dlr, fold_
from dlr_pretrain.util.errors import UserError
from tests.deploy.models import exported, tokenizer_of

pytest.importorskip("transformers")
TEXTS = ["the house stands on a hill above the river", "what was copied is folded in the end"] * 3
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def spiece(tmp_path_factory) -> Path:
    return tokenizer_of(tmp_path_factory.mktemp("spiece"), TEXTS, pieces=40)


@pytest.fixture
def folder(tmp_path, spiece) -> Path:
    return exported(tmp_path / "folded", spiece, "backbone=cola", "backbone.rank=8", rows=48)


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: t.pop("model.layers.1.mlp.up_proj.a.weight"), r"model\.layers\.1\.mlp\.up_proj\.a\.weight: missing"),
    (lambda t: t.update(extra=torch.ones(2)), "extra: not a tensor of this model"),
    (lambda t: t.update({"model.norm.weight": torch.ones(31)}), r"norm\.weight: has shape \[31\] instead of \[32\]"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_named(folder, change, message):
    rewrite(folder, change)
    with pytest.raises(UserError, match=message):
        open_folder(folder)


def test_a_users_copy_of_weights_is_no_part_of_the_model(folder):
    digest = sft._digest_of_weights(folder)
    save_file({"extra": torch.ones(2)}, folder / "model_ema.safetensors")
    save_file({"extra": torch.ones(2)}, folder / "model-00001-of-00002.safetensors")  # transformers reads the whole one
    open_folder(folder)
    assert sft._digest_of_weights(folder) == digest
    shutil.copy(folder / WEIGHTS, folder / "model_before.safetensors")
    rewrite(folder, lambda t: t.pop("model.norm.weight"))
    with pytest.raises(UserError, match=r"model\.norm\.weight: missing"):
        open_folder(folder)


def test_a_state_whose_residual_was_not_folded_is_named(folder):
    """As it is saved in the middle of somebody's loop: the shapes are right, and the model is not."""
    model, _ = open_folder(folder)
    names = attach_dlr(model)
    assert len(names) == 21
    model.save_pretrained(folder)
    assert load_file(folder / WEIGHTS).keys() > {f"{name}.weight" for name in names}
    with pytest.raises(UserError, match=r"residuals were not folded: .*_proj\.b\.dlr_mark and 20 more; call fold_"):
        open_folder(folder)
    fold_(model)
    model.save_pretrained(folder)
    open_folder(folder)


def test_a_learned_scale_that_was_not_folded_is_named(folder):
    """As a run's own state with dlr=learnable_alpha has it."""
    name = "model.layers.0.mlp.up_proj.b.dlr_alpha"
    rewrite(folder, lambda tensors: tensors.update({name: torch.ones(())}))
    with pytest.raises(UserError, match=rf"residuals were not folded: {name}; .* scripts/fold\.py"):
        open_folder(folder)


@pytest.mark.parametrize("pieces", [40, 38, 49])
def test_a_foreign_tokenizer_is_refused(folder, tmp_path, pieces):
    """Whether it fits into the embedding or not."""
    other = ["quite other words, of which no other model has ever been trained to know"] * 3
    shutil.copyfile(tokenizer_of(tmp_path / "other", other + TEXTS, pieces), folder / "spiece.model")
    with pytest.raises(UserError, match=r"is another tokenizer than the one|it is another model's"):
        open_folder(folder)


def test_what_is_no_export_says_what_to_name(folder, tmp_path):
    for name, fix in (("spiece.model", "Name a folder that an export wrote"), ("config.json", "for a checkpoint")):
        other = tmp_path / name
        shutil.copytree(folder, other)
        (other / name).unlink()
        with pytest.raises(UserError, match=rf"has no {name}.*{fix}"):
            open_folder(other)


def test_a_run_in_place_of_its_folder_is_told_where_that_is(folder):
    with pytest.raises(UserError, match=rf"has no config\.json\. Name {folder}$"):
        open_folder(folder.parent)


def test_a_file_that_was_cut_is_named(folder):
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="not a whole safetensors file"):
        open_folder(folder)


@pytest.mark.parametrize(("change", "message"), [
    ({"backbone": "colla"}, "colla"),
    ({"model_type": "cola"}, "its model_type is 'cola'. Name a folder in this package's own layout"),
])  # fmt: skip
def test_a_configuration_of_something_else_is_named(folder, change, message):
    config = json.loads((folder / "config.json").read_text())
    for content in (json.dumps(config | change), "{"):
        (folder / "config.json").write_text(content)
        with pytest.raises(UserError, match=rf"config\.json: is not that of an export: .*({message}|Expecting)"):
            open_folder(folder)
