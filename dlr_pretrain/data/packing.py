"""From documents to rows of one length: packed without a gap, or one padded document each.

A row is the seq_len inputs of a sequence and one token more, so that inputs and targets are the same memory: nothing is
stored, read or sent to a device twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from dlr_pretrain.data.streams import Chunk, Place
from dlr_pretrain.data.tokenizer import EOS
from dlr_pretrain.tensors import IGNORE


class Rows(NamedTuple):
    """Some sequences of one length."""

    tokens: np.ndarray  # [n, seq_len + 1], padded
    lengths: np.ndarray  # int32 [n], tokens of each row that are no padding


class PlacedRows(NamedTuple):
    """Consecutive rows of a stream, and where the stream stands after each of them."""

    rows: Rows
    place: Place  # of the block that they end in
    document: np.ndarray  # [n]
    token: np.ndarray  # [n]


def inputs_and_targets(
    tokens: torch.Tensor, lengths: torch.Tensor, mask_documents: bool = False
) -> tuple[torch.Tensor, ...]:
    """What a model takes, of rows [n, seq_len + 1] on any device: the ids and the next ids, or IGNORE, int64
    [n, seq_len]; where documents are masked from one another those of ``separated``.
    """
    wide = tokens.long()
    predicted = torch.arange(1, tokens.shape[1], device=tokens.device) < lengths[:, None]
    found = wide[:, :-1].contiguous(), torch.where(predicted, wide[:, 1:], IGNORE)
    return separated(*found) if mask_documents else found


def separated(ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The ids of packed rows [n, seq_len], the targets, and the number of each position's document in its row.

    A document ends with its one </s>, after which the beginning of another is no target: documents are scored, and with
    the numbers attended to, as each on its own.
    """
    ends = ids == EOS
    return ids, targets.masked_fill(ends, IGNORE), ends.cumsum(1) - ends.long()


def real_tokens(lengths: np.ndarray, seq_len: int) -> int:
    """Input positions of rows of these lengths that are no padding."""
    return int(np.minimum(lengths, seq_len).sum())


def padded(tokens: np.ndarray, starts: np.ndarray, seq_len: int, pad_id: int, eos_id: int) -> Rows:
    """One document a row, cut to ``seq_len`` (its last token is </s> then too) and padded.

    ``tokens`` [total] are documents joined, each with its </s>, beginning at ``starts`` [n]. The position after the
    inputs is padding always: nothing follows a document.
    """
    whole = np.diff(starts, append=len(tokens))
    lengths = np.minimum(whole, seq_len)
    beyond = np.append(tokens, np.full(seq_len, pad_id, tokens.dtype))
    rows = sliding_window_view(beyond, seq_len + 1)[starts]
    rows[np.arange(seq_len + 1) >= lengths[:, None]] = pad_id
    rows[whole > seq_len, seq_len - 1] = eos_id
    return Rows(rows, lengths.astype(np.int32))


def padded_runs(chunks: Iterator[Chunk], seq_len: int, pad_id: int, eos_id: int) -> Iterator[PlacedRows]:
    """A run for each chunk: its documents, one a row."""
    for place, tokens, starts in chunks:
        rows = padded(tokens, starts, seq_len, pad_id, eos_id)
        yield PlacedRows(rows, place, place.document + 1 + np.arange(len(starts)), np.zeros_like(starts))


def packed_runs(chunks: Iterator[Chunk], place: Place, seq_len: int) -> Iterator[PlacedRows]:
    """Windows of seq_len + 1 tokens, seq_len apart, over the joined documents: every position has a target.

    A window's last token is the first of the next; a run is what the chunks so far allow, the rest is carried.
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
            rows = Rows(sliding_window_view(flat, seq_len + 1)[::seq_len], np.full(count, seq_len + 1, np.int32))
            yield PlacedRows(rows, chunk.place, chunk.place.document + document, after - chunk.starts[document])
        carried, skip = flat[used:], 0


class RowReader:
    """Takes rows from runs, as many as are asked for."""

    def __init__(self, runs: Iterator[PlacedRows]):
        self._runs = runs
        self._run: PlacedRows | None = None
        self._taken = self._size = 0  # rows of the run

    def ready(self) -> None:
        """Have rows at hand; the first ones take long where documents before them are passed over."""
        if self._taken == self._size:
            self._run = next(self._runs)
            self._taken, self._size = 0, len(self._run.rows.tokens)

    def fill(self, tokens: np.ndarray, lengths: np.ndarray) -> list[int]:
        """Write the next rows into [n, seq_len + 1] and [n]; returns the stream's place after them."""
        done = 0
        while done < len(tokens):
            self.ready()
            count = min(len(tokens) - done, self._size - self._taken)
            rows, end = slice(done, done + count), self._taken + count
            tokens[rows] = self._run.rows.tokens[self._taken : end]
            lengths[rows] = self._run.rows.lengths[self._taken : end]
            done, self._taken = done + count, end
        _, place, document, token = self._run
        last = self._taken - 1
        return [place.epoch, place.shard, place.block, int(document[last]), int(token[last])]
