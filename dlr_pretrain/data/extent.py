"""How much text files hold, by their first bytes: the streams share text out before anybody has read it."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, islice
from typing import BinaryIO

import numpy as np

from dlr_pretrain.data import columns, formats
from dlr_pretrain.data.files import File, open_file
from dlr_pretrain.util.errors import UserError

HEAD_BYTES = 1 << 19  # that are read of a file, or more, up to the end of a document
MOST_BYTES = 8 << 20
PART_BYTES = 1 << 16  # of text, read at once
HEAD_ROWS = 256  # of a parquet or arrow file
MEASURED, SAMPLED = 64, 8  # so many files are all measured, and of more so many of each suffix
THREADS = 8
UNLIKE = 0.25  # by less, the head of a file may differ by chance from those of the others


def sizes(files: Sequence[File], text_key: str, by_paragraph: bool) -> tuple[list[int], list[int]]:
    """The numbers of characters and of documents of each file, at least 1.

    A file counts by its bytes, at the usual rate of its suffix, unless it is small or its head is unlike the others'.
    """
    groups: dict[str, list[File]] = defaultdict(list)
    for file in files:
        groups[formats.suffix_of(file.name)].append(file)
    every = len(files) <= MEASURED
    some = list(chain(*(group if every else group[:: -(-len(group) // SAMPLED)] for group in groups.values())))
    with ThreadPoolExecutor(THREADS) as pool:
        heads = pool.map(lambda file: extent(file, text_key, by_paragraph), some)
        found = dict(zip(some, heads, strict=True))
    found_all = [file for file in some if found[file] and file.size]
    usual = {suffix: _rate([file for file in group if file in found_all] or found_all, found)
             for suffix, group in groups.items()}  # fmt: skip

    def size(file: File, measure: int) -> int:
        expected = usual[formats.suffix_of(file.name)][measure] * (file.size or 0)
        own = (found.get(file) or {measure: expected})[measure]
        by_chance = (file.size or 0) > HEAD_BYTES and abs(own - expected) <= UNLIKE * expected
        return max(1, round(expected if by_chance else own))

    return [size(file, 0) for file in files], [size(file, 1) for file in files]


def _rate(files: Sequence[File], found: dict[File, tuple[float, float] | None]) -> np.ndarray:
    """Characters and documents per byte of the files."""
    total = np.sum([found[file] or (0, 0) for file in files], axis=0) if files else np.zeros(2)
    return total / max(1, sum(file.size or 0 for file in files))


def extent(file: File, text_key: str, by_paragraph: bool) -> tuple[float, float] | None:
    """The numbers of characters and of documents in a file: estimates, exact where the file is small. None if its head
    says nothing.

    Rows without a text do not count. A remote file is not fetched to a cache for this.
    """
    with open_file(file) as stream:
        kind, compression = formats.sniff(file, stream)
        if kind in formats.BINARY.values():
            rows = columns.row_count(kind, stream)
            head = islice(formats.rows(file, text_key, by_paragraph), HEAD_ROWS)
            lengths = [len(text) for text in _texts(file, head, text_key)]
            return rows * sum(lengths) / max(1, len(lengths)), float(rows)
        rowwise = kind == "lines" or by_paragraph
        text, share = _head(stream, compression, rowwise)
    end = len(text) if share == 1 else text.rfind(b"\n") + 1  # the last row may be cut off
    if not rowwise or (end == 0 and text):  # one document, or one that is longer than what is read
        return len(text.decode("utf-8", "replace")) / share, 1.0 if not rowwise else 1 / share
    found = formats.head_rows(kind, io.BytesIO(text[:end]), by_paragraph)
    lengths = [len(one) for one in _texts(file, found, text_key)]
    blank = end - len(text[:end].lstrip())  # at the start, of which the rest has no share
    scale = (len(text) / share - blank) / max(1, end - blank)
    return (sum(lengths) * scale, len(lengths) * scale) if sum(lengths) else None


def _head(stream: BinaryIO, compression: str, rowwise: bool) -> tuple[bytes, float]:
    """The first text of a file, and the share of the file that it makes: 1 if it is the whole.

    A decompressor has given all that it can of the bytes before when it reads more, so there the two are compared.
    """
    opened, text, known, size = formats.decompressed(stream, compression), bytearray(), (0, 0), _length(stream)
    with suppress(*formats.DAMAGED):  # whoever reads the file says where
        while True:
            before = stream.tell()
            part = opened.read(PART_BYTES)
            if not part:
                return bytes(text), 1.0
            if stream.tell() > before:
                known = before, len(text)
            text += part
            full = not rowwise or b"\n" in text[: known[1]].lstrip()
            if known[1] and known[0] >= (HEAD_BYTES if full else MOST_BYTES):
                break
    return bytes(text[: known[1]]), min(1.0, max(known[0], 1) / max(size, 1))


def _length(stream: BinaryIO) -> int:
    """The bytes of a file that is open at its start."""
    length = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    return length


def _texts(file: File, rows: Iterator[formats.RawRow], text_key: str) -> Iterator[str]:
    for number, row in enumerate(rows):
        with suppress(UserError):
            yield formats.parse_text(row, text_key, file.address, number)
