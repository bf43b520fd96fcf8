"""The recipes: each composes where it is meant to, a pair differs in DLR alone, and settings are the published ones."""

from __future__ import annotations

from functools import cache

import pytest

from dlr_pretrain.config import CONFIG_DIR, Config, flatten, to_dict, unused, validate
from dlr_pretrain.config.composition import build, session

TABLE1 = ("60m", "130m", "350m", "1b")
BACKBONES = ("lowrank", "cola", "lost", "lax", "cola_lax")
METHODS = [
    *("full", "lora", "galore", "fira", "sltrain", "loro"),
    *(f"{b}{dlr}" for b in BACKBONES for dlr in ("", "_dlr")),
]
OWN = ("evidence_cpu", "evidence_60m")  # of no paper: for benchmarks/evidence
RECIPES = sorted(
    str(p.relative_to(CONFIG_DIR / "experiment").with_suffix(""))
    for p in (CONFIG_DIR / "experiment").rglob("*.yaml")
    if p.stem not in OWN
)
EXTREMES = ("60m", "1b")  # for recipes without a value of their own for a scale
SCALES = {"7b": ("7b",), "long_26b": ("1b",), "ablation": EXTREMES}  # of a folder, where not those of Table 1

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
LATER = {"train.steps": (11_000, 20_000, 60_000, 100_000), "warmup": (1_100, 2_000, 6_000, 10_000)}
SHEETS = {
    **{f"{b}{dlr}": DLR_PAPER | {"backbone.name": b} for b in BACKBONES for dlr in ("", "_dlr")},
    "lost_dlr": DLR_PAPER | {"backbone.gamma": 0.7, "backbone.sparsity": 0.01, "backbone.rank": (124, 251, 249, 499)},
    "lax_dlr": DLR_PAPER | {"backbone.gate": ("dense", "tensor", "tensor", "tensor")},
    "cola_lax_dlr": DLR_PAPER | {"backbone.gate": ("dense", "dense", "dense", "tensor")},
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
    "lowrank_authors": {
        "train.lr": (0.0015,),
        "train.steps": (11_000,),
        "warmup": (1_100,),
        "train.clip": None,
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.0,
        "backbone.latent_scale": (0.25,),
        "backbone.init": "kaiming",
    },
    "lost_authors": {
        "backbone.init": "cola",
        "backbone.activation": "none",
        "backbone.channels": "random",
        "backbone.sparsity": 0.05,
        "backbone.gamma": 0.5,
        "optimizer.beta2": 0.95,
        "train.lr": DLR_PAPER["train.lr"],
    },
    "lax_authors": DLR_PAPER | {"backbone.gate": "tensor"},
    "cola_lax_authors": DLR_PAPER | {"backbone.gate": "tensor"},
    "full": LATER | {"optimizer.weight_decay": 0.0, "backbone.name": "full"},
    "lora": LATER | {"optimizer.weight_decay": 0.0, "backbone.alpha": 32.0, "train.clip": None},
}


@pytest.fixture(scope="module", autouse=True)
def hydra():
    with session():
        yield
    compose.cache_clear()


@cache
def compose(recipe: str, scale: str, *words: str) -> Config:
    given = [f"scale={scale}", f"experiment={recipe}", "data=sample", "compile=false", *words]
    cfg, problems = build("train", given)
    assert problems == []
    return cfg


def settings(recipe: str, scale: str) -> dict[str, object]:
    """Every key that takes part in the training, beside the warm-up that follows from them."""
    cfg = compose(recipe, scale)
    values = flatten(to_dict(cfg))
    del values["run.dir"]
    return values | {"warmup": cfg.warmup_steps}


def differences(one: str, other: str, scale: str) -> set[str]:
    a, b = settings(one, scale), settings(other, scale)
    return {key for key in a | b if a.get(key) != b.get(key)}


def scales_of(recipe: str) -> tuple[str, ...]:
    return EXTREMES if recipe.endswith("_packed") else SCALES.get(recipe.partition("/")[0], TABLE1)


def at(value: object, column: int) -> object:
    return value[column] if isinstance(value, tuple) else value


def reaches(value: object, column: int) -> bool:
    return not isinstance(value, tuple) or column < len(value)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_composes_at_every_scale_that_it_is_for(recipe):
    for scale in scales_of(recipe):
        words = ["train.lr=0.001"] if recipe == "table1/lowrank_authors" and scale != "60m" else []
        cfg = compose(recipe, scale, *words)
        assert validate(cfg, world_size=8) == []
        assert cfg.scale.name == scale
        precision = "bf16_mixed" if recipe in WITH_MASTERS else "bf16"
        assert (cfg.precision.name, cfg.eval.packing, cfg.train.seq_len) == (precision, "pad", 256)
        assert (cfg.optimizer.name == "adamw") == (precision == "bf16_mixed")
        assert cfg.train.global_batch == 512
        assert cfg.data.packing == ("packed" if recipe.endswith("_packed") else "pad")


@pytest.mark.parametrize(("recipe", "scale"), [("7b", "7b"), ("long_26b", "1b")])
def test_a_recipe_for_one_scale_chooses_it(recipe, scale):
    for name in (name for name in RECIPES if name.startswith(f"{recipe}/")):
        assert build("train", [f"experiment={name}"])[0].scale.name == scale


def test_every_method_of_table_1_has_a_recipe_and_a_packed_twin():
    assert set(RECIPES) >= {f"table1/{method}{twin}" for method in METHODS for twin in ("", "_packed")}


