"""A hub on the loopback, a tokenizer and tokens for the tests of the data room."""

from contextlib import ExitStack

import pytest
from data_corpus import make_config, write_shards
from loopback_hub import TEXTS, Hub, serving_here

from dlr_pretrain.data import open_source, open_tokenizer, remote, sample
from dlr_pretrain.data.prepare import prepare
from dlr_pretrain.data.tokens import MODEL


@pytest.fixture
def hub_at(monkeypatch):
    """Makes a hub of some files the one that this process knows."""
    with ExitStack() as opened:
        yield lambda files: opened.enter_context(serving_here(Hub(files), monkeypatch))


@pytest.fixture
def shards(tmp_path):
    """C4-layout shards in tmp_path/en, and the files of a hub that has the same."""
    paths = write_shards(tmp_path / "en", [TEXTS[:150], TEXTS[150:300], TEXTS[300:]])
    paths += write_shards(tmp_path / "en", [["validation", "text"]], split="validation")
    return {f"en/{path.name}": path.read_bytes() for path in paths}


@pytest.fixture
def small_ranges(monkeypatch):
    """Ranges so small that a shard has many."""
    monkeypatch.setattr(remote, "RANGE_BYTES", 500)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tokenizer of a few pieces."""
    path = tmp_path_factory.mktemp("tokenizer") / "spiece.model"
    sample.train_tokenizer(path, ["a word and more of the words in a text, and one <extra_id_3> two"] * 3, pieces=40)
    return path


@pytest.fixture
def made(corpus, tmp_path):
    """Tokens of the corpus of all tests."""
    cfg = make_config(data__root=corpus, tokenizer__path=corpus / MODEL)
    source = open_source(cfg)
    prepare(source, open_tokenizer(cfg, source), tmp_path / "tokens", 1, lambda _: None)
    return tmp_path / "tokens"
