"""The rows of a file, whatever its format, and the text of each.

A row is a line of JSON, a whole text, a paragraph, or a field of a table. Several processes can share a file: each
reads a part. Text is UTF-8. Bytes that are not UTF-8 become U+FFFD, and a file with more than a few of them is refused.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from dlr_pretrain.config.tree import Data
from dlr_pretrain.data.detect import DAMAGED, decompressed, sniff, unreadable
from dlr_pretrain.data.files import File, open_file
from dlr_pretrain.data.formats import OR_SKIP, WHOLE, Format, NoText, Opened, Part
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.text import plural

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
    format: Format
    data: Data  # how it is read
    part: Part = WHOLE  # of the file, in which rows are numbered

    def where(self) -> str:
        """The row's name in messages. Only these need the number of rows in the parts before this one."""
        before = (replace(self.part, index=index) for index in range(self.part.index))
        number = self.number + sum(1 for part in before for _ in read_rows(self.file, self.data, part=part))
        row = f" ({self.format.row} {number + 1})" if self.format.row else ""
        return f"{self.file.address}: document {number}{row}"

    def text(self) -> str:
        """The text. Raises a UserError that names the row if the row has no text."""
        text: Any = self.content
        if self.content is not None and self.format.parse is not None:
            try:
                text = self.format.parse(self.content, self.data.text_key)
            except NoText as error:
                rule, fix = error.args
                raise UserError(f"{self.where()} {rule}. {fix}") from error
        if isinstance(text, str):
            return text
        rule, fix = f"it is of type {type(text).__name__}", OR_SKIP
        if isinstance(text, dict):
            rule += f" with the fields {', '.join(text)}"
        if text is None:
            rule = self.format.without_text if self.content is None else "it is null"
        else:
            fix = f"Write it as one string, or name another field in data.text_key; {fix}, if only some are like this"
        raise UserError(f"{self.where()} has no text {self.data.text_key!r}", rule, fix)


def read_rows(file: File, data: Data, start: int = 0, part: Part = WHOLE) -> Iterator[Row]:
    """Yields the rows of a file, or of a part of it, from ``start`` on. Its parts together have each row once.

    The first part of a file that cannot be cut is the whole file, and its other parts are empty. Raises UserError if
    the file is damaged, is in another encoding, or has no column of text. ``data.bad_rows`` does not apply to these
    errors: they concern the file, and nearly all of its rows.
    """
    with open_file(file, data.cache) as stream:
        format, compression = sniff(file, stream, data)
        if format is None:
            return
        encoding, number = EncodingCheck(), start
        if format.cut == "nowhere" or (compression and (format.cut == "batches" or part.size is None)):
            if part.index:
                return
            part = WHOLE
        try:
            opened = Opened(file.address, decompressed(stream, compression), data.text_key, start, part)
            for number, content in enumerate(format.read(opened), start + 1):
                text = None if content is None else content.decode("utf-8", "replace")
                row = Row(number - 1, text, file, format, data, part)
                encoding.count(row, content)
                yield row
        except DAMAGED as error:
            where = f" after document {number}" if part == WHOLE else ""
            raise unreadable(file, error, where) from error
        if start == 0:  # a resume near the end must not judge a large file by its last rows
            encoding.judge(strays=0)


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
            self.judge(0 if row.format.is_document else MAX_STRAYS)
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
            how = f"value.decode({name!r})" if row.format.magic else f"iconv -f {name.upper()} -t UTF-8"
            raise UserError(f"{row.where()} {rule}. Convert the text: {how}")


def _is_cp1252(row: bytes) -> bool:
    """Whether bytes are probably Western text: few are not ASCII, most of these are not UTF-8, and cp1252 has all."""
    utf8 = row.decode("utf-8", "ignore")
    strange, others = len(row) - len(utf8.encode()), len(utf8.encode()) - len(utf8)
    return others < strange < len(row) / 4 and REPLACEMENT not in row.decode("cp1252", "replace")
