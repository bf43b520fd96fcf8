"""ReLoRA's merges (Lialin et al., 2023), which happen between two updates.

A merge adds the product of the factors to the frozen weights, and the factors start anew.
"""

from __future__ import annotations

from dlr_pretrain.config import Config
from dlr_pretrain.models.linear import Draw, named_groups
from dlr_pretrain.optim.build import Optimizer
from dlr_pretrain.train.weights import Weights


def is_due(cfg: Config, step: int) -> bool:
    """Whether a merge follows update ``step`` (counted from 1); none follows the last."""
    every = cfg.backbone.knobs.get("merge_every")
    return every is not None and step % every == 0 and step < cfg.train.steps


def merge(cfg: Config, weights: Weights, optimizer: Optimizer, step: int) -> None:
    """Merge after update ``step``, and drop most of the factors' optimizer state.

    The result depends on the state, ``cfg`` and ``step`` alone: it is the same on every rank and after a resume.
    """
    knobs, draw, state = cfg.backbone.knobs, Draw(cfg.seed), weights.state
    number = step // knobs["merge_every"]
    factors = [
        name for prefix, group in named_groups(weights.model) for name in group.merge_(state, draw, prefix, number)
    ]
    optimizer.prune(set(factors), 1 - knobs["prune_ratio"], (cfg.seed << 32) + number, knobs["prune"])
