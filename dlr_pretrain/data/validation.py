"""The validation set: the same sequences whatever the number of ranks and the micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from dlr_pretrain.config import Config
from dlr_pretrain.data.packing import IGNORE, padded
from dlr_pretrain.data.sources import Source
from dlr_pretrain.data.streams import CHUNK_DOCUMENTS, tokenise
from dlr_pretrain.data.tokenizer import Tokenizer
from dlr_pretrain.errors import UserError


@dataclass(frozen=True)
class ValidationSet:
    """Sequences of validation text with their targets."""

    inputs: np.ndarray  # uint16 (int32 above 65,536 pieces) [n, seq_len]
    targets: np.ndarray  # int32 [n, seq_len], the next token, or -100 where nothing is predicted
    real_tokens: int  # input positions that are no padding


def validation_set(cfg: Config, source: Source, tokenizer: Tokenizer) -> ValidationSet:
    """Documents of the validation shards in file order, until ``eval.tokens`` real tokens or all there is."""
    seq_len, pad = cfg.train.seq_len, cfg.eval.packing == "pad"
    parts, found, has_text = [], 0, False
    for tokens, starts in _chunks(source, tokenizer):
        ends = np.append(starts[1:], len(tokens))
        real = found + np.cumsum(np.minimum(ends - starts, seq_len) if pad else ends - starts)
        last = min(int(np.searchsorted(real, cfg.eval.tokens)), len(real) - 1)
        tokens, starts, found = tokens[: ends[last]], starts[: last + 1], int(real[last])
        parts.append(padded(tokens, starts, seq_len, tokenizer.pad_id, tokenizer.eos_id) if pad else tokens)
        has_text = has_text or len(tokens) > len(starts)
        if found >= cfg.eval.tokens:
            break
    if not has_text:
        raise UserError(f"No text in the validation shards: {', '.join(source.validation_shards[:3])}")
    if pad:
        inputs, targets, _ = map(np.concatenate, zip(*parts, strict=True))
    else:
        inputs, targets = _windows(np.concatenate(parts), seq_len, tokenizer.pad_id)
    return ValidationSet(inputs, targets, found)


def _chunks(source: Source, tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    texts = chain.from_iterable(map(source.read, source.validation_shards))
    while some := list(islice(texts, CHUNK_DOCUMENTS)):
        yield tokenise(some, tokenizer)


def _windows(tokens: np.ndarray, seq_len: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Packed windows as in training; the last is padded, so that no token is left out."""
    shape = (-(-len(tokens) // seq_len), seq_len)
    inputs = np.full(shape, pad_id, tokens.dtype)
    targets = np.full(shape, IGNORE, np.int32)
    inputs.reshape(-1)[: len(tokens)] = tokens
    targets.reshape(-1)[: len(tokens) - 1] = tokens[1:]
    return inputs, targets
