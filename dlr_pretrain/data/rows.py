"""The rows of a file, whatever its format, and the text of each.

A row is a line of JSON, a whole text, a paragraph, or a field of a table. Parquet, and JSON lines in gzip files, are
read from near any row on; other files from their start.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from typing import Any, NamedTuple

from dlr_pretrain.config.tree import Data
from dlr_pretrain.data import columns, gunzip
from dlr_pretrain.data.files import File, kept_beside, open_file
from dlr_pretrain.data.formats import BOM, DAMAGED, FETCH, TABLES, decompressed, place, sniff
from dlr_pretrain.data.utf8 import Decoder
from dlr_pretrain.util.errors import UserError, first_line

READ_BYTES = 1 << 20  # decompressed at once: large enough that Python's overhead is small
BLANK = " \t\n\r\v\f"


class Row(NamedTuple):
    """A row of a file, which is parsed when its text is asked for."""

    number: int
    content: str | None  # None where a table has null
    file: File
    kind: str
    text_key: str

    def text(self) -> str:
        """The text; a blank line is an empty document. Raises UserError, which names the row, if there is none."""
        text: Any = self.content
        if self.kind == "lines" and self.content is not None:
            text = self._field(self.content) if self.content.strip(BLANK) else ""
        if isinstance(text, str):
            return text
        found, fix = f"of type {type(text).__name__}", "data.bad_rows=skip leaves such rows out"
        if isinstance(text, dict):
            found += f" with the fields {', '.join(text)}"
        if text is None:
            found = "null"
        else:
            fix = f"Write it as one string, or name another field in data.text_key; {fix}, if only some are so"
        raise UserError(f"{self._where()} has no text {self.text_key!r}: it is {found}. {fix}")

    def _field(self, line: str) -> Any:
        """What a line of JSON has in the field of the text."""
        try:
            record = found = json.loads(line.removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:
            fix = "A shard holds one JSON object a line; data.bad_rows=skip leaves such rows out"
            raise UserError(f"{self._where()} is not JSON ({error}). {fix}") from error
        for name in columns.path(self.text_key, record if isinstance(record, dict) else ()):
            if not isinstance(found, dict) or name not in found:
                there = f"its fields are {', '.join(record)}" if isinstance(record, dict) else "it is no JSON object"
                fix = "Set data.text_key to the field that holds the text, or data.bad_rows=skip"
                raise UserError(f"{self._where()} has no text {self.text_key!r}: {there}. {fix}")
            found = found[name]
        return found

    def _where(self) -> str:
        return place(self.file, self.kind, self.number)


def rows_of(file: File, data: Data, start: int = 0) -> Iterator[Row]:
    """The rows of a file from ``start`` on.

    Raises UserError if the file is damaged, is in another encoding, or has no column of text. ``data.bad_rows`` is not
    for these: they concern the file, and nearly all of its rows.
    """
    number = start
    with open_file(file, data.cache) as stream:
        kind, compression = sniff(file, stream, data)
        decode = Decoder(file, kind)
        try:
            if (kind, compression) == ("lines", ".gz"):
                contents: Iterator[bytes | None] = gunzip.lines(stream, kept_beside(file, data.cache), start)
            else:
                contents = _contents(file, kind, decompressed(stream, compression), data.text_key, start)
            for number, content in enumerate(contents, start + 1):
                text = None if content is None else decode(content, number - 1)
                yield Row(number - 1, text, file, kind, data.text_key)
        except DAMAGED as error:
            said = first_line(error)
            raise UserError(f"{file.address}: damaged or cut off after document {number} ({said}). {FETCH}") from error
        if start == 0:  # a resume near the end must not judge a large file by its last rows
            decode.judge(strays=0)


def rows_of_head(file: File, kind: str, head: bytes, data: Data) -> Iterator[Row]:
    """The rows of text that begins a file and may be cut off: characters that are not UTF-8 are not counted."""
    for number, content in enumerate(_contents(file, kind, io.BytesIO(head), data.text_key, 0)):
        yield Row(number, (content or b"").decode("utf-8", "replace"), file, kind, data.text_key)


def _contents(file: File, kind: str, stream: Any, text_key: str, start: int) -> Iterator[bytes | None]:
    """The rows of a decompressed stream from ``start`` on, as bytes; None where a table has null."""
    if kind in TABLES.values():
        return columns.texts(file.address, kind, stream, text_key, start)
    if kind == "text":
        return iter([stream.read().removeprefix(BOM)][start:])
    lines = io.BufferedReader(stream, READ_BYTES)
    return islice(_paragraphs(lines) if kind == "paragraphs" else lines, start, None)


def _paragraphs(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Runs of lines that are not blank."""
    for has_text, run in groupby(lines, lambda line: bool(line.strip())):
        if has_text:
            yield b"\n".join(line.rstrip(b"\r\n") for line in run).removeprefix(BOM)
