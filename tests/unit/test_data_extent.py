"""Estimates of how much text files hold, compared with how much they hold."""

import random
from pathlib import Path

import pytest
from data_corpus import COMPRESS, lines_of, write_table

from dlr_pretrain.config.tree import Data
from dlr_pretrain.data.extent import estimate_size, estimate_sizes
from dlr_pretrain.data.files import File


def several(compress):
    """Concatenated compressed streams, as parallel compressors write them."""
    return lambda content: b"".join(compress(content[at : at + 400_000]) for at in range(0, len(content), 400_000))


PACKED = {".jsonl": bytes} | {f".jsonl{suffix}": compress for suffix, compress in COMPRESS.items()}
PACKED |= {f".2.jsonl{suffix}": several(COMPRESS[suffix]) for suffix in (".gz", ".bz2", ".zst")}
WORDS = [f"{random.Random(i).getrandbits(30):x}" for i in range(5000)]


def documents(count: int, words: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(words // 2, 2 * words))) for _ in range(count)]


def written(path: Path, content: bytes) -> File:
    path.write_bytes(content)
    return File(path.name, str(path), len(content))


def measured(file: File, texts: list[str], by_paragraph: bool = False) -> tuple[float, float]:
    """The estimated over the true numbers of characters and documents."""
    characters, count = estimate_size(file, Data("local", document="paragraph" if by_paragraph else "file"))
    return characters / sum(map(len, texts)), count / len(texts)


@pytest.mark.parametrize("suffix", PACKED)
def test_a_head_estimates_the_text_of_a_file(tmp_path, suffix):
    texts = documents(3000, 200)  # 6 MB: more than each head
    characters, count = measured(written(tmp_path / f"a{suffix}", PACKED[suffix](lines_of(texts))), texts)
    assert 0.95 < characters < 1.05 and 0.9 < count < 1.1


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".2.jsonl.gz"])
def test_an_estimate_does_not_depend_on_the_version_of_python(tmp_path, monkeypatch, suffix):
    texts = documents(3000, 200)
    file = written(tmp_path / f"a{suffix}", PACKED[suffix](lines_of(texts)))
    estimates = []
    for size in (1 << 13, 1 << 17):  # what gzip reads at once in Python 3.11, and from 3.12 on
        monkeypatch.setattr("io.DEFAULT_BUFFER_SIZE", size)
        monkeypatch.setattr("gzip.READ_BUFFER_SIZE", size, raising=False)
        estimates.append(estimate_size(file, Data("local")))
    assert estimates[0] == estimates[1]


@pytest.mark.parametrize("suffix", PACKED)
def test_a_small_file_is_counted(tmp_path, suffix):
    texts = ["", *documents(30, 20)]
    file = written(tmp_path / f"a{suffix}", PACKED[suffix](b"\n\n" + lines_of(texts)))
    characters, count = estimate_size(file, Data("local"))
    assert characters == sum(map(len, texts)) and count == len(texts) + 2  # a blank line is a document as well


@pytest.mark.parametrize("words", [20_000, 80_000])
def test_long_documents_are_not_counted_in_part(tmp_path, words):
    texts = documents(20, words)
    characters, count = measured(written(tmp_path / "a.jsonl", lines_of(texts)), texts)
    assert 0.9 < characters < 1.1 and 0.5 < count < 2


def test_a_book_is_one_document_or_many_paragraphs(tmp_path):
    texts = documents(3000, 100)
    file = written(tmp_path / "a.txt", "\n\n".join(texts).encode())
    assert measured(file, ["\n\n".join(texts)]) == (1.0, 1.0)
    characters, count = measured(file, texts, by_paragraph=True)
    assert 0.95 < characters < 1.05 and 0.9 < count < 1.1


def test_the_rows_of_a_table_are_exact(tmp_path):
    texts = documents(1000, 50)
    write_table(tmp_path / "a.parquet", {"text": texts}, rows=500)
    characters, count = measured(File("a.parquet", str(tmp_path / "a.parquet"), 1), texts)
    assert 0.9 < characters < 1.1 and count == 1


def test_blank_lines_at_the_head_are_ignored(tmp_path):
    texts = documents(2000, 200)
    characters, _ = measured(written(tmp_path / "a.jsonl", b"\n" * 400_000 + lines_of(texts)), texts)
    assert 0.8 < characters < 1.2


@pytest.mark.parametrize("count", [6, 90])
def test_sizes_compare_across_compressions(tmp_path, count):
    texts = [documents(400, 150, seed) for seed in range(3)]
    suffixes = [".jsonl", ".jsonl.gz", ".jsonl.zst"]
    files = [written(tmp_path / f"{i:02d}{suffixes[i % 3]}", PACKED[suffixes[i % 3]](lines_of(texts[i % 2])))
             for i in range(count)]  # fmt: skip
    characters, many = estimate_sizes(files, Data("local"))
    assert max(characters) / min(characters) < 1.1 and max(many) / min(many) < 1.1
