"""A checkpoint folds to the export that the run itself writes at its end, and the report of fold.py is right."""

import gzip
import importlib
import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dlr_pretrain.config import parse
from dlr_pretrain.config.run_folder import read_config
from dlr_pretrain.data import inputs_and_targets, load_tokenizer, open_source, validation_set
from dlr_pretrain.deploy import fold as fold_module
from dlr_pretrain.deploy.export import deployed
from dlr_pretrain.models import build_model
from dlr_pretrain.models.adapter import load_
from dlr_pretrain.models.llama import Llama
from dlr_pretrain.models.residual import branch_
from dlr_pretrain.util.errors import EXIT_FAILED, Stopped, UserError
from tests.conftest import main_of, saved
from tests.parity.reference import CPU, TODAYS, VOCAB, disturbed, small, weights
from tests.resume.test_resume import assert_same, final

FILE = "model.safetensors"


@pytest.fixture
def fold(capsys):
    """Runs ``scripts/fold.py`` in this process; returns its exit code, its output and its errors."""
    return lambda *words: (capsys.readouterr(), main_of("fold", *words), *capsys.readouterr())[1:]


def facts(folder) -> dict:
    return json.loads((folder / "fold.json").read_text())


def test_a_checkpoint_reports_its_own_evaluation_or_none(train, tmp_path, fold):
    run_dir = train(tmp_path / "run", "train.steps=8", "eval.every=4", "checkpoint.every=7")
    for step in (7, 8):
        assert fold(run_dir / "checkpoints" / f"step_{step:08d}", "--output", tmp_path / f"{step}")[0] == 0
    assert facts(tmp_path / "7").keys() == {"step", "tokens", "real_tokens", "command", "commit of the code"}
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert facts(tmp_path / "8")["eval/perplexity"] == last["eval/perplexity"]
    checkpoint, precious = run_dir / "checkpoints" / "step_00000008", tmp_path / "thesis"
    precious.mkdir()
    for words, reason in (
        ([run_dir], "(there: step_00000007, step_00000008)"),
        ([checkpoint.with_name("step_00000009")], "(there: step_00000007, step_00000008)"),
        ([checkpoint, "--output", precious], "exists already. Move it away"),
    ):
        code, _, said = fold(*words)
        assert code == EXIT_FAILED and reason in said
    assert list(precious.iterdir()) == []
    (part,) = checkpoint.glob("*.safetensors")
    weights = bytearray(part.read_bytes())
    weights[-50] ^= 1
    part.write_bytes(weights)
    assert "fails its checksum" in fold(checkpoint)[2]


def test_figures_follow_their_formulas_on_the_written_tensors(train, tmp_path, fold, monkeypatch):
    """The model before has the residual as a second product beside B; the model after has the folder's tensors."""
    run_dir = train(tmp_path / "run", "backbone=lowrank", "dlr=on", "train.steps=3", "train.lr=0.1")
    checkpoint, cfg = run_dir / "checkpoints" / "step_00000003", parse(read_config(run_dir))
    few = replace(cfg, eval=replace(cfg.eval, tokens=300))
    rows = validation_set(few, open_source(few), load_tokenizer(run_dir / "tokenizer"))
    ids, targets = inputs_and_targets(torch.from_numpy(rows.tokens), torch.from_numpy(rows.lengths))
    scored = targets != -100
    before = Llama(cfg, 120)
    before.load_state_dict({n: t for n, t in saved(checkpoint).items() if n in before.state_dict()})
    branch_(before, cfg.dlr)
    for form in ((), ("--dense",), ("--dtype", "bfloat16")):
        folder = tmp_path / f"folded{form}"
        assert fold(checkpoint, "--tokens", 300, "--output", folder, *form)[0] == 0
        written, found = load_file(folder / FILE), facts(folder)
        after = Llama(replace(cfg, backbone=small("full").backbone) if "--dense" in form else cfg, 120)
        load_(after, {name: t.float() for name, t in written.items()})
        assert not scored.all() and found["fold/targets"] == scored.sum().item() > 200
        with torch.no_grad():
            logits = {when: model.logits(ids)[scored] for when, model in (("before", before), ("after", after))}
        for when, some in logits.items():
            loss = F.cross_entropy(some, targets[scored]).item()
            assert found[f"fold/perplexity_{when}"] == pytest.approx(math.exp(loss), rel=1e-5)
        error = (logits["after"] - logits["before"]).abs().mean().item()
        assert found["fold/logits_mean_absolute_error"] == pytest.approx(error, rel=1e-3, abs=1e-6)
        assert (found["fold/logits_mean_absolute_error"] > 1e-4) == ("--dtype" in form)
        assert found["fold/parameters_after"] == sum(t.numel() for t in written.values()) and found["step"] == 3
        assert "| fold/perplexity_after |" in (folder / "README.md").read_text()

    def wrong(cfg, tensors):
        return {n: 1.001 * t if n.endswith("o_proj.b.weight") else t for n, t in folded_tensors(cfg, tensors).items()}

    folded_tensors = fold_module.folded_tensors
    monkeypatch.setattr(fold_module, "folded_tensors", wrong)
    said = fold(checkpoint)[2]
    assert "does not compute what was trained" in said and "weights identical             False" in said
    assert not (run_dir / "folded_step_00000003").exists()


