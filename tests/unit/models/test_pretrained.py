"""A run that starts from a folder of weights: its first output, and the folders that are refused."""

import copy
import json
import re
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from dlr_pretrain.config import ConfigError
from dlr_pretrain.deploy.export import model_config, write_weights
from dlr_pretrain.models import Llama
from dlr_pretrain.models.adapter import split
from dlr_pretrain.models.full import DENSE
from dlr_pretrain.models.pretrained import PretrainedFolder
from dlr_pretrain.train import checkpoint
from dlr_pretrain.train.state import new_model, new_optimizer
from dlr_pretrain.util.errors import Stopped, UserError
from dlr_pretrain.util.tensors import STATE_DTYPE, WORKING_DTYPE
from tests.conftest import ROOT
from tests.parity.reference import CPU, TODAYS, VOCAB, disturbed, small, weights
from tests.resume.test_resume import assert_same, final

FILE = "model.safetensors"


@pytest.fixture(scope="module")
def dense():
    """A full-rank model in fp32 whose norm weights are not 1."""
    return disturbed(small("full"), torch.float32).requires_grad_(False)


@pytest.fixture
def folder(dense, tmp_path):
    write_weights(tmp_path, weights(dense))
    return tmp_path


def dense_start(folder, cfg) -> PretrainedFolder:
    return PretrainedFolder(folder, cfg, VOCAB, "a tokenizer")


def started(cfg, folder):
    """The model of a new run in float64; with DLR it holds W."""
    ranks = SimpleNamespace(device=CPU, is_main=True, broadcast=list)
    with patch.dict(STATE_DTYPE, fp32=torch.float64), patch.dict(WORKING_DTYPE, fp32=torch.float64):
        model = new_model(cfg, ranks, VOCAB, dense_start(folder, cfg))
        new_optimizer(cfg, model)
    return model.requires_grad_(False)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("backbone", ["full", "lora", "relora"])
def test_a_start_from_dense_weights_keeps_the_output(dense, folder, ids, backbone):
    found = started(small(backbone, "precision=fp32"), folder).logits(ids)
    torch.testing.assert_close(found, copy.deepcopy(dense).double().logits(ids), rtol=1e-12, atol=1e-12)


def test_a_start_from_transformers_own_grouped_tied_model(tmp_path, ids):
    cfg = small("lora", *TODAYS, "precision=fp32")
    theirs = LlamaForCausalLM(LlamaConfig(**model_config(replace(cfg, backbone=DENSE), VOCAB, torch.float32)))
    theirs.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / FILE)
    found, wanted = started(cfg, tmp_path).logits(ids), theirs.double()(input_ids=ids).logits
    assert (found - wanted).abs().max() < 1e-5 * wanted.std()
    refused = {"scale.num_kv_heads=4": "k_proj.weight: has shape", "scale.rope_theta=1e4": "rope_theta is 500",
               "scale.tie_embeddings=false": "lm_head.weight: missing", "scale.norm_eps=0.5": "rms_norm"}  # fmt: skip
    for word, said in refused.items():
        others = [other for other in TODAYS if other.partition("=")[0] != word.partition("=")[0]]
        with pytest.raises(UserError, match=said):
            dense_start(tmp_path, small("lora", *others, word))


@pytest.mark.parametrize("words", [
    ("lowrank", "dlr=off"),
    ("cola", "dlr=on"),
    ("lax", "dlr=learnable_alpha", "dlr.grouping=random"),
    ("lost", "dlr=on"),
])  # fmt: skip
def test_a_start_from_an_export_keeps_the_output(tmp_path, ids, words):
    """With DLR, B starts without the residual. LOST takes over the channels."""
    source = disturbed(small(words[0], "seed=1"), torch.float32).requires_grad_(False)
    write_weights(tmp_path, weights(source))
    found = started(small(*words, "precision=fp32"), tmp_path).logits(ids)
    torch.testing.assert_close(found, source.double().logits(ids), rtol=1e-12, atol=1e-12)


