"""The recipes: each row of scripts/paper/items.yaml composes, and its settings are the published ones."""

from functools import cache

import pytest

from dlr_pretrain.cli import load
from dlr_pretrain.config import Config, ConfigError, flatten, to_dict
from scripts.paper.items import items, recipe

TABLE1 = ("60m", "130m", "350m", "1b")
BACKBONES = ("lowrank", "cola", "lost", "lax", "cola_lax")

# The authors' sheets: a value, or one for each of 60m, 130m, 350m, 1b and, where there is one, 7b.
DLR_PAPER = {
    "train.lr": (0.01, 0.005, 0.003, 0.002),
    "train.steps": (11_000, 22_000, 65_000, 140_000),
    "warmup": (1_100, 2_200, 6_500, 10_000),
    "train.clip": 0.5,
    "optimizer.eps": (1e-8, 1e-6, 1e-6, 1e-6),
    "optimizer.weight_decay": 0.1,
    "optimizer.beta2": 0.999,
    "dlr.alpha": 1.0,
}
PROJECTED = {
    "train.lr": (0.01, 0.01, 0.01, 0.01, 0.005),
    "warmup": (1_000, 2_000, 6_000, 10_000),
    "train.clip": (None, None, None, None, 1.0),
    "backbone.name": "full",
    "optimizer.refresh_every": (200, 200, 200, 200, 500),
    "optimizer.eps": 1e-6,
    "optimizer.weight_decay": 0.0,
}
SHEETS = {
    **{f"{b}{dlr}": DLR_PAPER | {"backbone.name": b} for b in BACKBONES for dlr in ("", "+dlr")},
    "lost+dlr": DLR_PAPER | {"backbone.gamma": 0.7, "backbone.sparsity": 0.01, "backbone.rank": (124, 251, 249, 499)},
    "lax+dlr": DLR_PAPER | {"backbone.gate": ("dense", "tensor", "tensor", "tensor")},
    "cola_lax+dlr": DLR_PAPER | {"backbone.gate": ("dense", "dense", "dense", "tensor")},
    "cola_authors": {
        "train.lr": (0.006, 0.003, 0.003, 0.002, 0.001),
        "train.steps": (10_000, 20_000, 60_000, 100_000, 150_000),
        "warmup": (2_000, 2_000, 6_000, 10_000, 15_000),
        "train.clip": 0.5,
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.01,
        "backbone.rank": (128, 256, 256, 512, 1024),
        "backbone.swiglu_silu": (True, True, False, False, False),
    },
    "sltrain": {
        "train.lr": 0.003,
        "train.steps": (11_000, 22_000, 65_000, 140_000, 150_000),
        "warmup": (1_100, 2_200, 6_500, 10_000, 15_000),
        "train.clip": None,
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.0,
        "backbone.alpha": (32, 16, 16, 8, 8),
        "backbone.sparsity": (0.03, 0.03, 0.03, 0.03, 0.05),
        "backbone.rank": (128, 256, 256, 512, 1024),
    },
    "loro": {
        "train.lr": (0.01, 0.01, 0.01, 0.005),
        "train.steps": (10_000, 20_000, 60_000, 100_000),
        "warmup": (1_000, 2_000, 2_000, 10_000),
        "train.clip": None,
        "backbone.name": "lowrank",
        "backbone.init": "xavier",
        "optimizer.name": "loro",
        "optimizer.exact_every": (500, 500, 500, 200),
        "optimizer.restart_warmup": 5,
        "optimizer.shift": (None, None, 6_000, None),
        "optimizer.eps": 1e-6,
        "optimizer.weight_decay": 0.0,
    },
    "galore": PROJECTED
    | {"optimizer.name": "galore", "optimizer.update_scale": 0.25, "optimizer.rank": (128, 256, 256, 512, 1024)}
    | {"train.steps": (10_000, 20_000, 60_000, 100_000, 150_000)},
    "fira": PROJECTED
    | {"optimizer.name": "fira", "optimizer.update_scale": (0.25, 0.25, 0.25, 0.0625, 0.0625)}
    | {"optimizer.rank": (128, 256, 256, 512, 64), "optimizer.limiter": 1.01}
    | {"train.steps": (10_000, 20_000, 60_000, 100_000, 10_000)},
}


