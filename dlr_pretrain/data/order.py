"""The data order: which part of the text each stream reads in each epoch.

An epoch joins the shards in a seeded order and cuts the result into equal parts, one per stream. Parts are measured in
what a stream uses up: tokens if documents are packed, documents if each is padded. Every stream provides equally many
sequences, so all streams finish an epoch together, whatever the sizes of the files. Parts may differ by one token or
document. A stream takes the next part in each epoch, so these differences do not add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
Place = tuple[int, int]  # of a block in a share: piece and first row, or 0 and the number of the block


class Piece(NamedTuple):
    """A part of a shard, in the units of its source."""

    shard: int  # index of the shard
    begin: int
    end: int
    size: int  # of the whole shard

    def has(self, row: int) -> bool:
        """Whether a row of the shard belongs to the piece.

        Multiples of the golden ratio spread consecutive rows evenly over the shard's size. So a part of a file is the
        same share of its rows in any format, even before the rows are counted.
        """
        return self.begin <= (row * GOLDEN % (1 << 64)) * self.size >> 64 < self.end


@dataclass(frozen=True)
class Share:
    """What a stream reads in an epoch."""

    pieces: list[Piece]
    packed: bool  # measured in tokens, else in documents
    key: tuple[int, ...]  # seeds the order within the share


def permutation(n: int, *key: int) -> np.ndarray:
    """A seeded order of n items, int64 [n].

    A run must resume under another version of numpy. numpy keeps SeedSequence and the raw words of PCG64 stable, but
    not ``Generator.permutation``, so this function sorts raw words.
    """
    words = np.random.PCG64(np.random.SeedSequence(key)).random_raw(n)
    return np.argsort(words, kind="stable")


def fraction(*key: int) -> float:
    """A seeded number in [0, 1)."""
    return int(np.random.PCG64(np.random.SeedSequence((*key, 1))).random_raw()) / (1 << 64)


def cut(
    sizes: Sequence[int], order: np.ndarray, part: int, parts: int, turn: float = 0.0, slack: float = 0.0
) -> list[Piece]:
    """Part ``part`` when the shards in ``order`` are cut into ``parts`` equal parts.

    The first part begins at the share ``turn`` of the whole, and the last part ends there. With ``slack``, cuts near
    the ends of shards move there, and parts may differ by twice this share.
    """
    order = np.concatenate((order, order))
    edges = np.concatenate(([0], np.cumsum(np.array(sizes, np.int64)[order])))
    total = int(edges[-1]) // 2
    cuts = int(turn * total) + np.arange(parts + 1) * total // parts
    if slack:
        cuts = _moved_to_ends(cuts, edges, len(sizes), slack)
    begin, end = int(cuts[part]), int(cuts[part + 1])
    pieces = []
    for at in range(int(np.searchsorted(edges, begin, "right")) - 1, len(order)):
        start, stop = int(edges[at]), int(edges[at + 1])
        if start >= end:
            break
        if max(start, begin) < min(stop, end):
            pieces.append(Piece(int(order[at]), max(begin - start, 0), min(end, stop) - start, stop - start))
    return pieces


def _moved_to_ends(cuts: np.ndarray, edges: np.ndarray, shards: int, slack: float) -> np.ndarray:
    """Cuts near the ends of shards, so that fewer shards are read by two streams.

    Shards of nearly the same size count as equal. Otherwise a cut moves to the nearest end within the slack.
    """
    parts, total = len(cuts) - 1, int(edges[-1]) // 2
    ends = np.arange(parts + 1) * shards / parts  # counted in shards
    ends = np.where(np.abs(ends - ends.round()) * parts <= slack * shards, ends.round(), ends)
    equal = np.interp(ends, np.arange(len(edges)), edges).astype(np.int64)
    if np.abs(np.diff(equal) * parts / total - 1).max() <= 2 * slack:
        return equal
    nearest = edges[np.abs(edges - cuts[:, None]).argmin(axis=1)]
    return np.where(np.abs(nearest - cuts) * parts <= slack * total, nearest, cuts)
