"""A small tokenizer for the tests of the data room."""

import pytest

from dlr_pretrain.data.sample import train_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "spiece.model"
    path.write_bytes(
        train_tokenizer(["a word and more of the words in a text, and one <extra_id_3> two"] * 3, vocab_size=40)
    )
    return path
