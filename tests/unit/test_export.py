"""The exported folder is what was trained, for whoever has transformers and not this package."""

import ast
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from small_tokenizer import PIECES, train

from dlr_pretrain.cli import load
from dlr_pretrain.config import Choice, Config
from dlr_pretrain.deploy import export as export_module
from dlr_pretrain.deploy.export import MODELING, export, write_weights
from dlr_pretrain.deploy.verify import agreement, verify
from dlr_pretrain.models.llama import Llama
from dlr_pretrain.util import files as durable
from dlr_pretrain.util.errors import UserError

HIDDEN, WIDE, HEADS, LAYERS, RANK, ROWS = 32, 83, 4, 3, 8, PIECES + 8  # more embedding rows than pieces
RECORD = {"step": 7, "train/tokens": 14_336, "perf/mfu": None, "eval/perplexity": 51.23456}
LAX = {"gate": "tensor", "norm": "latent", "crossing": "pre_act", "recursive": True}
LITERAL = {"gate": "linear", "norm": "output", "crossing": "post_act", "recursive": False}  # the DLR paper's text
KNOBS = {
    "full": {},
    "lowrank": {"rank": RANK},
    "lowrank-scaled": {"rank": RANK, "latent_scale": 0.3, "learn_latent_scale": False},
    "cola": {"rank": RANK, "swiglu_silu": True},
    "cola-learned": {"rank": RANK, "learn_latent_scale": True, "swiglu_silu": False},
    "lost": {"rank": RANK, "gamma": 0.7, "sparsity": 0.1, "activation": "silu"},
    "lax": {"rank": RANK, **LITERAL},
    "lax-dense": {"rank": RANK, **LAX, "gate": "dense", "recursive": False},
    "cola_lax": {"rank": RANK, **LAX},
}
KINDS = tuple(KNOBS)


def config(kind: str) -> Config:
    """A configuration of the small shape; ``kind`` is a backbone, and what is special about it."""
    shape = {"hidden_size": HIDDEN, "intermediate_size": WIDE, "num_heads": HEADS, "num_layers": LAYERS, "rank": RANK}
    cfg = load(["scale=tiny", "precision=fp32", "data=sample", "data.root=/private/texts", "device=cpu"])
    cfg = replace(cfg, data=replace(cfg.data, train_files="/private/texts/*.gz"))
    return replace(
        cfg,
        scale=replace(cfg.scale, name="test", **shape),
        backbone=Choice(kind.split("-")[0], KNOBS[kind]),
        eval=replace(cfg.eval, packing="pad"),
    )


def trained(kind: str) -> Llama:
    """A model whose norms are not one and whose logits are not tiny, as after training."""
    torch.manual_seed(3)
    model = Llama(config(kind), ROWS)
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape) * 0.2 if p.ndim > 1 else 0.5 + torch.rand(p.shape))
    for name, buffer in model.named_buffers():
        channels = torch.randperm(WIDE if "down_proj" in name else HIDDEN)[: len(buffer)]
        buffer.copy_(channels.sort().values)
    return model


def projections(weights: dict, kind: str):
    """(x, name) -> y of a backbone, from its formula; the crossing ones remember the block before."""
    backbone, knobs, crossing = kind.split("-")[0], KNOBS[kind], {}

    def layer_norm(h, w):
        h = h - h.mean(-1, keepdim=True)
        return h / torch.sqrt((h * h).mean(-1, keepdim=True) + 1e-6) * w["norm.weight"] + w["norm.bias"]

    def gate(c, w):
        if knobs["gate"] == "linear":
            return w["gate.weight"] * c
        if knobs["gate"] == "dense":
            return c @ w["gate.weight"].T + w["gate.bias"]
        return torch.einsum("tcd,de,cf->tfe", c.reshape(-1, 2, 4), w["gate.e1"], w["gate.e2"]).reshape(c.shape)

    def crossed(h, w, phi, slot):
        c, h = crossing.get(slot), h
        own = z = phi(h)
        if c is not None and knobs["crossing"] == "pre_act":
            z = phi(layer_norm(h + gate(c, w), w))
        elif c is not None:
            z = own + gate(c, w)
        crossing[slot] = z if knobs["recursive"] else own
        y = z @ w["b.weight"].T
        return layer_norm(y, w) if c is not None and knobs["norm"] == "output" else y

    def project(x, name):
        w = {key.removeprefix(f"{name}."): value for key, value in weights.items() if key.startswith(f"{name}.")}
        if backbone == "full":
            return x @ w["weight"].T
        h = x @ w["a.weight"].T
        phi = F.silu if backbone in ("cola", "lost", "cola_lax") else (lambda h: h)
        if backbone in ("lax", "cola_lax"):
            return crossed(h, w, phi, name.split(".")[-1])
        if backbone == "lost":
            return 0.7 * phi(h) @ w["b.weight"].T + 0.3 * x[:, w["channels"]] @ w["s.weight"].T
        s = torch.tanh(w["theta"]) if "theta" in w else knobs.get("latent_scale", 1.0)
        return s * phi(h) @ w["b.weight"].T

    return project


