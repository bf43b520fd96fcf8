"""The exported folder computes what was trained, in transformers, without this package."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from dlr_pretrain.data.tokenizer import load_tokenizer
from dlr_pretrain.deploy import export as export_module
from dlr_pretrain.deploy import exportable
from dlr_pretrain.deploy.export import export, exported_keys, modeling, open_folder, write_weights, written_whole
from dlr_pretrain.deploy.exportable import layer_difference, require_exportable
from dlr_pretrain.deploy.exported_layers import CALL, LAYERS, LaxLinear, LowRankLinear
from dlr_pretrain.deploy.tokenizer import export_tokenizer
from dlr_pretrain.train.corpus import open_corpus
from dlr_pretrain.util import files as durable
from dlr_pretrain.util.errors import UserError, need
from dlr_pretrain.util.files import LOCK
from tests.deploy.models import KINDS, exported, of_kind, trained
from tests.parity.reference import weights
from tests.unit.data.data_corpus import PIECES, small_model

ROWS = PIECES + 8  # more embedding rows than pieces
RECORD = {"step": 7, "train/tokens": 14_336, "perf/mfu": None, "eval/perplexity": 51.23456}
COLA = of_kind("cola")
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def spiece(tmp_path_factory) -> Path:
    return small_model(tmp_path_factory.mktemp("spiece"))


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(3, ROWS, (2, 24), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_loads_computes_generates_and_is_saved(kind, tmp_path, spiece, ids):
    """Loaded by the folder's own file, it agrees in fp32 with our model, whose formula the parity tests check."""
    ours, trust = trained(of_kind(kind), ROWS), {"trust_remote_code": True}
    export(tmp_path / "folded", of_kind(kind), weights(ours), spiece, RECORD)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "folded", output_loading_info=True, **trust)
    assert not any(report.values()) and model.dtype == torch.float32
    assert type(model).__name__ == ("LlamaForCausalLM" if kind == "full" else "LowRankLlamaForCausalLM")
    with torch.no_grad():
        logits, wanted = model(input_ids=ids).logits, ours.double().logits(ids)
    assert (logits - wanted).abs().max() < 1e-5 * wanted.std()
    greedy = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    cached, uncached = (model.generate(ids[:, :8], use_cache=use, **greedy) for use in (True, False))
    assert torch.equal(cached, uncached)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "folded", **trust)
    prompts = tokenizer(["the house", "two thin matrices and the river"], return_tensors="pt", padding=True)
    alone = model.generate(**tokenizer("the house", return_tensors="pt"), **greedy)
    assert torch.equal(model.generate(**prompts, **greedy)[0, -12:], alone[0, -12:])
    assert tokenizer("a b" + tokenizer.eos_token).input_ids == [*tokenizer("a b").input_ids, 1]
    assert 1 not in tokenizer("a </s> b", split_special_tokens=True).input_ids
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", **trust)
    assert torch.equal(again(input_ids=ids).logits, logits)
    kept, cfg = json.loads((tmp_path / "again/config.json").read_text()), of_kind(kind)
    assert (kept.get("bos_token_id"), kept["pad_token_id"], kept["eos_token_id"]) == (None, 0, 1)
    assert (kept["rms_norm_eps"], kept["max_position_embeddings"]) == (1e-6, 1024)
    assert kept["hidden_act"] == ("linear" if kind == "cola-linear" else "silu")
    assert all(kept[name] == getattr(cfg.backbone, name) for name in exported_keys(cfg) or ())


def test_weights_in_shards_are_loaded(tmp_path, spiece):
    tensors = weights(trained(COLA, ROWS).bfloat16())
    export(tmp_path / "folded", COLA, tensors, spiece, RECORD)
    (tmp_path / "folded" / WEIGHTS).unlink()
    write_weights(tmp_path / "folded", tensors, shard_bytes=30_000)
    assert len(list((tmp_path / "folded").glob("*.safetensors"))) > 1
    model, _ = open_folder(tmp_path / "folded")
    assert all(torch.equal(tensors[name], tensor) for name, tensor in model.state_dict().items())


def test_the_modeling_file_needs_torch_and_transformers_alone():
    imported = set(re.findall(r"^ *(?:from|import) (\w+)", modeling(COLA), flags=re.MULTILINE))
    assert imported - sys.stdlib_module_names == {"torch", "transformers"}
    assert set(LAYERS) == {kind.split("-")[0] for kind in KINDS} - {"full"}


