"""The exported folder is what was trained, for whoever has transformers and not this package."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from small_tokenizer import PIECES, train

from dlr_pretrain.deploy import export as export_module
from dlr_pretrain.deploy.export import EXPORTED as KNOBS
from dlr_pretrain.deploy.export import MODELING, export, write_weights
from dlr_pretrain.deploy.modeling_lowrank_llama import LAYERS
from dlr_pretrain.util import files as durable
from dlr_pretrain.util.errors import UserError
from tests.deploy.models import HIDDEN, KINDS, RANK, WIDE, configured, of_kind, trained

ROWS = PIECES + 8  # more embedding rows than pieces
RECORD = {"step": 7, "train/tokens": 14_336, "perf/mfu": None, "eval/perplexity": 51.23456}
COLA = of_kind("cola")


@pytest.fixture(scope="module")
def spiece(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("spiece"))


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(3, ROWS, (2, 24), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def answers(tmp_path_factory, spiece, ids) -> dict:
    """What transformers makes of a folder of each kind, and of one in bf16 and one in shards.

    DLR_TEST_FOREIGN_PYTHON names the Python of another transformers than the installed one.
    """
    root, scratch = tmp_path_factory.mktemp("folders"), tmp_path_factory.mktemp("scratch")
    for kind in KINDS:
        export(root / kind, of_kind(kind), trained(of_kind(kind), ROWS).state_dict(), spiece, RECORD)
    weights = trained(COLA, ROWS).state_dict()
    halves = {name: tensor.bfloat16() for name, tensor in weights.items()}
    for name, tensors in (("cola-bf16", halves), ("cola-sharded", weights)):
        export(root / name, COLA, tensors, spiece, RECORD)
    (root / "cola-sharded/model.safetensors").unlink()
    write_weights(root / "cola-sharded", weights, shard_bytes=30_000)
    torch.save(ids, root / "ids.pt")
    script = Path(__file__).with_name("foreign_checks.py")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_MODULES_CACHE": str(scratch / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [os.environ.get("DLR_TEST_FOREIGN_PYTHON", sys.executable), str(script), str(root)]
    done = subprocess.run(
        [*command, str(scratch / "answers.pt")], env=environment, cwd=scratch, capture_output=True, text=True
    )
    assert done.returncode == 0 and "model of type" not in done.stderr, done.stderr
    return torch.load(scratch / "answers.pt")


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_our_model(answers, ids, kind):
    """Which the parity tests hold against its formula."""
    wanted = trained(of_kind(kind), ROWS).double().logits(ids)
    assert (answers[kind]["logits"] - wanted).abs().max() < 1e-5 * wanted.std()


@pytest.mark.parametrize("kind", [*KINDS, "cola-bf16", "cola-sharded"])
def test_a_folder_loads_strictly_generates_and_is_saved_again(answers, kind):
    found, full = answers[kind], kind == "full"
    assert found["loading"] == {} and answers["imported"] == []
    assert found["class"] == ("LlamaForCausalLM" if full else "LowRankLlamaForCausalLM")
    assert found["dtype"] == (torch.bfloat16 if kind == "cola-bf16" else torch.float32)
    assert found["ended"] == [*found["open"], 1] and 1 not in found["literal"]
    if kind != "cola-bf16":  # rounding decides between near-equal logits
        assert torch.equal(found["cached"], found["uncached"]) and torch.equal(found["batched"], found["alone"])
    assert torch.equal(found["reloaded"], found["logits"])
    kept = found["config"]
    assert (kept.get("bos_token_id"), kept["pad_token_id"], kept["eos_token_id"]) == (None, 0, 1)
    assert (kept["rms_norm_eps"], kept["max_position_embeddings"]) == (1e-6, 1024)
    assert kept["hidden_act"] == ("linear" if kind == "cola-linear" else "silu")
    if kind in KINDS and not full:
        knobs = of_kind(kind).backbone.knobs
        assert kept["backbone"] == kind.split("-")[0] and all(
            kept[name] == knobs[name] for name in KNOBS[kept["backbone"]]
        )
    assert torch.equal(answers["cola-sharded"]["logits"], answers["cola"]["logits"])


def test_a_fresh_model_starts_as_ours(answers):
    """From a configuration alone, the factors are drawn with our standard deviation, not the library's 0.02."""
    std = answers["cola"]["fresh_std"]
    for name, width in (("self_attn.q_proj", 2 * HIDDEN), ("mlp.down_proj", HIDDEN + WIDE)):
        for factor in "ab":
            found = std[f"model.layers.1.{name}.{factor}.weight"]
            assert found == pytest.approx((RANK * width) ** -0.25, rel=0.2)
    assert std["lm_head.weight"] == pytest.approx(0.02, rel=0.2)