def formulas(weights: dict, kind: str, ids: torch.Tensor) -> torch.Tensor:
    """LLaMA written out, in fp64: ids [T] -> logits [T, vocabulary]."""
    weights = {name: t.double() if t.is_floating_point() else t for name, t in weights.items()}
    linear, act = projections(weights, kind), F.silu if KNOBS[kind].get("swiglu_silu", True) else (lambda h: h)

    def norm(x, name):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weights[f"{name}.weight"]

    def turned(x):  # position t turns the pair (i, i + E/2) of a head by t / 10000^(2i/E)
        half = x.shape[-1] // 2
        angle = torch.outer(torch.arange(len(x)).double(), 10000.0 ** (-torch.arange(half).double() / half))
        pair = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((pair.real, pair.imag), -1)

    x, width = weights["model.embed_tokens.weight"][ids], HIDDEN // HEADS
    mask = torch.full((len(ids), len(ids)), -math.inf).triu(1)
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        h = norm(x, f"{at}.input_layernorm")
        q, k, v = (linear(h, f"{at}.self_attn.{p}_proj").split(width, -1) for p in "qkv")
        heads = [
            (turned(q) @ turned(k).T / math.sqrt(width) + mask).softmax(-1) @ v for q, k, v in zip(q, k, v, strict=True)
        ]
        x = x + linear(torch.cat(heads, -1), f"{at}.self_attn.o_proj")
        h = norm(x, f"{at}.post_attention_layernorm")
        gated = act(linear(h, f"{at}.mlp.gate_proj")) * linear(h, f"{at}.mlp.up_proj")
        x = x + linear(gated, f"{at}.mlp.down_proj")
    return norm(x, "model.norm") @ weights["lm_head.weight"].T


