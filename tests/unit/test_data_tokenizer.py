"""The tokenizer: raw sentencepiece, T5's layout, and no id outside the vocabulary whatever a text holds."""

import gzip
import hashlib
import io
import json
import os
import random
import time

import numpy as np
import pytest
import sentencepiece
import small_tokenizer
from data_corpus import NASTY, REAL, make_config, needs_real_data

from dlr_pretrain.data import Tokenizer, open_source, open_tokenizer, sample
from dlr_pretrain.util.errors import UserError

PROSE = ["It is a truth universally acknowledged, that a single man in possession of a good fortune must want a wife."]


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "spiece.model"
    sample.train_tokenizer(path, PROSE, pieces=60)
    return path


@pytest.fixture(params=["small", pytest.param("t5", marks=needs_real_data)])
def tokenizer(request, small_model):
    return Tokenizer(small_model if request.param == "small" else REAL / "tokenizer" / "spiece.model")


def test_layout_and_fingerprint(small_model):
    tokenizer = Tokenizer(small_model)
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.unk_id) == (0, 1, 2)
    assert tokenizer.path == small_model
    assert tokenizer.fingerprint == hashlib.sha256(small_model.read_bytes()).hexdigest()
    assert 4 < tokenizer.vocab_size <= 60


def test_ids_are_in_the_vocabulary_and_no_text_reaches_a_control_symbol(tokenizer):
    for text, ids in zip(NASTY, tokenizer.encode(NASTY), strict=True):
        assert all(2 <= i < tokenizer.vocab_size for i in ids), text
    assert tokenizer.encode(["", " \n"]) == [[], []]


@needs_real_data
def test_t5_ids():
    tokenizer = Tokenizer(REAL / "tokenizer" / "spiece.model")
    assert tokenizer.vocab_size == 32_000
    assert tokenizer.encode(["Hello world", "The"]) == [[8774, 296], [37]]


@needs_real_data
@pytest.mark.parametrize("word", ["x", "word "])
def test_a_document_of_ten_megabytes(word):
    tokenizer, begin = Tokenizer(REAL / "tokenizer" / "spiece.model"), time.monotonic()
    (ids,) = tokenizer.encode([word * (10_000_000 // len(word))])
    assert len(ids) > 1_000_000 and min(ids) >= 2 and max(ids) < 32_000
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("gives_arrays", [True, False])
def test_documents_are_the_ids_and_eos_with_any_version_of_sentencepiece(tokenizer, gives_arrays, monkeypatch):
    monkeypatch.setattr(tokenizer, "_gives_arrays", tokenizer._gives_arrays and gives_arrays)
    texts = [*NASTY, *PROSE]
    found = tokenizer.encode_documents(texts)
    assert all(one.dtype == np.int32 for one in found)
    assert [one.tolist() for one in found] == [[*ids, 1] for ids in tokenizer.encode(texts)]
    assert tokenizer.encode_documents([]) == []


@pytest.mark.parametrize(
    ("options", "cuts"),
    [
        ({}, True),
        ({"model_type": "bpe"}, True),
        ({"byte_fallback": True, "vocab_size": 400}, True),
        ({"remove_extra_whitespaces": False}, True),
        ({"normalization_rule_name": "identity"}, True),
        ({"split_by_whitespace": False, "vocab_size": 190}, False),  # its pieces hold spaces
        ({"treat_whitespace_as_suffix": True}, False),
    ],
    ids=str,
)
def test_the_first_ids_of_a_text_are_those_of_its_beginning(options, cuts, tmp_path, monkeypatch):
    tokenizer, rng = Tokenizer(small_tokenizer.train(tmp_path, **options)), random.Random(0)
    monkeypatch.setattr("dlr_pretrain.data.tokenizer.CHARACTERS", 3)  # too few, so that some are looked for again
    words = [word for text in (*NASTY, *PROSE, *small_tokenizer.SENTENCES) for word in text.split(" ")]
    gaps = [*" " * 8, "  ", "\n", " \n ", "\u3000", " \u0301", "\u00a8", ""]
    texts = ["".join(rng.choice(words) + rng.choice(gaps) for _ in range(rng.randint(0, 60))) for _ in range(300)]
    whole = [one.tolist() for one in tokenizer.encode_documents(texts)]
    for longest in (1, 2, 7, 30):
        found = [one.tolist() for one in tokenizer.encode_documents(texts, longest)]
        assert [ids[:longest] for ids in found] == [ids[:longest] for ids in whole]
        assert all(len(ids) > longest or ids == all_of_it for ids, all_of_it in zip(found, whole, strict=True))
        assert (found != whole) == cuts


@needs_real_data
def test_the_first_ids_of_documents_of_c4_are_those_of_their_beginnings():
    tokenizer = Tokenizer(REAL / "tokenizer" / "spiece.model")
    with gzip.open(min((REAL / "c4" / "en").glob("*train*")), "rt") as lines:
        texts = [json.loads(line)["text"] for line, _ in zip(lines, range(2000), strict=False)]
    whole, found = tokenizer.encode_documents(texts), tokenizer.encode_documents(texts, 257)
    assert all(np.array_equal(a[:257], b[:257]) for a, b in zip(whole, found, strict=True))
    assert sum(map(len, found)) < 0.7 * sum(map(len, whole))


def test_a_forked_process_encodes_as_its_parent_does(tokenizer):
    expected, (reading, writing) = tokenizer.encode([*NASTY, *PROSE]), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"same" if tokenizer.encode([*NASTY, *PROSE]) == expected else b"other")
        os._exit(0)
    assert os.read(reading, 8) == b"same" and os.waitpid(child, 0)[1] == 0
    os.close(reading), os.close(writing)


@pytest.mark.parametrize("content", [None, b"", b"not a model", bytes(1000)])
def test_an_unreadable_model_is_named(tmp_path, content):
    path = tmp_path / "broken.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"broken\.model: not a readable sentencepiece model .*tokenizer\.path"):
        Tokenizer(path)


def test_another_layout_is_refused(tmp_path):
    model, path = io.BytesIO(), tmp_path / "llama.model"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PROSE), model_writer=model, vocab_size=60, hard_vocab_limit=False, minloglevel=2
    )
    path.write_bytes(model.getvalue())
    with pytest.raises(
        UserError, match=r"llama\.model: its pad, eos and unk are \(-1, 2, 0\), and must be \(0, 1, 2\)"
    ):
        Tokenizer(path)


def test_the_configured_model_goes_before_the_sources_own(small_model, tmp_path):
    class Source:
        tokenizer_path = small_model

    assert open_tokenizer(make_config(), Source).path == small_model
    other = tmp_path / "other.model"
    other.write_bytes(small_model.read_bytes())
    assert open_tokenizer(make_config(tokenizer__path=other), Source).path == other


@needs_real_data
def test_counts_of_real_c4_equal_those_of_sentencepiece():
    cfg = make_config(data__root=REAL / "c4" / "en", tokenizer__path=REAL / "tokenizer" / "spiece.model")
    source = open_source(cfg)
    tokenizer = open_tokenizer(cfg, source)
    texts = [text for shard in source.validation_shards for text in source.read(shard)]
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer.path))
    assert tokenizer.encode(texts) == [reference.encode(text) for text in texts]
    assert (len(texts), sum(map(len, tokenizer.encode(texts))) + len(texts)) == (200, 85_866)
