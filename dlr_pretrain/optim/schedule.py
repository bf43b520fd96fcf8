"""Learning rates as pure functions of the update's index: no state to save or restore."""

import math

from dlr_pretrain.config import Config


def rate(cfg: Config, index: int) -> float:
    """The learning rate of the update with this ``index``, counted from 0, in the run ``cfg``."""
    if cfg.optimizer.restart_every:
        return cfg.optimizer.rate(cfg, index)
    t, every = cfg.train, cfg.backbone.merge_every
    factor = restarted(index, every, cfg.backbone.restart_warmup) if every else 1.0
    span = t.steps, cfg.warmup_steps, t.lr, t.min_lr_ratio
    return factor * decayed(index, *span, decay=cfg.lr_decay_steps, shape=t.lr_decay)


def merge_due(cfg: Config, step: int) -> bool:
    """Whether ReLoRA merges after update ``step`` (counted from 1). It never merges after the last update."""
    every = cfg.backbone.merge_every
    return every is not None and step % every == 0 and step < cfg.train.steps


SHAPES = {"cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)), "linear": lambda progress: 1 - progress}


def decayed(index: int, steps: int, warmup: int, peak: float, min_ratio: float, decay: int, shape: str) -> float:
    """The rate of the update with this ``index``, counted from 0: a linear warm-up, then ``peak``, then a decay.

    The rate rises from 0 to ``peak`` over ``warmup`` updates. Over the last ``decay`` updates it falls to
    ``min_ratio * peak`` at ``steps``, as a half cosine or linearly. As in the GaLore family of scripts, the first
    update of a warm-up has rate 0.
    """
    if index < warmup:
        return peak * index / warmup
    since = index - (steps - decay)
    return peak * (min_ratio + (1 - min_ratio) * SHAPES[shape](since / decay)) if since >= 0 else peak


def restarted(index: int, every: int, restart: int) -> float:
    """ReLoRA's factor of the rate (Lialin et al., 2023): it rises from 0 to 1 over ``restart`` updates after a merge.

    The first update after a merge has an index that is a multiple of ``every``.
    """
    since = index % every
    return since / restart if index >= every and since < restart else 1.0