def test_weights_are_stored_bit_for_bit_with_a_card(tmp_path, spiece):
    tensors = weights(trained(COLA, ROWS))
    export(tmp_path / "folded", COLA, tensors, spiece, RECORD)
    stored = load_file(tmp_path / "folded/model.safetensors")
    assert stored.keys() == tensors.keys() and all(torch.equal(stored[name], tensors[name]) for name in tensors)
    readme = (tmp_path / "folded/README.md").read_text()
    for words in ("| precision | fp32 |", "| train/tokens | 14,336 |", "51.23", "| trained on | sample, packed |",
                  '`target_modules="all-linear"`'):  # fmt: skip
        assert words in readme
    assert not any(words in readme for words in ("mfu", "/private/texts", "Latent Residuals"))
    assert yaml.safe_load(readme.split("---")[1])["tags"] == ["pre-training", "low-rank", "cola"]
    written = yaml.safe_load(readme.split("```yaml")[1].split("```")[0])
    assert written["backbone"]["name"] == "cola" and written["train"]["seq_len"] == 256
    dlr = replace(of_kind("cola_lax"), dlr=replace(COLA.dlr, name="on", enabled=True))
    export(tmp_path / "dlr", dlr, weights(trained(dlr, ROWS)), spiece, RECORD)
    readme = (tmp_path / "dlr/README.md").read_text()
    assert "# LLaMA tiny, cola_lax + DLR (on), folded" in readme
    assert "Zero-Inference-Cost Latent Residuals for Low-Rank Pre-Training" in readme


def test_a_folder_is_whole_before_it_has_its_name(tmp_path, spiece, monkeypatch):
    folder, tensors, synced, rename = tmp_path / "folded", weights(trained(COLA, ROWS)), set(), Path.rename

    def named(self, target):
        if self.name.endswith(".partial"):
            assert {self, *self.rglob("*")} <= synced
        return rename(self, target)

    def flushed(path):
        if path.name == WEIGHTS:
            with pytest.raises(UserError, match="is being written by process"), written_whole(folder):
                pass
        synced.add(path)
        sync(path)

    sync = durable.sync
    for module in (durable, export_module):
        monkeypatch.setattr(module, "sync", flushed)
    monkeypatch.setattr(Path, "rename", named)
    export(folder, COLA, tensors, spiece, {"step": 1})
    assert not (folder / LOCK).exists()
    with monkeypatch.context() as broken, pytest.raises(OSError, match="disk full"):
        broken.setattr(export_module, "export_tokenizer", Mock(side_effect=OSError("disk full")))
        export(folder, COLA, tensors, spiece, {"step": 2})
    assert "| step | 1 |" in (folder / "README.md").read_text()
    (folder / "zero_shot.json").write_text("measured")
    export(folder, COLA, tensors, spiece, {"step": 2})
    assert "| step | 2 |" in (folder / "README.md").read_text() and tmp_path in synced
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folded", "folded_1"]
    assert (tmp_path / "folded_1/zero_shot.json").read_text() == "measured"


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_llama_cpp_finds_the_vocabulary_of_bpe_alone(tmp_path, kind):
    """Its converter reads any tokenizer.model as BPE; without that file, it refuses a Unigram model."""
    export_tokenizer(tmp_path, load_tokenizer(small_model(tmp_path, model_type=kind)), 1024)
    assert (tmp_path / "tokenizer.model").exists() == (kind == "bpe")
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["type"].lower() == kind


def test_a_backbone_without_an_exported_layer_is_written(tmp_path, spiece, ids, monkeypatch):
    monkeypatch.delattr(type(COLA.backbone), "exported_keys")
    said = export(tmp_path / "folded", COLA, weights(trained(COLA, ROWS)), spiece, RECORD, ids)
    assert said.startswith("transformers cannot load backbone=cola yet")
    assert said in (tmp_path / "folded/README.md").read_text() and (tmp_path / "folded" / WEIGHTS).exists()


class WideLinear(LowRankLinear):
    def __init__(self, d_in, d_out, *of):
        super().__init__(d_in, d_out + 1, *of)


class ForeignLinear(LowRankLinear):
    def forward(self, x):
        return pytest.approx(x)


class LoudLinear(LowRankLinear):
    def forward(self, x):
        return super().forward(x) * (1.01 if self.block == 2 else 1)


class NoLayer(nn.Module):
    pass


class UnsavedLinear(LowRankLinear):
    def __init__(self, *of):
        super().__init__(*of)
        self.register_buffer("ramp", torch.ones(8), persistent=False)


class CarryingLinear(LowRankLinear):
    """A layer that reads latents without saying so by ``crosses``."""

    def forward(self, x):
        CALL.latents.by_layer[self.block, self.name] = x
        return super().forward(x)


class OwnLax(LaxLinear):
    pass