@pytest.fixture(scope="module")
def spiece(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("spiece"))


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(3, ROWS, (2, 24), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def answers(tmp_path_factory, spiece, ids) -> dict:
    """What transformers makes of a folder of each kind, one of them in bf16 and one in shards."""
    root, scratch = tmp_path_factory.mktemp("folders"), tmp_path_factory.mktemp("scratch")
    for kind in KINDS:
        export(root / kind, trained(kind).state_dict(), config(kind), ROWS, spiece, RECORD)
    halves = {name: tensor.bfloat16() for name, tensor in trained("cola").state_dict().items()}
    export(root / "cola-bf16", halves, config("cola"), ROWS, spiece, RECORD)
    export(root / "cola-sharded", trained("cola").state_dict(), config("cola"), ROWS, spiece, RECORD)
    (root / "cola-sharded/model.safetensors").unlink()
    write_weights(root / "cola-sharded", trained("cola").state_dict(), shard_bytes=30_000)
    torch.save(ids, root / "ids.pt")
    script = Path(__file__).with_name("foreign_checks.py")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_MODULES_CACHE": str(scratch / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(script), str(root), str(scratch / "answers.pt")]
    done = subprocess.run(command, env=environment, cwd=scratch, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(scratch / "answers.pt")


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.std()).item()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_formulas(answers, ids, kind):
    weights = trained(kind).state_dict()
    wanted = torch.stack([formulas(weights, kind, row) for row in ids])
    assert relative(answers[kind]["logits"], wanted) < 1e-5
    assert relative(trained(kind).logits(ids).detach(), wanted) < 1e-5


def test_nothing_of_this_package_is_imported(answers):
    assert answers["imported"] == []
    imports = [node for node in ast.walk(ast.parse(MODELING.read_text())) if isinstance(node, ast.Import)]
    froms = [node for node in ast.walk(ast.parse(MODELING.read_text())) if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in imports for alias in node.names] + [node.module for node in froms]
    assert all(node.level == 0 for node in froms)
    assert {name.split(".")[0] for name in names} - sys.stdlib_module_names == {"torch", "transformers"}


@pytest.mark.parametrize("kind", [*KINDS, "cola-bf16", "cola-sharded"])
def test_loads_strictly_and_generates(answers, kind):
    found = answers[kind]
    assert found["loading"] == {}
    assert found["class"] == ("LlamaForCausalLM" if kind == "full" else "LowRankLlamaForCausalLM")
    assert found["dtype"] == (torch.bfloat16 if kind == "cola-bf16" else torch.float32)
    assert found["cast"] == torch.bfloat16
    assert (found["eps"], found["bos"], found["positions"]) == (1e-6, None, 1024)
    assert found["pieces"] == PIECES
    assert found["ended"] == [*found["open"], 1] and 1 not in found["literal"]
    if kind != "cola-bf16":  # rounding decides between near-equal logits
        assert torch.equal(found["cached"], found["uncached"])
        assert torch.equal(found["batched"], found["alone"])


@pytest.mark.parametrize("kind", [*KINDS, "cola-bf16", "cola-sharded"])
def test_saving_by_transformers_keeps_everything(answers, kind):
    found = answers[kind]
    assert torch.equal(found["reloaded"], found["logits"])
    assert (MODELING.name in found["resaved"]) == (kind != "full")
    kept = found["resaved_config"]
    assert (kept.get("bos_token_id"), kept["pad_token_id"], kept["eos_token_id"]) == (None, 0, 1)
    if kind != "full":
        assert kept["backbone"] == kind.split("-")[0]
        knobs = {name: value for name, value in KNOBS.get(kind, {}).items() if name != "swiglu_silu"}
        assert kept.items() >= knobs.items()
        assert kept["hidden_act"] == ("linear" if kind == "cola-learned" else "silu")


def test_sharded_and_whole_are_the_same(answers):
    assert torch.equal(answers["cola-sharded"]["logits"], answers["cola"]["logits"])


def test_a_fresh_model_starts_as_ours(answers):
    """From a configuration alone, the factors are drawn with our standard deviation, not the library's 0.02."""
    std = answers["cola"]["fresh_std"]
    for name, width in (("self_attn.q_proj", 2 * HIDDEN), ("mlp.down_proj", HIDDEN + WIDE)):
        for factor in "ab":
            found = std[f"model.layers.1.{name}.{factor}.weight"]
            assert found == pytest.approx((RANK * width) ** -0.25, rel=0.2)
    assert std["lm_head.weight"] == pytest.approx(0.02, rel=0.2)


def test_weights_are_stored_bit_for_bit(tmp_path, spiece):
    model = trained("cola")
    export(tmp_path / "folded", model.state_dict(), config("cola"), ROWS, spiece, RECORD)
    stored = load_file(tmp_path / "folded/model.safetensors")
    assert stored.keys() == model.state_dict().keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in model.state_dict().items())
    readme = (tmp_path / "folded/README.md").read_text()
    numbers = ("| precision | fp32 |", "| evaluation text | pad |", "| train/tokens | 14,336 |", "51.23")
    for words in (*numbers, "| trained on | sample, packed |", '`target_modules="all-linear"`'):
        assert words in readme
    assert "mfu" not in readme and "/private/texts" not in readme
    card = yaml.safe_load(readme.split("---")[1])
    assert card["tags"] == ["pre-training", "low-rank", "cola"]
    written = yaml.safe_load(readme.split("```yaml")[1].split("```")[0])
    assert written["backbone"] == {"name": "cola", **KNOBS["cola"]} and written["train"]["seq_len"] == 256
    assert "CoLA: Compute-Efficient" in readme and "Latent Residuals" not in readme
    dlr = replace(config("cola_lax"), dlr=replace(config("cola").dlr, name="on", enabled=True))
    export(tmp_path / "dlr", trained("cola_lax").state_dict(), dlr, ROWS, spiece, RECORD)
    readme = (tmp_path / "dlr/README.md").read_text()
    assert "# LLaMA test, cola_lax + DLR (on), folded" in readme
    assert all(title in readme for title in ("CoLA: Compute-Efficient", "LaX: Boosting", "Latent Residuals"))


