"""Documents as tokens, in the blocks within which they are shuffled.

A block of text is a run of rows. It ends with the row that brings it to ``BLOCK_DOCUMENTS`` rows or
``BLOCK_CHARACTERS`` characters. Each stream holds one block of texts in memory and tokenises them as they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from dlr_pretrain.data.tokenizer import Tokenizer

BLOCK_DOCUMENTS = 1024  # documents that are shuffled together
BLOCK_CHARACTERS = 4 << 20  # ends a block of long texts, such as books, earlier
CHUNK_DOCUMENTS = 64  # documents that are tokenised, or copied from a shard, at once


class Tokens(NamedTuple):
    """The joined tokens of some documents, each of which ends with an end-of-sequence token."""

    tokens: np.ndarray  # [total], uint16 (int32 above 65,536 ids)
    starts: np.ndarray  # [documents], offset of each document in tokens; strictly increasing


@dataclass(frozen=True)
class Block:
    """Documents that are shuffled together."""

    documents: int
    take: Callable[[np.ndarray], Tokens]  # returns the documents with these numbers [n]


def text_blocks(rows: Iterator[tuple[int, str | None]], tokenizer: Tokenizer) -> Iterator[tuple[int, Block]]:
    """Yields each block after the number of its first row. A row whose text is None is left out."""
    while block := list(_rows_of_block(rows)):
        texts = [text for _, text in block if text is not None]
        yield block[0][0], Block(len(texts), partial(tokenise, texts, tokenizer))


def _rows_of_block(rows: Iterator[tuple[int, str | None]]) -> Iterator[tuple[int, str | None]]:
    size = 0
    for number, text in islice(rows, BLOCK_DOCUMENTS):
        yield number, text
        size += len(text or "")
        if size >= BLOCK_CHARACTERS:
            return


def tokenise(documents: Sequence[str], tokenizer: Tokenizer, numbers: Iterable[int]) -> Tokens:
    """The tokens of the documents with these numbers."""
    ids = tokenizer.encode([documents[i] for i in numbers])
    end = np.array([tokenizer.eos_id])
    parts = [part for document in ids for part in (document, end)]
    tokens = np.concatenate(parts, dtype=token_dtype(tokenizer.vocab_size), casting="unsafe")
    return Tokens(tokens, np.cumsum([0, *(len(document) + 1 for document in ids[:-1])]))


def tokenise_in_chunks(texts: Iterable[str | None], tokenizer: Tokenizer) -> Iterator[Tokens]:
    """Yields the tokens of the texts in their order, a chunk at a time. A text that is None is left out."""
    present = (text for text in texts if text is not None)
    while chunk := list(islice(present, CHUNK_DOCUMENTS)):
        yield tokenise(chunk, tokenizer, range(len(chunk)))


def token_dtype(vocab_size: int) -> type[np.unsignedinteger] | type[np.signedinteger]:
    return np.uint16 if vocab_size <= 1 << 16 else np.int32
