"""A saved checkpoint folds to what the run itself writes at its end, merged where that is dense."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from dlr_pretrain.deploy import export as export_module
from dlr_pretrain.deploy.merge import deployed
from dlr_pretrain.models import build, fold_
from dlr_pretrain.models.dlr import active, residuals
from dlr_pretrain.models.llama import Llama
from dlr_pretrain.util.errors import EXIT_CONFIG, EXIT_FAILED, UserError
from dlr_pretrain.util.history import read_metrics
from tests.conftest import ROOT
from tests.parity.reference import VOCAB, small

pytestmark = pytest.mark.usefixtures("no_export", "in_this_process")
FILE = "model.safetensors"
CPU = torch.device("cpu")


@pytest.fixture
def fold(monkeypatch, capsys):
    """``scripts/fold.py`` in this process: its exit code and what it says."""
    spec = importlib.util.spec_from_file_location("fold_script", ROOT / "scripts" / "fold.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def run(*words) -> SimpleNamespace:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["fold.py", *map(str, words)])
        code = script.main()
        said = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=said.out, stderr=said.err)

    return run


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_mixed"])
def test_the_last_checkpoint_folds_to_the_runs_own_folder(train, tmp_path, fold, precision):
    run = train(tmp_path / "run", "backbone=cola", "dlr=on", f"precision={precision}", "train.steps=4")
    checkpoint = run / "checkpoints" / "step_00000004"
    assert "14 folded" in fold(checkpoint).stdout
    own, again = load_file(run / "folded" / FILE), load_file(run / "folded_step_00000004" / FILE)
    assert own.keys() == again.keys() and all(torch.equal(own[n], again[n]) for n in own)
    assert own["lm_head.weight"].dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
    if precision == "bf16_mixed":
        fold(checkpoint, "--output", tmp_path / "bf16", "--dtype", "bfloat16")
        cast = load_file(tmp_path / "bf16" / FILE)
        assert all(torch.equal(cast[n], own[n].to(torch.bfloat16)) for n in own)


def test_a_checkpoint_tells_its_own_evaluation_or_none(train, tmp_path, fold):
    run = train(tmp_path / "run", "train.steps=8", "eval.every=4", "checkpoint.every=7")
    told = {}
    for step in (7, 8):
        assert fold(run / "checkpoints" / f"step_{step:08d}", "--output", tmp_path / f"{step}").returncode == 0
        told[step] = json.loads((tmp_path / f"{step}" / "fold.json").read_text())
    assert told[7].keys() == {"step", "tokens", "real_tokens"}
    assert told[8]["eval/perplexity"] == read_metrics(run / "metrics.jsonl")[-1]["eval/perplexity"]


def test_the_script_runs_by_itself(train, tmp_path):
    run = train(tmp_path / "run", "dlr=on", "train.steps=1")
    script = [sys.executable, ROOT / "scripts" / "fold.py", run / "checkpoints" / "step_00000001", "--tokens", "200"]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    said = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert said.keys() == {
        *("layers", "parameters", "training", "perplexity", "logits", "latency", "checked", "written")
    }
    assert said["checked"].startswith("transformers loads it, its logits agree to")


def test_what_is_no_sound_checkpoint_is_named_and_nothing_is_overwritten(train, tmp_path, fold):
    run = train(tmp_path / "run", "train.steps=2")
    checkpoint, precious = run / "checkpoints" / "step_00000002", tmp_path / "thesis"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years")
    shutil.copytree(run / "folded", tmp_path / "alike")
    (tmp_path / "alike" / "config.json").write_text('{"model_type": "llama"}')
    for words, reason in (
        ([run], "name one as"),
        ([checkpoint.with_name("step_00000009")], "is not there; "),
        ([checkpoint, "--output", precious], "is in the way: it is no earlier export (thesis.txt). Move it away"),
        ([checkpoint, "--output", tmp_path / "alike"], "is in the way"),
        ([checkpoint, "--output", run], "is in the way"),
    ):
        refused = fold(*words)
        assert refused.returncode == EXIT_FAILED and refused.stderr.startswith("error: ") and reason in refused.stderr
    assert (precious / "thesis.txt").read_text() == "years"
    (part,) = checkpoint.glob("*.safetensors")
    weights = bytearray(part.read_bytes())
    weights[-50] ^= 1
    part.write_bytes(weights)
    assert "fails its checksum" in fold(checkpoint).stderr


def test_the_folder_that_the_command_runs_in_is_not_replaced(train, tmp_path, fold, monkeypatch):
    checkpoint = train(tmp_path / "run", "train.steps=1") / "checkpoints" / "step_00000001"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for word in (".", "..", tmp_path / "here"):
        refused = fold(checkpoint, "--output", word)
        assert refused.returncode == EXIT_CONFIG and f"--output={word}: is the folder that this" in refused.stderr
    assert fold(checkpoint, "--output", "new").returncode == 0 and (tmp_path / "here" / "new" / FILE).exists()


def test_what_was_put_into_an_earlier_export_stays_with_its_weights(train, tmp_path, fold, monkeypatch):
    notes, output = [], tmp_path / "output"
    monkeypatch.setattr(export_module, "tell", notes.append)
    run = train(tmp_path / "run", "train.steps=1")
    checkpoint = run / "checkpoints" / "step_00000001"
    for _ in range(2):
        assert fold(checkpoint, "--output", output).returncode == 0
    assert notes == [] and sorted(path.name for path in tmp_path.iterdir()) == ["output", "run"]
    (output / "zero_shot.json").write_text("measured")
    (output / FILE).write_bytes(b"weights")
    assert fold(checkpoint, "--output", output).returncode == 0
    kept = tmp_path / "output_kept1"
    assert (kept / "zero_shot.json").read_text() == "measured" and (kept / FILE).read_bytes() == b"weights"
    assert not (output / "zero_shot.json").exists() and (output / FILE).stat().st_size > 7
    assert len(notes) == 1 and f"{output} held what no export writes (zero_shot.json): it is {kept} now" in notes[0]
    config = json.loads((output / "config.json").read_text())
    (output / "config.json").write_text(json.dumps(config | {"transformers_version": "5.0"}))  # by save_pretrained
    assert fold(checkpoint, "--output", output).returncode == 0 and (tmp_path / "output_kept2" / FILE).exists()


def test_the_end_of_a_run_keeps_what_is_in_its_way(train, tmp_path, monkeypatch):
    monkeypatch.setattr(export_module, "tell", lambda _: None)
    run = train(tmp_path / "run", "train.steps=1")
    (run / "folded" / "notes.txt").write_text("mine")
    (run / "folded" / "README.md").unlink()  # by which a run knows that it is complete
    train(run, "train.steps=1")
    shutil.rmtree(run / "folded")
    (run / "folded").mkdir()
    (run / "folded" / "notes.txt").write_text("alone")
    train(run, "train.steps=1")
    assert [(run / f"folded_kept{n}" / "notes.txt").read_text() for n in (1, 2)] == ["mine", "alone"]
    assert (run / "folded_kept1" / FILE).exists() and (run / "folded" / FILE).exists()


# ----------------------------------------------------------------------------------------------------
# Merged into dense weights


@pytest.mark.parametrize(("backbone", "merge", "words"), [
    ("lora", False, ()),
    ("relora", False, ()),
    ("sltrain", False, ("backbone.sparsity=0.1",)),
    ("lowrank", True, ("backbone.latent_scale=0.4",)),
    ("lowrank", True, ("backbone.learn_latent_scale=true", "dlr=on")),
])  # fmt: skip
def test_what_is_deployed_dense_computes_what_was_trained(backbone, merge, words):
    cfg = small(backbone, *words)
    model = build(cfg, VOCAB, CPU).double().requires_grad_(False)
    for p in model.parameters():
        p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype)
    ids = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(0))
    with active(model):
        trained = model.logits(ids)
    if residuals(model):
        fold_(model)
    own, tensors = deployed(cfg, model.state_dict(), merge)
    plain = Llama(small("full"), VOCAB).double()
    plain.load_state_dict(tensors)
    assert own.backbone.name == "full"
    torch.testing.assert_close(plain.logits(ids), trained, rtol=1e-11, atol=1e-11)


def test_merged_weights_are_formed_in_fp32_and_rounded_once():
    cfg = small("sltrain")
    model = build(cfg, VOCAB, CPU, torch.bfloat16).requires_grad_(False)
    for p in model.parameters():
        p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    _, tensors = deployed(cfg, model.state_dict())
    p = model.model.layers[1].mlp.up_proj
    exact = 32 / 8 * (p.b.weight.double() @ p.a.weight.double())
    exact.view(-1)[p.index] += p.values.double()
    found = tensors["model.layers.1.mlp.up_proj.weight"]
    assert found.dtype == torch.bfloat16
    half = 0.502 * torch.finfo(torch.bfloat16).eps * exact.abs()  # and fp32's own, where terms cancel
    assert ((found.double() - exact).abs() <= half + 1e-5).all()


@pytest.mark.parametrize("backbone", ["cola", "lost", "lax", "cola_lax"])
def test_layers_that_are_no_matrix_are_not_merged(backbone):
    cfg = small(backbone)
    tensors = build(cfg, VOCAB, CPU).state_dict()
    with pytest.raises(UserError, match=r"layers are not a single matrix: they cannot be merged"):
        deployed(cfg, tensors, merge=True)
    same, left = deployed(cfg, tensors)
    assert same is cfg and left is tensors


@pytest.mark.parametrize("precision", ["bf16_mixed", "bf16"])
@pytest.mark.parametrize("backbone", ["relora", "sltrain"])
def test_a_dense_deployment_is_a_plain_llama_at_the_end_and_from_a_checkpoint(
    train, tmp_path, fold, backbone, precision
):
    merges = ["backbone.merge_every=3", "backbone.restart_warmup=1"] if backbone == "relora" else []
    run = train(tmp_path / "run", f"backbone={backbone}", f"precision={precision}", "train.steps=4", *merges)
    fold(run / "checkpoints" / "step_00000004", "--output", tmp_path / "again")
    own, again = load_file(run / "folded" / FILE), load_file(tmp_path / "again" / FILE)
    assert all(torch.equal(own[n], again[n]) for n in own) and own.keys() == again.keys()
    assert own.keys() == Llama(small("full"), VOCAB).state_dict().keys()
    assert json.loads((run / "folded" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert f"LLaMA tiny, {backbone}, merged into dense weights" in (run / "folded" / "README.md").read_text()


def test_a_low_rank_run_is_merged_on_request_and_then_cast(train, tmp_path, fold):
    run = train(tmp_path / "run", "dlr=on", "precision=bf16_mixed", "train.steps=2")
    checkpoint = run / "checkpoints" / "step_00000002"
    done = fold(checkpoint, "--dense", "--dtype", "bfloat16", "--output", tmp_path / "merged")
    assert "14 folded" in done.stdout and "checked       transformers loads it" in done.stdout
    factors, merged = load_file(run / "folded" / FILE), load_file(tmp_path / "merged" / FILE)
    at = "model.layers.0.self_attn.o_proj"
    product = factors[f"{at}.b.weight"] @ factors[f"{at}.a.weight"]
    assert torch.equal(merged[f"{at}.weight"], product.bfloat16())
    title = next(line for line in (tmp_path / "merged" / "README.md").read_text().splitlines() if line[:1] == "#")
    assert title == "# LLaMA tiny, lowrank + DLR (on), folded, merged into dense weights"


def test_the_script_says_why_it_cannot_merge(train, tmp_path, fold):
    run = train(tmp_path / "run", "backbone=cola", "train.steps=1")
    refused = fold(run / "checkpoints" / "step_00000001", "--dense")
    assert refused.returncode == EXIT_FAILED and "Cola layers are not a single matrix" in refused.stderr


def test_a_dense_merge_of_dlr_is_a_plain_llama_that_computes_the_same(train, tmp_path, fold):
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    run = train(tmp_path / "run", "dlr=on", "train.steps=3", "train.lr=0.1")
    fold(run / "checkpoints" / "step_00000003", "--dense", "--output", tmp_path / "merged")
    factors = AutoModelForCausalLM.from_pretrained(run / "folded", trust_remote_code=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert type(merged) is LlamaForCausalLM
    ids = torch.randint(3, 120, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = factors(input_ids=ids).logits
        assert (merged(input_ids=ids).logits - wanted).abs().max() < 1e-5 * wanted.std()


def test_the_script_writes_the_layout_of_the_colas_authors(train, tmp_path, fold):
    run = train(tmp_path / "run", "backbone=cola", "dlr=on", "train.steps=1")
    checkpoint, at = run / "checkpoints" / "step_00000001", "model.layers.1.mlp.down_proj"
    assert fold(checkpoint, "--layout", "cola", "--output", tmp_path / "theirs").returncode == 0
    own, theirs = load_file(run / "folded" / FILE), load_file(tmp_path / "theirs" / FILE)
    for ours, name in (("a.weight", "cola_a"), ("b.weight", "cola_b")):
        assert torch.equal(theirs[f"{at}.{name}"], own[f"{at}.{ours}"].T)
    other = train(tmp_path / "other", "train.steps=1") / "checkpoints" / "step_00000001"
    refused = fold(other, "--layout", "cola")
    assert refused.returncode == EXIT_FAILED and "this is backbone=lowrank" in refused.stderr
    with pytest.raises(SystemExit):
        fold(checkpoint, "--layout", "cola", "--dense")