def test_the_modeling_file_needs_torch_and_transformers_alone():
    tree = ast.parse(MODELING.read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {node.module if isinstance(node, ast.ImportFrom) else alias.name for node in nodes for alias in node.names}
    assert {name.split(".")[0] for name in names} - sys.stdlib_module_names == {"torch", "transformers"}
    assert set(KNOBS) == set(LAYERS) == {kind.split("-")[0] for kind in KINDS} - {"full"}


def test_weights_are_stored_bit_for_bit_with_a_card(tmp_path, spiece):
    weights = trained(COLA, ROWS).state_dict()
    export(tmp_path / "folded", COLA, weights, spiece, RECORD)
    stored = load_file(tmp_path / "folded/model.safetensors")
    assert stored.keys() == weights.keys() and all(torch.equal(stored[name], weights[name]) for name in weights)
    readme = (tmp_path / "folded/README.md").read_text()
    for words in ("| precision | fp32 |", "| train/tokens | 14,336 |", "51.23", "| trained on | sample, packed |",
                  '`target_modules="all-linear"`'):  # fmt: skip
        assert words in readme
    assert not any(words in readme for words in ("mfu", "/private/texts", "Latent Residuals"))
    assert yaml.safe_load(readme.split("---")[1])["tags"] == ["pre-training", "low-rank", "cola"]
    written = yaml.safe_load(readme.split("```yaml")[1].split("```")[0])
    assert written["backbone"]["name"] == "cola" and written["train"]["seq_len"] == 256
    dlr = replace(of_kind("cola_lax"), dlr=replace(COLA.dlr, name="on", enabled=True))
    export(tmp_path / "dlr", dlr, trained(dlr, ROWS).state_dict(), spiece, RECORD)
    readme = (tmp_path / "dlr/README.md").read_text()
    assert "# LLaMA tiny, cola_lax + DLR (on), folded" in readme
    assert "Zero-Inference-Cost Latent Residuals for Low-Rank Pre-Training" in readme


@pytest.mark.parametrize("words", [(), ("latent_scale=0.3", "swiglu_silu=false")])
def test_the_colas_authors_layout_is_that_of_their_formula(tmp_path, spiece, words):
    """Theirs is y = silu(x A) B."""
    cfg = configured("backbone=cola", f"backbone.rank={RANK}", *(f"backbone.{word}" for word in words))
    ours = trained(cfg, ROWS).state_dict()
    export(tmp_path / "folded", cfg, ours, spiece, RECORD, layout="cola")
    assert not (tmp_path / "folded" / MODELING.name).exists()
    settings = json.loads((tmp_path / "folded/config.json").read_text())
    assert (settings["model_type"], settings["architectures"], settings["rank"]) == ("cola", ["ColaForCausalLM"], RANK)
    assert settings["hidden_act"] == "silu" and settings["only_lr_act"] == ("swiglu_silu=false" in words)
    stored, at = load_file(tmp_path / "folded/model.safetensors"), "model.layers.0.mlp.up_proj"
    assert torch.equal(stored[f"{at}.cola_a"].T, ours[f"{at}.a.weight"])
    torch.testing.assert_close(stored[f"{at}.cola_b"].T, cfg.backbone.knobs["latent_scale"] * ours[f"{at}.b.weight"])
    assert not any(name.endswith((".a.weight", ".b.weight")) for name in stored)
    with pytest.raises(UserError, match="holds CoLA's layers alone, and this is backbone=lowrank"):
        export(tmp_path / "other", of_kind("lowrank"), ours, spiece, RECORD, layout="cola")


def test_an_older_folder_stays_with_what_was_put_into_it(tmp_path, spiece, monkeypatch):
    folder, tensors = tmp_path / "folded", trained(COLA, ROWS).state_dict()
    export(folder, COLA, tensors, spiece, {"step": 1})
    with monkeypatch.context() as broken, pytest.raises(OSError, match="disk full"):
        broken.setattr(export_module, "export_tokenizer", _disk_full)
        export(folder, COLA, tensors, spiece, {"step": 2})
    assert "| step | 1 |" in (folder / "README.md").read_text()
    (folder / "zero_shot.json").write_text("measured")
    export(folder, COLA, tensors, spiece, {"step": 2})
    assert "| step | 2 |" in (folder / "README.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folded", "folded_1"]
    assert (tmp_path / "folded_1/zero_shot.json").read_text() == "measured"


def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path, spiece, monkeypatch):
    synced, rename = [], Path.rename

    def named(self, target):
        inside = {str(path.relative_to(self)) for path in self.rglob("*")}
        assert inside and {str(self / name) for name in inside} | {str(self)} <= set(synced)
        synced.clear()
        return rename(self, target)

    sync = durable.sync
    for module in (durable, export_module):
        monkeypatch.setattr(module, "sync", lambda path: (synced.append(str(path)), sync(path)))
    monkeypatch.setattr(Path, "rename", named)
    export(tmp_path / "folded", COLA, trained(COLA, ROWS).state_dict(), spiece, {"step": 1})
    assert synced == [str(tmp_path)]


def _disk_full(*_):
    raise OSError("disk full")


def test_a_difference_is_found_and_what_does_not_load_is_named(tmp_path, spiece, ids, monkeypatch):
    folder, weights = tmp_path / "folded", trained(COLA, ROWS).bfloat16().state_dict()
    assert float(export(folder, COLA, weights, spiece, RECORD, ids).split("agree to ")[1].split()[0]) < 1e-5
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "transformers", None)
        said = export(tmp_path / "unseen", COLA, weights, spiece, RECORD, ids)
        assert said.startswith("not verified: transformers cannot be imported")
    changed = weights | {"lm_head.weight": 1.02 * weights["lm_head.weight"]}
    for written, message in (
        (changed, "beyond the bound"),
        ({name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}, r"norm\.weight: missing"),
    ):
        with monkeypatch.context() as wrong, pytest.raises(UserError, match=message):
            wrong.setattr(export_module, "write_weights", lambda to, _, own=written: write_weights(to, own))
            export(tmp_path / "wrong", COLA, weights, spiece, RECORD, ids)
        assert not (tmp_path / "wrong").exists() and (tmp_path / ".wrong.partial").exists()
