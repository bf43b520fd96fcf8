"""Document streams: the data order is a pure function of (data.seed, step) on any number of ranks.

V streams share the text (``order.py``). In each epoch a stream reads its share block by block, and each block in its
own seeded order. Five integers give a stream's position, so it can be resumed, or moved to another rank, exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dlr_pretrain.data import documents
from dlr_pretrain.data.documents import Tokens
from dlr_pretrain.data.order import Share, cut, fraction, permutation
from dlr_pretrain.data.sources import Source
from dlr_pretrain.data.tokenizer import Tokenizer
from dlr_pretrain.util.errors import UserError

MAX_IDLE = 4  # passes of a stream through all parts of a source without finding text


class Position(NamedTuple):
    """A position in a stream, stored as a list of five integers."""

    epoch: int = 0
    piece: int = 0  # in the stream's share of the epoch
    row: int = 0  # the first row of the block; in a token source, the number of the block
    document: int = 0  # position in the block's order
    token: int = 0  # tokens of this document that have been used


Chunk = tuple[Position, Tokens]  # some documents, and the position of the first


class DocumentStream:
    """The endless sequence of documents of one of the V streams."""

    def __init__(self, source: Source, tokenizer: Tokenizer, seed: int, stream: int, num_streams: int, packed: bool):
        self._source, self._tokenizer = source, tokenizer
        self._seed, self._stream, self._streams, self._packed = seed, stream, num_streams, packed

    def share(self, epoch: int) -> Share:
        """What the stream reads in an epoch."""
        sizes, slack, parts = self._source.sizes(self._packed), self._source.slack, self._streams
        turn = 0.0 if parts == 1 or slack else fraction(self._seed, epoch)  # cuts documents elsewhere in each epoch
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
                for done in range(document, block.documents, documents.CHUNK_DOCUMENTS):
                    some = block.take(order[done : done + documents.CHUNK_DOCUMENTS])
                    if len(some.tokens) > len(some.starts):
                        idle = 0
                    yield Position(epoch, *place, document=done), some
                document = 0
            epoch, piece, row, document = epoch + 1, 0, 0, 0
        raise UserError(f"{self._source.describe()}: no text to train on. Give other files, or see data.text_key")
