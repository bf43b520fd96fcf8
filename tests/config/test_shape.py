"""``scale.from``: the shape of a LLaMA from its ``config.json``; and the keys of today's shapes."""

import json
from pathlib import Path

import pytest
import torch

from dlr_pretrain.cli import load
from dlr_pretrain.config import Config, ConfigError, identity, parse, to_dict
from dlr_pretrain.config.identity import differences
from dlr_pretrain.models import build_model
from dlr_pretrain.models.flops import parameter_counts
from dlr_pretrain.train.run import run
from dlr_pretrain.util.errors import Stopped
from tests.resume.test_resume import assert_same, final
from tests.unit.data.loopback_hub import Hub, serving_here

COMMON = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
          "max_position_embeddings": 2048, "torch_dtype": "bfloat16"}  # fmt: skip


def shape(vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more) -> dict:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads")  # fmt: skip
    return COMMON | dict(zip(names, (vocab, hidden, intermediate, layers, heads, kv_heads), strict=True)) | more


LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
PUBLISHED = {  # with their numbers of parameters, and the words that they need
    "SmolLM-135M": (shape(49152, 576, 1536, 30, 9, 3, rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=True),
                    134_515_008, []),
    "TinyLlama-1.1B": (shape(32000, 2048, 5632, 22, 32, 4, rms_norm_eps=1e-5, rope_scaling=None), 1_100_048_384, []),
    "Llama-3.2-1B": (shape(128256, 2048, 8192, 16, 32, 8, head_dim=64, rms_norm_eps=1e-5, rope_theta=5e5,
                           rope_scaling=LLAMA3, mlp_bias=False, tie_word_embeddings=True),
                     1_235_814_400, ["scale.rope_theta=500000"]),
}  # fmt: skip
SMALL = shape(64, 32, 91, 2, 4, 2, head_dim=6, rms_norm_eps=1e-5, rope_theta=500.0, tie_word_embeddings=True)