@cache
def compose(*words: str) -> Config:
    return load([*words, "data=sample", "compile=false", "logger=jsonl"], 8)


def settings(*words: str) -> dict[str, object]:
    """Every key that affects the training, and the resulting warm-up."""
    cfg = compose(*words)
    values = flatten(to_dict(cfg))
    del values["run.dir"]
    return values | {"warmup": cfg.warmup_steps}


@pytest.mark.parametrize("names", [["table1"], pytest.param([*items()], marks=pytest.mark.full)], ids=["one", "all"])
def test_every_row_is_a_run_of_its_own_in_the_papers_setting(names):
    found = {}
    for item in map(items().get, names):
        for row in item.rows:
            words = item.words(row)
            cfg = compose(f"scale={item.scales[-1]}", *words)
            precision = "bf16_mixed" if "precision=bf16_mixed" in words else "bf16"
            assert (cfg.precision.name, cfg.data.packing, cfg.eval.packing) == (precision, "pad", "pad")
            assert (cfg.optimizer.name == "adamw") == (precision == "bf16_mixed")
            assert (cfg.train.seq_len, cfg.train.global_batch) == (256, 512)
            assert found.setdefault(cfg.run.dir, words) == words or item.name == "paths"
    methods = ["full", "lora", "galore", "fira", "sltrain", "loro"] + [
        b + dlr for b in BACKBONES for dlr in ("", "+dlr")
    ]
    assert list(items()["table1"].rows) == methods


@pytest.mark.parametrize("scales", [("60m", "1b"), pytest.param(("130m", "350m", "7b"), marks=pytest.mark.full)])
@pytest.mark.parametrize("method", SHEETS)
def test_settings_are_those_of_the_sheets(method, scales):
    columns = max(len(value) for value in SHEETS[method].values() if isinstance(value, tuple))
    words = recipe(method)
    for column, scale in enumerate((*TABLE1, "7b")[:columns]):
        if scale not in scales:
            continue
        values = settings(f"scale={scale}", *words)
        for key, value in SHEETS[method].items():
            published = value if isinstance(value, tuple) else (value,) * columns
            assert column >= len(published) or values[key] == published[column], (scale, key)


def test_an_unpublished_learning_rate_is_asked_for():
    with pytest.raises(ConfigError, match=r"train\.lr: .*no value for scale=1b"):
        compose("scale=1b", "experiment=table1/lowrank_authors")


MASTERS = {"precision.name": "bf16_mixed", "optimizer.name": "adamw"}  # pure bf16 would round the ablation away
ABLATIONS = {  # what a row changes from its control, except the name of the option
    ("rank", "rank x 0.5"): {"backbone.rank": 256},
    ("rank", "rank x 0.75"): {"backbone.rank": 384},
    ("variance", "without correction"): {"dlr.variance_correction": False},
    ("offset", "initial offset"): {"dlr.mode": "offset"},
    ("dynamics", "random map"): {"dlr.grouping": "random"},
    ("dynamics", "residual only (no B)"): {"dlr.train_b": False},
    ("alpha", "alpha=2"): {"dlr.alpha": 2.0},
    ("alpha", "alpha=1 (fp32 masters)"): MASTERS,
    ("alpha", "learned alpha (fp32 masters)"): {"dlr.learn_alpha": True} | MASTERS,
}


@pytest.mark.parametrize(("item", "row"), ABLATIONS)
def test_an_ablation_changes_one_thing(item, row):
    control = settings("scale=1b", *items()[item].words(items()[item].control or "cola+dlr"))
    values = settings("scale=1b", *items()[item].words(row))
    changed = {key for key in values if values[key] != control.get(key)}
    changed -= {"dlr.name", "optimizer._target_"}
    assert {key: values[key] for key in changed} == ABLATIONS[item, row]
