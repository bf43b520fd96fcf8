"""C4-layout shards: files with one JSON object per line, gzipped or plain, each with its text under one key."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from dlr_pretrain.util.errors import UserError

GZIP = b"\x1f\x8b"
READ_BYTES = 1 << 20  # decompressed at once: large enough that Python's overhead is small
FED_BYTES = 1 << 18  # compressed, given to zlib at once: it copies the bytes that it does not consume


def read_lines(path: Path, start: int = 0) -> Iterator[bytes]:
    """The lines of a shard on disk from line ``start`` on."""
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file. Was it moved? Check data.root and the globs of data") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be opened ({error.strerror})") from error
    with file:
        yield from lines(iter(lambda: file.read(READ_BYTES), b""), start, path, "Fetch this shard again")


def lines(parts: Iterable[bytes], start: int, name: object, fix: str) -> Iterator[bytes]:
    """The lines from line ``start`` on, without their line feeds, of a shard whose bytes are ``parts``.

    The lines before are decompressed and counted, but neither split nor parsed. Raises a UserError with ``name``, the
    line and ``fix`` if the shard is damaged.
    """
    number, rest = 0, b""  # lines passed so far; the unfinished last line of the last block
    try:
        for block in _plain(parts):
            if number < start:
                skipped = min(block.count(b"\n"), start - number)
                number += skipped
                if number < start:
                    continue
                block = block.split(b"\n", skipped)[-1]
            whole = (rest + block).split(b"\n")
            rest = whole.pop()
            for line in whole:
                yield line
                number += 1
    except (EOFError, zlib.error, OSError) as error:
        raise UserError(f"{name}: damaged or cut off after document {number} ({error}). {fix}") from error
    if rest:
        yield rest


def _plain(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The parts, decompressed if the first bytes (not the name) say that they are gzipped."""
    parts = iter(parts)
    first = next(parts, b"")
    if first[:2] != GZIP:
        yield first
        yield from parts
        return
    parts, first = chain([first], parts), b""  # no reference keeps a part in memory after its use
    engine = None  # a file may be several gzip files in a row
    for part in parts:
        for at in range(0, len(part), FED_BYTES):
            fed = part[at : at + FED_BYTES]
            while fed:
                if engine is None:
                    fed = fed.lstrip(b"\0")  # zeros may follow a gzip file
                    if not fed:
                        break
                    engine = zlib.decompressobj(wbits=31)
                yield engine.decompress(fed, READ_BYTES)
                fed = engine.unconsumed_tail
                if engine.eof:
                    fed, engine = engine.unused_data, None
    if engine is not None:
        yield engine.flush()
        if not engine.eof:
            raise EOFError("the end of the gzip file is missing")


def is_cut_off(path: Path, size: int) -> bool:
    """Whether the first ``size`` bytes of a shard are a gzip file that breaks off.

    A reader of such a file gets an error instead of its end. In contrast, a plain file that breaks off between two
    lines, or a row of gzip files that breaks off between two of them, looks complete to its reader.
    """
    with path.open("rb") as file:
        left = iter(lambda: file.read(min(READ_BYTES, size - file.tell())), b"")
        try:
            for _ in _plain(left):
                pass
        except EOFError:
            return True
        except zlib.error:
            return False
    return False


def parse_text(line: bytes, text_key: str, path: object, document: int) -> str:
    """The text of one record; a blank line is an empty document. Bytes that are not UTF-8 become U+FFFD."""
    if not line.strip():
        return ""
    try:
        record = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        fix = "A shard holds one JSON object a line"
        raise UserError(f"{path}: document {document} (line {document + 1}) is not JSON ({error}). {fix}") from error
    text = record.get(text_key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        fix = "Set data.text_key to the field that holds the text"
        found = f"its fields are {', '.join(record)}" if isinstance(record, dict) else "it is no JSON object"
        raise UserError(f"{path}: document {document} (line {document + 1}) has no text {text_key!r}: {found}. {fix}")
    return text
