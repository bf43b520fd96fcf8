"""The rules that tie an optimizer to the backbone, the residual, the precision, the sharding and the steps of a run."""

from __future__ import annotations

from collections.abc import Iterator

from dlr_pretrain.config.problems import Problem
from dlr_pretrain.config.tree import Config

OF_MATRICES = ("galore", "fira", "loro", "muon")
ROUND_AT_WILL = ("adamw", "adamw_8bit")  # optimizers whose updates precision=bf16_sr can round


def optimizer_problems(cfg: Config) -> Iterator[Problem]:
    """Every rule that the optimizer's choice and knobs break."""
    name = cfg.optimizer.name
    if name in OF_MATRICES and cfg.parallel.name != "ddp":
        rule = f"a matrix optimizer needs whole matrices, and parallel={cfg.parallel.name} shards them"
        yield Problem("optimizer", name, rule, "Use parallel=ddp, or optimizer=adamw")
    if cfg.precision.name == "bf16_sr" and name not in ROUND_AT_WILL:
        rule = f"optimizer={name} writes its weights itself, rounded to the nearest"
        yield Problem("precision", "bf16_sr", rule, "Use optimizer=adamw or adamw_8bit, or precision=bf16_mixed")
    if name in ("galore", "fira"):
        yield from _projected(cfg)
    if name == "loro":
        yield from _loro(cfg)
    if name == "muon" and not cfg.optimizer.nesterov and cfg.precision.name == "bf16":
        rule = "torch (up to 2.13) then overwrites a momentum that is kept in bf16"
        yield Problem("optimizer.nesterov", False, rule, "Use optimizer.nesterov=true, or precision=bf16_mixed")


def _projected(cfg: Config) -> Iterator[Problem]:
    name, rank = cfg.optimizer.name, cfg.optimizer.rank
    narrowest = min(cfg.scale.hidden_size, cfg.scale.intermediate_size)
    if cfg.backbone.name != "full":
        rule = f"projects the gradients of dense layers, and those of backbone={cfg.backbone.name} are not"
        yield Problem("optimizer", name, rule, "Use backbone=full, or optimizer=adamw")
    if not 1 <= rank <= narrowest:
        yield Problem("optimizer.rank", rank, f"must lie between 1 and the narrowest layer's width, {narrowest}")


def _loro(cfg: Config) -> Iterator[Problem]:
    knobs, steps = cfg.optimizer.knobs, cfg.train.steps
    every, shift, restart = knobs["exact_every"], knobs["shift"], knobs["restart_warmup"]
    if cfg.backbone.name != "lowrank":
        rule = f"moves the product B A^T of linear factors, which backbone={cfg.backbone.name} does not multiply by"
        yield Problem("optimizer", "loro", rule, "Use backbone=lowrank, or optimizer=adamw")
    elif cfg.dlr.enabled:
        rule = f"moves the product B A^T, not the (B + beta R^T) A^T that dlr={cfg.dlr.name} multiplies by"
        yield Problem("optimizer", "loro", rule, "Use dlr=off, or optimizer=adamw")
    if every > steps:
        rule = f"must not exceed train.steps={steps}: no step would be exact"
        yield Problem("optimizer.exact_every", every, rule)
    if not cfg.own_schedule:
        return
    if restart >= every:
        yield Problem("optimizer.restart_warmup", restart, f"must be below optimizer.exact_every={every}")
    span = steps - cfg.warmup_steps
    if shift is not None and (shift > span or shift % every):
        rule = f"must be null or a multiple of optimizer.exact_every={every} up to {span}, the steps after the warm-up"
        yield Problem("optimizer.shift", shift, rule)


def idle_knobs(cfg: Config) -> dict[str, str]:
    """Keys that the run does not read because of its optimizer, each with the reason."""
    knobs, idle = cfg.optimizer.knobs, {}
    if knobs.get("rank", cfg.scale.rank) != cfg.scale.rank:
        idle["scale.rank"] = f"optimizer.rank is {knobs['rank']}"
    if knobs.get("schedule", "loro") != "loro":
        why = f"optimizer.schedule={knobs['schedule']}"
        idle |= {"optimizer.restart_warmup": why, "optimizer.shift": why}
    return idle