def test_shards(tmp_path):
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(5)}
    write_weights(tmp_path, tensors, shard_bytes=80)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 200
    assert index["weight_map"] == {f"t{i}": f"model-0000{1 + i // 2}-of-00003.safetensors" for i in range(5)}
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])


@pytest.mark.parametrize("knobs", [{}, {"learn_latent_scale": True, "swiglu_silu": False}, {"latent_scale": 0.3}])
def test_the_colas_authors_layout_computes_their_formula(tmp_path, spiece, ids, monkeypatch, knobs):
    monkeypatch.setitem(KNOBS, "cola-theirs", {"rank": RANK, **knobs})
    ours = trained("cola-theirs").state_dict()
    export(tmp_path / "folded", ours, config("cola-theirs"), ROWS, spiece, RECORD, layout="cola")
    assert not (tmp_path / "folded" / MODELING.name).exists()
    settings = json.loads((tmp_path / "folded/config.json").read_text())
    assert (settings["model_type"], settings["architectures"], settings["rank"]) == ("cola", ["ColaForCausalLM"], RANK)
    assert settings["hidden_act"] == "silu" and settings["only_lr_act"] == ("swiglu_silu" in knobs)
    stored = load_file(tmp_path / "folded/model.safetensors")
    assert stored["model.layers.0.mlp.up_proj.cola_a"].shape == (HIDDEN, RANK)
    assert stored["model.layers.0.mlp.up_proj.cola_b"].shape == (RANK, WIDE)
    with monkeypatch.context() as theirs:  # y = silu(x A) B
        theirs.setitem(KNOBS, "theirs", {"swiglu_silu": not settings["only_lr_act"]})
        theirs.setattr(
            sys.modules[__name__],
            "projections",
            lambda w, _: lambda x, name: F.silu(x @ w[f"{name}.cola_a"]) @ w[f"{name}.cola_b"],
        )
        found = formulas(stored, "theirs", ids[0])
    assert relative(found, formulas(ours, "cola-theirs", ids[0])) < 1e-6


def test_other_backbones_have_no_place_in_colas_layout(tmp_path, spiece):
    with pytest.raises(UserError, match="holds CoLA's layers alone, and this is backbone=lowrank"):
        tensors = trained("lowrank").state_dict()
        export(tmp_path / "folded", tensors, config("lowrank"), ROWS, spiece, RECORD, layout="cola")
    assert list(tmp_path.iterdir()) == []


def test_an_older_folder_stays_until_the_new_one_is_whole(tmp_path, spiece, monkeypatch):
    folder, tensors = tmp_path / "folded", trained("cola").state_dict()
    export(folder, tensors, config("cola"), ROWS, spiece, {"step": 1})
    with monkeypatch.context() as broken, pytest.raises(OSError, match="disk full"):
        broken.setattr(export_module, "export_tokenizer", _disk_full)
        export(folder, tensors, config("cola"), ROWS, spiece, {"step": 2})
    assert "| step | 1 |" in (folder / "README.md").read_text()
    export(folder, tensors, config("cola"), ROWS, spiece, {"step": 3})
    assert "| step | 3 |" in (folder / "README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["folded"]


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
    export(tmp_path / "folded", trained("cola").state_dict(), config("cola"), ROWS, spiece, {"step": 1})
    assert synced == [str(tmp_path)]


def _disk_full(*_):
    raise OSError("disk full")


def test_verify_finds_a_difference_and_names_what_does_not_load(tmp_path, spiece, ids, monkeypatch):
    """bf16 weights are verified in either precision."""
    folder, cfg, model = tmp_path / "folded", config("cola"), trained("cola").requires_grad_(False).bfloat16()
    export(folder, model.state_dict(), cfg, ROWS, spiece, RECORD)
    assert verify(folder, model.logits(ids), ids, torch.bfloat16) < 0.25
    logits, tensors = model.float().logits(ids), model.state_dict()
    assert verify(folder, logits, ids, torch.float32) < 1e-5
    with pytest.raises(UserError, match="beyond the bound"):
        verify(folder, logits * 1.02, ids, torch.float32)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "transformers", None)
        said = agreement(folder, cfg, cfg, tensors, tensors, ids, torch.device("cpu"))
        assert said.startswith("not verified: transformers cannot be imported")
    del tensors["model.norm.weight"]
    write_weights(folder, tensors)
    with pytest.raises(UserError, match=r"model\.norm\.weight: missing"):
        verify(folder, logits, ids, torch.float32)
