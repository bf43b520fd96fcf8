"""OmegaConf resolvers for values in ``configs/`` that follow from the chosen scale."""

from __future__ import annotations

from collections.abc import Mapping

from omegaconf import DictConfig, OmegaConf


def by_scale(values: Mapping, *, _root_: DictConfig) -> object:
    """The value for the chosen scale's name, else that of ``other``: ``"${by_scale:{1b: 200, other: 500}}"``, quoted.

    Raises KeyError if the scale is not listed and there is no ``other``.
    """
    name = _root_.scale.name
    if name not in values and "other" not in values:
        raise KeyError(f"no value for scale={name} (there are {', '.join(values)}): give one on the command line")
    return values[name] if name in values else values["other"]


def times(number: int, ratio: float) -> int:
    """A rounded share of a whole number: ``${times:${scale.rank},0.5}``."""
    return round(number * ratio)


def lost_rank(rank: int, hidden: int, intermediate: int, sparsity: float) -> int:
    """The largest rank at which LOST, sparse channels included, has no more parameters than plain layers of ``rank``.

    The rank is at least 1. A block's low-rank factors have 8 d + 3 (d + f) parameters per unit of rank; each of its
    seven projections adds k = max(1, int(sparsity * d_in)) dense columns.
    """
    d, f = hidden, intermediate
    columns = {width: max(1, int(sparsity * width)) for width in (d, f)}
    extra = 4 * columns[d] * d + 2 * columns[d] * f + columns[f] * d
    per_rank = 8 * d + 3 * (d + f)
    return max(1, rank - -(-extra // per_rank))


def register() -> None:
    for resolver in (by_scale, times, lost_rank):
        OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)