@pytest.mark.parametrize(("backbone", "given"), [
    ("cola_lax", ("precision=bf16_mixed", "dlr.learn_alpha=true")),
    ("lowrank", ("precision=bf16", "data.mask_documents=true", "eval.packing=packed")),
])  # fmt: skip
def test_training_and_the_folded_model_are_equal_bit_for_bit(train, tmp_path, fold, backbone, given):
    run_dir = train(tmp_path / "run", "dlr=on", "train.steps=3", "train.lr=0.1", f"backbone={backbone}", *given)
    checkpoint = run_dir / "checkpoints" / "step_00000003"
    said = {line[:29].strip(): line[30:] for line in fold(checkpoint, "--tokens", 200)[1].splitlines()}
    assert {"perplexity before", "perplexity after", "latency ms before", "latency ms after", "written"} <= said.keys()
    assert said["layers"] == "14" and said["checked"].startswith("transformers loads it; its logits differ by at most")
    own, again = load_file(run_dir / "folded" / FILE), load_file(run_dir / "folded_step_00000003" / FILE)
    assert own.keys() == again.keys() and all(torch.equal(own[n], again[n]) for n in own)
    assert own["lm_head.weight"].dtype == (torch.bfloat16 if "precision=bf16" in given else torch.float32)
    found = facts(run_dir / "folded_step_00000003")
    assert found["fold/weights_identical"] is True
    assert found["fold/logits_mean_relative_error"] < 0.05  # the branch rounds differently
    assert found["fold/perplexity_after"] == pytest.approx(found["fold/perplexity_before"], rel=0.02)
    learned = 14 if "dlr.learn_alpha=true" in given else 0
    assert found["fold/parameters_before"] - found["fold/parameters_after"] == learned


@pytest.mark.parametrize("backbone", ["lora", pytest.param("sltrain", marks=pytest.mark.full)])
def test_a_merge_at_the_end_is_checked_against_the_run(train, tmp_path, monkeypatch, backbone):
    layer = importlib.import_module(f"dlr_pretrain.models.{backbone}").Options.layer
    given = (f"backbone={backbone}", "precision=bf16", "train.steps=4", "train.lr=1e-2", "train.warmup_steps=0")
    train(tmp_path / "right", *given)
    dense = layer.dense
    monkeypatch.setattr(layer, "dense", lambda *own: 2 * dense(*own))
    with pytest.raises(UserError, match="differ from the trained model's"):
        train(tmp_path / "wrong", *given)
    assert not (tmp_path / "wrong" / "folded").exists()


