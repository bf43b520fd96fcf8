"""Text in files: every format, held-out documents, and everything that can be wrong with a file."""

import csv
import gzip
import io
import json
import shutil
from itertools import chain
from pathlib import Path

import pytest

from dlr_pretrain.data import formats, open_source, open_tokenizer, sample, validation_set
from dlr_pretrain.data.sources import HELD_OUT
from dlr_pretrain.util.errors import Stopped, UserError
from dlr_pretrain.util.files import claim
from tests.unit.data.data_corpus import (
    COMPRESS,
    NASTY,
    LetterTokenizer,
    MemorySource,
    global_batches,
    lines_of,
    make_config,
    same,
    write_shards,
    write_table,
)

TEXTS = [f"document {i} " + "y" * (i % 50) for i in range(300)]
TOKENIZER = LetterTokenizer()


def tabular(path: Path, texts) -> None:
    write_table(path, {"id": range(len(texts)), "text": texts, "meta": [{"text": t} for t in texts]}, rows=37)


def plain(content, compression=None):
    return lambda path, texts: path.write_bytes(COMPRESS.get(compression, bytes)(content(texts)))


def paragraphs(texts) -> bytes:
    return ("\n\n \n".join(texts) + "\n").encode()


def separated(delimiter, pack=bytes):
    def write(path, texts):
        table = io.StringIO(newline="")
        rows = csv.writer(table, delimiter=delimiter)
        rows.writerows([["id", "text"], *([i, text] for i, text in enumerate(texts))])
        path.write_bytes(pack(table.getvalue().encode()))

    return write


SKIPPED = b"\x50*M\x18\x04\0\0\0skip"  # a frame that zstd skips

FORMATS = {
    ".jsonl": plain(lines_of),
    ".json": plain(lambda texts: b"\xef\xbb\xbf" + lines_of(texts)),
    **{f".jsonl{suffix}": plain(lines_of, suffix) for suffix in COMPRESS},
    ".txt": plain(paragraphs),
    ".txt.gz": plain(paragraphs, ".gz"),
    ".skipped.jsonl.zst": plain(lambda texts: SKIPPED + COMPRESS[".zst"](lines_of(texts))),
    ".parquet": tabular,
    ".arrow": tabular,
    ".file.arrow": tabular,
    ".csv": separated(","),
    ".csv.gz": separated(",", gzip.compress),
    ".tsv": separated("\t"),
    ".packed.jsonl": plain(lines_of, ".gz"),  # names may be wrong about compression
    ".other.jsonl.gz": plain(lines_of, ".bz2"),
    ".unpacked.jsonl.gz": plain(lines_of),
}


def local(root, **keys):
    return open_source(make_config("local", data__root=root, **keys))


@pytest.fixture
def root(tmp_path):
    write_shards(tmp_path, [TEXTS[:100], TEXTS[100:]])
    write_shards(tmp_path, [["validation"]], split="validation")
    return tmp_path


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_gives_the_batches_of_its_texts(tmp_path, monkeypatch, suffix):
    for name, texts in (("train-0", TEXTS[:120]), ("train-1", TEXTS[120:]), ("validation", ["one", "two"])):
        FORMATS[suffix](tmp_path / f"{name}{suffix}", texts)
    for packing in ("packed", "pad"):
        keys = {"train__global_batch": 6, "train__seq_len": 16, "data__packing": packing, "data__document": "paragraph"}
        cfg = make_config("local", data__root=tmp_path, **keys)
        reference = global_batches(cfg, MemorySource([TEXTS[:120], TEXTS[120:]]), TOKENIZER, 1, 12)
        source = open_source(cfg)
        assert source.validation_shards == (f"validation{suffix}",)
        assert same(global_batches(cfg, source, TOKENIZER, 1, 12), reference)
        head = global_batches(cfg, source, TOKENIZER, 2, 5)
        assert same(head + global_batches(cfg, open_source(cfg), TOKENIZER, 1, 7, head[-1][3]), reference)
    for read_bytes in (7, 1 << 20):  # from any row on
        monkeypatch.setattr(formats, "READ_BYTES", read_bytes)
        for start in (0, 1, 36, 37, 179, 180, 181):
            assert list(source.read(f"train-1{suffix}", start)) == TEXTS[120 + start :]


