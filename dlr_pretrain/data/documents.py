"""Documents as tokens, in the blocks inside which they are shuffled.

A block is a run of consecutive documents of a shard (or of every m-th document). It ends with the document that brings
it to ``BLOCK_DOCUMENTS`` documents or ``BLOCK_CHARACTERS`` characters. Characters are counted because text is tokenised
only when it is used, so the number of tokens is unknown when a block ends. Pre-tokenised shards store the number of
characters of each text, so they have the same blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from dlr_pretrain.data.tokenizer import WHOLE, Tokenizer

if TYPE_CHECKING:
    from dlr_pretrain.data.sources import TextSource

BLOCK_DOCUMENTS = 1024  # documents that are shuffled together
BLOCK_CHARACTERS = 4 << 20  # also ends a block, for long texts such as books: each stream holds a block in memory
CHUNK_DOCUMENTS = 64  # documents that are tokenised at once
CHUNK_CHARACTERS = 1 << 18


class Tokens(NamedTuple):
    """Some documents, each followed by </s>."""

    tokens: np.ndarray  # [total], uint16 (int32 above 65,536 pieces), all documents joined
    starts: np.ndarray  # [documents], offset of each in tokens; strictly increasing, as each has at least </s>


class Block(Protocol):
    """Documents that are shuffled together."""

    def __len__(self) -> int: ...

    def take(self, order: np.ndarray, longest: int) -> Tokens:
        """The tokens of the first documents in ``order`` [n]: at least one, and as many as one take should hold.

        Only the first ``longest`` tokens of a document are needed, so those after them may be missing.
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


def text_chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    """The texts in lists that are efficient to tokenise at once; each has at least one text."""
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
    """A block of texts, which are tokenised when they are taken."""

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
