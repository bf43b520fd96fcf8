"""From documents to sequences of one length: packed without a gap, or one padded document each."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dlr_pretrain.data.streams import Chunk, Place

IGNORE = -100  # target of a position where nothing is predicted; cross_entropy leaves it out


class Sequences(NamedTuple):
    """Some sequences of one length."""

    inputs: np.ndarray  # [n, seq_len]
    targets: np.ndarray  # [n, seq_len], the next token or IGNORE
    real_tokens: int  # input positions that are no padding


def joined(parts: list[Sequences]) -> Sequences:
    return Sequences(
        np.concatenate([part.inputs for part in parts]),
        np.concatenate([part.targets for part in parts]),
        sum(part.real_tokens for part in parts),
    )


def padded(tokens: np.ndarray, starts: np.ndarray, seq_len: int, pad_id: int, eos_id: int) -> Sequences:
    """One document a sequence, cut to ``seq_len`` (its last token is </s> then too) and padded.

    ``tokens`` [total] are documents joined, each with its </s>, beginning at ``starts`` [n].
    """
    lengths = np.diff(np.append(starts, len(tokens)))
    kept = np.minimum(lengths, seq_len)[:, None]
    column = np.arange(seq_len)[None, :]
    inside = column < kept
    inputs = np.where(inside, tokens[np.where(inside, starts[:, None] + column, 0)], pad_id)
    inputs[lengths > seq_len, -1] = eos_id
    targets = np.full(inputs.shape, IGNORE, np.int32)
    targets[:, :-1] = np.where(inside[:, 1:], inputs[:, 1:].astype(np.int32), IGNORE)
    return Sequences(inputs, targets, int(kept.sum()))


class PackedReader:
    """Windows of seq_len + 1 tokens, seq_len apart, over the joined documents: every position has a target."""

    def __init__(self, chunks: Iterator[Chunk], place: Place, seq_len: int):
        self._chunks, self._seq_len = chunks, seq_len
        self._held: deque[Chunk] = deque()
        self._offset = place.token  # of the next window in the first chunk held

    def take(self, count: int) -> tuple[Sequences, Place]:
        """The next sequences, and where the stream stands after them."""
        used = count * self._seq_len
        parts, missing, offset = [], used + 1, self._offset
        for index in itertools.count():
            if index == len(self._held):
                self._held.append(next(self._chunks))
            parts.append(self._held[index].tokens[offset : offset + missing])
            missing, offset = missing - len(parts[-1]), 0
            if not missing:
                break
        self._offset += used
        while self._offset >= len(self._held[0].tokens):
            self._offset -= len(self._held.popleft().tokens)
        window, shape = np.concatenate(parts), (count, self._seq_len)
        return Sequences(window[:-1].reshape(shape), window[1:].reshape(shape), used), self._place()

    def _place(self) -> Place:
        """The next window's first token: the last target of the one before, so it is always in a chunk held."""
        chunk = self._held[0]
        document = int(np.searchsorted(chunk.starts, self._offset, side="right")) - 1
        return chunk.place._replace(
            document=chunk.place.document + document, token=self._offset - int(chunk.starts[document])
        )


class PaddedReader:
    """One document a sequence."""

    def __init__(self, chunks: Iterator[Chunk], seq_len: int, pad_id: int, eos_id: int):
        self._chunks, self._seq_len, self._pad_id, self._eos_id = chunks, seq_len, pad_id, eos_id
        self._held: Chunk | None = None
        self._document = 0  # the next one in the chunk held

    def take(self, count: int) -> tuple[Sequences, Place]:
        """The next sequences, and where the stream stands after them."""
        parts = []
        while count:
            if self._held is None or self._document == len(self._held.starts):
                self._held, self._document = next(self._chunks), 0
            place, tokens, starts = self._held
            first, last = self._document, min(self._document + count, len(starts))
            begin, end = starts[first], starts[last] if last < len(starts) else len(tokens)
            documents = tokens[begin:end], starts[first:last] - begin
            parts.append(padded(*documents, self._seq_len, self._pad_id, self._eos_id))
            self._document, count = last, count - (last - first)
        return joined(parts), place._replace(document=place.document + last, token=0)
