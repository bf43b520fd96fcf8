"""Bounds of the knobs that this project's own backbones and optimizers declare in their YAML files.

They are looked up by the option's name: an option of somebody else's may mean something else by a knob's name.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlr_pretrain.config.tree import key

RANK = {"rank": key("rank r of the factors", at_least=1)}
FACTORS = RANK | {
    "init": key("initialisation of the factors", choices=("cola", "kaiming", "xavier")),
    "latent_scale": key("factor of the latent", above=0),
}
GAIN = {"b_gain": key("factor of B's initial values", above=0)}
RATES = {"b_lr": key("rate of B over that of the other parameters", above=0)}
ADAPTER = RANK | {"alpha": key("strength of the factors times their rank", above=0)}
LOST = {
    "gamma": key("share of the low-rank branch", at_least=0, at_most=1),
    "sparsity": key("share of the input channels", above=0, at_most=1),
    "activation": key("between the factors", choices=("silu", "none")),
    "init": key("initialisation of the factors", choices=("svd", "cola")),
    "channels": key("choice of the channels", choices=("residual", "smallest", "random")),
    "residual_rank": key("singular values that the choice looks at", at_least=1),
}
LAX = {
    "gate": key("map of the crossing latent", choices=("identity", "linear", "tensor", "dense")),
    "norm": key("LayerNorm", choices=("latent", "output", "none")),
    "crossing": key("where the latents are added", choices=("pre_act", "post_act")),
}
SLTRAIN = ADAPTER | {"sparsity": key("share of trained entries", above=0, at_most=1)}
RELORA = ADAPTER | {
    "merge_every": key("updates between merges", at_least=1),
    "restart_warmup": key("updates of warm-up after a merge", at_least=0),
    "prune": key("which optimizer state is dropped", choices=("random", "magnitude")),
    "prune_ratio": key("share of the optimizer state that is dropped", at_least=0, at_most=1),
}
ADAM = {
    "beta1": key("decay of first moments", at_least=0, below=1),
    "beta2": key("decay of second moments", at_least=0, below=1),
    "eps": key("added to the root of second moments", above=0),
    "weight_decay": key("share of a weight that an update at rate 1 takes off", at_least=0),
}
GALORE = ADAM | {
    "rank": key("rank of the projection", at_least=1),
    "update_scale": key("factor of a projected update", above=0),
    "refresh_every": key("updates between renewals of the projectors", at_least=1),
}
LORO = ADAM | {
    "schedule": key("learning rate", choices=("loro", "cosine")),
    "exact_every": key("updates from one exact step to the next", at_least=1),
    "restart_warmup": key("updates of warm-up after an exact step", at_least=0),
    "shift": key("updates by which the cosine runs late", at_least=0, kind=int),
}
MUON = {
    "momentum": key("decay of the momentum", at_least=0, below=1),
    "nesterov": key("Nesterov's momentum"),
    "ns_steps": key("iterations", at_least=1, at_most=99),
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
        "fira": GALORE | {"limiter": key("growth of a norm in an update", at_least=1)},
        "loro": LORO,
        "muon": ADAM | MUON,
        "adamw_8bit": ADAM | {"block_size": key("values that share a scale", at_least=1)},
    },
}


def rules(group: str, option: str, knob: str) -> Mapping:
    """The metadata with which a knob is declared here; nothing for one that is not."""
    declared = KNOBS[group].get(option, {}).get(knob)
    return declared.metadata if declared else {}
