"""Document streams: the data order is a pure function of (data.seed, step) on any number of ranks.

In an epoch, each of V streams reads a share of the text, and other text in the next epoch. Tokens are laid end to end
in a seeded order of their files and cut into equal shares, measured in what a stream uses up: tokens if documents are
packed, documents if each is padded. Text is dealt in whole files. Every stream provides the same number of sequences,
so all finish an epoch together: to the token, or as nearly as the sizes of files are equal.

A stream reads its share block by block, and each block in its own seeded order. A block of text is a run of rows, which
ends with the row that brings it to ``BLOCK_DOCUMENTS`` rows or ``BLOCK_CHARACTERS`` characters. Each stream holds one
block of texts in memory and tokenises them as they are used.

Five integers give a stream's position, so it can be resumed, or moved to another rank, exactly.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from dlr_pretrain.data.tokenizer import Tokenizer
from dlr_pretrain.util.errors import UserError

BLOCK_DOCUMENTS = 1024  # documents that are shuffled together
BLOCK_CHARACTERS = 4 << 20  # ends a block of long texts, such as books, earlier
CHUNK_DOCUMENTS = 64  # documents that are tokenised, or copied from a shard, at once
MAX_IDLE = 4  # passes of a stream through all shares of a source without finding text
UNEVEN = 0.05  # how much the shares of dealt files may differ, relative to their average
DEALING = 2  # in the seeds of dealt files, so that they differ from other seeds


class Position(NamedTuple):
    """A position in a stream, stored as a list of five integers."""

    epoch: int = 0
    file: int = 0  # in the stream's share of the epoch; 0 in a token source
    row: int = 0  # the first row of the block; in a token source, the number of the block
    document: int = 0  # position in the block's order
    token: int = 0  # tokens of this document that have been used


class Tokens(NamedTuple):
    """The joined tokens of some documents, each of which ends with an end-of-sequence token."""

    tokens: np.ndarray  # [total], uint16 (int32 above 65,536 ids)
    starts: np.ndarray  # [documents], offset of each document in tokens; strictly increasing


@dataclass(frozen=True)
class DocumentBlock:
    """Documents that are shuffled together."""

    documents: int
    take: Callable[[np.ndarray], Tokens]  # returns the documents with these numbers [n]


Place = tuple[int, int]  # of a block in a share: file and first row, or 0 and the number of the block
Chunk = tuple[Position, Tokens]  # some documents, and the position of the first


class Share(NamedTuple):
    """Names what a stream reads in an epoch."""

    seed: int
    stream: int
    epoch: int
    streams: int
    packed: bool  # measured in tokens, else in documents

    @property
    def key(self) -> tuple[int, int, int]:
        """Seeds the order within the share."""
        return self.seed, self.stream, self.epoch


class BlockSource(Protocol):
    """What a stream needs from a source."""

    def blocks(self, tokenizer: Tokenizer, share: Share, start: Place) -> Iterator[tuple[Place, DocumentBlock]]:
        """Yields the blocks of a share in their order, from the block at ``start`` on, each with its place."""

    def describe(self) -> str:
        """One line for the console."""


def endless(source: BlockSource, tokenizer: Tokenizer, share: Share, position: Position) -> Iterator[Chunk]:
    """Yields chunks of the documents of a stream from ``position`` on, each with the position of its first document.

    ``share`` is that of any epoch. The caller must skip the first ``position.token`` tokens. Raises UserError if the
    source has no text.
    """
    epoch, file, row, document, _ = position
    idle = 0  # epochs in a row in which this stream finds no text
    while idle < MAX_IDLE * share.streams:
        share, idle = share._replace(epoch=epoch), idle + 1
        for place, block in source.blocks(tokenizer, share, (file, row)):
            order = permutation(block.documents, *share.key, *place)
            for done in range(document, block.documents, CHUNK_DOCUMENTS):
                some = block.take(order[done : done + CHUNK_DOCUMENTS])
                if len(some.tokens) > len(some.starts):
                    idle = 0
                yield Position(epoch, *place, document=done), some
            document = 0
        epoch, file, row, document = epoch + 1, 0, 0, 0
    raise UserError(f"{source.describe()}: no text to train on. Give other files, or see data.text_key")


def permutation(n: int, *key: int) -> np.ndarray:
    """A seeded order of n items, int64 [n].

    A run must resume under another version of numpy. numpy keeps SeedSequence and the raw words of PCG64 stable, but
    not ``Generator.permutation``, so this function sorts raw words.
    """
    words = np.random.PCG64(np.random.SeedSequence(key)).random_raw(n)
    return np.argsort(words, kind="stable")


def can_be_dealt(sizes: Sequence[int], streams: int) -> bool:
    """Whether whole files of these sizes, in bytes, give streams nearly equal shares. See ``dealt``."""
    smallest = min(sizes) if len(sizes) % streams == 0 else 0
    return min(sizes) > 0 and max(sizes) - smallest <= UNEVEN * sum(sizes) / streams


def dealt(sizes: Sequence[int], share: Share) -> list[int]:
    """The numbers of the files in a share.

    Files in the order of their sizes are dealt in rounds, one to each stream, in a seeded order. Two shares differ at
    most by the largest file minus the smallest, or minus nothing if the last round is not full.
    """
    rounds = -(-len(sizes) // share.streams)
    by_size = np.argsort(sizes, kind="stable")[::-1]
    hands = np.arange(rounds) * share.streams + [
        int(permutation(share.streams, share.seed, share.epoch, number, DEALING)[share.stream])
        for number in range(rounds)
    ]
    files = by_size[hands[hands < len(sizes)]]
    return files[permutation(len(files), *share.key, 0, DEALING)].tolist()


def text_blocks(rows: Iterator[tuple[int, str | None]], tokenizer: Tokenizer) -> Iterator[tuple[int, DocumentBlock]]:
    """Yields each block after the number of its first row. A row whose text is None is left out."""
    while block := list(_rows_of_block(rows)):
        texts = [text for _, text in block if text is not None]
        yield block[0][0], DocumentBlock(len(texts), partial(tokenise, texts, tokenizer))


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
