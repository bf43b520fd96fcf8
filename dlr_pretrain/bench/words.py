"""Overrides of train.py, put together for the arms of a comparison."""

from dlr_pretrain.config.arguments import key_of, spread


def with_source(words: list[str]) -> list[str]:
    """``words``, with a data source that needs no download if they name none."""
    named = set(map(key_of, spread(words)))
    return words if {"data", "experiment"} & named else ["data=sample", *words]


def joined(words: list[str], more: list[str]) -> list[str]:
    """``words`` without the keys that ``more`` sets, followed by ``more``."""
    words, more = spread(words), spread(more)
    set_anew = set(map(key_of, more))
    return [*(word for word in words if key_of(word) not in set_anew), *more]
