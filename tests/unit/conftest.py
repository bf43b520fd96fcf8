"""A hub on the loopback for the tests of the data room."""

from contextlib import ExitStack

import pytest
from data_corpus import write_shards
from loopback_hub import TEXTS, Hub, serving_here

from dlr_pretrain.data import remote


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