def test_a_field_of_csv_may_hold_quotes_and_lines(tmp_path):
    texts = [*filter(str.strip, NASTY), 'a "quoted" word, and another', "two\nlines\r\nand a third", "tab\there"]
    texts = [text.encode("utf-8", "replace").decode().replace("\0", "") for text in texts]
    for delimiter, name in ((",", "a.csv"), ("\t", "a.tsv")):
        separated(delimiter)(tmp_path / name, texts)
        source = local(tmp_path, data__train_files=name)
        for start in range(len(texts)):
            together = zip(source.read(name, start), source.read(HELD_OUT + name, start), strict=True)
            assert [train if held is None else held for train, held in together] == texts[start:]
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbftext\r\nfirst\r\n\r\n" + b"x" * 200_000 + b"\r\n")
    assert sorted(chain(*split(local(tmp_path, data__train_files="a.csv")))) == ["first", "x" * 200_000]


def test_a_nested_field_is_read(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines_of("abcdefghi"))
    assert sorted(chain(*split(local(tmp_path, data__text_key="meta.text")))) == list("abcdefghi")


def test_a_dataset_saved_by_datasets_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    splits = {"train": TEXTS, "test": ["not read"], "validation": ["one", "two"]}
    made = datasets.DatasetDict({k: datasets.Dataset.from_dict({"text": v}) for k, v in splits.items()})
    made.save_to_disk(tmp_path / "both", num_shards={"train": 2, "test": 1, "validation": 1})
    source = local(tmp_path / "both")
    assert split(source) == [TEXTS, ["one", "two"]]


def test_a_text_file_is_a_document_and_a_single_one_is_cut(tmp_path):
    text = "".join(f"line {i}\n" for i in range(1000))
    (tmp_path / "all.txt").write_text(text)
    cfg = make_config("local", data__root=tmp_path, data__held_out=0.1, data__streams=1, eval__packing="packed")
    source = open_source(cfg)
    (head,), (tail,) = list(source.read("all.txt")), list(source.read(HELD_OUT + "all.txt"))
    assert head + tail == text and head.endswith("\n") and 0.05 < len(tail) / len(text) < 0.15
    assert validation_set(cfg, source, TOKENIZER).real_tokens == len(tail) + 1
    assert len(global_batches(cfg, source, TOKENIZER, 1, 3)) == 3
    for i in range(30):
        (tmp_path / f"{i:02d}.txt").write_text(f"text\n\n{i}")
    source = local(tmp_path)
    assert len(source.train_shards) == 31 and "text\n\n7" in chain(*split(source))
    assert len(split(source)[1]) == 1  # at least one


def split(source):
    """The texts for training, and those for validation."""
    shards = (source.train_shards, source.validation_shards)
    return [[t for name in names for t in source.read(name) if t is not None] for names in shards]


def test_files_read_and_left_out_are_listed(tmp_path):
    (tmp_path / "eval").mkdir()
    for name in ("web.jsonl", "wiki.jsonl", "eval/a.jsonl"):
        (tmp_path / name).write_bytes(lines_of(TEXTS[:3]))
    for name in ("LICENSE.txt", "README.md", "valid.docx"):
        (tmp_path / name).write_text("text")
    found = local(tmp_path).contents
    assert found["training"].endswith("B): web.jsonl, wiki.jsonl") and found["training"].startswith("2 files (")
    assert found["validation"].endswith("B): eval/a.jsonl")
    assert found["left out"] == (
        "LICENSE.txt, README.md (a side file); "
        "valid.docx (.docx is not read, and its name is that of a validation split)"
    )
    (tmp_path / "eval" / "a.jsonl").unlink()
    assert local(tmp_path).contents["validation"] == "1 % of these documents, at least one, by a hash of each"


