"""The report of a fold: the paper's figures by their formulas, and a fold that changes the model is not exported."""

from __future__ import annotations

import gzip
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dlr_pretrain.cli import load
from dlr_pretrain.config.composition import recorded
from dlr_pretrain.config.written import read_config
from dlr_pretrain.data import Tokenizer, ValidationSet, open_source, validation_set
from dlr_pretrain.data.prepare import prepare
from dlr_pretrain.data.tokenizer import EOS, PAD
from dlr_pretrain.deploy import fold as fold_module
from dlr_pretrain.deploy.consistency import _compare
from dlr_pretrain.deploy.fold import fold_checkpoint
from dlr_pretrain.models import Llama, build
from dlr_pretrain.util.errors import UserError
from tests.conftest import saved
from tests.parity.reference import r_transposed

pytestmark = pytest.mark.usefixtures("no_export")


@pytest.fixture(autouse=True)
def without_transformers(monkeypatch):
    monkeypatch.setattr(fold_module, "agreement", lambda *_: "not looked at")


def checkpoint_of(train, folder: Path, *given: str) -> tuple[Path, dict]:
    run = train(folder, "dlr=on", "train.steps=3", "train.lr=0.1", *given)
    state = saved(run / "checkpoints" / "step_00000003")
    names = build(recorded(read_config(run)), 120, torch.device("meta")).state_dict().keys()
    return run, {name: value for name, value in state.items() if name in names}


def by_hand(run: Path, state: dict, tokens: int) -> dict:
    """Perplexities and errors with the residual as a second product beside B, entry by entry, and without."""
    cfg = recorded(read_config(run))
    few = replace(cfg, eval=replace(cfg.eval, tokens=tokens))
    rows = validation_set(few, open_source(few), Tokenizer(run / "spiece.model"))
    branch, folded = (dict(state) for _ in range(2))
    for name in state:
        if name.endswith(".b.weight"):
            d_out, rank = state[name].shape
            folded[name] = state[name] + r_transposed(d_out, rank) / math.sqrt(math.ceil(d_out / rank))
    logits = []
    for tensors, residual in ((branch, True), (folded, False)):
        model = Llama(cfg, 120, grouped=False).requires_grad_(False)
        model.load_state_dict(tensors)
        if residual:
            for name, module in model.named_modules():
                if name.endswith(".b"):
                    module.register_forward_hook(add_copies)
        logits.append(model.logits(torch.from_numpy(rows.tokens[:, :-1].astype("int64"))))
    targets = torch.from_numpy(rows.tokens[:, 1:].astype("int64"))
    scored = torch.arange(1, rows.tokens.shape[1]) < torch.from_numpy(rows.lengths)[:, None]
    losses = [F.cross_entropy(some[scored], targets[scored]).item() for some in logits]
    real = torch.arange(rows.tokens.shape[1] - 1) < torch.from_numpy(rows.lengths)[:, None]
    assert not real.all()
    error = (logits[1] - logits[0])[real].abs().mean().item()
    return {
        "targets": scored.sum().item(),
        "perplexity_before": math.exp(losses[0]),
        "perplexity_after": math.exp(losses[1]),
        "logits_mean_absolute_error": error,
        "logits_mean_relative_error": error / logits[0][real].abs().mean().item(),
    }


def add_copies(linear, inputs, y):
    d_out, rank = linear.weight.shape
    return y + inputs[0] @ r_transposed(d_out, rank).T / math.sqrt(math.ceil(d_out / rank))


def test_figures_are_those_of_their_formulas(train, tmp_path):
    run, state = checkpoint_of(train, tmp_path / "run", "backbone=cola")
    fold_checkpoint(run, state, {"step": 3}, tmp_path / "folded", tokens=300)
    found = json.loads((tmp_path / "folded" / "fold.json").read_text())
    wanted = by_hand(run, state, 300)
    for name in ("perplexity_before", "perplexity_after"):
        assert found[f"fold/{name}"] == pytest.approx(wanted[name], rel=1e-6)
    assert found["fold/targets"] == wanted["targets"] > 200
    assert 0 < found["fold/logits_mean_absolute_error"] < 10 * wanted["logits_mean_absolute_error"] < 1e-5  # rounding
    assert found["fold/layers"] == 14 and found["fold/parameters_before"] == found["fold/parameters_after"]
    assert found["fold/latency_before"] > 0 and found["fold/latency_after"] > 0 and found["step"] == 3
    assert "| fold/perplexity_after |" in (tmp_path / "folded" / "README.md").read_text()


def test_errors_of_the_logits_are_those_at_the_text_and_not_at_its_padding():
    class Answers:
        def __init__(self, at_padding: float):
            self.at_padding = at_padding

        def logits(self, ids):
            return torch.where(ids == PAD, self.at_padding, 2.0)[..., None] * torch.tensor([1.0, -1.0, 1.0])

    tokens = np.array([[2, 2, EOS, PAD, PAD], [2, 1, 2, EOS, PAD]], np.uint16)
    rows = ValidationSet(tokens, np.array([3, 4], np.int32), 7)
    same, found = _compare(Answers(1.0), Answers(9.0), Answers(9.0), rows, torch.device("cpu"))
    assert same and found["targets"] == 5 and found["logits_mean_absolute_error"] == 0
    assert found["perplexity_before"] == found["perplexity_after"]


