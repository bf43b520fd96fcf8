"""The knobs of this project's backbones and optimizers, each a dataclass, with the rules of that option alone.

``OPTIONS`` names the class of each option. An option of a user's own needs no class here: its YAML file declares its
knobs and their defaults.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dlr_pretrain.config.problems import Problem
from dlr_pretrain.config.tree import Config, key

STOCHASTIC_ROUNDING = ("adamw", "adamw_8bit")  # optimizers whose updates precision=bf16_sr can round


class Option:
    @staticmethod
    def problems(cfg: Config) -> Iterator[Problem]:
        """The rules of this option that a configuration with it breaks."""
        yield from ()


def unsharded(cfg: Config, needs: str = "a matrix optimizer needs whole matrices") -> Iterator[Problem]:
    """The rule of optimizers whose updates need more of a tensor than a rank's rows."""
    if cfg.parallel.name != "ddp":
        rule = f"{needs}, and parallel={cfg.parallel.name} shards them"
        yield Problem("optimizer", cfg.optimizer.name, rule, "Use parallel=ddp, or optimizer=adamw")


@dataclass
class Backbone(Option):
    factorized: bool = key("whether the layer is y = B z, to which DLR can be attached", False, fixed=True)


@dataclass
class Factors(Backbone):
    factorized: bool = key("y = B z", True, fixed=True)
    rank: int = key("rank r of the factors", "${scale.rank}", ge=1)
    init: Literal["cola", "kaiming", "xavier"] = key("of the factors; cola: Var[(B A)_ij] = 1 / (d_in + d_out)", "cola")


@dataclass
class LowRank(Factors):
    latent_scale: float = key("factor s of the latent", 1.0, gt=0)


@dataclass
class Cola(LowRank):
    swiglu_silu: bool = key("as in the DLR paper; the authors of CoLA drop it from 350M on", True)


@dataclass
class Lax(Factors):
    gate: Literal["tensor", "dense"] = key(
        "a two-sided product (tensor), or r x r with bias (dense)", "${by_scale:{60m: dense, other: tensor}}"
    )


@dataclass
class ColaLax(Lax):
    gate: Literal["tensor", "dense"] = key(
        "see lax", "${by_scale:{60m: dense, 130m: dense, 350m: dense, other: tensor}}"
    )
    swiglu_silu: bool = key("as in the DLR paper; the authors of CoLA drop it from 350M on", True)


@dataclass
class Lost(Backbone):
    factorized: bool = key("y = B z and a sparse branch beside it", True, fixed=True)
    rank: int = key(
        "rank r of the factors; by default within the parameters of plain factors of scale.rank",
        "${lost_rank:${scale.rank},${scale.hidden_size},${scale.intermediate_size},${backbone.sparsity}}",
        ge=1,
    )
    gamma: float = key("share of the low-rank branch", 0.7, ge=0, le=1)
    sparsity: float = key("input channels of the sparse branch, as a share of d_in (one at least)", 0.01, gt=0, le=1)
    activation: Literal["silu", "none"] = key("between the factors", "silu")
    residual_rank: int = key("singular values beyond the rank that choose the channels", 256, ge=1)


@dataclass
class Lora(Backbone):
    rank: int = key("rank r of the factors", "${scale.rank}", ge=1)
    alpha: float = key("strength of the factors times their rank", 32.0, gt=0)


@dataclass
class Sltrain(Lora):
    alpha: float = key("s = alpha / rank", "${by_scale:{130m: 16.0, 350m: 16.0, 1b: 8.0, 7b: 8.0, other: 32.0}}", gt=0)
    sparsity: float = key("share of trained entries of S", "${by_scale:{7b: 0.05, other: 0.03}}", gt=0, le=1)


@dataclass
class Relora(Lora):
    merge_every: int = key("updates between merges", "${by_scale:{tiny: 100, other: 5000}}", ge=1)
    restart_warmup: int = key("updates of linear warm-up after each merge", "${by_scale:{tiny: 10, other: 100}}", ge=0)
    prune_ratio: float = key("share of the optimizer state, drawn at random, that a merge zeroes", 0.999, ge=0, le=1)

    @staticmethod
    def problems(cfg: Config) -> Iterator[Problem]:
        every, restart = cfg.backbone.merge_every, cfg.backbone.restart_warmup
        if every >= cfg.train.steps:
            rule = f"must be below train.steps={cfg.train.steps}: nothing would be merged"
            yield Problem("backbone.merge_every", every, rule, "Use backbone=lora for that")
        elif restart >= every:
            yield Problem("backbone.restart_warmup", restart, f"must be below backbone.merge_every={every}")


