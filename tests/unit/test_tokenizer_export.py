"""The exported tokenizer gives raw sentencepiece's ids, and nothing else."""

import gzip
import json
import os
import random
from pathlib import Path

import pytest
import sentencepiece
from small_tokenizer import PIECES, SENTENCES, train

from dlr_pretrain.data import load_tokenizer
from dlr_pretrain.deploy.tokenizer import export_tokenizer, fast_tokenizer
from dlr_pretrain.util.errors import UserError

tokenizers = pytest.importorskip("tokenizers")
DATA = Path(os.environ.get("DLR_TEST_DATA", "../shared/data"))

ODD = [
    "", " ", "  \t\n ", "\n\nparagraphs\r\n\r\nand  lines\t", " one  space ", "a", "▁", "▁a ▁ b",
    "</s>", "<pad>", "<unk>", "a</s>b", "</s></s>", "<<pad>>", "日</s>本", "日本<unk>", "</s", "<extra_id_7>",
    "x<pad> y", "👩‍👩‍👧 🏳️‍🌈",
    "ﬁve ½ ① ㎏ Å ｆｕｌｌ …", "cafe\u0301 nai\u0308ve", "zero\u200bwidth\u200d\ufeff", "a\0b", "\u00a0nbsp\u3000wide",
    "a" * 300, "x " * 300,  # not longer: the score's fp32 rounding decides ties in long runs
]  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("spiece"))


def pair(model: Path):
    """(raw sentencepiece, the exported fast tokenizer) as functions from a text to ids."""
    raw = sentencepiece.SentencePieceProcessor(model_file=str(model))
    fast = fast_tokenizer(load_tokenizer(model))
    fast.encode_special_tokens = True  # what transformers sets for split_special_tokens
    return raw.encode, lambda text: fast.encode(text).ids


def test_ids_are_those_of_sentencepiece(small):
    raw, fast = pair(small)
    rng = random.Random(0)
    words = " ".join(SENTENCES + ODD).split(" ")
    shuffled = [" ".join(rng.choices(words, k=30)) for _ in range(300)]
    for text in SENTENCES + ODD + shuffled:
        assert fast(text) == raw(text), repr(text[:80])


@pytest.mark.parametrize("options", [
    {"add_dummy_prefix": False},
    {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    {"byte_fallback": True, "vocab_size": 420},
    {"model_type": "bpe"},
    {"model_type": "bpe", "byte_fallback": True, "vocab_size": 420},
])  # fmt: skip
def test_other_models_and_normalisations(tmp_path, options):
    """Whatever the model file says about prefix, spaces and character map is followed."""
    raw, fast = pair(train(tmp_path, **options))
    for text in SENTENCES + ODD:
        assert fast(text) == raw(text), repr(text[:80])


def test_files(small, tmp_path):
    export_tokenizer(tmp_path, small, 1024)
    assert (tmp_path / "spiece.model").read_bytes() == small.read_bytes()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["pad_token"], config["eos_token"], config["unk_token"]) == ("<pad>", "</s>", "<unk>")
    fast = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "a low-rank layer is two thin matrices, and the latent between them"
    ids = fast.encode(text).ids
    assert fast.get_vocab_size() == PIECES and ids[-1] != 1 and fast.decode(ids) == text  # nothing is appended


@pytest.mark.parametrize(("options", "reason"), [
    ({"model_type": "char"}, "neither a unigram nor a BPE model"),
    ({"user_defined_symbols": ["<x>"]}, "user-defined"),
    ({"treat_whitespace_as_suffix": True}, "suffixes"),
])  # fmt: skip
def test_models_that_cannot_be_reproduced_are_refused(tmp_path, options, reason):
    with pytest.raises(UserError, match=rf"small\.model: .*{reason}"):
        fast_tokenizer(load_tokenizer(train(tmp_path, **options)))


@pytest.mark.skipif(not (DATA / "tokenizer/spiece.model").exists(), reason="DLR_TEST_DATA has no T5 tokenizer")
def test_t5_on_real_documents():
    """No document of C4's or webmix' validation shard differs."""
    raw, fast = pair(DATA / "tokenizer/spiece.model")
    assert raw("Hello world") == [8774, 296] and raw("The") == [37]
    shards = [*DATA.glob("c4/en/c4-validation*.json.gz"), *DATA.glob("webmix/webmix-validation*.json.gz")]
    lines = [line for shard in shards for line in gzip.decompress(shard.read_bytes()).splitlines()]
    texts = [json.loads(line)["text"] for line in lines]
    assert len(texts) > 500
    assert [text[:80] for text in texts + ODD if fast(text) != raw(text)] == []
