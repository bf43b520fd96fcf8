"""The rules of ``train.memory=low``, which updates the parameters during the backward pass."""

from __future__ import annotations

from collections.abc import Iterator

from dlr_pretrain.config.problems import Problem
from dlr_pretrain.config.tree import Config

ONE_BY_ONE = ("adamw_8bit", "adamw")  # optimizers that update one parameter at a time and mask the update on the device
LOW = "train.memory=low"
AHEAD = 4  # sums of gradients over ranks that may be under way at once, beside the backward pass


def memory_problems(cfg: Config, world_size: int | None) -> Iterator[Problem]:
    """Every broken rule of ``train.memory=low``."""
    t, dlr = cfg.train, cfg.dlr
    if t.memory != "low":
        return
    if cfg.optimizer.name not in ONE_BY_ONE:
        rule = f"does not update parameters one by one, as {LOW} requires"
        yield Problem("optimizer", cfg.optimizer.name, rule, "Use optimizer=adamw_8bit, or adamw (more memory)")
    if t.clip is not None and t.clip_by == "norm":
        rule = f"needs the norm of all gradients before the first update, and {LOW} keeps none of them"
        yield Problem("train.clip", t.clip, rule, "Use train.clip_by=previous_norm, or train.clip=null")
    if world_size is not None and t.global_batch % world_size == 0:
        share = t.global_batch // world_size
        taken = "auto" if t.micro_batch == "auto" else cfg.micro_batch(world_size)
        if taken != share:
            rule = f"{LOW} sums no micro-batches, so it must be a rank's whole share of train.global_batch, {share}"
            fix = f"Use train.micro_batch={share}, a smaller train.global_batch, or more ranks"
            yield Problem("train.micro_batch", taken, rule, fix)
    if t.accumulate == "fp32":
        rule = f"needs a buffer of all gradients, which {LOW} does not keep"
        yield Problem("train.accumulate", "fp32", rule, "Use train.accumulate=native")
    if cfg.parallel.name != "ddp":
        rule = f"shards gradients block by block, and {LOW} sums them one by one"
        yield Problem("parallel", cfg.parallel.name, rule, "Use parallel=ddp, or train.memory=full")
    if dlr.enabled and dlr.learn_alpha:
        rule = f"alpha's gradient is taken from that of B after the backward pass, when {LOW} has released it"
        yield Problem("dlr.learn_alpha", True, rule, "Use dlr=on, or train.memory=full")
    if dlr.enabled and dlr.mode == "decayed_offset":
        rule = f"gives back a share of the offset after a whole update, which {LOW} may take in part"
        yield Problem("dlr.mode", dlr.mode, rule, "Use train.memory=full")
