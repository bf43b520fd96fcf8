"""How much text a file holds, by its first bytes: the streams share text out before anybody has read it."""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

from dlr_pretrain.data import columns, formats
from dlr_pretrain.data.files import File, open_file
from dlr_pretrain.util.errors import UserError

HEAD_BYTES = 1 << 18  # that are read
HEAD_ROWS = 256  # of a parquet or arrow file


def extent(file: File, text_key: str, by_paragraph: bool) -> tuple[float, float]:
    """The numbers of characters and of documents in a file: estimates, exact where the file is small.

    Rows without a text do not count. A remote file is not fetched to a cache for this.
    """
    with open_file(file) as stream:
        kind, compression = formats.sniff(file, stream)
        if kind in formats.BINARY.values():
            rows = columns.row_count(kind, stream)
            head = islice(formats.rows(file, text_key, by_paragraph), HEAD_ROWS)
            lengths = [len(text) for text in _texts(file, head, text_key)]
            return rows * sum(lengths) / max(1, len(lengths)), float(rows)
        content = stream.read(HEAD_BYTES if file.size is not None else -1)
    whole = file.size is None or len(content) >= file.size
    text = _begun(content, compression)
    found = list(formats.head_rows(kind, io.BytesIO(text), by_paragraph))
    if not whole and len(found) > 1:
        found.pop()  # it is cut off
    lengths = [len(one) for one in _texts(file, iter(found), text_key)] or [len(text)]
    share = 1.0 if file.size is None or whole else file.size / len(content)
    documents = 1.0 if kind == "text" and not by_paragraph else len(lengths) * share
    return sum(lengths) * share, documents


def _texts(file: File, rows: Iterator[formats.RawRow], text_key: str) -> Iterator[str]:
    for number, row in enumerate(rows):
        with suppress(UserError):
            yield formats.parse_text(row, text_key, file.address, number)


def _begun(content: bytes, compression: str) -> bytes:
    """The text of the first bytes of a file, as far as it goes."""
    parts: list[bytes] = []
    with suppress(*formats.DAMAGED):
        if compression == ".zst":
            import pyarrow

            stream = pyarrow.CompressedInputStream(pyarrow.BufferReader(content), "zstd")
            parts.extend(iter(lambda: stream.read(1 << 16), b""))
        while content and compression in (".gz", ".bz2", ".xz"):  # one stream after another
            made: dict[str, Any] = {".gz": zlib.decompressobj(31), ".bz2": bz2.BZ2Decompressor()}
            unpack = made.get(compression) or lzma.LZMADecompressor()
            parts.append(unpack.decompress(content))
            content = unpack.unused_data
    return b"".join(parts) if compression else content
