"""A mixture of texts: each stream draws its sequences from several sources, in proportion to their weights.

The source of a sequence depends only on ``data.seed``, the stream, and the position in the stream. Of the first n
sequences of a stream, about w n come from a source of weight w: within 1 of two sources, within 2 of a few. Streams
round up at different sequences, so all of them together are about as close. As without a mixture, all streams reach the
end of a source together. Each source has its own epochs.

A stream's position is the number of sequences that it has drawn, followed by its position in each source.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from dlr_pretrain.config import Config
from dlr_pretrain.data.packing import TokenRow
from dlr_pretrain.data.streams import Position, permutation
from dlr_pretrain.data.tokens import TokenSource

if TYPE_CHECKING:
    from dlr_pretrain.data.sources import TextSource

MIXING = 3  # in the seeds of mixtures, so that they differ from other seeds


@dataclass(frozen=True)
class Mixture:
    """Sources by name, and their weights, which add up to 1."""

    sources: Mapping[str, TextSource | TokenSource]
    weights: Mapping[str, float]

    @property
    def version(self) -> dict[str, str | None]:
        return {name: source.version for name, source in self.sources.items()}

    @property
    def versions(self) -> dict[str, str]:
        return dict(chain.from_iterable(source.versions.items() for source in self.sources.values()))

    @property
    def order(self) -> str:
        return f"mixture 1 of {', '.join(source.order for source in self.sources.values())}"

    @property
    def tokenizer_path(self) -> Any:
        return next(filter(None, (source.tokenizer_path for source in self.sources.values())), None)

    @cached_property
    def fingerprint(self) -> str:
        parts = [(name, source.fingerprint) for name, source in self.sources.items()]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def contents(self) -> dict[str, str]:
        """What each source has for training, for validation, and leaves out."""
        named = self.sources.items()
        labels = dict.fromkeys(chain.from_iterable(source.contents for _, source in named))
        return {
            label: "; ".join(f"{name}: {one.contents[label]}" for name, one in named if label in one.contents)
            for label in labels
        }

    def describe(self) -> str:
        return "; ".join(f"{self.weights[name]:.1%} {name}: {one.describe()}" for name, one in self.sources.items())

    def drawn(self, sequences: int, seed: int, streams: int) -> np.ndarray:
        """How many of the first ``sequences`` of each stream come from each source, int64 [streams, sources].

        The first source gets floor(w n + phase), and the others share the rest in the same way.
        """
        left, rest, counts = np.full(streams, sequences), 1.0, []
        for number, weight in enumerate([*self.weights.values()][:-1]):
            share = min(1.0, weight / rest)  # of what is left
            counts.append(np.floor(left * share + phases(seed, streams, number)).astype(np.int64))
            left, rest = left - counts[-1], rest - weight
        return np.stack([*counts, left], axis=1)

    def progress(self, cfg: Config, sequences: int) -> dict[str, float]:
        """What of each source was read in ``sequences`` of each stream: its share of all, and in how many epochs.

        Of text that is streamed, the number of epochs is not known.
        """
        counts = self.drawn(sequences, cfg.data.seed, cfg.num_streams).sum(0)
        packed, record = cfg.data.packing == "packed", {}
        for (name, source), count in zip(self.sources.items(), counts.tolist(), strict=True):
            record[f"data/{name}/share"] = count / max(1, counts.sum().item())
            if isinstance(source, TokenSource):
                record[f"data/{name}/epochs"] = count * (cfg.train.seq_len if packed else 1) / source.size(packed)
        return record

    def forecast(self, cfg: Config) -> str:
        """How much of each source a run of ``cfg`` reads, in words."""
        ends = self.progress(cfg, cfg.train.steps * cfg.train.global_batch // cfg.num_streams)
        parts = []
        for name, weight in self.weights.items():
            epochs = ends.get(f"data/{name}/epochs")
            parts.append(f"{name} {weight:.1%}, {'streamed' if epochs is None else f'read {epochs:.3g} times'}")
        return "; ".join(parts)


@cache
def phases(seed: int, streams: int, number: int) -> np.ndarray:
    """Equally spaced numbers in (0, 1) in a seeded order, one for each stream: of source ``number``."""
    return (permutation(streams, seed, number, MIXING) + 0.5) / streams


def divided(position: Sequence[int], sources: int) -> tuple[int, list[list[int]]]:
    """The number of sequences that a stream has drawn, and its position in each source; [] is the beginning."""
    size = len(Position())
    drawn, *inside = position or [0] * (1 + size * sources)
    return drawn, [inside[size * i : size * (i + 1)] for i in range(sources)]


def mixed_rows(
    mixture: Mixture, rows: Sequence[Iterator[TokenRow]], position: Sequence[int], seed: int, stream: int, streams: int
) -> Iterator[TokenRow]:
    """Yields the rows of a stream from ``position`` on; ``rows`` has those of each source, from its position on."""
    number, inside = divided(position, len(rows))
    places: list[Sequence[int]] = [*inside]
    rows = [chain([next(one)], one) for one in rows]  # at the start, because each may have to wait for the network
    before = mixture.drawn(number, seed, streams)[stream]
    while True:
        number += 1
        after = mixture.drawn(number, seed, streams)[stream]
        source = int(np.argmax(after - before))
        row, length, places[source] = next(rows[source])
        before = after
        yield row, length, (number, *chain.from_iterable(places))