@pytest.mark.parametrize("method", METHODS)
def test_a_twin_differs_in_packing_alone(method):
    for scale in EXTREMES:
        assert differences(f"table1/{method}", f"table1/{method}_packed", scale) == {"data.packing"}


@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_pair_differs_in_dlr_alone(backbone):
    for scale in TABLE1:
        pair = f"table1/{backbone}", f"table1/{backbone}_dlr"
        assert differences(*pair, scale) == {"dlr.name", "dlr.enabled"}
        assert [compose(name, scale).dlr.enabled for name in pair] == [False, True]


@pytest.mark.parametrize("method", SHEETS)
def test_settings_are_those_of_the_sheets(method):
    columns = max(len(value) for value in SHEETS[method].values() if isinstance(value, tuple))
    for column, scale in enumerate((*TABLE1, "7b")[:columns]):
        values = settings(f"table1/{method}", scale)
        expected = {key: at(value, column) for key, value in SHEETS[method].items() if reaches(value, column)}
        assert {key: values[key] for key in expected} == expected


def test_an_unpublished_learning_rate_is_asked_for():
    _, problems = build("train", ["scale=1b", "experiment=table1/lowrank_authors"])
    assert [problem.key for problem in problems] == ["train.lr"]
    assert "no value for scale=1b" in str(problems[0])


MASTERS = {"precision.name": "bf16_mixed", "optimizer.name": "adamw"}  # where pure bf16 would round the ablation away
WITH_MASTERS = ("ablation/init_offset_decay", "ablation/learnable_alpha", "ablation/learnable_s")
ABLATIONS = {  # what each changes of its control, table1/cola_dlr
    "uncorrected": {"dlr.variance_correction": False},
    "init_offset": {"dlr.mode": "offset"},
    "init_offset_decay": {"dlr.mode": "decayed_offset"} | MASTERS,
    "random": {"dlr.grouping": "random"},
    "no_b": {"dlr.train_b": False},
    "balanced": {"dlr.grouping": "balanced"},
    "learnable_alpha": {"dlr.learn_alpha": True} | MASTERS,
    "attention": {"dlr.scope": "attention"},
    "mlp": {"dlr.scope": "mlp"},
    "learnable_s": {"backbone.learn_latent_scale": True} | MASTERS,
    "rank_050": {"backbone.rank": 256},
    "rank_075": {"backbone.rank": 384},
}


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_an_ablation_changes_one_thing(ablation):
    values = settings(f"ablation/{ablation}", "1b")
    changed = differences("table1/cola_dlr", f"ablation/{ablation}", "1b") - {"dlr.name"}
    assert {key: values[key] for key in changed} == ABLATIONS[ablation]


def test_every_ablation_is_held_against_its_control():
    assert {f"ablation/{name}" for name in ABLATIONS} == {r for r in RECIPES if r.startswith("ablation/")}


def test_no_recipe_repeats_another():
    """A second name for the same runs trains them twice: the name of a run has its recipe's."""
    found: dict[str, str] = {}
    for recipe in set(RECIPES) - {"paper"}:  # which takes any backbone
        assert found.setdefault(str(settings(recipe, scales_of(recipe)[0])), recipe) == recipe


@pytest.mark.parametrize(("recipe", "expected"), [
    ("cola_dlr", {"train.lr": 0.001, "warmup": 15_000, "train.micro_batch": 8, "backbone.rank": 1024,
                  "dlr.enabled": True}),
    ("lost", {"train.lr": 0.001, "warmup": 15_000, "train.micro_batch": 8, "backbone.rank": 998,
              "dlr.enabled": False}),
    ("full", {"train.micro_batch": 4, "backbone.name": "full", "optimizer.name": "adamw_foreach"}),
    ("sltrain", {"train.lr": 0.003, "train.micro_batch": 8, "train.clip": 1.0, "optimizer.name": "adamw_8bit",
                 "optimizer.weight_decay": 0.0, "optimizer.eps": 1e-8, "backbone.sparsity": 0.05,
                 "backbone.alpha": 8.0}),
])  # fmt: skip
def test_settings_at_7b(recipe, expected):
    values = settings(f"7b/{recipe}", "7b")
    assert {key: values[key] for key in expected} == expected
    assert values["train.steps"] == 150_000


def test_the_long_run_sees_26_billion_positions():
    for name, backbone in (("full", "full"), ("lowrank_dlr", "lowrank")):
        cfg = compose(f"long_26b/{name}", "1b")
        assert cfg.train.steps * cfg.train.global_batch * cfg.train.seq_len == pytest.approx(26e9, rel=1e-5)
        assert cfg.backbone.name == backbone
        assert 0.07 <= cfg.warmup_steps / cfg.train.steps <= 0.1


def test_the_command_line_wins_over_a_recipe_and_what_a_recipe_shadows_is_refused():
    cfg, problems = build("train", ["experiment=table1/full", "++train.lr=0.5", "precision=bf16_mixed", "data=sample"])
    assert (problems, cfg.train.lr, cfg.precision.name) == ([], 0.5, "bf16_mixed")
    shadowed = unused(compose("table1/full", "60m"), {"scale.lr", "scale.steps", "scale.adam_eps", "scale.micro_batch"})
    assert list(map(str, shadowed)) == [
        "scale.lr=0.01: would be ignored: the recipe sets train.lr. Leave it out",
    ]
