"""What a format says about itself, and what the formats share: parts of a file, and lines of bounded length.

A new format is a file with a ``Format``, and a line in ``detect.FORMATS``.
"""

import io
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

READ_BYTES = 1 << 20  # decompressed at once: large enough that Python's overhead is small
MAX_LINE_BYTES = 1 << 28
LINE_TOO_LONG = f"a line of more than {MAX_LINE_BYTES >> 20:,} MB would fill the memory"
BOM = b"\xef\xbb\xbf"
OR_SKIP = "data.bad_rows=skip leaves such rows out"

Head = tuple[tuple[bytes, ...], str, str]  # how a file may begin, what it then is, and the fix


class NoText(ValueError):
    """A row without text: the rule that it breaks, and the fix."""


@dataclass(frozen=True)
class Part:
    """One of ``count`` parts of a file that are about equal, as far as ``size`` is right."""

    index: int
    count: int
    size: int | None = None  # the expected bytes of text in a compressed file

    def span(self, size: int) -> tuple[int, int | None]:
        """Where the part begins and ends among ``size`` bytes, batches or row groups; None: at the end, wherever."""
        end = size * (self.index + 1) // self.count
        return size * self.index // self.count, end if self.index + 1 < self.count else None


WHOLE = Part(0, 1)


@dataclass(frozen=True)
class Opened:
    """An open file, and what to read of it."""

    address: str
    stream: Any  # of bytes, decompressed
    text_key: str
    start: int = 0  # the first row, counted from the beginning of the part
    part: Part = WHOLE


@dataclass(frozen=True, eq=False)
class Format:
    """A format of text in files."""

    name: str  # for people
    suffixes: tuple[str, ...]  # of file names
    read: Callable[[Opened], Iterator[bytes | None]]  # yields rows as UTF-8; None: a row without text
    cut: Literal["nowhere", "lines", "batches"]  # where a file can be cut into parts; at lines, also if compressed
    magic: tuple[bytes, ...] = ()  # how each file of this format begins
    refused: Sequence[Head] = ()  # how files begin that have the name of this format and are something else
    parse: Callable[[str, str], Any] | None = None  # the value of data.text_key in a row; None: a row is its text
    without_text: str = "it is null"  # of a row that ``read`` yields as None
    row: str | None = None  # what messages call a row beside its number as a document
    count_rows: Callable[[BinaryIO], int] | None = None  # without reading them
    is_document: bool = False  # a file is one row


def field_path(text_key: str, fields: Collection[str]) -> Sequence[str]:
    """The nested fields that lead to the text. A dot in ``text_key`` separates them, unless a field has that name."""
    return [text_key] if text_key in fields else text_key.split(".")


def lines_of(opened: Opened, is_border: Callable[[bytes], bool] = lambda _: True) -> Iterator[bytes]:
    """Yields the lines of a part of a file, with their ends. Parts meet at lines for which ``is_border`` is true."""
    stream = io.BufferedReader(opened.stream, READ_BYTES)
    if opened.part == WHOLE:
        yield from _bounded_lines(stream)
        return
    size = stream.seek(0, io.SEEK_END) if opened.part.size is None else opened.part.size
    begin, end = opened.part.span(size)
    if begin == end:
        return
    position = _skip_to(max(0, begin - 1), stream)
    lines, within = _bounded_lines(stream), begin == 0
    if begin:
        position += len(next(lines, b""))  # the end of the line before
    for line in lines:
        if is_border(line):
            if end is not None and position >= end:
                return
            within = True
        if within:
            yield line
        position += len(line)


def _skip_to(position: int, stream: io.BufferedReader) -> int:
    if stream.seekable():
        return stream.seek(position)
    left = position
    while left and (skipped := len(stream.read(min(left, READ_BYTES)))):
        left -= skipped
    return position - left


def _bounded_lines(stream: io.BufferedReader) -> Iterator[bytes]:
    """Yields the lines of a stream. Raises ValueError at a line that would fill the memory."""
    while line := stream.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES:
            raise ValueError(LINE_TOO_LONG)
        yield line
