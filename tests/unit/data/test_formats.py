"""Text that is not UTF-8, and columns of every type: what is read, reported and refused."""

import errno
import gzip
import io
import os
import re
from functools import partial
from pathlib import Path

import pyarrow
import pytest

from dlr_pretrain.config.tree import Data
from dlr_pretrain.data import detect, formats, open_source
from dlr_pretrain.data.files import File
from dlr_pretrain.data.formats import BOM
from dlr_pretrain.data.rows import MAX_STRAYS, read_rows
from dlr_pretrain.util.errors import UserError
from tests.conftest import ROOT
from tests.unit.data.data_corpus import in_key, make_config, write_table

FRENCH = ["Il fait beau.", "Le café est très bon, et fermé l'été.", "On y va."]
ASCII = "plain text, " * 200
CUT_OFF = "é".encode()[:1]


def lines(path: Path, texts: list[bytes]) -> None:
    path.write_bytes(b"".join(b'{"text": "%s"}\n' % text for text in texts))


def paragraphs(path: Path, texts: list[bytes]) -> None:
    path.write_bytes(b"\n\n".join(texts))


def compressed(write, path: Path, texts: list[bytes]) -> None:
    write(path, texts)
    path.write_bytes(gzip.compress(path.read_bytes()))


def column(path: Path, texts: list[bytes], kind: str = "binary") -> None:
    write_table(path, {"text": pyarrow.array(texts, "binary").view(kind)})


WRITERS = {
    ".jsonl": lines,
    ".jsonl.gz": partial(compressed, lines),
    ".txt": paragraphs,
    ".txt.gz": partial(compressed, paragraphs),
    ".parquet": column,
    ".string.parquet": partial(column, kind="string"),  # arrow does not check the bytes
    ".arrow": column,
}
TABLES = (".parquet", ".arrow", ".file.arrow")
each_writer = pytest.mark.parametrize("suffix", WRITERS)


def written(folder: Path, suffix: str, texts: list[bytes]) -> File:
    path = folder / f"a{suffix}"
    WRITERS[suffix](path, texts)
    return File(path.name, str(path), path.stat().st_size)


def how(key: str = "text", by_paragraph: bool = False) -> Data:
    return Data("local", text_key=key, document="paragraph" if by_paragraph else "file")


def read(file: File, key: str = "text", start: int = 0, by_paragraph: bool = True) -> list[str]:
    return [row.text() for row in read_rows(file, how(key, by_paragraph), start)]


# ----------------------------------------------------------------------------------------------------
# Bytes that are not UTF-8


@each_writer
def test_a_small_file_in_cp1252_is_refused_at_its_end(tmp_path, suffix):
    file = written(tmp_path, suffix, [text.encode("cp1252") for text in FRENCH])
    fix = r"value\.decode\('cp1252'\)" if suffix.endswith(("parquet", "arrow")) else "iconv -f CP1252 -t UTF-8"
    row = r"document 1 \(line 2\)" if "json" in suffix else "document 1"
    rule = rf"a{suffix}: {row} is not UTF-8, but probably cp1252: 5 of \d+ characters read .*: {fix}$"
    with pytest.raises(UserError, match=rule):
        read(file)


def test_a_document_in_cp1252_is_refused_before_it_is_read(tmp_path):
    file = written(tmp_path, ".txt", [text.encode("cp1252") for text in FRENCH])
    with pytest.raises(UserError, match=r"document 0 is not UTF-8, but probably cp1252: 5 of 62"):
        next(read_rows(file, how()))


