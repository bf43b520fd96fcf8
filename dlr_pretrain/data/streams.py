"""Document streams: the data order is a pure function of (data.seed, step) on any number of ranks.

An epoch joins the shards in a seeded order and cuts the result into equal parts, one for each of V streams. Parts are
measured in what a stream uses up: tokens if documents are packed, documents if each is padded. Every stream provides
the same number of sequences, so all finish an epoch together, whatever the sizes of the files. Parts may differ by
one token or document. A stream takes the next part in each epoch, so these differences do not add up.

A stream reads its part block by block, and each block in its own seeded order. A block of text is a run of rows, which
ends with the row that brings it to ``BLOCK_DOCUMENTS`` rows or ``BLOCK_CHARACTERS`` characters. Each stream holds one
block of texts in memory and tokenises them as they are used.

Five integers give a stream's position, so it can be resumed, or moved to another rank, exactly.
"""

from __future__ import annotations

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
MAX_IDLE = 4  # passes of a stream through all parts of a source without finding text
GOLDEN_MULTIPLIER = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio


class Position(NamedTuple):
    """A position in a stream, stored as a list of five integers."""

    epoch: int = 0
    piece: int = 0  # in the stream's share of the epoch
    row: int = 0  # the first row of the block; in a token source, the number of the block
    document: int = 0  # position in the block's order
    token: int = 0  # tokens of this document that have been used


class Tokens(NamedTuple):
    """The joined tokens of some documents, each of which ends with an end-of-sequence token."""

    tokens: np.ndarray  # [total], uint16 (int32 above 65,536 ids)
    starts: np.ndarray  # [documents], offset of each document in tokens; strictly increasing


@dataclass(frozen=True)
class Block:
    """Documents that are shuffled together."""

    documents: int
    take: Callable[[np.ndarray], Tokens]  # returns the documents with these numbers [n]


Place = tuple[int, int]  # of a block in a share: piece and first row, or 0 and the number of the block
Chunk = tuple[Position, Tokens]  # some documents, and the position of the first


class Piece(NamedTuple):
    """A part of a shard, in the units of its source."""

    shard: int  # index of the shard
    begin: int
    end: int
    size: int  # of the whole shard

    def has(self, row: int) -> bool:
        """Whether a row of the shard belongs to the piece.

        Multiples of the golden ratio spread consecutive rows evenly over the shard's size. So a part of a file is the
        same share of its rows in any format, even before the rows are counted.
        """
        return self.begin <= (row * GOLDEN_MULTIPLIER % (1 << 64)) * self.size >> 64 < self.end


@dataclass(frozen=True)
class Share:
    """What a stream reads in an epoch."""

    pieces: list[Piece]
    packed: bool  # measured in tokens, else in documents
    key: tuple[int, ...]  # seeds the order within the share


class BlockSource(Protocol):
    """What a stream needs from a source."""

    slack: float  # the share of a part by which a cut may move to the end of a shard

    def sizes(self, packed: bool) -> list[int]:
        """The size of each training shard: tokens (or characters) if ``packed``, else documents."""

    def blocks(self, tokenizer: Tokenizer, share: Share, start: Place) -> Iterator[tuple[Place, Block]]:
        """Yields the blocks of a share in their order, from the block at ``start`` on, each with its place."""

    def describe(self) -> str:
        """One line for the console."""


