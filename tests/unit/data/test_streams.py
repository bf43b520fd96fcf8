"""The data order: every document once per epoch, for any files, streams and ranks; and what a model learns of it."""

import json
import random
from collections import Counter
from itertools import takewhile

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from dlr_pretrain.data import load_tokenizer
from dlr_pretrain.data import streams as streaming
from dlr_pretrain.data.streams import Position, Share, can_be_dealt, dealt, endless, permutation
from dlr_pretrain.util.errors import UserError
from tests.unit.data.data_corpus import (
    PACKINGS,
    LetterTokenizer,
    MemorySource,
    corpus,
    documents_of,
    global_batches,
    make_config,
    tokens_of,
)

TOKENIZER = LetterTokenizer()


def epochs(source, stream, num_streams, count, seed=42, packed=True):
    """The first epochs of a stream, each as a list of documents, which are lists of tokens."""
    out = [[] for _ in range(count)]
    chunks = endless(source, TOKENIZER, Share(seed, stream, 0, num_streams, packed), Position())
    for epoch, document in takewhile(lambda found: found[0] < count, documents_of(chunks)):
        out[epoch].append(document)
    return out


def expected(texts):
    return sorted((*ids, 1) for ids in TOKENIZER.encode(texts))


def passes(source, texts, global_batch, streams, ranks, packing, least):
    """Reads at least ``least`` epochs. Returns the exact number of epochs, how often each document began, how many
    beginnings are cut to </s> alone, and the current epochs of the slowest and the fastest stream."""
    keys = {"train__global_batch": global_batch, "train__seq_len": 8, "data__streams": streams}
    cfg = make_config(data__packing=packing, **keys)
    each = global_batch * (8 if packing == "packed" else 1)
    total = sum(len(text) + 1 if packing == "packed" else 1 for shard in texts for text in shard)
    steps = -(-round(least * total) // each)
    batches = global_batches(cfg, source, TOKENIZER, ranks, steps)
    rows = np.stack([inputs for inputs, *_ in batches])
    own = rows.reshape(steps, streams, -1).swapaxes(0, 1).reshape(streams, -1)  # the tokens of each stream
    cut_off = int(((own == 1) & (np.pad(own, ((0, 0), (1, 0)), constant_values=1)[:, :-1] == 1)).sum())
    begun = Counter(own.ravel().tolist())
    counts = [begun[3 + ord(text[0]) % 39_000] for shard in texts for text in shard]
    own_epochs = [Position(*position).epoch for position in batches[-1][3].values()]
    return steps * each / total, counts, cut_off, (min(own_epochs), max(own_epochs))


@st.composite
def layouts(draw):
    """Files of any number and sizes, streams, ranks and a packing."""
    streams = draw(st.sampled_from([1, 2, 3, 8, 12]))
    ranks = draw(st.sampled_from([ranks for ranks in (1, 2, 6, 12) if streams % ranks == 0]))
    sizes = draw(st.lists(st.one_of(st.integers(1, 6), st.integers(1, 120)), min_size=1, max_size=9))
    sizes[0] += max(0, streams - sum(sizes))
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=50))
    names = iter(range(0x4E00, 0x4E00 + sum(sizes)))
    texts = [[chr(next(names)) + "x" * lengths[i % len(lengths)] for i in range(size)] for size in sizes]
    return texts, streams * draw(st.sampled_from([1, 2])), streams, ranks, draw(st.sampled_from(["packed", "pad"]))


def check_tokens(folder, layout):
    texts, *how = layout
    epochs, begun, cut_off, _ = passes(tokens_of(folder, texts), texts, *how, least=2.4)
    assert epochs - 1 <= min(begun) + cut_off and max(begun) <= min(begun) + cut_off + 1 and max(begun) <= epochs + 1


QUICK = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(QUICK, max_examples=300)
EXTENT = pytest.mark.parametrize("how_many", [QUICK, pytest.param(MANY, marks=pytest.mark.full)], ids=["25", "300"])


@EXTENT
def test_no_two_documents_differ_by_more_than_one_pass(tmp_path_factory, how_many):
    how_many(given(layouts())(lambda layout: check_tokens(tmp_path_factory.mktemp("tokens"), layout)))()


