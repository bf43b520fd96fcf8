"""The validation set: the same sequences whatever the number of ranks and the micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from dlr_pretrain.config import Config
from dlr_pretrain.data.documents import Tokens, in_order
from dlr_pretrain.data.packing import Rows, padded
from dlr_pretrain.data.sources import Source
from dlr_pretrain.data.tokenizer import WHOLE, Tokenizer
from dlr_pretrain.util.errors import UserError


@dataclass(frozen=True)
class ValidationSet:
    """Sequences of validation text, as rows of seq_len + 1 tokens for ``inputs_and_targets``."""

    tokens: np.ndarray  # uint16 (int32 above 65,536 ids) [n, seq_len + 1], padded
    lengths: np.ndarray  # int32 [n], number of tokens in each row that are not padding
    real_tokens: int  # number of input positions that are not padding
    separator: int | None = None  # the id that ends a document, where each is scored on its own: see ``separated``


def validation_set(cfg: Config, source: Source, tokenizer: Tokenizer) -> ValidationSet:
    """Documents of the validation shards in file order, until they have ``eval.tokens`` real tokens or all are used."""
    seq_len, pad = cfg.train.seq_len, cfg.eval.packing == "pad"
    parts, found, has_text = [], 0, False
    for tokens, starts in _documents(source, tokenizer, seq_len + 1 if pad else WHOLE):
        ends = np.append(starts[1:], len(tokens))
        real = found + np.cumsum(np.minimum(ends - starts, seq_len) if pad else ends - starts)
        last = min(int(np.searchsorted(real, cfg.eval.tokens)), len(real) - 1)
        tokens, starts, found = tokens[: ends[last]], starts[: last + 1], int(real[last])
        parts.append(padded(tokens, starts, seq_len, tokenizer.pad_id, tokenizer.eos_id) if pad else tokens)
        has_text = has_text or len(tokens) > len(starts)
        if found >= cfg.eval.tokens:
            break
    if not has_text:
        fix = "Give data.validation_files with text, or a larger data.held_out"
        raise UserError(f"No text in the validation shards: {', '.join(source.validation_shards[:3])}. {fix}")
    if pad:
        rows = Rows(*map(np.concatenate, zip(*parts, strict=True)))
    else:
        rows = _windows(np.concatenate(parts), seq_len, tokenizer.pad_id)
    separator = tokenizer.eos_id if cfg.data.mask_documents and not pad else None
    return ValidationSet(*rows, found, separator)


def _documents(source: Source, tokenizer: Tokenizer, longest: int) -> Iterator[Tokens]:
    for shard in source.validation_shards:
        for block in source.blocks(tokenizer, shard):
            for _, some in in_order(block, np.arange(len(block)), longest):
                yield some


def _windows(tokens: np.ndarray, seq_len: int, pad_id: int) -> Rows:
    """Packed windows as in training; the last is padded, so that no token is left out."""
    count = -(-len(tokens) // seq_len)
    filled = np.full(count * seq_len + 1, pad_id, tokens.dtype)
    filled[: len(tokens)] = tokens
    lengths = np.minimum(len(tokens) - seq_len * np.arange(count), seq_len + 1)
    return Rows(sliding_window_view(filled, seq_len + 1)[::seq_len].copy(), lengths.astype("int32"))
