"""Documents as tokens, in the blocks inside which they are shuffled.

Of text, a block is a run of rows. It ends with the row that brings it to ``BLOCK_DOCUMENTS`` rows or
``BLOCK_CHARACTERS`` characters: each stream holds a block in memory, and tokenises its texts when they are used.
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
BLOCK_CHARACTERS = 4 << 20  # also ends a block of text, for long texts such as books
CHUNK_DOCUMENTS = 64  # documents that are tokenised, or copied from a shard, at once


class Tokens(NamedTuple):
    """Some documents, each followed by its end of sequence."""

    tokens: np.ndarray  # [total], uint16 (int32 above 65,536 ids), all documents joined
    starts: np.ndarray  # [documents], offset of each in tokens; strictly increasing


@dataclass(frozen=True)
class Block:
    """Documents that are shuffled together."""

    documents: int
    take: Callable[[np.ndarray], Tokens]  # gives the documents with these numbers [n]

    def in_order(self, order: np.ndarray, done: int = 0) -> Iterator[tuple[int, Tokens]]:
        """Yield the documents in ``order`` from position ``done`` on, some at a time, as (position, tokens)."""
        for at in range(done, len(order), CHUNK_DOCUMENTS):
            yield at, self.take(order[at : at + CHUNK_DOCUMENTS])


def text_blocks(rows: Iterable[tuple[int, str | None]], tokenizer: Tokenizer) -> Iterator[tuple[int, Block]]:
    """Yield the blocks of texts, each after the number of its first row. The text of a row that is left out is None."""
    documents: list[str] = []
    first, count, size = 0, 0, 0
    for number, text in rows:
        first, count = (number if count == 0 else first), count + 1
        if text is not None:
            documents.append(text)
            size += len(text)
        if count == BLOCK_DOCUMENTS or size >= BLOCK_CHARACTERS:
            yield first, Block(len(documents), partial(tokenised, documents, tokenizer))
            documents, count, size = [], 0, 0
    if count:
        yield first, Block(len(documents), partial(tokenised, documents, tokenizer))


def tokenised(documents: Sequence[str], tokenizer: Tokenizer, numbers: Iterable[int]) -> Tokens:
    """The documents with these numbers."""
    ids = tokenizer.encode([documents[i] for i in numbers])
    end = np.array([tokenizer.eos_id])
    parts = [part for document in ids for part in (document, end)]
    tokens = np.concatenate(parts, dtype=token_dtype(tokenizer.vocab_size), casting="unsafe")
    return Tokens(tokens, np.cumsum([0, *(len(document) + 1 for document in ids[:-1])]))


def tokenised_in_chunks(texts: Iterable[str | None], tokenizer: Tokenizer) -> Iterator[Tokens]:
    """The documents of texts in their order, some at a time; without those that are None."""
    there = (text for text in texts if text is not None)
    while some := list(islice(there, CHUNK_DOCUMENTS)):
        yield tokenised(some, tokenizer, range(len(some)))


def token_dtype(vocab_size: int) -> type[np.unsignedinteger] | type[np.signedinteger]:
    return np.uint16 if vocab_size <= 1 << 16 else np.int32
