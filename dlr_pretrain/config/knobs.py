"""Bounds of the knobs that this project's own backbones and optimizers declare in their YAML files.

They are looked up by the option's name, because a user's own option may have a knob of the same name but another
meaning.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlr_pretrain.config.tree import key


def bounds(**of):
    """The bounds of a knob's value; its YAML file says what the knob means."""
    return key("", **of)


RANK = {"rank": bounds(at_least=1)}
FACTORS = RANK | {
    "init": bounds(choices=("cola", "kaiming", "xavier")),
    "latent_scale": bounds(above=0),
}
GAIN = {"b_gain": bounds(above=0)}
RATES = {"b_lr": bounds(above=0)}
ADAPTER = RANK | {"alpha": bounds(above=0)}
LOST = {
    "gamma": bounds(at_least=0, at_most=1),
    "sparsity": bounds(above=0, at_most=1),
    "activation": bounds(choices=("silu", "none")),
    "init": bounds(choices=("svd", "cola")),
    "channels": bounds(choices=("residual", "smallest", "random")),
    "residual_rank": bounds(at_least=1),
}
LAX = {
    "gate": bounds(choices=("identity", "linear", "tensor", "dense")),
    "norm": bounds(choices=("latent", "output", "none")),
    "crossing": bounds(choices=("pre_act", "post_act")),
}
SLTRAIN = ADAPTER | {"sparsity": bounds(above=0, at_most=1)}
RELORA = ADAPTER | {
    "merge_every": bounds(at_least=1),
    "restart_warmup": bounds(at_least=0),
    "prune": bounds(choices=("random", "magnitude")),
    "prune_ratio": bounds(at_least=0, at_most=1),
}
ADAM = {
    "beta1": bounds(at_least=0, below=1),
    "beta2": bounds(at_least=0, below=1),
    "eps": bounds(above=0),
    "weight_decay": bounds(at_least=0),
}
GALORE = ADAM | {
    "rank": bounds(at_least=1),
    "update_scale": bounds(above=0),
    "refresh_every": bounds(at_least=1),
}
LORO = ADAM | {
    "schedule": bounds(choices=("loro", "cosine")),
    "exact_every": bounds(at_least=1),
    "restart_warmup": bounds(at_least=0),
    "shift": bounds(at_least=0, kind=int),
}
MUON = {
    "momentum": bounds(at_least=0, below=1),
    "ns_steps": bounds(at_least=1, at_most=99),
}

KNOBS: dict[str, dict[str, dict]] = {
    "backbone": {
        "lowrank": FACTORS | GAIN,
        "cola": FACTORS | GAIN,
        "lost": LOST,
        "lax": FACTORS | LAX,
        "cola_lax": FACTORS | LAX,
        "sltrain": SLTRAIN,
        "lora": ADAPTER,
        "relora": RELORA,
    },
    "optimizer": {
        "adamw": ADAM | RATES,
        "adamw_foreach": ADAM | RATES,
        "galore": GALORE,
        "fira": GALORE | {"limiter": bounds(at_least=1)},
        "loro": LORO,
        "muon": ADAM | MUON,
        "adamw_8bit": ADAM | {"block_size": bounds(at_least=1)},
    },
}


def rules(group: str, option: str, knob: str) -> Mapping:
    """The metadata of a knob that is declared here; empty for any other knob."""
    declared = KNOBS[group].get(option, {}).get(knob)
    return declared.metadata if declared else {}