@pytest.mark.parametrize(("precision", "given"), [
    ("bf16", ()),
    ("bf16_mixed", ()),
    ("bf16_mixed", ("dlr.learn_alpha=true",)),
    ("fp32", ("dlr.learn_alpha=true",)),
    ("fp32", ("dlr.grouping=random",)),
    ("bf16", ("data.mask_documents=true", "eval.packing=packed")),
])  # fmt: skip
@pytest.mark.parametrize("backbone", ["lowrank", "cola_lax"])
def test_training_and_the_folded_model_are_equal_bit_for_bit(train, tmp_path, backbone, precision, given):
    run, state = checkpoint_of(train, tmp_path / "run", f"backbone={backbone}", f"precision={precision}", *given)
    report = fold_checkpoint(run, state, {}, tmp_path / "folded", tokens=200)
    assert "training      its weights equal the folded bit for bit, its logits equal the folded bit for bit" in report
    found = json.loads((tmp_path / "folded" / "fold.json").read_text())
    assert found["fold/perplexity_after"] == pytest.approx(found["fold/perplexity_before"], rel=0.02)
    assert (found["fold/logits_mean_absolute_error"] > 1e-4) == precision.startswith("bf16")
    learned = 14 if "dlr.learn_alpha=true" in given else 0
    assert found["fold/parameters_before"] - found["fold/parameters_after"] == learned


def test_a_run_of_branches_has_no_weights_to_compare(train, tmp_path):
    run, state = checkpoint_of(train, tmp_path / "run", "dlr.impl=branch")
    report = fold_checkpoint(run, state, {}, tmp_path / "folded", tokens=200)
    assert "training      its weights came of branches, its logits came of branches" in report


def test_nothing_is_reported_of_a_run_without_a_residual(train, tmp_path):
    run = train(tmp_path / "run", "train.steps=1")
    names = ("model.", "lm_head")
    state = {k: v for k, v in saved(run / "checkpoints/step_00000001").items() if k.startswith(names) and "/" not in k}
    report = fold_checkpoint(run, state, {}, tmp_path / "folded", tokens=200)
    assert report[0] == "layers        nothing to fold"


def test_a_fold_that_changes_the_model_is_not_exported(train, tmp_path, monkeypatch):
    run, state = checkpoint_of(train, tmp_path / "run")

    def wrong(model, tensors):
        return {n: 1.001 * t if n.endswith("o_proj.b.weight") else t for n, t in folded_state(model, tensors).items()}

    folded_state = fold_module.folded_state
    monkeypatch.setattr(fold_module, "folded_state", wrong)
    with pytest.raises(UserError, match=r"does not compute what was trained.*weights DIFFER"):
        fold_checkpoint(run, state, {}, tmp_path / "folded", tokens=200)
    assert not (tmp_path / "folded").exists()


def test_text_that_is_away_is_named_and_can_be_left_out(train, tmp_path):
    run, state = checkpoint_of(train, tmp_path / "run")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("root: ", "root: /nowhere", 1))
    with pytest.raises(UserError, match="--tokens 0 folds without it"):
        fold_checkpoint(run, state, {}, tmp_path / "folded", tokens=200)
    fold_checkpoint(run, state, {}, tmp_path / "folded", tokens=0)
    assert (tmp_path / "folded" / "model.safetensors").exists()


def test_the_perplexity_of_other_text_is_not_told_as_the_runs(train, tmp_path, corpus):
    text = tmp_path / "text"
    shutil.copytree(corpus, text)
    run, state = checkpoint_of(train, tmp_path / "run", f"data.root={text}")
    (shard,) = text.glob("c4-validation*")
    with gzip.open(shard, "at") as file:
        file.write(json.dumps({"text": "another day"}) + "\n")
    with pytest.raises(UserError, match=r"text: .* is another text by now, data\.shards=\w+, .*\n--tokens 0 folds"):
        fold_checkpoint(run, state, {}, tmp_path / "folded", tokens=200)
    assert not (tmp_path / "folded").exists()
    fold_checkpoint(run, state, {}, tmp_path / "folded", tokens=0)
    manifest = json.loads((run / "manifest.json").read_text())
    del manifest["identity"]["data.shards"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert len(fold_checkpoint(run, state, {}, tmp_path / "folded", tokens=200)) > 1  # it says nothing of its text


def test_tokens_made_of_the_runs_text_are_the_same_text(train, tmp_path, corpus):
    text = open_source(load(["scale=tiny", "data=c4_local", f"data.root={corpus}"]))
    prepare(text, Tokenizer(corpus / "spiece.model"), tmp_path / "tokens", 1, lambda _: None)
    run, state = checkpoint_of(train, tmp_path / "run", "data=tokens", f"data.root={tmp_path}/tokens")
    assert len(fold_checkpoint(run, state, {}, tmp_path / "folded", tokens=200)) > 1