class CarefulLinear(LowRankLinear):
    """A layer that reads LLaMA's settings, the three dimensions of x and its values."""

    def forward(self, x):
        _batch, _length, _width = x.shape
        assert self.config.attention_dropout == 0 and not hasattr(self.config, "slope")
        assert self.config.head_dim == self.config.hidden_size // self.config.num_attention_heads
        assert self.config.num_hidden_layers == 7
        if x.isnan().any():
            raise ValueError
        return super().forward(x)

    def __init__(self, d_in, d_out, config, *of):
        super().__init__(d_in, d_out, config, *of)
        self.config = config


def test_a_layer_may_read_shapes_values_and_llamas_settings(monkeypatch):
    monkeypatch.setattr(type(COLA.backbone), "exported_layer", f"{__name__}.CarefulLinear")
    before = torch.get_rng_state()
    assert require_exportable(replace(COLA, scale=replace(COLA.scale, num_layers=7))) == ""
    assert torch.equal(torch.get_rng_state(), before)


def test_a_layer_of_ones_own_may_carry_latents(tmp_path, spiece, ids, monkeypatch):
    cfg = of_kind("lax")
    monkeypatch.setattr(type(cfg.backbone), "exported_layer", f"{__name__}.OwnLax")
    monkeypatch.setattr(cfg.backbone, "name", "mine")
    monkeypatch.setitem(LAYERS, "mine", OwnLax)
    assert require_exportable(cfg) == ""
    said = export(tmp_path / "folded", cfg, weights(trained(cfg, ROWS)), spiece, RECORD, ids)
    assert "differ by at most" in said


def test_an_error_of_a_trained_layer_is_its_own(monkeypatch):
    monkeypatch.setattr(type(COLA.backbone), "exported_layer", f"{__name__}.CarefulLinear")
    monkeypatch.setattr(COLA.backbone.layer, "activate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        require_exportable(COLA)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "full"])
def test_exported_layers_compute_what_is_trained(kind, monkeypatch):
    assert layer_difference(of_kind(kind)) == ""
    monkeypatch.setattr(exportable, "LAYER_BOUND", -1)  # they were compared
    assert "in model.layers.0.self_attn.q_proj" in layer_difference(of_kind(kind))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"exported_layer": f"{__name__}.CarefulLinear", "exported_keys": ("rank", "slope")},
            "'Options' object has no attribute 'slope'",
        ),
        ({"name": "mine"}, "LAYERS of exported_layers.py lacks it, and its options name no exported_layer"),
        ({"exported_layer": "no_such_package.Layer"}, "No module named 'no_such_package'"),
        ({"exported_layer": f"{__name__}.NoLinear"}, "has no attribute 'NoLinear'"),
        ({"exported_layer": f"{__name__}.ForeignLinear"}, "name 'pytest' is not defined"),
        (
            {"exported_layer": f"{__name__}.WideLinear"},
            r"b.weight is \(32, 8\) in training, and \(33, 8\) there, in model.layers.0.self_attn.q_proj",
        ),
        (
            {"exported_layer": f"{__name__}.LoudLinear"},
            "computes another formula: .* by 0.0[0-9]+ of their standard deviation, in model.layers.2.self_attn.q_proj",
        ),
        ({"exported_layer": f"{__name__}.NoLayer"}, "NoLayer is not a subclass of LowRankLinear"),
        ({"exported_layer": f"{__name__}.UnsavedLinear"}, "has a buffer with persistent=False, .*: ramp"),
        ({"exported_layer": f"{__name__}.CarryingLinear"}, "'NoneType' object has no attribute 'by_layer'"),
    ],
    ids=["key", "name", "package", "class", "foreign", "shape", "formula", "no layer", "buffer", "latents"],
)
def test_a_run_checks_the_exported_layer_before_its_text(changed, said, tmp_path, monkeypatch):
    for name, value in changed.items():
        monkeypatch.setattr(COLA.backbone if name == "name" else type(COLA.backbone), name, value)
    with pytest.raises(UserError, match=f"^backbone={COLA.backbone.name}: its exported layer .*{said}.* exported_keys"):
        open_corpus(COLA, tmp_path, Mock(), Mock())


def test_a_run_says_first_that_it_has_no_exported_layer(monkeypatch):
    assert require_exportable(COLA) == ""
    monkeypatch.delattr(type(COLA.backbone), "exported_keys")
    assert require_exportable(COLA) == "transformers cannot load backbone=cola yet: its options name no exported_keys"