OTHERS = {
    "cp1251": "Съешь ещё этих мягких французских булок.".encode("cp1251"),
    "shift-jis": "日本語の文章です。".encode("shift-jis"),
    "no cp1252": b"a few words and \x81, and some more of them",
    "cut off": "déjà vu à Orléans, l'été".encode() + CUT_OFF,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_encodings_are_not_called_cp1252(tmp_path, name):
    with pytest.raises(UserError, match=r"is not UTF-8: .*iconv -f ITS_ENCODING -t UTF-8"):
        read(written(tmp_path, ".txt", [OTHERS[name]]))


@each_writer
def test_a_truncated_character_is_reported_once(tmp_path, suffix, caplog):
    texts = [ASCII.encode() + (CUT_OFF if number % 100 == 7 else b"") for number in range(300)]
    file = written(tmp_path, suffix, texts)
    for _ in range(2):
        assert read(file) == [text.decode("utf-8", "replace") for text in texts]
    row = "document 7 (line 8)" if "json" in suffix else "document 7"
    assert len(caplog.messages) == 1 and f"a{suffix}: {row}: 1 byte not in UTF-8 became U+FFFD" in caplog.text


def test_a_book_with_one_bad_byte_is_read(tmp_path, caplog):
    file = written(tmp_path, ".txt", [b"\xff" + 400 * ASCII.encode()])
    assert read(file, by_paragraph=False) == ["\ufffd" + 400 * ASCII] and "document 0: 1 byte" in caplog.text


def test_the_bytes_of_a_character_are_counted(tmp_path, caplog):
    read(written(tmp_path, ".jsonl", [ASCII.encode() + "\U0001f9ff".encode()[:3] + b" \xff"]))
    assert "document 0 (line 1): 4 bytes not in UTF-8" in caplog.text


def test_a_large_file_in_cp1252_is_refused_near_its_start(tmp_path):
    rows = read_rows(written(tmp_path, ".jsonl", [FRENCH[1].encode("cp1252")] * 5000), how())
    with pytest.raises(UserError, match=r"document 10 \(line 11\) is not UTF-8"):
        for count, _ in enumerate(rows, 1):  # noqa: B007
            pass
    assert count == MAX_STRAYS


@pytest.mark.parametrize("start", [0, 500])
def test_a_few_bad_documents_at_the_start_are_accepted(tmp_path, start):
    texts = [ASCII.encode()] * 1000
    texts[start : start + MAX_STRAYS] = [FRENCH[1].encode("cp1252")] * MAX_STRAYS
    assert len(read(written(tmp_path, ".jsonl", texts), start=start)) == 1000 - start


def test_the_last_rows_of_a_file_are_not_judged_alone(tmp_path):
    file = written(tmp_path, ".jsonl", [ASCII.encode()] * 9 + [b"cut" + CUT_OFF])
    assert read(file, start=9) == read(file)[9:] == ["cut\ufffd"]


@each_writer
def test_a_replacement_character_in_utf8_is_text(tmp_path, suffix, caplog):
    texts = ["a \ufffd", "\ufffd" * 99]
    escaped = [rb"\ufffd \ufffd"] if "json" in suffix else []
    found = read(written(tmp_path, suffix, [*escaped, *(text.encode() for text in texts)]))
    assert found == ["\ufffd \ufffd"][: len(escaped)] + texts and not caplog.messages


@pytest.mark.parametrize(("suffix", "by_paragraph"), [(".jsonl", False), (".txt", False), (".txt", True)])
def test_a_byte_order_mark_is_not_part_of_a_text(tmp_path, suffix, by_paragraph):
    file = written(tmp_path, suffix, [b"\xc3\xa9"])
    Path(file.address).write_bytes(BOM + Path(file.address).read_bytes())
    assert read(file, by_paragraph=by_paragraph) == ["é"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_skipping_rows_does_not_hide_another_encoding(tmp_path, suffix):
    written(tmp_path, suffix, [FRENCH[1].encode("cp1252")] * 50)
    with pytest.raises(UserError, match="probably cp1252") as caught:
        list(open_source(make_config("local", data__root=tmp_path, data__bad_rows="skip")).read(f"a{suffix}"))
    assert "bad_rows" not in str(caught.value)


# ----------------------------------------------------------------------------------------------------
# Columns


def encoded(kind: str):
    """The texts "a", null, "é" and null again as a column of this type."""
    values, _, dictionary = kind.partition(" ")
    if dictionary:
        return pyarrow.DictionaryArray.from_arrays([0, None, 1, None], pyarrow.array(["a", "é"], values))
    return pyarrow.array(["a", None, "é", None], values)


PLAIN = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
KINDS = [kind + more for kind in PLAIN for more in ("", " dictionary")]
READ = [(kind, suffix) for kind in KINDS for suffix in TABLES if "view dictionary.parquet" not in kind + suffix]


@pytest.mark.parametrize(("kind", "suffix"), READ)  # pyarrow does not write dictionaries of views to parquet
def test_columns_of_each_type_of_text_are_read(tmp_path, kind, suffix):
    path = tmp_path / f"a{suffix}"
    for key in ("text", "meta.text"):
        write_table(path, in_key(key, encoded(kind)), rows=None if "view" in kind else 2)  # pyarrow cannot slice views
        for start, texts in ((0, ["a", None, "é", None]), (2, ["é", None])):
            assert [row.content for row in read_rows(File("a", str(path), None), how(key), start)] == texts


@pytest.mark.parametrize("suffix", TABLES)
def test_an_empty_table_may_have_a_column_of_any_type(tmp_path, suffix):
    write_table(tmp_path / f"a{suffix}", {"text": pyarrow.array([], "null")})
    assert read(File("a", str(tmp_path / f"a{suffix}"), None)) == []


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_an_endless_line_is_refused_before_it_fills_memory(tmp_path, monkeypatch, name):
    monkeypatch.setattr(formats, "MAX_LINE_BYTES", 1 << 20)
    line = b'{"text": "' + b"a" * (3 << 20) + b'"}\n'
    if name.endswith(".zst"):
        zstandard = pytest.importorskip("zstandard")
        line = zstandard.compress(line)
    (tmp_path / name).write_bytes(gzip.compress(line) if name.endswith(".gz") else line)
    with pytest.raises(UserError, match="a line of more than"):
        source = open_source(make_config("local", data__root=tmp_path))
        for shard in source.train_shards:
            list(source.read(shard))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt"])
def test_a_disk_error_is_not_reported_as_damage(tmp_path, monkeypatch, name):
    (tmp_path / name).write_bytes(gzip.compress(b'{"text": "a"}\n') if name.endswith(".gz") else b'{"text": "a"}\n')
    source = open_source(make_config("local", data__root=tmp_path))

    class Failing(io.BytesIO):
        def read(self, *_):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        readinto = read1 = readline = read

    monkeypatch.setattr("dlr_pretrain.data.rows.open_file", lambda *_: Failing())
    with pytest.raises(UserError, match=rf"{name}: cannot be read.*: Input/output error\. Its disk or file server"):
        list(source.read(source.train_shards[0]))


def test_the_tutorial_names_every_format():
    line = (ROOT / "docs" / "tutorial.md").read_text().partition("**Formats**")[2].partition("\n* ")[0]
    assert {*detect.SUFFIXES, *detect.COMPRESSIONS} == set(re.findall(r"`(\.\w+)`", line))
