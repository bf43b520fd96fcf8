"""Estimates the amount of text in files from their first bytes: streams divide the text before it has been read."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import BinaryIO

import numpy as np

from dlr_pretrain.config.tree import Data
from dlr_pretrain.data import columns, formats
from dlr_pretrain.data.files import File, open_file
from dlr_pretrain.data.gunzip import inflate
from dlr_pretrain.data.rows import Row, read_head_rows, read_rows
from dlr_pretrain.util.errors import UserError

HEAD_BYTES = 1 << 19  # read from each file; more if no document has ended by then, up to MAX_HEAD_BYTES
MAX_HEAD_BYTES = 8 << 20
PART_BYTES = 1 << 16  # of text, read at a time
HEAD_ROWS = 256  # of a parquet or arrow file
MAX_MEASURED = 64  # up to this many files, all are measured; of more, SAMPLED of each suffix, and those without a size
SAMPLED = 8
THREADS = 8
TOLERANCE = 0.25  # relative difference from the average of a suffix that is put down to chance


def estimate_sizes(files: Sequence[File], data: Data) -> tuple[list[int], list[int]]:
    """The numbers of characters and of documents in each file, each at least 1.

    They are a file's bytes times the average rate of its suffix, unless the file is small or its head is atypical.
    """
    groups: dict[str, list[File]] = defaultdict(list)
    for file in files:
        groups[formats.suffix_of(file.name)].append(file)
    step = {suffix: 1 if len(files) <= MAX_MEASURED else -(-len(group) // SAMPLED) for suffix, group in groups.items()}
    sample = [
        file
        for suffix, group in groups.items()
        for number, file in enumerate(group)
        if number % step[suffix] == 0 or file.size is None  # without a size, the rate of other files says nothing
    ]
    with ThreadPoolExecutor(THREADS) as pool:
        measured = dict(zip(sample, pool.map(lambda file: estimate_size(file, data), sample), strict=True))
    known = {file: own for file, own in measured.items() if own and file.size}
    rates = {suffix: _rate({file: known[file] for file in group if file in known} or known)
             for suffix, group in groups.items()}  # fmt: skip
    found = []
    for file in files:
        size = file.size or 0
        expected = rates[formats.suffix_of(file.name)] * size
        own = np.array(measured.get(file) or expected)
        by_chance = (np.abs(own - expected) <= TOLERANCE * expected) & (size > HEAD_BYTES)
        found.append(np.where(by_chance, expected, own))
    characters, documents = np.round(found).clip(1).astype(np.int64).T.tolist()
    return characters, documents


def _rate(known: dict[File, tuple[float, float]]) -> np.ndarray:
    """Characters and documents per byte of files."""
    total = np.sum([*known.values()], axis=0) if known else np.zeros(2)
    return total / max(1, sum(file.size or 0 for file in known))


def estimate_size(file: File, data: Data) -> tuple[float, float] | None:
    """The estimated numbers of characters and documents in a file; None if its head has no text.

    They are exact for a small file. Rows without text do not count. A remote file is not copied to the cache for this.
    """
    with open_file(file) as stream:
        kind, compression = formats.sniff(file, stream, data)
        if kind in formats.TABLES.values():
            count = columns.count_rows(kind, stream)
            lengths = _lengths(islice(read_rows(file, replace(data, cache=None)), HEAD_ROWS))
            return count * sum(lengths) / max(1, len(lengths)), float(count)
        rowwise = kind in ("lines", "paragraphs")
        text, share = _head(stream, compression, rowwise)
    end = len(text) if share == 1 else text.rfind(b"\n") + 1  # the last row may be cut off
    if not rowwise or (end == 0 and text):  # one document, or one that is longer than what is read
        return len(text.decode("utf-8", "replace")) / share, 1.0 if not rowwise else 1 / share
    lengths = _lengths(read_head_rows(file, kind, text[:end], data))
    blank = end - len(text[:end].lstrip())  # blank text at the start says nothing about the rest
    scale = (len(text) / share - blank) / max(1, end - blank)
    return (sum(lengths) * scale, len(lengths) * scale) if sum(lengths) else None


def _head(stream: BinaryIO, compression: str, rowwise: bool) -> tuple[bytes, float]:
    """The first text of a stream, and the share of the file that it makes up: 1 for the whole file."""
    size = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    text, known = bytearray(), (0, 0)
    with suppress(*formats.DAMAGED):  # a later read of the file reports where
        for position, part in _parts(stream, compression):
            if position is not None:
                known = position, len(text)
            text += part
            full = not rowwise or b"\n" in text[: known[1]].lstrip()
            if known[1] and known[0] >= (HEAD_BYTES if full else MAX_HEAD_BYTES):
                break
        else:
            return bytes(text), 1.0
    return bytes(text[: known[1]]), min(1.0, max(known[0], 1) / max(size, 1))


def _parts(stream: BinaryIO, compression: str) -> Iterator[tuple[int | None, bytes]]:
    """Yields the text of a stream in parts, each with the number of bytes that hold all text before it, if known.

    A decompressor reads more bytes only after it has returned all text of the earlier ones. At that point the numbers
    of bytes and of text match. For .gz this does not use Python's ``gzip``: it reads 8 KB at once, and 128 KB from
    Python 3.12 on, so the estimates and the order of the data would depend on the version.
    """
    if compression == ".gz":
        yield from ((offset, text) for offset, _, text in inflate(stream, 0, b""))
        return
    opened, before = formats.decompressed(stream, compression), 0
    while part := opened.read(PART_BYTES):
        after = stream.tell()
        yield before if after > before else None, part
        before = after


def _lengths(rows: Iterable[Row]) -> list[int]:
    """The number of characters of each row that has text."""
    lengths = []
    for row in rows:
        with suppress(UserError):
            lengths.append(len(row.text()))
    return lengths
