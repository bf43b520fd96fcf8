"""The rows of a file, whatever its format, and the text of each.

A row is a line of JSON, a whole text, a paragraph, or a field of a table. Parquet files, and JSON lines in gzip files,
can be read from near any row; other files only from their start. Several processes can share a file without
compression: each reads a part. Text is UTF-8. Bytes that are not UTF-8 become U+FFFD, and a file with more than a few
of them is refused.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from typing import Any, NamedTuple

from dlr_pretrain.config.tree import Data
from dlr_pretrain.data import columns, gunzip
from dlr_pretrain.data.columns import WHOLE, Part
from dlr_pretrain.data.files import File, index_path, open_file
from dlr_pretrain.data.formats import BOM, DAMAGED, TABLES, decompressed, sniff, unreadable
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.text import plural

READ_BYTES = 1 << 20  # decompressed at once: large enough that Python's overhead is small
BLANK = " \t\n\r\v\f"
REPLACEMENT = "\ufffd"
MAX_REPLACED = 0.001  # share of a file's characters that may be replaced
MAX_STRAYS = 10  # documents with replaced characters before the share is checked: reading may begin near some

log = logging.getLogger(__name__)
_reported: set[str] = set()  # addresses of files whose first replaced bytes this process has reported


class Row(NamedTuple):
    """A row of a file. Its text is parsed on request."""

    number: int
    content: str | None  # None where a table has null
    file: File
    kind: str
    text_key: str
    part: Part = WHOLE  # of the file, in which rows are numbered

    def where(self) -> str:
        """The row's name in messages. Only these need the number of rows in the parts before this one."""
        number = self.number
        for index in range(self.part.index):
            with open_file(self.file) as stream:
                before = _contents(self.file, self.kind, stream, self.text_key, 0, Part(index, self.part.count))
                number += sum(1 for _ in before)
        line = f" (line {number + 1})" if self.kind == "lines" else ""
        return f"{self.file.address}: document {number}{line}"

    def text(self) -> str:
        """The text; a blank line is an empty document. Raises a UserError that names the row if the row has no text."""
        text: Any = self.content
        if self.kind == "lines" and self.content is not None:
            text = self._text_field(self.content) if self.content.strip(BLANK) else ""
        if isinstance(text, str):
            return text
        found, fix = f"of type {type(text).__name__}", "data.bad_rows=skip leaves such rows out"
        if isinstance(text, dict):
            found += f" with the fields {', '.join(text)}"
        if text is None:
            found = "null"
        else:
            fix = f"Write it as one string, or name another field in data.text_key; {fix}, if only some are like this"
        raise UserError(f"{self.where()} has no text {self.text_key!r}: it is {found}. {fix}")

    def _text_field(self, line: str) -> Any:
        """The value of the text field in a line of JSON."""
        try:
            record = value = json.loads(line.removeprefix("\ufeff"))
        except (ValueError, RecursionError) as error:
            fix = "A shard holds one JSON object per line; data.bad_rows=skip leaves such rows out"
            raise UserError(f"{self.where()} is not JSON ({error}). {fix}") from error
        for name in columns.field_path(self.text_key, record if isinstance(record, dict) else ()):
            if not isinstance(value, dict) or name not in value:
                found = f"its fields are {', '.join(record)}" if isinstance(record, dict) else "it is not a JSON object"
                fix = "Set data.text_key to the field that holds the text, or data.bad_rows=skip"
                raise UserError(f"{self.where()} has no text {self.text_key!r}: {found}. {fix}")
            value = value[name]
        return value


def read_rows(file: File, data: Data, start: int = 0, part: Part = WHOLE) -> Iterator[Row]:
    """Yields the rows of a file, or of a part of it, from ``start`` on. Its parts together have each row once.

    The first part of a file that cannot be cut is the whole file, and its other parts are empty. Raises UserError if
    the file is damaged, is in another encoding, or has no column of text. ``data.bad_rows`` does not apply to these
    errors: they concern the file, and nearly all of its rows.
    """
    with open_file(file, data.cache) as stream:
        kind, compression = sniff(file, stream, data)
        encoding, number = EncodingCheck(), start
        if compression or kind == "text":
            if part.index:
                return
            part = WHOLE
        try:
            if (kind, compression) == ("lines", ".gz"):
                contents: Iterator[bytes | None] = gunzip.lines(stream, index_path(file, data.cache), start)
            else:
                contents = _contents(file, kind, decompressed(stream, compression), data.text_key, start, part)
            for number, content in enumerate(contents, start + 1):
                text = None if content is None else content.decode("utf-8", "replace")
                row = Row(number - 1, text, file, kind, data.text_key, part)
                encoding.count(row, content)
                yield row
        except DAMAGED as error:
            where = f" after document {number}" if part == WHOLE else ""
            raise unreadable(file, error, where) from error
        if start == 0:  # a resume near the end must not judge a large file by its last rows
            encoding.judge(strays=0)