def test_the_pages_conversion_reads_the_names_of_colas_code(tmp_path, monkeypatch, ids):
    source = disturbed(small("cola", "seed=1"), torch.float32).requires_grad_(False)
    theirs = {
        name.replace(".a.weight", ".cola_a").replace(".b.weight", ".cola_b"): t for name, t in weights(source).items()
    }
    theirs = {name: t.T.contiguous() if ".cola_" in name else t for name, t in theirs.items()}
    (tmp_path / "cola").mkdir()
    save_file(theirs, tmp_path / "cola" / FILE)
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/runs.md").read_text()
    exec(re.search(r"```python\n(.*?)```", page, flags=re.DOTALL)[1], {})
    found = started(small("cola", "precision=fp32"), tmp_path / "converted").logits(ids)
    torch.testing.assert_close(found, source.double().logits(ids), rtol=1e-12, atol=1e-12)


def test_shards_are_read_like_one_file(dense, folder, tmp_path):
    whole = dense_start(folder, small("full"))
    (tmp_path / "shards").mkdir()
    write_weights(tmp_path / "shards", weights(dense), shard_bytes=20_000)
    start = dense_start(tmp_path / "shards", small("full"))
    assert start.files.keys() == whole.files.keys() and len(set(start.files.values())) > 1
    assert all(torch.equal(start.read(name), whole.read(name)) for name in whole.files)


SOUND = {"num_attention_heads": 2, "num_key_value_heads": None, "rope_scaling": None, "rms_norm_eps": 1e-6}
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
LINEAR = {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}


@pytest.mark.parametrize(("backbone", "file", "change", "message"), [
    ("lora", FILE, {"model.norm.weight": None}, "model.norm.weight: missing"),
    ("lora", FILE, {"lm_head.weight": torch.ones(60, 32)}, "lm_head.weight: has shape"),
    ("lora", FILE, None, "cannot be read: "),
    ("lora", "config.json", THETA, "rope_theta is 500000.0, here 10000.0"),
    ("lora", "config.json", LINEAR, ": type is linear, here default"),
    ("lora", "config.json", {"backbone": "cola"}, "backbone is cola, here lora"),
    ("lora", "config.json", {"model_type": "cola"}, "model_type is cola, whose settings are not read"),
    ("lora", "config.json", {"hidden_act": "linear"}, "hidden_act is linear, here silu"),
    ("lora", "config.json", {"tokenizer_sha256": "f"}, "tokenizer_sha256 is f, here a tokenizer"),
    ("lora", "config.json", None, "cannot be read: "),
    ("cola", FILE, {}, "it is dense, and backbone=cola cannot start from dense weights"),
])  # fmt: skip
def test_a_folder_that_does_not_fit_is_refused(folder, backbone, file, change, message):
    (folder / "config.json").write_text(json.dumps(SOUND))
    dense_start(folder, small("lora"))
    if change is None:
        (folder / file).write_text("[1]")
    elif file == FILE:
        tensors = load_file(folder / FILE) | change
        save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / FILE)
    else:
        (folder / file).write_text(json.dumps(SOUND | change))
    with pytest.raises(UserError, match=message):
        dense_start(folder, small(backbone))


def test_an_init_option_with_a_start_folder_is_refused(folder):
    with pytest.raises(ConfigError, match=r"backbone\.init=xavier: would be ignored"):
        small("lowrank", "backbone.init=xavier", f"run.start_from={folder}")


@pytest.mark.usefixtures("no_export")
def test_a_run_starts_from_the_export_of_another(train, tmp_path):
    source = train(tmp_path / "dense", "backbone=full", "train.steps=3") / "folded"
    choice = ("backbone=lora", f"run.start_from={source}", "train.steps=4", "precision=bf16_mixed")
    whole = final(train(tmp_path / "whole", *choice))
    start = load_file(source / FILE)
    with pytest.raises(Stopped):
        train(tmp_path / "parts", *choice, "train.stop_after=2")
    state = checkpoint.load(tmp_path / "parts" / "checkpoints" / "step_00000002").model
    cfg = small("lora")
    own = split(Llama(cfg, VOCAB), {name: stored.whole() for name, stored in state.items()})
    frozen = [name for name in own if name.endswith("_proj.weight")]
    assert len(frozen) == 14 and all(torch.equal(own[name], start[name]) for name in frozen)
    source.rename(tmp_path / "away")  # a resumed run does not need it
    assert_same(final(train(tmp_path / "parts", *choice)), whole)