@dataclass
class Adam(Option):
    beta1: float = key("decay of first moments", 0.9, ge=0, lt=1)
    beta2: float = key("decay of second moments", 0.999, ge=0, lt=1)
    eps: float = key("added before the bias correction", 1e-6, gt=0)
    weight_decay: float = key("share of a weight that an update at rate 1 takes off", 0.0, ge=0)


@dataclass
class Adamw(Adam):
    eps: float = key("added to the root of second moments", "${by_scale:{tiny: 1e-8, 60m: 1e-8, other: 1e-6}}", gt=0)
    weight_decay: float = key("on every parameter, as in the paper", 0.1, ge=0)


@dataclass
class Adamw8bit(Adamw):
    block_size: int = key("values that share a scale", 256, ge=1)

    @staticmethod
    def problems(cfg: Config) -> Iterator[Problem]:
        yield from unsharded(cfg, "8-bit moments come in whole blocks")


@dataclass
class Muon(Adamw):
    weight_decay: float = key("under precision=bf16 it rounds away on the matrices", 0.1, ge=0)
    momentum: float = key("decay of the momentum", 0.95, ge=0, lt=1)
    ns_steps: int = key("iterations of Newton and Schulz", 5, ge=1, le=99)
    problems = staticmethod(unsharded)


@dataclass
class Galore(Adam):
    rank: int = key("rank of the projection", "${scale.rank}", ge=1)
    update_scale: float = key("factor of a projected update", 0.25, gt=0)
    refresh_every: int = key("updates between renewals of the projectors", "${by_scale:{7b: 500, other: 200}}", ge=1)

    @staticmethod
    def problems(cfg: Config) -> Iterator[Problem]:
        yield from unsharded(cfg)
        if cfg.backbone.name != "full":
            rule = f"projects the gradients of dense layers, and those of backbone={cfg.backbone.name} are not"
            yield Problem("optimizer", cfg.optimizer.name, rule, "Use backbone=full, or optimizer=adamw")


@dataclass
class Fira(Galore):
    rank: int = key("rank of the projection", "${by_scale:{7b: 64, other: ${scale.rank}}}", ge=1)
    update_scale: float = key("factor of a projected update", "${by_scale:{1b: 0.0625, 7b: 0.0625, other: 0.25}}", gt=0)
    limiter: float = key("largest growth, in an update, of the norm of what is not projected", 1.01, ge=1)


@dataclass
class Loro(Adam):
    schedule: Literal["loro", "cosine"] = key("a cosine that restarts after each exact step, or as all others", "loro")
    exact_every: int = key("updates between exact steps", "${by_scale:{tiny: 50, 1b: 200, other: 500}}", ge=1)
    restart_warmup: int = key("updates of warm-up after an exact step", 5, ge=0)
    shift: int | None = key(
        "delay of the cosine, a multiple of exact_every; null: that in the warm-up",
        "${by_scale:{350m: 6000, other: null}}",
        ge=0,
    )

    @staticmethod
    def problems(cfg: Config) -> Iterator[Problem]:
        yield from unsharded(cfg)
        if cfg.backbone.name != "lowrank":
            rule = f"moves the product B A^T of linear factors, which backbone={cfg.backbone.name} does not multiply by"
            yield Problem("optimizer", "loro", rule, "Use backbone=lowrank, or optimizer=adamw")
        elif cfg.dlr.enabled:
            rule = f"moves the product B A^T, not the (B + beta R^T) A^T that dlr={cfg.dlr.name} multiplies by"
            yield Problem("optimizer", "loro", rule, "Use dlr=off, or optimizer=adamw")
        every, shift, span = cfg.optimizer.exact_every, cfg.optimizer.shift, cfg.train.steps - cfg.warmup_steps
        if cfg.own_schedule and shift is not None and (shift > span or shift % every):
            rule = f"must be null or a multiple of optimizer.exact_every={every} up to the {span} steps after warm-up"
            yield Problem("optimizer.shift", shift, rule)


# The YAML file of an option takes the defaults of its class as base_<option>, such as base_full or base_adamw_8bit.
OPTIONS: dict[str, dict[str, type[Option]]] = {
    "backbone": {
        "full": Backbone,
        "lowrank": LowRank,
        "cola": Cola,
        "lost": Lost,
        "lax": Lax,
        "cola_lax": ColaLax,
        "sltrain": Sltrain,
        "lora": Lora,
        "relora": Relora,
    },
    "optimizer": {
        "adamw": Adamw,
        "adamw_foreach": Adamw,
        "adamw_8bit": Adamw8bit,
        "muon": Muon,
        "galore": Galore,
        "fira": Fira,
        "loro": Loro,
    },
}