def read_head_rows(file: File, kind: str, head: bytes, data: Data) -> Iterator[Row]:
    """Yields the rows in the first bytes of a file's text, which may be cut off. The encoding is not checked."""
    for number, content in enumerate(_contents(file, kind, io.BytesIO(head), data.text_key, 0)):
        yield Row(number, (content or b"").decode("utf-8", "replace"), file, kind, data.text_key)


def _contents(
    file: File, kind: str, stream: Any, text_key: str, start: int, part: Part = WHOLE
) -> Iterator[bytes | None]:
    """The rows of a part of a decompressed stream from ``start`` on, as bytes; None where a table has null."""
    if kind in TABLES.values():
        return columns.read_texts(file.address, kind, stream, text_key, start, part)
    if kind == "text":
        return iter([stream.read().removeprefix(BOM)][start:])
    buffered = io.BufferedReader(stream, READ_BYTES)
    lines = _bounded_lines(buffered) if part == WHOLE else _lines_of_part(buffered, part, kind == "paragraphs")
    return islice(_paragraphs(lines) if kind == "paragraphs" else lines, start, None)


def _lines_of_part(stream: Any, part: Part, blank: bool) -> Iterator[bytes]:
    """Yields the lines of a part of a file. Parts meet at lines, if ``blank`` at blank ones: these end a paragraph."""
    begin, end = part.span(stream.seek(0, io.SEEK_END))
    position = stream.seek(max(0, begin - 1))
    lines, within = _bounded_lines(stream), begin == 0
    if begin:
        position += len(next(lines, b""))  # the end of the line before
    for line in lines:
        if not blank or not line.strip():
            if position >= end:
                return
            within = True
        if within:
            yield line
        position += len(line)


def _bounded_lines(stream: Any) -> Iterator[bytes]:
    """Yields the lines of a stream. Raises ValueError at a line that would fill the memory."""
    while line := stream.readline(gunzip.MAX_LINE_BYTES):
        if len(line) == gunzip.MAX_LINE_BYTES:
            raise ValueError(gunzip.LINE_TOO_LONG)
        yield line


def _paragraphs(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yields each run of lines that are not blank."""
    for has_text, run in groupby(lines, lambda line: bool(line.strip())):
        if has_text:
            yield b"\n".join(line.rstrip(b"\r\n") for line in run).removeprefix(BOM)


class EncodingCheck:
    """Counts the characters of one reading of a file, and those that replace bytes that are not UTF-8."""

    def __init__(self) -> None:
        self.read = self.replaced = self.rows = 0  # characters, replaced characters, and rows with any of these
        self.last: tuple[Row, bytes]  # the last of these rows

    def count(self, row: Row, content: bytes | None) -> None:
        """Count a row. Raises UserError if too many of the file's characters are replaced."""
        text, content = row.content or "", content or b""
        self.read += len(text)
        if REPLACEMENT in text and (replaced := text.count(REPLACEMENT) - content.count(REPLACEMENT.encode())):
            self.replaced, self.rows, self.last = self.replaced + replaced, self.rows + 1, (row, content)
            self.judge(0 if row.kind == "text" else MAX_STRAYS)
            if row.file.address not in _reported:
                _reported.add(row.file.address)
                lost = plural(len(content) - len(content.decode("utf-8", "ignore").encode()), "byte")
                log.warning("%s: %s not in UTF-8 became U+FFFD (reported once per file)", row.where(), lost)

    def judge(self, strays: int) -> None:
        """Raise UserError if more than ``strays`` rows, and more characters than allowed, are affected."""
        if self.rows > strays and self.replaced > MAX_REPLACED * self.read:
            row, content = self.last
            probably, name = (", but probably cp1252", "cp1252") if _is_cp1252(content) else ("", "ITS_ENCODING")
            rule = f"is not UTF-8{probably}: {self.replaced:,} of {self.read:,} characters read would become U+FFFD"
            table = row.kind in TABLES.values()
            how = f"value.decode({name!r})" if table else f"iconv -f {name.upper()} -t UTF-8"
            raise UserError(f"{row.where()} {rule}. Convert the text: {how}")


def _is_cp1252(row: bytes) -> bool:
    """Whether bytes are probably Western text: few are not ASCII, most of these are not UTF-8, and cp1252 has all."""
    utf8 = row.decode("utf-8", "ignore")
    strange, others = len(row) - len(utf8.encode()), len(utf8.encode()) - len(utf8)
    return others < strange < len(row) / 4 and REPLACEMENT not in row.decode("cp1252", "replace")