def test_copies_of_one_document_are_not_all_held_out(tmp_path):
    text = "".join(f"line {i}\n" for i in range(100))
    (tmp_path / "a.jsonl").write_bytes(lines_of([text] * 5))
    train, held = split(local(tmp_path, data__held_out=0.1))
    assert [head + tail for head, tail in zip(train, held, strict=True)] == [text] * 5


def test_held_out_documents_are_never_trained_on(tmp_path):
    texts = [f"{i} {'x' * (i % 9)}" for i in range(2000)]
    (tmp_path / "a.jsonl").write_bytes(lines_of(texts[:1500]))
    (tmp_path / "b.jsonl").write_bytes(lines_of(texts[1500:]))
    source = local(tmp_path, data__held_out=0.05)
    train, held = split(source)
    assert sorted(train + held) == sorted(texts) and not {*train} & {*held}
    assert 60 < len(held) < 140 and "5 % of the documents held out" in source.describe()
    moved = shutil.copytree(tmp_path, tmp_path / "moved")
    assert local(moved, data__held_out=0.05).fingerprint == source.fingerprint
    assert local(moved, data__held_out=0.06).fingerprint != source.fingerprint


BAD_ROWS = [
    (b"not json", "is not JSON"),
    (b"[" * 100_000, "is not JSON"),
    (b'{"content": "x", "url": "y"}', "has no text 'text': its fields are content, url. Set data.text_key"),
    (b'{"text": null}', "has no text 'text': it is null. data.bad_rows=skip"),
    (b'{"text": 7}', "has no text 'text': it is of type int. Write it as one string, or name another field"),
    (b'{"text": ["a"]}', "has no text 'text': it is of type list. Write it as one string, or name another field"),
    (b'{"text": {"en": "a", "de": "b"}}', "has no text 'text': it is of type dict with the fields en, de"),
    (b'["text"]', "has no text 'text': it is not a JSON object"),
]


def test_rows_without_text_are_refused_or_skipped(tmp_path, caplog):
    (tmp_path / "validation.jsonl").write_bytes(lines_of(["v"]))
    parts = [part for i, (bad, _) in enumerate(BAD_ROWS) for part in (lines_of(TEXTS[9 * i : 9 * i + 9]), bad + b"\n")]
    (tmp_path / "train.jsonl").write_bytes(b"".join(parts))
    source = local(tmp_path)
    for i, (_, rule) in enumerate(BAD_ROWS):
        with pytest.raises(UserError) as caught:
            list(source.read("train.jsonl", 10 * i))  # rows before are not parsed
        assert f"train.jsonl: document {10 * i + 9} (line {10 * i + 10}) {rule}" in str(caught.value)
        assert "data.bad_rows=skip" in str(caught.value)
    cfg = make_config("local", data__root=tmp_path, data__bad_rows="skip", data__streams=1, train__seq_len=16)
    source = open_source(cfg)
    assert [t for t in source.read("train.jsonl") if t is not None] == TEXTS[:72]
    told = [record.getMessage() for record in caplog.records]
    assert ["left out" in line and f"document {10 * i + 9} (" in line for i, line in enumerate(told[:5])] == [True] * 5
    assert told[4].endswith("This process names no more")
    assert told[5:] == ["train.jsonl: 8 of 80 rows left out (data.bad_rows=skip)"]
    whole = global_batches(cfg, source, TOKENIZER, 1, 9)
    assert same(global_batches(cfg, source, TOKENIZER, 1, 4, whole[4][3]), whole[5:])
    for suffix in (".parquet", ".arrow"):
        FORMATS[suffix](tmp_path / f"train{suffix}", ["a", None, "b"])
        cfg = make_config("local", data__root=tmp_path, data__train_files=f"train{suffix}", data__bad_rows="skip",
                          data__validation_files="validation.jsonl")  # fmt: skip
        assert list(open_source(cfg).read(f"train{suffix}")) == ["a", None, "b"]
        cfg.data.bad_rows = "stop"
        with pytest.raises(UserError, match=r"document 1 has no text 'text': it is null"):
            list(open_source(cfg).read(f"train{suffix}"))


