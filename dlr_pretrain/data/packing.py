"""From documents to sequences of one length: packed without a gap, or one padded document each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dlr_pretrain.data.streams import Chunk, Place

IGNORE = -100  # target of a position where nothing is predicted; cross_entropy leaves it out


class Sequences(NamedTuple):
    """Some sequences of one length."""

    inputs: np.ndarray  # [n, seq_len]
    targets: np.ndarray  # [n, seq_len], the next token or IGNORE
    real: np.ndarray  # [n], input positions that are no padding


class Run(NamedTuple):
    """Consecutive sequences of a stream."""

    sequences: Sequences
    places: list[list[int]]  # where the stream stands after each of them: n times the numbers of a ``Place``


def padded(tokens: np.ndarray, starts: np.ndarray, seq_len: int, pad_id: int, eos_id: int) -> Sequences:
    """One document a sequence, cut to ``seq_len`` (its last token is </s> then too) and padded.

    ``tokens`` [total] are documents joined, each with its </s>, beginning at ``starts`` [n].
    """
    lengths = np.diff(np.append(starts, len(tokens)))
    real = np.minimum(lengths, seq_len)
    column = np.arange(seq_len)
    inside = column < real[:, None]
    inputs = np.where(inside, tokens[np.where(inside, starts[:, None] + column, 0)], pad_id)
    inputs[lengths > seq_len, -1] = eos_id
    targets = np.full(inputs.shape, IGNORE, np.int32)
    targets[:, :-1] = np.where(inside[:, 1:], inputs[:, 1:].astype(np.int32), IGNORE)
    return Sequences(inputs, targets, real)


def padded_runs(chunks: Iterator[Chunk], seq_len: int, pad_id: int, eos_id: int) -> Iterator[Run]:
    """A run for each chunk: its documents, one a sequence."""
    for place, tokens, starts in chunks:
        yield Run(
            padded(tokens, starts, seq_len, pad_id, eos_id),
            _places(place, place.document + 1 + np.arange(len(starts)), np.zeros_like(starts)),
        )


def packed_runs(chunks: Iterator[Chunk], place: Place, seq_len: int) -> Iterator[Run]:
    """Windows of seq_len + 1 tokens, seq_len apart, over the joined documents: every position has a target.

    A window's last target is the first input of the next; a run is what the chunks so far allow, the rest is carried.
    """
    carried, skip = np.empty(0, np.uint16), place.token
    for chunk in chunks:
        flat = np.concatenate((carried, chunk.tokens[skip:])) if len(carried) else chunk.tokens[skip:]
        count = (len(flat) - 1) // seq_len
        used = count * seq_len
        if count > 0:
            # At most seq_len tokens are carried, so the first token after any window lies in this chunk.
            after = np.arange(seq_len, used + 1, seq_len) - len(carried) + skip
            document = np.searchsorted(chunk.starts, after, side="right") - 1
            yield Run(
                Sequences(
                    flat[:used].reshape(count, seq_len),
                    flat[1 : used + 1].reshape(count, seq_len),
                    np.full(count, seq_len),
                ),
                _places(chunk.place, chunk.place.document + document, after - chunk.starts[document]),
            )
        carried, skip = flat[used:], 0


def _places(place: Place, document: np.ndarray, token: np.ndarray) -> list[list[int]]:
    """Places in the block of ``place``, at these documents and tokens [n]."""
    block = (place.epoch, place.shard, place.block)
    return [[*block, d, t] for d, t in zip(document.tolist(), token.tolist(), strict=True)]


class SequenceReader:
    """Takes sequences from runs, as many as are asked for."""

    def __init__(self, runs: Iterator[Run]):
        self._runs = runs
        self._run: Run | None = None
        self._taken = 0  # of the run

    def fill(self, inputs: np.ndarray, targets: np.ndarray) -> tuple[int, list[int]]:
        """Write the next sequences into [n, seq_len]; returns their real tokens and the stream's place after them."""
        done = real = 0
        while done < len(inputs):
            if self._run is None or self._taken == len(self._run.places):
                self._run, self._taken = next(self._runs), 0
            sequences, places = self._run
            count = min(len(inputs) - done, len(places) - self._taken)
            rows = slice(self._taken, self._taken + count)
            inputs[done : done + count] = sequences.inputs[rows]
            targets[done : done + count] = sequences.targets[rows]
            real += int(sequences.real[rows].sum())
            self._taken, done = self._taken + count, done + count
        return real, places[self._taken - 1]
