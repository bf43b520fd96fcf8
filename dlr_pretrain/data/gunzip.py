"""The lines of a gzip file, starting near any line.

A DEFLATE block refers to a window of the 32 KB of text before it, and may begin at any bit. After every ``SPACING``
bytes of text, the reader looks for a block that begins on a byte boundary. Such access points, each with its window,
are stored in an index file, and a resume starts from the nearest one. (``indexed_gzip`` would decompress the file an
extra time to find them.)
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from dlr_pretrain.util.files import write_durably

CHUNK_BYTES = 1 << 16  # compressed bytes that are decompressed at once
SPACING = 32 << 20  # bytes of text between two access points
WINDOW = 1 << 15  # bytes of text that a block may refer to
MIN_BLOCK_TEXT = 1024  # bytes of text; what only looks like a block does not yield this many by chance
POINT = np.dtype([("line", "<i8"), ("offset", "<i8"), ("window", f"V{WINDOW}")])  # line ends and bytes before it
GZIP_FILE, RAW_BLOCKS = 31, -15  # zlib's wbits: with or without gzip's header and checksum
MAX_LINE_BYTES = 1 << 28
LINE_TOO_LONG = f"a line of more than {MAX_LINE_BYTES >> 20:,} MB would fill the memory"


def lines(stream: BinaryIO, index: Path, start: int) -> Iterator[bytes]:
    """Yields the lines of a gzip file from ``start`` on, without line ends, and adds access points to ``index``.

    Text after an access point is not checked against the file's checksum.
    """
    points = _load_points(index)
    usable = points[points["line"] < start]  # a point lies inside a line, whose remainder is discarded
    line, begin, window = usable[-1].item() if len(usable) else (0, 0, b"")
    del points, usable  # they would hold a megabyte in each stream
    unfinished, since = [b""], 0  # parts of a line that has not ended; bytes of text since the last point
    for offset, chunk, text in inflate(stream, begin, window):
        first, *more = text.split(b"\n")
        unfinished.append(first)
        if sum(map(len, unfinished)) >= MAX_LINE_BYTES:
            raise ValueError(LINE_TOO_LONG)
        whole = [b"".join(unfinished), *more[:-1]] if more else []
        unfinished = more[-1:] or unfinished
        yield from whole[max(0, start - line) :]
        line, since, known = line + len(whole), since + len(text), window + text
        window = known[-WINDOW:]
        if since >= SPACING and len(chunk) == CHUNK_BYTES and (block := _find_block(chunk, known)):
            at, since = block
            before, after = known[:-since], known[-since:]
            _add_point(index, line - after.count(b"\n"), offset + at, before[-WINDOW:])
        elif since >= 2 * SPACING:
            since = 0  # this file may have no such blocks
    if (rest := b"".join(unfinished)) and line >= start:
        yield rest


def inflate(stream: BinaryIO, offset: int, window: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yields the file from an access point on, chunk by chunk: the chunk's offset, compressed bytes and text."""
    stream.seek(offset)
    inflate = zlib.decompressobj(RAW_BLOCKS, window) if window else zlib.decompressobj(GZIP_FILE)
    ended, trailer = False, 8 if window else 0
    while chunk := stream.read(CHUNK_BYTES):
        if ended and not chunk.strip(b"\0"):  # gzip allows zeros at the end
            continue
        yield offset, chunk, inflate.decompress(chunk)
        offset += len(chunk)
        if ended := inflate.eof:  # another gzip member may follow
            offset += trailer - len(inflate.unused_data)
            stream.seek(offset)
            inflate, trailer = zlib.decompressobj(GZIP_FILE), 0
    if not ended:
        raise EOFError("Compressed file ended before the end-of-stream marker was reached")


def _find_block(chunk: bytes, known: bytes) -> tuple[int, int] | None:
    """The first byte of a chunk at which a block begins, and the length of the chunk's text from there on.

    ``known`` is the text up to the chunk's end. A byte that looks like a block header is one if decompression from
    there yields the end of ``known``.
    """
    view = memoryview(chunk)
    for at in (at for at, byte in enumerate(chunk) if byte & 7 == 4):  # dynamic Huffman codes, not the last block
        with suppress(zlib.error):
            length = len(zlib.decompressobj(RAW_BLOCKS, bytes(WINDOW)).decompress(view[at:]))
            if length < MIN_BLOCK_TEXT:
                continue
            window = known[: len(known) - length][-WINDOW:]
            if zlib.decompressobj(RAW_BLOCKS, window).decompress(view[at:]) == known[-length:]:
                return at, length
    return None


def _load_points(index: Path) -> np.ndarray:
    """The access points of an index file, sorted by offset; none if the file is missing or damaged."""
    with suppress(OSError, ValueError, zlib.error):
        return np.frombuffer(zlib.decompress(index.read_bytes()), POINT)
    return np.empty(0, POINT)


def _add_point(index: Path, line: int, offset: int, window: bytes) -> None:
    """Add an access point to an index file, unless the file has later ones."""
    points = _load_points(index)
    if not len(points) or points["offset"][-1] < offset:
        point = np.array([(line, offset, window.rjust(WINDOW, b"\0"))], POINT)
        with suppress(OSError):  # without it a resume only takes longer
            index.parent.mkdir(parents=True, exist_ok=True)
            write_durably(index, zlib.compress(np.concatenate((points, point)).tobytes()))
