"""Documents as tokens, in the blocks inside which they are shuffled.

A block is a run of consecutive documents of a shard (or of every m-th of them). It ends with the document that makes it
``BLOCK_DOCUMENTS`` long, or its texts ``BLOCK_CHARACTERS``: text is tokenised only as it is used, so its tokens are not
known when a block ends. Pre-tokenised shards keep each text's length, and so have the same blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from dlr_pretrain.data.tokenizer import WHOLE, Tokenizer

if TYPE_CHECKING:
    from dlr_pretrain.data.sources import TextSource

BLOCK_DOCUMENTS = 1024  # documents that are shuffled together
BLOCK_CHARACTERS = 4 << 20  # and a bound for collections of books: a block is in memory, one a stream
CHUNK_DOCUMENTS = 64  # documents that are tokenised at once
CHUNK_CHARACTERS = 1 << 18


class Tokens(NamedTuple):
    """Some documents, each followed by </s>."""

    tokens: np.ndarray  # [total], uint16 (int32 above 65,536 pieces), all documents joined
    starts: np.ndarray  # [documents], offset of each in tokens; strictly increasing, as none is without </s>


class Block(Protocol):
    """Documents that are shuffled together."""

    def __len__(self) -> int: ...

    def take(self, order: np.ndarray, longest: int) -> Tokens:
        """The first of the documents ``order`` [n], as many as are worth taking at once; at least one.

        No more than the first ``longest`` tokens of a document are wanted, so what follows them may be missing.
        """
        ...


class Documents(Protocol):
    """The tokenised documents of a source's shards."""

    def blocks(self, shard: str, first: int = 0, step: int = 1) -> Iterator[Block]:
        """The documents first, first + step, ... of a shard, block by block in file order."""
        ...


def token_dtype(vocab_size: int) -> type[np.unsignedinteger] | type[np.signedinteger]:
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


def tokenise(texts: list[str], tokenizer: Tokenizer, longest: int = WHOLE) -> Tokens:
    """The tokens of each text; of a document with more than ``longest``, those that follow may be missing."""
    ids = tokenizer.encode_documents(texts, longest)
    tokens = np.concatenate(ids, dtype=token_dtype(tokenizer.vocab_size), casting="unsafe")
    return Tokens(tokens, np.cumsum([0, *map(len, ids[:-1])]))


def in_order(block: Block, order: np.ndarray, longest: int, done: int = 0) -> Iterator[tuple[int, Tokens]]:
    """The documents of a block in ``order`` from position ``done`` on: the position of the first, and some tokens."""
    while done < len(order):
        some = block.take(order[done:], longest)
        yield done, some
        done += len(some.starts)


def text_chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    """The texts, as many at once as are worth tokenising together; at least one."""
    taken, characters = [], 0
    for text in texts:
        taken.append(text)
        characters += len(text)
        if len(taken) == CHUNK_DOCUMENTS or characters >= CHUNK_CHARACTERS:
            yield taken
            taken, characters = [], 0
    if taken:
        yield taken


class TextBlock:
    """A block of texts, tokenised as they are taken."""

    def __init__(self, texts: list[str], tokenizer: Tokenizer):
        self.texts, self._tokenizer = texts, tokenizer

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, order: np.ndarray, longest: int) -> Tokens:
        return tokenise(next(text_chunks(self.texts[i] for i in order)), self._tokenizer, longest)


class TextDocuments:
    """The documents of a source of texts."""

    def __init__(self, source: TextSource, tokenizer: Tokenizer):
        self._source, self._tokenizer = source, tokenizer

    def blocks(self, shard: str, first: int = 0, step: int = 1) -> Iterator[TextBlock]:
        texts, characters = [], 0
        for text in self._source.read(shard, first, step):
            texts.append(text)
            characters += len(text)
            if len(texts) == BLOCK_DOCUMENTS or characters >= BLOCK_CHARACTERS:
                yield TextBlock(texts, self._tokenizer)
                texts, characters = [], 0
        if texts:
            yield TextBlock(texts, self._tokenizer)
