"""The sample: what counts as prose, its origin in the standard library, and its cache."""

import pytest

from dlr_pretrain.data import open_source, open_tokenizer, sample
from dlr_pretrain.util.errors import UserError
from tests.unit.data.data_corpus import make_config

SOURCE = '''
"""Return the sum of all the items, which must be numbers of a kind that can be added.

Title of some words
===================

The second :func:`~a.b.paragraph` is prose as well, and it
holds ``code`` and *emphasis* in it.

    >>> code(in, an, example)

:param x: this is a field and not a sentence of the text at all.
"""
def f():
    """Short."""
    if True:
        def g():
            """The inner function has a sentence of its own that is as long as it needs to be."""
'''


def test_prose_is_sentences_without_code_fields_and_markup():
    found = [sample.prose(block) for block in sample.docstrings(SOURCE)]
    assert [text for block in found for text in block] == [
        "Return the sum of all the items, which must be numbers of a kind that can be added.",
        "The second a.b.paragraph is prose as well, and it holds code and emphasis in it.",
        "The inner function has a sentence of its own that is as long as it needs to be.",
    ]


@pytest.mark.full
def test_the_sample_holds_only_the_standard_library():
    first = list(sample.harvest())
    assert first == list(sample.harvest())
    assert sum(map(len, first)) > 500_000 and len({*first}) == len(first)


def test_the_sample_is_made_once_and_found_by_its_name(tmp_path, monkeypatch):
    texts = [f"The document of number {i} holds some words of a text, and it is one of many." for i in range(400)]
    monkeypatch.setattr(sample, "harvest", lambda: iter(texts))
    cfg, said = make_config("sample", data__root=tmp_path, tokenizer__path=None), []
    source = open_source(cfg, said.append)
    assert "harvesting" in said[0] and source.version == next(tmp_path.iterdir()).name
    assert len(said) == 1 and source.fingerprint == open_source(cfg, said.append).fingerprint and len(said) == 1
    assert sum(len(list(source.read(shard))) for shard in source.train_shards) == 400
    assert open_tokenizer(cfg, source).vocab_size > 50
    monkeypatch.setattr(sample.platform, "python_version", lambda: "9.9.9")
    assert open_source(cfg, said.append, source.version).version == source.version  # the sample of the run still exists
    assert open_source(cfg, said.append).version == f"python-9.9.9-{sample.VERSION}"
    with pytest.raises(UserError, match=r"reads the sample python-1\.2\.3-4, which is not in .* makes python-9\.9\.9"):
        open_source(cfg, said.append, "python-1.2.3-4")


@pytest.mark.parametrize("lost", ["text-*.jsonl", sample.TOKENIZER_FILE])
def test_a_sample_whose_files_were_purged_is_made_again(tmp_path, monkeypatch, lost):
    texts = [f"The document of number {i} holds some words of a text, and it is one of many." for i in range(400)]
    monkeypatch.setattr(sample, "harvest", lambda: iter(texts))
    folder = sample.folder_of(tmp_path, None, print)
    whole = sorted(path.name for path in folder.iterdir())
    for path in folder.glob(lost):
        path.unlink()
    assert sample.folder_of(tmp_path, None, print) == folder
    assert sorted(path.name for path in folder.iterdir()) == whole