def test_nasty_texts_invalid_utf8_and_long_lines_are_read(tmp_path):
    odd = b'{"text": "caf\xe9 \xff\xfe"}\r\n{"text": "\xc3\xa9\xed\xa0\x80"}\r\n\r\n'
    texts = [*NASTY, "word " * 2_000_000, "after"]
    (tmp_path / "a.jsonl").write_bytes(lines_of(texts) + odd)
    read = ["caf\ufffd \ufffd\ufffd", "é\ufffd\ufffd\ufffd", ""]
    assert sorted(chain(*split(local(tmp_path)))) == sorted(texts + read)


def test_a_missing_shard_is_named(root):
    source = open_source(make_config(data__root=root))
    (root / "c4-train.00001-of-00002.json.gz").unlink()
    with pytest.raises(UserError, match=r"c4-train\.00001-of-00002\.json\.gz: No such file.*data\.root"):
        list(source.read(source.train_shards[1]))


def test_globs_below_the_root_or_absolute_name_the_same_text(root):
    source = open_source(make_config(data__root=root))
    assert source.train_shards == ("c4-train.00000-of-00002.json.gz", "c4-train.00001-of-00002.json.gz")
    assert source.describe() == f"{root}: 2 train and 1 validation shards"
    inside = {"data__train_files": f"{root.name}/c4-train*", "data__validation_files": f"{root.name}/c4-val*"}
    absolute = {"data__train_files": root / "c4-train*", "data__validation_files": root / "c4-val*"}
    for other in (make_config(data__root=root.parent, **inside), make_config("local", **absolute)):
        assert open_source(other).fingerprint == source.fingerprint and split(open_source(other))[0] == TEXTS


def test_what_the_program_writes_below_the_root_is_not_read(tmp_path, train, corpus, capsys):
    """A run, its cache, a report: the same command continues the run on the same text, and says what it leaves out."""
    root = tmp_path / "text"
    root.mkdir()
    (root / "a.jsonl").write_text("".join(json.dumps({"text": f"{i} house"}) + "\n" for i in range(300)))
    claim(root / "report", "report.py")
    (root / "report" / "notes.txt").write_text("numbers")
    words = ["data=local", f"data.root={root}", f"data.cache={root}/cache", "train.steps=4"]
    with pytest.raises(Stopped):
        train(root / "runs" / "one", *words, "train.stop_after=2")
    assert (root / "runs/one/checkpoints/step_00000002/checkpoint.json").exists() and (root / "cache").exists()
    capsys.readouterr()
    train(root / "runs" / "one", *words)
    said = " ".join(capsys.readouterr().out.split())
    assert "resuming after step 2" in said and "(written by this program)" in said
    cfg = make_config("local", data__root=root, data__train_files="**/*.json*", data__cache=root / "cache")
    source = open_source(cfg)
    assert source.train_shards == ("a.jsonl",)


# ----------------------------------------------------------------------------------------------------
# The sample: what counts as prose, its origin in the standard library, and its cache


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


@pytest.fixture
def harvested(monkeypatch):
    texts = [f"The document of number {i} holds some words of a text, and it is one of many." for i in range(400)]
    monkeypatch.setattr(sample, "harvest", lambda: iter(texts))


def test_the_sample_is_made_once_and_found_by_its_name(tmp_path, monkeypatch, harvested):
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
def test_a_sample_whose_files_were_purged_is_made_again(tmp_path, harvested, lost):
    folder = sample.folder_of(tmp_path, None, print)
    whole = sorted(path.name for path in folder.iterdir())
    for path in folder.glob(lost):
        path.unlink()
    assert sample.folder_of(tmp_path, None, print) == folder
    assert sorted(path.name for path in folder.iterdir()) == whole
