"""C4-layout shards: a file of one JSON object a line, gzipped or plain, each with its text under one key."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from dlr_pretrain.errors import UserError

READ_BYTES = 1 << 20  # decompressed at once: large enough that Python's share of reading is small


def read_lines(path: Path, start: int = 0) -> Iterator[bytes]:
    """The lines of a shard from line ``start`` on, without their line feeds.

    The lines before are decompressed and counted, neither split nor parsed.
    """
    number, rest = 0, b""  # lines passed so far; the open end of the last block
    try:
        with _open(path) as file:
            while block := file.read(READ_BYTES):
                if number < start:
                    skipped = min(block.count(b"\n"), start - number)
                    number += skipped
                    if number < start:
                        continue
                    block = block.split(b"\n", skipped)[-1]
                lines = (rest + block).split(b"\n")
                rest = lines.pop()
                for line in lines:
                    yield line
                    number += 1
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file. Was it moved? Check data.root and the globs of data") from error
    except (EOFError, zlib.error, OSError) as error:
        raise UserError(
            f"{path}: damaged or cut off after document {number} ({error}). Fetch this shard again"
        ) from error
    if rest:
        yield rest


def _open(path: Path) -> io.BufferedIOBase:
    """Open for reading, through gzip where the first bytes, not the name, say that it is gzipped."""
    with path.open("rb") as file:
        gzipped = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if gzipped else path.open("rb")


def parse_text(line: bytes, text_key: str, path: object, document: int) -> str:
    """The text of one record; a blank line is an empty document. Bytes that are no UTF-8 become U+FFFD."""
    if not line.strip():
        return ""
    try:
        record = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        mend = "A shard holds one JSON object a line"
        raise UserError(f"{path}: document {document} (line {document + 1}) is not JSON ({error}). {mend}") from error
    text = record.get(text_key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        mend = "Set data.text_key to the field that holds the text"
        found = f"its fields are {', '.join(record)}" if isinstance(record, dict) else "it is no JSON object"
        raise UserError(f"{path}: document {document} (line {document + 1}) has no text {text_key!r}: {found}. {mend}")
    return text
