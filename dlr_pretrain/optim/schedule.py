"""Learning rates as pure functions of the update's index: nothing to save, nothing to restore."""

from __future__ import annotations

import math
from typing import Any

from dlr_pretrain.config import Config


def rate(cfg: Config, update: int) -> float:
    """The learning rate of update ``update`` (counted from 0) in the run ``cfg``."""
    t = cfg.train
    knobs: dict[str, Any] = cfg.optimizer.knobs
    backbone: dict[str, Any] = cfg.backbone.knobs
    span = t.steps, cfg.warmup_steps, t.lr, t.min_lr_ratio
    if cfg.own_schedule:
        every, shift = knobs["exact_every"], knobs["shift"]
        shift = cfg.warmup_steps // every * every if shift is None else shift  # restarts follow exact steps
        return loro(update, *span, every=every, restart=knobs["restart_warmup"], shift=shift)
    since_merge = 1.0
    if "merge_every" in backbone:
        since_merge = restarted(update, backbone["merge_every"], backbone["restart_warmup"])
    return since_merge * decayed(update, *span, decay=cfg.lr_decay_steps, shape=t.lr_decay)


def merge_due(cfg: Config, step: int) -> bool:
    """Whether ReLoRA merges after update ``step`` (counted from 1); never after the last."""
    every: Any = cfg.backbone.knobs.get("merge_every")
    return every is not None and step % every == 0 and step < cfg.train.steps


def restarts(cfg: Config) -> int | None:
    """The updates between restarts of the rate of ``cfg``; None without restarts."""
    return cfg.optimizer.knobs["exact_every"] if cfg.own_schedule else cfg.backbone.knobs.get("merge_every")


SHAPES = {"cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)), "linear": lambda progress: 1 - progress}


def decayed(update: int, steps: int, warmup: int, peak: float, min_ratio: float, decay: int, shape: str) -> float:
    """The rate of update ``update`` (counted from 0): linear from 0 to ``peak`` over ``warmup`` updates, then constant;
    over the last ``decay`` updates it falls to ``min_ratio * peak`` at ``steps``, as a half cosine or linearly.

    As in the GaLore family of scripts, the first update has rate 0 if there is a warm-up.
    """
    if update < warmup:
        return peak * update / warmup
    since = update - (steps - decay)
    return peak * (min_ratio + (1 - min_ratio) * SHAPES[shape](since / decay)) if since >= 0 else peak


def restarted(update: int, every: int, restart: int) -> float:
    """ReLoRA's factor of the rate (Lialin et al., 2023): it rises from 0 to 1 in ``restart`` updates after a merge.

    A merge follows every ``every`` updates, so the index of the first update after a merge is a multiple of ``every``.
    """
    since = update % every
    return since / restart if update >= every and since < restart else 1.0


def loro(
    update: int, steps: int, warmup: int, peak: float, min_ratio: float, every: int, restart: int, shift: int
) -> float:
    """LORO's rate, with the constants of its authors' code.

    The warm-up starts at ``min_ratio * peak`` rather than 0. The cosine after it runs ``shift`` updates late, so that
    it rises a little further first and ends above the minimum. An exact step, every ``every`` updates, zeroes the
    moments; the rate then rises, over ``restart`` updates, from almost 0 to the value of the curve at the restart.
    There is no restart from the end of the warm-up until update ``shift + every``.
    """
    warms_up, span = update < warmup, steps - warmup
    t = update if warms_up else update - shift
    cycle, since = divmod(t, every)
    restarting = cycle > 0 and since < restart
    at = cycle * every if restarting else t
    if warms_up:
        top = 0.5 * (1 + math.cos(math.pi * shift / span))
        level = at / warmup * (top - min_ratio) + min_ratio
    else:
        level = min_ratio + (1 - min_ratio) * SHAPES["cosine"]((at - warmup) / span)
    if restarting:
        level = since / restart * (level - 1e-6) + 1e-6
    return peak * level
