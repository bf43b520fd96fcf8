"""Turns documents into rows of one length: packed without gaps, or one padded document per row.

A row holds the seq_len inputs of a sequence and one more token, so that it provides both inputs and targets: nothing is
stored, read or sent to a device twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from dlr_pretrain.data.documents import Tokens
from dlr_pretrain.data.streams import Position
from dlr_pretrain.util.tensors import IGNORE


class Run(NamedTuple):
    """Consecutive rows of a stream, and the stream's position after each of them."""

    tokens: np.ndarray  # [n, seq_len + 1], padded
    lengths: np.ndarray  # int32 [n], number of tokens in each row that are not padding
    position: Position  # its epoch, shard and block are those in which the rows end
    document: np.ndarray  # [n], ``Position.document`` after each row
    token: np.ndarray  # [n], ``Position.token`` after each row


def inputs_and_targets(
    tokens: torch.Tensor, lengths: torch.Tensor, separator: int | None = None
) -> tuple[torch.Tensor, ...]:
    """A model's ids and targets, int64 [n, seq_len], from rows [n, seq_len + 1] on any device.

    A target is the next id, or IGNORE if that is padding. With a ``separator``, the id that ends a document, this is
    the result of ``separated``.
    """
    wide = tokens.long()
    predicted = torch.arange(1, tokens.shape[1], device=tokens.device) < lengths[:, None]
    found = wide[:, :-1].contiguous(), torch.where(predicted, wide[:, 1:], IGNORE)
    return found if separator is None else separated(*found, separator)


def separated(
    ids: torch.Tensor, targets: torch.Tensor, separator: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The ids of packed rows [n, seq_len], the targets, and the number of each position's document in its row, from 0.

    A document ends with its only ``separator``, whose target, the start of the next document, becomes IGNORE. So each
    document is scored on its own, and with the numbers attention can stay inside it.
    """
    ends = ids == separator
    return ids, targets.masked_fill(ends, IGNORE), ends.cumsum(1) - ends.long()


def padded(
    tokens: np.ndarray, starts: np.ndarray, seq_len: int, pad_id: int, eos_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows [n, seq_len + 1] and their lengths, int32 [n]: a document each, padded, or cut to ``seq_len`` tokens, of
    which the last is replaced by </s>.

    ``tokens`` [total] are the joined documents, each with its </s>, which begin at ``starts`` [n]. The position after
    the inputs is always padding, because nothing follows a document.
    """
    whole = np.diff(starts, append=len(tokens))
    lengths = np.minimum(whole, seq_len)
    beyond = np.append(tokens, np.full(seq_len, pad_id, tokens.dtype))
    rows = sliding_window_view(beyond, seq_len + 1)[starts]
    rows[np.arange(seq_len + 1) >= lengths[:, None]] = pad_id
    rows[whole > seq_len, seq_len - 1] = eos_id
    return rows, lengths.astype(np.int32)


def padded_runs(chunks: Iterator[tuple[Position, Tokens]], seq_len: int, pad_id: int, eos_id: int) -> Iterator[Run]:
    """A run for each chunk: its documents, one per row."""
    for position, chunk in chunks:
        after = position.document + 1 + np.arange(len(chunk.starts))
        yield Run(*padded(*chunk, seq_len, pad_id, eos_id), position, after, np.zeros_like(after))


def packed_runs(chunks: Iterator[tuple[Position, Tokens]], position: Position, seq_len: int) -> Iterator[Run]:
    """Windows of seq_len + 1 tokens, seq_len apart, over the joined documents: every position has a target.

    A window's last token is the first of the next. A run holds the windows that the chunks so far complete; the
    tokens that are left are carried over to the next chunk.
    """
    carried, skip = np.empty(0, np.uint16), position.token
    for where, chunk in chunks:
        flat = np.concatenate((carried, chunk.tokens[skip:])) if len(carried) else chunk.tokens[skip:]
        count = (len(flat) - 1) // seq_len
        used = count * seq_len
        if count > 0:
            # At most seq_len tokens are carried, so the first token after any window lies in this chunk.
            after = np.arange(seq_len, used + 1, seq_len) - len(carried) + skip
            document = np.searchsorted(chunk.starts, after, side="right") - 1
            rows, lengths = sliding_window_view(flat, seq_len + 1)[::seq_len], np.full(count, seq_len + 1, np.int32)
            yield Run(rows, lengths, where, where.document + document, after - chunk.starts[document])
        carried, skip = flat[used:], 0


class RowReader:
    """Reads rows from runs, any number at a time."""

    def __init__(self, runs: Iterator[Run]):
        self._runs = runs
        self._run: Run | None = None
        self._taken = 0  # rows of the run

    def ready(self) -> Run:
        """The run that the next row is of. The first takes long if the documents before it must be skipped."""
        if self._run is None or self._taken == len(self._run.document):
            self._run, self._taken = next(self._runs), 0
        return self._run

    def fill(self, tokens: np.ndarray, lengths: np.ndarray) -> list[int]:
        """Write the next rows to ``tokens`` [n, seq_len + 1] and ``lengths`` [n]; returns the position after them."""
        done, after = 0, Position()
        while done < len(tokens):
            run = self.ready()
            count = min(len(tokens) - done, len(run.document) - self._taken)
            own, found = slice(done, done + count), slice(self._taken, self._taken + count)
            tokens[own], lengths[own] = run.tokens[found], run.lengths[found]
            done, self._taken = done + count, self._taken + count
            last = self._taken - 1
            after = run.position._replace(document=int(run.document[last]), token=int(run.token[last]))
        return list(after)
