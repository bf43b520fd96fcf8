"""The data order: which documents a stream holds, in which order, and that none is lost or repeated."""

from itertools import takewhile

import numpy as np
import pytest
from data_corpus import LetterTokenizer, MemorySource, corpus

from dlr_pretrain.data import documents
from dlr_pretrain.data.streams import DocumentStream, Position, permutation
from dlr_pretrain.util.errors import UserError

TOKENIZER = LetterTokenizer()


def epochs(source, stream, num_streams, count, seed=42):
    """The documents of the first epochs of a stream, each as a list of its token lists."""
    out = [[] for _ in range(count)]
    chunks = DocumentStream(source, TOKENIZER, seed, stream, num_streams).chunks(Position())
    for position, some in takewhile(lambda chunk: chunk[0].epoch < count, chunks):
        out[position.epoch] += [tuple(tokens) for tokens in np.split(some.tokens, some.starts[1:])]
    return out


def expected(texts):
    return sorted((*ids, 1) for ids in TOKENIZER.encode(texts))


@pytest.mark.parametrize(("shards", "num_streams"), [(1, 1), (1, 8), (3, 8), (4, 4), (5, 2), (20, 4)])
def test_each_epoch_of_the_streams_is_every_document_once(shards, num_streams):
    texts = corpus(shards, 29)
    first = [epochs(MemorySource(texts), v, num_streams, 2) for v in range(num_streams)]
    for epoch in range(2):
        seen = [document for stream in first for document in stream[epoch]]
        assert sorted(seen) == expected([text for shard in texts for text in shard])


def test_whole_shards_where_there_are_enough_and_otherwise_every_mth_document():
    texts = corpus(7, 10)
    (epoch,) = epochs(MemorySource(texts), 1, 4, 1)
    assert sorted(epoch) == expected(texts[1] + texts[5])
    texts = corpus(3, 10)  # of 8 streams, 0 to 2 meet on shard 0, 3 to 5 on shard 1, 6 and 7 on shard 2
    for stream, wanted in ((2, texts[0][2::3]), (3, texts[1][0::3]), (7, texts[2][1::2])):
        (epoch,) = epochs(MemorySource(texts), stream, 8, 1)
        assert sorted(epoch) == expected(wanted)


def test_epochs_streams_and_seeds_have_orders_of_their_own(monkeypatch):
    monkeypatch.setattr(documents, "BLOCK_DOCUMENTS", 16)
    source = MemorySource(corpus(6, 50))
    first, second = epochs(source, 0, 2, 2)
    assert first != second and sorted(first) == sorted(second)
    assert epochs(source, 0, 2, 1, seed=43)[0] != first
    first, second = epochs(MemorySource(corpus(1, 50)), 0, 1, 2)
    assert first != second  # also where there is one order of shards
    assert permutation(8, 42, 0, 0).tolist() == [4, 1, 3, 6, 0, 7, 2, 5]  # with any version of numpy


def test_documents_are_shuffled_within_their_block_which_documents_or_characters_end(monkeypatch):
    monkeypatch.setattr(documents, "BLOCK_DOCUMENTS", 16)
    texts = corpus(1, 40)
    (epoch,) = epochs(MemorySource(texts), 0, 1, 1)
    for start in (0, 16, 32):
        block = epoch[start : start + 16]
        assert sorted(block) == expected(texts[0][start : start + 16]) and block != sorted(block)
    monkeypatch.setattr(documents, "BLOCK_CHARACTERS", 1000)
    texts = [[chr(0x4E00 + i) + "x" * 300 for i in range(20)]]
    chunks = DocumentStream(MemorySource(texts), TOKENIZER, 42, 0, 1).chunks(Position())
    assert {p.block for p, _ in takewhile(lambda chunk: chunk[0].epoch == 0, chunks)} == {0, 4, 8, 12, 16}


@pytest.mark.parametrize(
    ("shards", "stream", "streams", "rule"),
    [
        ([["text"], []], 1, 2, r"1 document for 2 data streams: stream 1 has no text\. Set data\.streams=1"),
        ([["one", "two"]], 5, 8, r"2 documents for 8 data streams: stream 5 has no text\. Set data\.streams=2"),
        ([[]], 0, 1, r"0 documents for 1 data stream: stream 0 has no text\. Give other files"),
    ],
)
def test_a_stream_without_text_ends_with_its_reason(shards, stream, streams, rule):
    with pytest.raises(UserError, match=rule):
        for _ in DocumentStream(MemorySource(shards), TOKENIZER, 42, stream, streams).chunks(Position()):
            pass