@st.composite
def file_sizes(draw):
    """Sizes of files in bytes, of any or of nearly one size."""
    count, base = draw(st.integers(1, 300)), draw(st.integers(1, 10**9))
    spread = draw(st.sampled_from([0.0, 0.01, 0.5, 3.0]))
    return [base + int(base * spread * draw(st.floats(0, 1))) for _ in range(count)]


def check_dealing(sizes, streams, epoch):
    shares = [dealt(sizes, Share(42, stream, epoch, streams, True)) for stream in range(streams)]
    assert sorted(file for files in shares for file in files) == list(range(len(sizes)))
    if can_be_dealt(sizes, streams):
        held = [sum(sizes[file] for file in files) for files in shares]
        assert max(held) - min(held) <= 0.05 * sum(sizes) / streams


@EXTENT
def test_files_are_dealt_once_an_epoch_and_evenly(how_many):
    how_many(given(file_sizes(), st.sampled_from([1, 2, 8, 64]), st.integers(0, 5))(check_dealing))()


def test_text_is_streamed_only_where_its_files_can_be_dealt():
    c4 = np.random.default_rng(1).normal(319e6, 0.7e6, 1024).astype(int).tolist()  # as its 1,024 shards
    assert all(can_be_dealt(c4, streams) for streams in (1, 8, 64, 512))
    web = np.random.default_rng(1).uniform(1e8, 4e8, 4096).astype(int).tolist()
    assert can_be_dealt(web, 64) and not can_be_dealt(web[:100], 64)
    assert not can_be_dealt([10**9] * 63, 64) and not can_be_dealt([10**9] * 96, 64)
    assert not can_be_dealt([0] * 64, 64)  # sizes that the server does not report


def test_a_stream_reads_other_files_in_the_next_epoch():
    first, second = (dealt([100] * 64, Share(42, 3, epoch, 8, True)) for epoch in range(2))
    assert len(first) == len(second) == 8 and len({*first} & {*second}) < 5


SIZES = {
    "99 to 1": [594, 6],
    "eight, the last short": [*[60] * 7, 4],
    "ten lognormal": [int(20 * n) + 1 for n in np.random.default_rng(0).lognormal(0, 1.5, 10)],
    "one": [400],
}


