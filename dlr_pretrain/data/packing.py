"""Turns documents into rows: packed without gaps, or one padded document per row.

A row of seq_len + 1 tokens provides both the inputs and the targets of a sequence, so nothing is stored or sent twice.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from dlr_pretrain.data.streams import Chunk, Position, Tokens
from dlr_pretrain.data.tokenizer import Tokenizer
from dlr_pretrain.util.tensors import IGNORE

# A padded row [seq_len + 1], the number of its tokens without padding, and the stream's position after it.
TokenRow = tuple[np.ndarray, int, tuple[int, ...]]


def inputs_and_targets(
    tokens: torch.Tensor, lengths: torch.Tensor, separator: int | None = None
) -> tuple[torch.Tensor, ...]:
    """A model's ids and targets, int64 [n, seq_len], from rows [n, seq_len + 1] on any device.

    A target is the next id, or IGNORE if that is padding. With a ``separator``, the id that ends a document, the
    result is that of ``separated``.
    """
    wide = tokens.long()
    predicted = torch.arange(1, tokens.shape[1], device=tokens.device) < lengths[:, None]
    plain = wide[:, :-1].contiguous(), torch.where(predicted, wide[:, 1:], IGNORE)
    return plain if separator is None else separated(*plain, separator)


def separated(
    ids: torch.Tensor, targets: torch.Tensor, separator: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, targets and document numbers of packed rows, each [n, seq_len]; numbers count the documents in a row from 0.

    A document ends with its only ``separator``. The target of this token would be the start of the next document, and
    becomes IGNORE. So each document is scored on its own, and the numbers let attention stay within it.
    """
    ends = ids == separator
    return ids, targets.masked_fill(ends, IGNORE), ends.cumsum(1) - ends.long()


def padded_documents(documents: Tokens, seq_len: int, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Rows [n, seq_len + 1] and their lengths, int32 [n]: one document per row, padded or cut to ``seq_len`` tokens.

    </s> replaces the last token of a cut document. The position after the inputs is always padding, because nothing
    follows a document.
    """
    tokens, starts = documents
    whole = np.diff(starts, append=len(tokens))
    lengths = np.minimum(whole, seq_len)
    beyond = np.append(tokens, np.full(seq_len, tokenizer.pad_id, tokens.dtype))
    rows = sliding_window_view(beyond, seq_len + 1)[starts]
    rows[np.arange(seq_len + 1) >= lengths[:, None]] = tokenizer.pad_id
    rows[whole > seq_len, seq_len - 1] = tokenizer.eos_id
    return rows, lengths.astype(np.int32)


def padded_rows(chunks: Iterator[Chunk], seq_len: int, tokenizer: Tokenizer) -> Iterator[TokenRow]:
    """Yields the documents of the chunks, one per row."""
    for position, chunk in chunks:
        rows, lengths = padded_documents(chunk, seq_len, tokenizer)
        for done, (row, length) in enumerate(zip(rows, lengths.tolist(), strict=True), position.document + 1):
            yield row, length, position._replace(document=done, token=0)


def packed_rows(chunks: Iterator[Chunk], position: Position, seq_len: int) -> Iterator[TokenRow]:
    """Yields windows of seq_len + 1 tokens, seq_len apart, over the joined documents: every position has a target.

    The last token of a window is the first of the next. Tokens after the last window of a chunk are carried over.
    """
    carried, skip = np.empty(0, np.uint16), position.token
    for where, chunk in chunks:
        flat = np.concatenate((carried, chunk.tokens[skip:])) if len(carried) else chunk.tokens[skip:]
        count = (len(flat) - 1) // seq_len
        used = count * seq_len
        if count > 0:
            # At most seq_len tokens are carried over, so the first token after any window lies in this chunk.
            after = np.arange(seq_len, used + 1, seq_len) - len(carried) + skip
            document = np.searchsorted(chunk.starts, after, side="right") - 1
            token = after - chunk.starts[document]
            windows = sliding_window_view(flat, seq_len + 1)[::seq_len]
            for row, d, t in zip(windows, document.tolist(), token.tolist(), strict=True):
                yield row, seq_len + 1, where._replace(document=where.document + d, token=t)
        carried, skip = flat[used:], 0
