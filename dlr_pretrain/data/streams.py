"""Document streams: the data order as a pure function of (data.seed, step), whatever the number of ranks.

The documents of a source are dealt out to V streams once and for all: whole shards where there are at least V of them
(stream v reads shards v, v + V, ...), otherwise the m streams that meet on shard v % S take every m-th of its
documents. A stream runs through its documents for ever, each epoch in another order: its shards in a seeded order, and
inside a shard the documents of one block after the other, each block in a seeded order of its own. Where a stream
stands is five integers, so it is resumed, or moved to another rank, exactly.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dlr_pretrain.data.sources import Source
from dlr_pretrain.data.tokenizer import Tokenizer
from dlr_pretrain.errors import UserError

BLOCK_DOCUMENTS = 1024  # documents that are shuffled together
BLOCK_CHARACTERS = 4 << 20  # and a bound for collections of books: a block is in memory, one a stream
CHUNK_DOCUMENTS = 64  # documents that are tokenised at once
CHUNK_CHARACTERS = 1 << 18


class Place(NamedTuple):
    """A position in a stream; all are whole numbers, so that it is stored as a plain list."""

    epoch: int = 0
    shard: int = 0  # position in the epoch's order of the stream's shards
    block: int = 0  # first document of the block, counted over the stream's documents of this shard
    document: int = 0  # position in the block's order
    token: int = 0  # tokens of this document that are already used


class Chunk(NamedTuple):
    """Some consecutive documents of a stream, tokenised, each followed by </s>."""

    place: Place  # of the first document
    tokens: np.ndarray  # [total], all documents joined
    starts: np.ndarray  # [documents], offset of each in tokens; strictly increasing, as none is without </s>


def permutation(n: int, *key: int) -> np.ndarray:
    """A seeded order of n items, int64 [n].

    Sorts raw words of PCG64: numpy keeps these and SeedSequence stable for ever, but not ``Generator.permutation``,
    and a run must resume under another version of numpy.
    """
    words = np.random.PCG64(np.random.SeedSequence(key)).random_raw(n)
    return np.argsort(words, kind="stable")


def token_dtype(vocab_size: int) -> type[np.unsignedinteger] | type[np.signedinteger]:
    return np.uint16 if vocab_size <= 1 << 16 else np.int32


def tokenise(texts: list[str], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """The texts' tokens, each text followed by </s>, joined: tokens [total] and the offset of each text [texts]."""
    ids = tokenizer.encode(texts)
    for one in ids:
        one.append(tokenizer.eos_id)
    flat = b"".join([array("I", one) for one in ids])  # twice as fast as numpy takes numbers from lists
    tokens = np.frombuffer(flat, np.uintc).astype(token_dtype(tokenizer.vocab_size))
    return tokens, np.cumsum([0, *map(len, ids[:-1])])


class DocumentStream:
    """The endless sequence of documents of one of the V streams."""

    def __init__(self, source: Source, tokenizer: Tokenizer, seed: int, stream: int, num_streams: int):
        self._source, self._tokenizer = source, tokenizer
        self._key = (seed, stream)
        self._stream = stream
        total = len(source.train_shards)
        if total >= num_streams:
            self._shards = list(range(stream, total, num_streams))
            self._residue, self._step = 0, 1
        else:
            self._shards = [stream % total]
            self._residue, self._step = stream // total, len(range(stream % total, num_streams, total))

    def chunks(self, place: Place) -> Iterator[Chunk]:
        """The documents from ``place`` on, for ever. ``place.token`` is left to the reader of the chunks."""
        epoch, position, block, document, _ = place
        while True:
            whole = (position, block, document) == (0, 0, 0)
            order = permutation(len(self._shards), *self._key, epoch)
            has_text = False
            for at in range(position, len(order)):
                for chunk in self._shard_chunks(Place(epoch, at, block, document), self._shards[order[at]]):
                    has_text = has_text or len(chunk.tokens) > len(chunk.starts)
                    yield chunk
                block = document = 0
            if whole and not has_text:
                raise UserError(self._no_text())
            epoch, position = epoch + 1, 0

    def _shard_chunks(self, place: Place, shard: int) -> Iterator[Chunk]:
        epoch, at, _, document, _ = place
        for block, texts in self._blocks(shard, place.block):
            order = permutation(len(texts), *self._key, epoch, shard, block)
            while document < len(texts):
                taken = self._chunk(texts, order[document:])
                yield Chunk(Place(epoch, at, block, document), *tokenise(taken, self._tokenizer))
                document += len(taken)
            document = 0

    @staticmethod
    def _chunk(texts: list[str], order: np.ndarray) -> list[str]:
        """The next documents in the block's order, as many as are worth tokenising at once; at least one."""
        taken, characters = [], 0
        for i in order[:CHUNK_DOCUMENTS]:
            taken.append(texts[i])
            characters += len(texts[i])
            if characters >= CHUNK_CHARACTERS:
                break
        return taken

    def _blocks(self, shard: int, start: int) -> Iterator[tuple[int, list[str]]]:
        """The blocks of this stream's documents of a shard in file order, each with its first document's number."""
        name = self._source.train_shards[shard]
        texts, characters = [], 0
        for text in self._source.read(name, self._residue + start * self._step, self._step):
            texts.append(text)
            characters += len(text)
            if len(texts) == BLOCK_DOCUMENTS or characters >= BLOCK_CHARACTERS:
                yield start, texts
                start, texts, characters = start + len(texts), [], 0
        if texts:
            yield start, texts

    def _no_text(self) -> str:
        names = [self._source.train_shards[shard] for shard in self._shards]
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        share = f"document {self._residue} of every {self._step} in {shown}" if self._step > 1 else shown
        mend = "Give more text, or fewer streams: gcd(train.global_batch, 64) of them share the documents out"
        return f"Data stream {self._stream} ({share}) holds no text. {mend}"