def written(folder: Path, settings: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def of(*words: object) -> Config:
    return load([*map(str, words), "data=sample", "logger=jsonl"])


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_parameters_to_the_unit(tmp_path, name):
    settings, parameters, words = PUBLISHED[name]
    cfg = of(f"scale.from={written(tmp_path / name, settings)}", "backbone=full", *words)
    model = build_model(cfg, cfg.scale.vocab_size, torch.device("meta"))
    assert cfg.scale.name == name and cfg.run.dir.startswith(f"runs/{name}-full-dlr_off-sample-s42")
    assert parameter_counts(cfg, model) == dict.fromkeys(("total", "trainable", "folded"), parameters)


def test_the_users_values_win_and_the_option_gives_the_recipe(tmp_path):
    file = written(tmp_path / "small", SMALL | {"rope_scaling": None}) / "config.json"
    cfg = of("scale=130m", f"scale.from={file}", "scale.num_layers=3", "scale.rank=8")
    s = cfg.scale
    assert (s.name, s.source, s.num_layers, s.rank, s.micro_batch, s.vocab_size) == ("small", str(file), 3, 8, 32, 64)
    assert (s.num_kv_heads, s.head_dim, s.norm_eps, s.rope_theta, s.tie_embeddings) == (2, 6, 1e-5, 500, True)
    assert (cfg.train.lr, cfg.train.steps) == (0.005, 22_000)
    assert of("backbone=lost", f"scale.from={file}", "scale.rank=8").backbone.rank < 8  # from the file's widths
    names = {of(f"scale.from={file}", "scale.rank=8", *more).run.dir for more in ([], ["scale.num_layers=8"])}
    assert len(names) == 2  # also for a value that the option has


@pytest.mark.parametrize(("change", "rule"), [
    ({"rope_scaling": LLAMA3}, r"rope_type is llama3, here default\. .* set scale\.rope_theta"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type is yarn, here default"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "=.*other: type is linear, here default"),
    ({"attention_bias": True}, "attention_bias is true, here false"),
    ({"mlp_bias": True}, "mlp_bias is true, here false"),
    ({"hidden_act": "gelu"}, "hidden_act is gelu, here silu"),
    ({"model_type": "qwen2"}, "model_type is qwen2, here llama"),
    ({"hidden_size": None}, r"scale\.hidden_size: needs a value"),
    ({"hidden_size": "wide"}, r"scale\.hidden_size=wide: must be a whole number"),
    ([1], "cannot be read: ValueError: it holds no settings by name"),
    ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5, here 1"),
])  # fmt: skip
def test_what_models_here_are_not_is_refused_by_name(tmp_path, change, rule):
    folder = written(tmp_path / "other", SMALL | change if isinstance(change, dict) else change)
    with pytest.raises(ConfigError, match=rule):
        of(f"scale.from={folder}", "scale.rank=8")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"scale\.from=: an empty name\. Name a file, its folder, or.*\n.*seed=-1"):
        of("scale.from=", "seed=-1")
    with pytest.raises(
        ConfigError, match=r"scale\.from=.*no/config\.json: cannot be read: FileNotFoundError.*on the hub"
    ):
        of(f"scale.from={tmp_path}/no/config.json")


def test_a_repository_of_the_hub_gives_its_shape(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with serving_here(Hub({"config.json": json.dumps(SMALL).encode()}), monkeypatch):
        cfg = of("scale.from=me/small-llama", "scale.rank=8")
    assert (cfg.scale.name, cfg.scale.source, cfg.scale.hidden_size) == ("small-llama", "me/small-llama", 32)


@pytest.mark.usefixtures("no_export")
def test_a_resume_does_not_read_the_file_again(words, tmp_path):
    """It finds its record, because a run's name does not depend on what the file holds."""
    folder = written(tmp_path / "small", SMALL | {"vocab_size": 120})
    shaped = ("scale.hidden", "scale.intermediate", "scale.num_heads", "scale.num_layers")
    given = [word for word in words("train.steps=6", f"scale.from={folder}") if not word.startswith(shaped)]

    def train(root: str, *more: str) -> Path:
        run(cfg := load([*given, f"run.root={tmp_path / root}", *more]))
        return Path(cfg.run.dir)

    whole = train("whole")
    with pytest.raises(Stopped):
        train("parts", "train.stop_after=3")
    (folder / "config.json").write_text("{")
    parts = train("parts")
    assert_same(final(parts), final(whole))
    assert parts.name.startswith("small-lowrank") and final(whole)[0]["model.embed_tokens.weight"].shape == (120, 32)
    assert str(folder) not in (parts / "folded" / "README.md").read_text()
    with pytest.raises(ConfigError, match="cannot be read: JSONDecodeError"):
        train("new")


@pytest.mark.parametrize(("words", "rule"), [
    ("scale.num_kv_heads=3", r"scale\.num_kv_heads=3: must divide scale\.num_heads=4"),
    ("scale.head_dim=5", r"scale\.head_dim=5: must be even"),
    ("scale.rope_theta=0.5", r"scale\.rope_theta=0\.5: must be a number above 1"),
    ("scale.norm_eps=1e30", r"scale\.norm_eps=1e\+30: must be .* below 1"),
    ("scale.num_heads=5", r"scale\.num_heads=5: .* heads of even width\. Or set an even scale\.head_dim"),
    ("scale.num_kv_heads=1 scale.rank=48", r"backbone\.rank=48: must lie between 1 and the narrowest .* 32"),
    ("scale.num_kv_heads=2 attention=triton precision=bf16", r"those of scale=tiny have 32 \(4 of q, 2 of k\)"),
])  # fmt: skip
def test_shapes_that_cannot_be_are_refused(words, rule):
    with pytest.raises(ConfigError, match=rule):
        of("scale=tiny", "train.seq_len=64", *words.split())


def test_a_run_without_the_keys_is_the_same_run():
    cfg = of("scale=tiny", "backbone=cola")
    tree, before = to_dict(cfg), identity(cfg)
    for leaf in ("source", "num_kv_heads", "head_dim", "rope_theta", "norm_eps", "tie_embeddings"):
        del tree["scale"][leaf]
        before.pop(f"scale.{leaf}", None)
    assert (
        parse(tree) == cfg
        and not differences(before, identity(cfg))
        and cfg.run.dir.endswith("cola-dlr_off-sample-s42")
    )
