"""Document streams: the data order as a pure function of (data.seed, step), whatever the number of ranks.

The documents of a source are divided among V streams once and for all. If there are at least V shards, a stream gets
whole shards (stream v reads shards v, v + V, ...). Otherwise m neighbouring streams, which are mostly of one rank,
share a shard, and each takes every m-th document of it. A stream repeats its documents for ever, in another order each
epoch: its shards in a seeded order, and inside a shard one block after the other, each block in a seeded order of its
own. Five integers give a stream's position, so it is resumed, or moved to another rank, exactly.

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
from dlr_pretrain.data.sources import Source
from dlr_pretrain.data.tokenizer import Tokenizer
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.tensors import IGNORE
from dlr_pretrain.util.text import plural

ORDER_VERSION = 1  # of the order that this file, the blocks and the packing produce; a run resumes only under its own


class Position(NamedTuple):
    """A position in a stream: five integers, which are stored as a plain list."""

    epoch: int = 0
    shard: int = 0  # position in the epoch's order of the stream's shards
    block: int = 0  # first row of the block, counted over the stream's rows of this shard
    document: int = 0  # position in the block's order
    token: int = 0  # tokens of this document that are already used


def permutation(n: int, *key: int) -> np.ndarray:
    """A seeded order of n items, int64 [n].

    It sorts raw words of PCG64, because numpy keeps these and SeedSequence stable for ever, but not
    ``Generator.permutation``, and a run must resume under another version of numpy.
    """
    words = np.random.PCG64(np.random.SeedSequence(key)).random_raw(n)
    return np.argsort(words, kind="stable")


def _assignment(shards: int, stream: int, num_streams: int) -> tuple[list[int], int, int]:
    """The indices of a stream's shards, the first document that it takes of each, and the step between documents."""
    if shards >= num_streams:
        return list(range(stream, shards, num_streams)), 0, 1
    shard = stream * shards // num_streams
    meeting = [v for v in range(num_streams) if v * shards // num_streams == shard]
    return [shard], meeting.index(stream), len(meeting)


class DocumentStream:
    """The endless sequence of documents of one of the V streams."""

    def __init__(self, source: Source, tokenizer: Tokenizer, seed: int, stream: int, num_streams: int):
        self._source, self._tokenizer = source, tokenizer
        self._key, self._count = (seed, stream), num_streams
        dealt, self._residue, self._step = _assignment(len(source.train_shards), stream, num_streams)
        self.shards = tuple(dealt)  # indices; two streams have the same, or no shard in common

    def chunks(self, position: Position) -> Iterator[tuple[Position, Tokens]]:
        """The documents from ``position`` on, for ever, some at a time, with the position of the first of them.

        The caller must skip the first ``position.token`` tokens.
        """
        epoch, begin, block, document, _ = position
        while True:
            whole = (begin, block, document) == (0, 0, 0)
            order = permutation(len(self.shards), *self._key, epoch)
            has_text = False
            for at in range(begin, len(order)):
                for where, some in self._shard_chunks(Position(epoch, at, block, document), self.shards[order[at]]):
                    has_text = has_text or len(some.tokens) > len(some.starts)
                    yield where, some
                block = document = 0
            if whole and not has_text:
                raise UserError(self._no_text())
            epoch, begin = epoch + 1, 0

    def _shard_chunks(self, position: Position, shard: int) -> Iterator[tuple[Position, Tokens]]:
        epoch, at, start, document, _ = position
        name, first = self._source.train_shards[shard], self._residue + start * self._step
        for block in self._source.blocks(self._tokenizer, name, first, self._step):
            order = permutation(block.documents, *self._key, epoch, shard, start)
            for done, some in block.in_order(order, document):
                yield Position(epoch, at, start, done), some
            start, document = start + block.rows, 0

    def _no_text(self) -> str:
        names = self._source.train_shards
        there = sum(block.documents for name in names for block in self._source.blocks(self._tokenizer, name))
        counts = f"{plural(there, 'document')} for {plural(self._count, 'data stream')}"
        rule = f"{', '.join(names[:3])}: {counts}: stream {self._key[1]} has no text"
        if there == 0:
            return f"{rule}. Give other files, or see data.text_key"
        fitting = max((n for n in range(1, self._count) if self._count % n == 0 and n <= there), default=1)
        return f"{rule}. Set data.streams={fitting}, or give more text"


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