@PACKINGS
@pytest.mark.parametrize("streams", [8, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 64))])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_files_of_any_size_get_their_share_of_the_tokens(tmp_path, sizes, streams, packing):
    names = iter(range(0x4E00, 0x4E00 + sum(sizes)))
    texts = [[chr(next(names)) + "x" * (7 * i % 23) for i in range(n)] for n in sizes]
    epochs, begun, *_ = passes(tokens_of(tmp_path, texts), texts, streams, streams, 1, packing, least=3)
    ends = np.cumsum(sizes)
    of_files = [np.mean(begun[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    assert max(of_files) - min(of_files) <= 1 and np.allclose(np.mean(begun), epochs, rtol=0.05)


@pytest.mark.parametrize(("shards", "num_streams"), [(1, 1), (4, 4), (5, 2), (20, 4)])
@pytest.mark.parametrize("packed", [True, False])
def test_each_epoch_of_the_streams_is_every_document_once(shards, num_streams, packed):
    texts = corpus(shards, 29)
    first = [epochs(MemorySource(texts), v, num_streams, 2, packed=packed) for v in range(num_streams)]
    for epoch in range(2):
        seen = [document for stream in first for document in stream[epoch]]
        assert sorted(seen) == expected([text for shard in texts for text in shard])


def test_a_document_that_two_streams_share_ends_in_both(tmp_path):
    texts = [["a" * 9, "b" * 12, "c" * 4]]
    first = [epochs(tokens_of(tmp_path, texts), v, 4, 1)[0] for v in range(4)]
    assert [sum(map(len, own)) for own in first] == [7, 7, 7, 7]
    assert all(document[-1] == 1 and 1 not in document[:-1] for own in first for document in own)


def test_streams_take_turns_where_documents_cannot_be_divided(tmp_path):
    texts = [[letter * 3 for letter in "abcdefghi"]]  # one stream of eight gets two documents an epoch
    epochs, begun, *_ = passes(tokens_of(tmp_path, texts), texts, 8, 8, 1, "pad", least=24)
    assert epochs >= 24 and max(begun) - min(begun) <= 3  # counts letters: a document has three


def test_each_epoch_stream_and_seed_has_its_own_order(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "BLOCK_DOCUMENTS", 16)
    for source in (MemorySource(corpus(6, 50)), tokens_of(tmp_path, corpus(6, 50))):
        first, second = epochs(source, 0, 1, 2)
        assert first != second and sorted(first) == sorted(second)
        assert epochs(source, 0, 1, 1, seed=43)[0] != first
    first, second = epochs(MemorySource(corpus(1, 50)), 0, 1, 2)
    assert first != second  # also with a single shard
    assert permutation(8, 42, 0, 0).tolist() == [4, 1, 3, 6, 0, 7, 2, 5]  # with any version of numpy


def test_documents_are_shuffled_within_their_block(monkeypatch):
    """Documents or characters end a block."""
    monkeypatch.setattr(streaming, "BLOCK_DOCUMENTS", 16)
    texts = corpus(1, 40)
    (epoch,) = epochs(MemorySource(texts), 0, 1, 1)
    for start in (0, 16, 32):
        block = epoch[start : start + 16]
        assert sorted(block) == expected(texts[0][start : start + 16]) and block != sorted(block)
    monkeypatch.setattr(streaming, "BLOCK_CHARACTERS", 1000)
    texts = [[chr(0x4E00 + i) + "x" * 300 for i in range(20)]]
    chunks = endless(MemorySource(texts), TOKENIZER, Share(42, 0, 0, 1, True), Position())
    assert {p.row for p, _ in takewhile(lambda chunk: chunk[0].epoch == 0, chunks)} == {0, 4, 8, 12, 16}


def test_tokens_are_shuffled_across_the_whole_share(tmp_path, monkeypatch):
    """The few documents of a small file are spread over the share."""
    monkeypatch.setattr(streaming, "BLOCK_DOCUMENTS", 16)
    texts = corpus(2, 200)
    texts[1] = texts[1][:20]
    (epoch,) = epochs(tokens_of(tmp_path, texts), 0, 1, 1)
    small = [at for at, document in enumerate(epoch) if document in expected(texts[1])]
    assert sorted(epoch) == expected(texts[0] + texts[1]) and max(np.diff(small)) > 10


@pytest.mark.parametrize("texts", [[[]], [["", ""], [""]]])
def test_a_source_without_text_is_refused(tmp_path, texts):
    for source in (MemorySource(texts), tokens_of(tmp_path, texts)):
        with pytest.raises(UserError, match=r"no text to train on\. Give other files, or see data\.text_key"):
            for _ in endless(source, TOKENIZER, Share(42, 1, 0, 2, True), Position()):
                pass


@pytest.mark.full
@pytest.mark.parametrize("streamed", [False, True])
def test_a_model_learns_1_percent_from_1_percent_of_the_text(corpus, train, tmp_path, monkeypatch, streamed):
    if streamed:  # as a text that is too large to be tokenised first
        monkeypatch.setattr("dlr_pretrain.data.prepare.SMALL_BYTES", 0)
    rng, text = random.Random(0), tmp_path / "text"
    text.mkdir()
    for name, count, first in (("web", 6000, "aeiou"), ("wiki", 60, "t")):
        texts = (f"{rng.choice(first)} {' '.join(rng.choices('lnrs', k=rng.randint(3, 15)))}" for _ in range(count))
        (text / f"{name}.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    given = ("data=local", f"data.root={text}", "train.steps=150", "eval.every=150", "checkpoint.every=150")
    run_dir = train(tmp_path / "run", *given)
    tokenizer = load_tokenizer(corpus / "spiece.model")
    model = AutoModelForCausalLM.from_pretrained(run_dir / "folded", trust_remote_code=True)
    before = [*tokenizer.encode(["a l n r s l n"])[0], tokenizer.eos_id]
    begins = [tokenizer.encode([f"{letter} l"])[0].tolist() for letter in "aeiout"]
    assert len({len(tokens) for tokens in begins}) == 1  # otherwise they cannot be compared
    with torch.no_grad():
        logits = [model(torch.tensor([[*before, *tokens]])).logits[0].log_softmax(-1) for tokens in begins]
    chances = torch.tensor([
        sum(own[len(before) - 1 + i, token].item() for i, token in enumerate(tokens[:-1]))
        for own, tokens in zip(logits, begins, strict=True)
    ]).exp()  # fmt: skip
    assert 0.0001 < chances[-1] / chances.sum() < 0.1
