"""A tokenizer and tokens for the tests of the data room."""

import pytest
from data_corpus import make_config

from dlr_pretrain.data import open_source, open_tokenizer
from dlr_pretrain.data.prepare import prepare
from dlr_pretrain.data.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tokenizer of a few pieces."""
    path = tmp_path_factory.mktemp("tokenizer") / "spiece.model"
    train_tokenizer(path, ["a word and more of the words in a text, and one <extra_id_3> two"] * 3, pieces=40)
    return path


@pytest.fixture
def made(corpus, tmp_path):
    """Tokens of the corpus of all tests."""
    cfg = make_config(data__root=corpus, tokenizer__path=corpus / "spiece.model")
    source = open_source(cfg)
    prepare(source, open_tokenizer(cfg, source), tmp_path / "tokens", 1, lambda _: None)
    return tmp_path / "tokens"