class DocumentStream:
    """The endless sequence of documents of one of the V streams."""

    def __init__(
        self, source: BlockSource, tokenizer: Tokenizer, seed: int, stream: int, num_streams: int, packed: bool
    ):
        self._source, self._tokenizer = source, tokenizer
        self._seed, self._stream, self._streams, self._packed = seed, stream, num_streams, packed

    def share(self, epoch: int) -> Share:
        """What the stream reads in an epoch."""
        sizes, slack, parts = self._source.sizes(self._packed), self._source.slack, self._streams
        turn = 0.0 if parts == 1 or slack else fraction(self._seed, epoch)  # moves the cuts in each epoch
        order, part = permutation(len(sizes), self._seed, epoch), (self._stream + epoch) % parts
        pieces = cut(sizes, order, part, parts, turn, slack)
        return Share(pieces, self._packed, (self._seed, self._stream, epoch))

    def chunks(self, position: Position) -> Iterator[Chunk]:
        """Yields chunks of documents from ``position`` on, each with the position of its first document.

        The caller must skip the first ``position.token`` tokens. Raises UserError if the source has no text.
        """
        epoch, piece, row, document, _ = position
        idle = 0  # epochs in a row in which this stream finds no text
        while idle < MAX_IDLE * self._streams:
            share, idle = self.share(epoch), idle + 1
            for place, block in self._source.blocks(self._tokenizer, share, (piece, row)):
                order = permutation(block.documents, *share.key, *place)
                for done in range(document, block.documents, CHUNK_DOCUMENTS):
                    some = block.take(order[done : done + CHUNK_DOCUMENTS])
                    if len(some.tokens) > len(some.starts):
                        idle = 0
                    yield Position(epoch, *place, document=done), some
                document = 0
            epoch, piece, row, document = epoch + 1, 0, 0, 0
        raise UserError(f"{self._source.describe()}: no text to train on. Give other files, or see data.text_key")


def permutation(n: int, *key: int) -> np.ndarray:
    """A seeded order of n items, int64 [n].

    A run must resume under another version of numpy. numpy keeps SeedSequence and the raw words of PCG64 stable, but
    not ``Generator.permutation``, so this function sorts raw words.
    """
    words = np.random.PCG64(np.random.SeedSequence(key)).random_raw(n)
    return np.argsort(words, kind="stable")


def fraction(*key: int) -> float:
    """A seeded number in [0, 1)."""
    return int(np.random.PCG64(np.random.SeedSequence((*key, 1))).random_raw()) / (1 << 64)


def cut(
    sizes: Sequence[int], order: np.ndarray, part: int, parts: int, turn: float = 0.0, slack: float = 0.0
) -> list[Piece]:
    """Part ``part`` when the shards in ``order`` are cut into ``parts`` equal parts.

    The first part begins at the fraction ``turn`` of the whole, and the last part ends there. With ``slack``, cuts near
    the ends of shards move there, and parts may differ by twice this share.
    """
    order = np.concatenate((order, order))
    edges = np.concatenate(([0], np.cumsum(np.array(sizes, np.int64)[order])))
    total = int(edges[-1]) // 2
    cuts = int(turn * total) + np.arange(parts + 1) * total // parts
    if slack:
        cuts = _moved_to_ends(cuts, edges, len(sizes), slack)
    begin, end = int(cuts[part]), int(cuts[part + 1])
    pieces = []
    for at in range(int(np.searchsorted(edges, begin, "right")) - 1, len(order)):
        start, stop = int(edges[at]), int(edges[at + 1])
        if start >= end:
            break
        if max(start, begin) < min(stop, end):
            pieces.append(Piece(int(order[at]), max(begin - start, 0), min(end, stop) - start, stop - start))
    return pieces


def _moved_to_ends(cuts: np.ndarray, edges: np.ndarray, shards: int, slack: float) -> np.ndarray:
    """``cuts``, moved to nearby ends of shards so that fewer shards are read by two streams.

    Shards of nearly the same size count as equal. Otherwise a cut moves to the nearest end within the slack.
    """
    parts, total = len(cuts) - 1, int(edges[-1]) // 2
    ends = np.arange(parts + 1) * shards / parts  # counted in shards
    ends = np.where(np.abs(ends - ends.round()) * parts <= slack * shards, ends.round(), ends)
    equal = np.interp(ends, np.arange(len(edges)), edges).astype(np.int64)
    if np.abs(np.diff(equal) * parts / total - 1).max() <= 2 * slack:
        return equal
    nearest = edges[np.abs(edges - cuts[:, None]).argmin(axis=1)]
    return np.where(np.abs(nearest - cuts) * parts <= slack * total, nearest, cuts)


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