def test_a_difference_from_the_trained_model_is_found(tmp_path, spiece, ids, monkeypatch):
    tensors = weights(trained(COLA, ROWS).bfloat16())
    said = export(tmp_path / "folded", COLA, tensors, spiece, RECORD, ids)
    assert float(said.split("at most ")[1].split()[0]) < 1e-5
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "transformers", None)
        said = export(tmp_path / "unseen", COLA, tensors, spiece, RECORD, ids)
        assert said.startswith("not verified: transformers cannot be imported")
    changed = tensors | {"lm_head.weight": 1.02 * tensors["lm_head.weight"]}
    monkeypatch.setattr(export_module, "write_weights", lambda to, _: write_weights(to, changed))
    with pytest.raises(UserError, match="beyond the bound"):
        export(tmp_path / "wrong", COLA, tensors, spiece, RECORD, ids)
    assert not (tmp_path / "wrong").exists() and (tmp_path / ".wrong.partial").exists()
    monkeypatch.undo()
    other = load_tokenizer(small_model(tmp_path, model_type="bpe"))
    monkeypatch.setattr(export_module, "export_tokenizer", lambda to, _, size: export_tokenizer(to, other, size))
    with pytest.raises(UserError, match="does not give the ids"):
        export(tmp_path / "other", COLA, tensors, spiece, RECORD, ids)


def test_a_folder_that_is_not_a_sound_export_is_refused(tmp_path, spiece):
    folder = exported(tmp_path / "folded", spiece, COLA, ROWS)
    assert open_folder(tmp_path)[0].state_dict().keys() == open_folder(folder)[0].state_dict().keys()  # of its run
    (saved := tmp_path / "new" / "checkpoints" / "step_00000002").mkdir(parents=True)
    for place in (saved.parents[1], saved):
        with pytest.raises(UserError, match=rf"has no config\.json.*python scripts/fold\.py {saved}"):
            open_folder(place)
    sound, config = load_file(folder / WEIGHTS), json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"model.norm.weight": None}, r"model\.norm\.weight: missing"),
        ({"model.layers.0.mlp.up_proj.b.dlr_mark": torch.ones(2)}, r"dlr_mark: not a tensor of this model"),
        ({"model.norm.weight": torch.ones(31)}, r"another shape: .*model\.norm\.weight"),
    ):
        tensors = {name: tensor for name, tensor in (sound | change).items() if tensor is not None}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        with pytest.raises(UserError, match=message):
            open_folder(folder)
    (folder / WEIGHTS).write_bytes(b"cut")
    for content in (json.dumps(config), json.dumps(config | {"backbone": "colla"}), "{"):
        (folder / "config.json").write_text(content)
        with pytest.raises(UserError, match=r"is not what an export wrote: .*Export it again"):
            open_folder(folder)
    with pytest.raises(UserError, match=r'needs absent-one, which is not installed. .* pip install -e "\.\[eval\]"'):
        need("absent-one", "eval")


@pytest.mark.parametrize("where", ["around it", "in it", "elsewhere, but no layer", "elsewhere"])
def test_code_that_may_have_come_with_a_folder_does_not_run(tmp_path, spiece, monkeypatch, where):
    """A downloaded config.json may name any module that Python finds, such as one beside the folder."""
    folder, ran = tmp_path / "download" / "folded", tmp_path / "ran"
    export(folder, COLA, weights(trained(COLA, ROWS)), spiece, RECORD)
    place = {"around it": folder.parent, "in it": folder}.get(where, tmp_path / "elsewhere")
    place.mkdir(exist_ok=True)
    base = "object" if where == "elsewhere, but no layer" else "LowRankLinear"
    module = f"planted_{len(where)}"
    (place / f"{module}.py").write_text(
        "from dlr_pretrain.deploy.exported_layers import LowRankLinear\n"
        f"open({str(ran)!r}, 'w')\nclass Layer({base}): pass\n"
    )
    monkeypatch.syspath_prepend(place)
    monkeypatch.setattr("dlr_pretrain.deploy.export.LAYERS", dict(LAYERS))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"exported_layer": f"{module}.Layer"}))
    said = {"elsewhere": "", "elsewhere, but no layer": "names the layer .* not a subclass of LowRankLinear"}
    if pattern := said.get(where, rf"names the layer {module}.Layer, which is in a folder around it"):
        with pytest.raises(UserError, match=pattern):
            open_folder(folder)
    else:
        open_folder(folder)
    assert ran.exists() == where.startswith("elsewhere")


@pytest.mark.parametrize("name", ["os.system", "builtins:print", "no_such.module", "collections.abc:Mapping"])
def test_only_a_layer_is_taken_for_one(tmp_path, spiece, name):
    export(tmp_path / "folded", COLA, weights(trained(COLA, ROWS)), spiece, RECORD)
    path = tmp_path / "folded" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"exported_layer": name}))
    with pytest.raises(UserError, match=f"{tmp_path}/folded: (names the layer|needs) {name}"):
        open_folder(tmp_path / "folded")
