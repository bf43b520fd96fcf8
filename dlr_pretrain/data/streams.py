"""Document streams: the data order as a pure function of (data.seed, step), whatever the number of ranks.

V streams share the text (``order.py``). A stream reads its share of one epoch after that of another, block by block,
each block in a seeded order of its own. Five integers give a stream's position, so it is resumed, or moved to another
rank, exactly.

The documents become rows: packed without gaps, or one padded document a row. A row holds the seq_len inputs of a
sequence and one more token, so that it provides both inputs and targets: nothing is stored, read or sent twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from dlr_pretrain.data.documents import Tokens
from dlr_pretrain.data.order import Share, cut, fraction, permutation
from dlr_pretrain.data.sources import Source
from dlr_pretrain.data.tokenizer import Tokenizer
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.tensors import IGNORE

IDLE = 4  # times that a stream has had each part of the source, after which this has no text


class Position(NamedTuple):
    """A position in a stream: five integers, which are stored as a plain list."""

    epoch: int = 0
    piece: int = 0  # of the stream's share of the epoch
    row: int = 0  # of this piece, with which the block begins; of tokens, the number of the block
    document: int = 0  # position in the block's order
    token: int = 0  # tokens of this document that are already used


class DocumentStream:
    """The endless sequence of documents of one of the V streams."""

    def __init__(self, source: Source, tokenizer: Tokenizer, seed: int, stream: int, num_streams: int, packed: bool):
        self._source, self._tokenizer = source, tokenizer
        self._seed, self._stream, self._streams, self._packed = seed, stream, num_streams, packed

    def share(self, epoch: int) -> Share:
        """What the stream reads in an epoch."""
        sizes, slack, parts = self._source.sizes(self._packed), self._source.slack, self._streams
        turn = 0.0 if parts == 1 or slack else fraction(self._seed, epoch)  # no document is cut at one place for good
        order, part = permutation(len(sizes), self._seed, epoch), (self._stream + epoch) % parts
        pieces = cut(sizes, order, part, parts, turn, slack)
        return Share(pieces, self._packed, (self._seed, self._stream, epoch))

    def chunks(self, position: Position) -> Iterator[tuple[Position, Tokens]]:
        """Yield the documents from ``position`` on, some at a time, with the position of the first of them.

        The caller must skip the first ``position.token`` tokens. Raises UserError if the source has no text.
        """
        epoch, piece, row, document, _ = position
        idle = 0  # epochs without text for this stream
        while idle < IDLE * self._streams:
            share, idle = self.share(epoch), idle + 1
            for place, block in self._source.blocks(self._tokenizer, share, (piece, row)):
                order = permutation(block.documents, *share.key, *place)
                for done, some in block.in_order(order, document):
                    if len(some.tokens) > len(some.starts):
                        idle = 0
                    yield Position(epoch, *place, document=done), some
                document = 0
            epoch, piece, row, document = epoch + 1, 0, 0, 0
        raise UserError(f"{self._source.describe()}: no text to train on. Give other files, or see data.text_key")


# A row [seq_len + 1], padded; the number of its tokens that are not padding; and the stream's position after it.
Row = tuple[np.ndarray, int, Position]


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


def padded_documents(
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


def padded_rows(chunks: Iterator[tuple[Position, Tokens]], seq_len: int, pad_id: int, eos_id: int) -> Iterator[Row]:
    """The documents of the chunks, one a row."""
    for position, chunk in chunks:
        rows, lengths = padded_documents(*chunk, seq_len, pad_id, eos_id)
        for done, (row, length) in enumerate(zip(rows, lengths.tolist(), strict=True), position.document + 1):
            yield row, length, position._replace(document=done, token=0)


def packed_rows(chunks: Iterator[tuple[Position, Tokens]], position: Position, seq_len: int) -> Iterator[Row]:
    """Windows of seq_len + 1 tokens, seq_len apart, over the joined documents: every position has a target.

    A window's last token is the first of the next. The tokens that are left after the windows of a chunk are carried
    over to the next chunk.
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
            token = after - chunk.starts[document]
            windows = sliding_window_view(flat, seq_len + 1)[::seq_len]
            for row, d, t in zip(windows, document.tolist(), token.tolist(), strict=True):
                yield row, seq_len + 1, where._replace(document=where.document + d, token=t)
        carried, skip = flat[used:], 0