def test_the_perplexity_of_a_changed_text_is_not_reported(train, tmp_path, corpus, fold):
    text = tmp_path / "text"
    shutil.copytree(corpus, text)
    run_dir = train(tmp_path / "run", "dlr=on", "train.steps=1", f"data.root={text}")
    checkpoint, (shard,) = run_dir / "checkpoints" / "step_00000001", text.glob("c4-validation*")
    with gzip.open(shard, "at") as file:
        file.write(json.dumps({"text": "another day"}) + "\n")
    said = fold(checkpoint)[2]
    assert "text: " in said and "the text has changed since the run" in said and "--tokens 0 folds" in said
    shutil.rmtree(text)
    code, _, said = fold(checkpoint)
    assert code == EXIT_FAILED and "data.train_files" in said and "--tokens 0 folds without the text" in said
    assert fold(checkpoint, "--tokens", 0)[0] == 0


@pytest.mark.parametrize(("backbone", "merge", "words"), [
    ("lora", False, ()),
    ("sltrain", False, ("backbone.sparsity=0.1",)),
    ("lowrank", True, ("backbone.latent_scale=0.4", "dlr=on")),
])  # fmt: skip
def test_a_dense_export_computes_what_was_trained(backbone, merge, words):
    cfg = small(backbone, *words)
    model = disturbed(cfg).requires_grad_(False)
    ids = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(0))
    tensors = fold_module.folded_tensors(cfg, model.state_dict())
    branch_(model, cfg.dlr)
    trained = model.logits(ids)
    own, tensors = deployed(cfg, tensors, merge)
    plain = Llama(small("full"), VOCAB).double()
    load_(plain, tensors)
    assert own.backbone.name == "full"
    torch.testing.assert_close(plain.logits(ids), trained, rtol=1e-11, atol=1e-11)


def test_merged_weights_are_formed_in_fp32_and_rounded_once():
    cfg = small("lowrank", "backbone.latent_scale=0.3")
    model = build_model(cfg, VOCAB, CPU, torch.bfloat16).requires_grad_(False)
    for p in model.parameters():
        p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    own, name = weights(model), "model.layers.1.mlp.up_proj"
    _, tensors = deployed(cfg, own, dense=True)
    exact = 0.3 * (own[f"{name}.b.weight"].double() @ own[f"{name}.a.weight"].double())
    found = tensors[f"{name}.weight"]
    assert found.dtype == torch.bfloat16
    half = 0.502 * torch.finfo(torch.bfloat16).eps * exact.abs()  # 1e-5: fp32's rounding, where terms cancel
    assert ((found.double() - exact).abs() <= half + 1e-5).all()


@pytest.mark.parametrize("backbone", ["cola", "lost", "cola_lax"])
def test_layers_that_are_not_a_matrix_are_not_merged(backbone):
    with pytest.raises(UserError, match=rf"backbone={backbone}: has no dense form.*Fold without --dense"):
        model = build_model(small(backbone), VOCAB, CPU)
        deployed(small(backbone), weights(model), dense=True)


@pytest.mark.parametrize("choice", [
    ("backbone=cola", "dlr=on", "precision=bf16_mixed"),
    pytest.param(("backbone=full",), marks=pytest.mark.full),
    pytest.param(("backbone=lax", "dlr=learnable_alpha"), marks=pytest.mark.full),
    pytest.param(("backbone=lost", "dlr=on", "optimizer=muon"), marks=pytest.mark.full),
])  # fmt: skip
def test_a_grouped_tied_run_resumes_folds_and_generates(train, tmp_path, capsys, fold, choice):
    given = (*choice, *TODAYS, "train.steps=10")
    whole = final(train(tmp_path / "whole", *given))
    assert "its logits differ by at most" in capsys.readouterr().out
    with pytest.raises(Stopped):
        train(tmp_path / "parts", *given, "train.stop_after=4")
    assert_same(final(train(tmp_path / "parts", *given)), whole)
    assert fold(tmp_path / "parts/checkpoints/step_00000010")[0] == 0
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
