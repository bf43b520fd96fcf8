"""Documents as tokens, in the blocks inside which they are shuffled.

A block is a run of consecutive rows of a shard (or of every m-th row). It ends with the row that brings it to
``BLOCK_DOCUMENTS`` rows or ``BLOCK_CHARACTERS`` characters. Characters are counted because text is tokenised only when
it is used, so the number of tokens is unknown when a block ends. Pre-tokenised shards store the number of characters of
each text, so they have the same blocks. A row is a document, unless it is left out (held out, or bad).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import numpy as np

from dlr_pretrain.data.tokenizer import WHOLE, Tokenizer

BLOCK_DOCUMENTS = 1024  # documents that are shuffled together
BLOCK_CHARACTERS = 4 << 20  # also ends a block, for long texts such as books: each stream holds a block in memory
CHUNK_DOCUMENTS = 64  # documents that are tokenised at once
CHUNK_CHARACTERS = 1 << 18


class Tokens(NamedTuple):
    """Some documents, each followed by its end of sequence."""

    tokens: np.ndarray  # [total], uint16 (int32 above 65,536 ids), all documents joined
    starts: np.ndarray  # [documents], offset of each in tokens; strictly increasing


class Block(Protocol):
    """Documents that are shuffled together."""

    rows: int  # of the shard that the block spans: its documents, and rows that are left out

    def __len__(self) -> int:
        """The number of its documents."""
        ...

    def take(self, order: np.ndarray, longest: int) -> Tokens:
        """The tokens of the first documents in ``order`` [n]: at least one, and as many as one take should hold.

        Only the first ``longest`` tokens of a document are needed, so those after them may be missing.
        """
        ...


def token_dtype(vocab_size: int) -> type[np.unsignedinteger] | type[np.signedinteger]:
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


def tokenise(texts: list[str], tokenizer: Tokenizer, longest: int = WHOLE) -> Tokens:
    """The tokens of each text. If a document has more than ``longest``, those after them may be missing."""
    ids = tokenizer.encode_documents(texts, longest)
    tokens = np.concatenate(ids, dtype=token_dtype(tokenizer.vocab_size), casting="unsafe")
    return Tokens(tokens, np.cumsum([0, *map(len, ids[:-1])]))


def in_order(block: Block, order: np.ndarray, longest: int, done: int = 0) -> Iterator[tuple[int, Tokens]]:
    """Yield the documents of a block in ``order`` from position ``done`` on, as (position of the first, tokens)."""
    while done < len(order):
        some = block.take(order[done:], longest)
        yield done, some
        done += len(some.starts)


def chunks(texts: Iterable[str | None], documents: int, characters: int) -> Iterator[list[str | None]]:
    """Lists of consecutive texts (None: left out), each ended by its number of texts or of characters."""
    taken: list[str | None] = []
    size = 0
    for text in texts:
        taken.append(text)
        size += len(text or "")
        if len(taken) == documents or size >= characters:
            yield taken
            taken, size = [], 0
    if taken:
        yield taken


class TextBlock:
    """A block of texts, which are tokenised when they are taken."""

    def __init__(self, texts: list[str | None], tokenizer: Tokenizer):
        self.texts = [text for text in texts if text is not None]
        self.rows, self._tokenizer = len(texts), tokenizer

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, order: np.ndarray, longest: int) -> Tokens:
        texts = next(chunks((self.texts[i] for i in order), CHUNK_DOCUMENTS, CHUNK_CHARACTERS))
        return tokenise([text for text in texts if text is not None], self._tokenizer, longest)
