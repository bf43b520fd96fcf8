"""The lines of a gzip file, from near any line on.

A block of DEFLATE refers to the 32 KB of text before it, and may begin at any bit. While a file is read, a block that
begins at a byte is looked for after every ``SPACING`` bytes of text. Such places, with the text before them, are kept
in another file, and a resume reads on from there. (``indexed_gzip`` decompresses a file once more to find places.)
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
SPACING = 32 << 20  # bytes of text between two places
WINDOW = 1 << 15  # bytes of text that a block may refer to
NOTHING = bytes(WINDOW)
CERTAIN = 1024  # bytes of text that no false beginning of a block gives by chance
PLACE = np.dtype([("line", "<i8"), ("offset", "<i8"), ("window", f"V{WINDOW}")])  # line ends and bytes before; text
WHOLE, BLOCKS = 31, -15  # zlib's wbits: a gzip file, or blocks without its header and checksum
MOST_BYTES = 1 << 28  # of a line
LONG = f"a line of more than {MOST_BYTES >> 20:,} MB would fill the memory"


def lines(stream: BinaryIO, kept: Path, start: int) -> Iterator[bytes]:
    """The lines of a gzip file from ``start`` on, without their ends. Places are read from the file ``kept`` and added.

    Text after a place is not held against the file's checksum.
    """
    places = _load(kept)
    usable = places[places["line"] < start]  # each begins in a line, whose rest is passed over
    line, begin, window = usable[-1].item() if len(usable) else (0, 0, b"")
    del places, usable  # a megabyte, in each stream
    parts, since = [b""], 0  # of the line that has not ended
    for offset, chunk, text in _inflated(stream, begin, window):
        first, *more = text.split(b"\n")
        parts.append(first)
        if sum(map(len, parts)) >= MOST_BYTES:
            raise ValueError(LONG)
        whole = [b"".join(parts), *more[:-1]] if more else []
        parts = more[-1:] or parts
        yield from whole[max(0, start - line) :]
        line, since, known = line + len(whole), since + len(text), window + text
        window = known[-WINDOW:]
        if since >= SPACING and len(chunk) == CHUNK_BYTES and (block := _block(chunk, known)):
            at, since = block
            before, after = known[:-since], known[-since:]
            _keep(kept, line - after.count(b"\n"), offset + at, before[-WINDOW:])
        elif since >= 2 * SPACING:
            since = 0  # a file without such blocks
    if (rest := b"".join(parts)) and line >= start:
        yield rest


def _inflated(stream: BinaryIO, offset: int, window: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """A file's text from a place on, in parts: the offset of each, its bytes in the file, and their text."""
    stream.seek(offset)
    inflate = zlib.decompressobj(BLOCKS, window) if window else zlib.decompressobj(WHOLE)
    ended, trailer = False, 8 if window else 0
    while chunk := stream.read(CHUNK_BYTES):
        if ended and not chunk.strip(b"\0"):  # gzip allows zeros at the end
            continue
        yield offset, chunk, inflate.decompress(chunk)
        offset += len(chunk)
        if ended := inflate.eof:  # perhaps another file follows
            offset += trailer - len(inflate.unused_data)
            stream.seek(offset)
            inflate, trailer = zlib.decompressobj(WHOLE), 0
    if not ended:
        raise EOFError("Compressed file ended before the end-of-stream marker was reached")


def _block(chunk: bytes, known: bytes) -> tuple[int, int] | None:
    """The first byte of a chunk at which a block begins, and the number of the chunk's bytes of text from there on.

    ``known`` is the text up to the chunk's end. What looks like the header of a block is one if the chunk decompresses
    from there on to the end of this.
    """
    view = memoryview(chunk)
    for at in (at for at, byte in enumerate(chunk) if byte & 7 == 4):  # codes of its own, and not the last block
        with suppress(zlib.error):
            length = len(zlib.decompressobj(BLOCKS, NOTHING).decompress(view[at:]))
            window = known[: len(known) - length][-WINDOW:]
            if length >= CERTAIN and zlib.decompressobj(BLOCKS, window).decompress(view[at:]) == known[-length:]:
                return at, length
    return None


def _load(kept: Path) -> np.ndarray:
    """The places in a file, by their offsets; none if it is not there, or damaged."""
    with suppress(OSError, ValueError, zlib.error):
        return np.frombuffer(zlib.decompress(kept.read_bytes()), PLACE)
    return np.empty(0, PLACE)


def _keep(kept: Path, line: int, offset: int, window: bytes) -> None:
    """Add a place to a file, unless that has later ones."""
    places = _load(kept)
    if not len(places) or places["offset"][-1] < offset:
        place = np.array([(line, offset, window.rjust(WINDOW, b"\0"))], PLACE)
        with suppress(OSError):  # then a later resume takes longer
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_durably(kept, zlib.compress(np.concatenate((places, place)).tobytes()))
