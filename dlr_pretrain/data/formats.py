"""How documents lie in a file: JSON lines, text, parquet or arrow, plain or compressed, and what is none of these.

The first bytes of a file are looked at before it is read, because downloads and editors leave much behind that has the
right name. Parquet, and JSON lines in gzip files, are read from near any row on; other files from their start.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from typing import Any, BinaryIO

from dlr_pretrain.data import columns, gunzip
from dlr_pretrain.data.files import File, kept_beside, open_file
from dlr_pretrain.data.utf8 import STRAYS, Decoder
from dlr_pretrain.util.errors import UserError, first_line

READ_BYTES = 1 << 20  # decompressed at once: large enough that Python's overhead is small
HEAD_BYTES = 512  # that are looked at
BOM = b"\xef\xbb\xbf"
SKIPPABLE = {bytes((0x50 + i,)) + b"*M\x18": ".zst" for i in range(16)}  # frames with which zstd files may begin
COMPRESSED = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"BZh": ".bz2", b"\xfd7zXZ\0": ".xz"} | SKIPPABLE
BINARY = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
FORMATS = {".json": "lines", ".jsonl": "lines", ".ndjson": "lines", ".txt": "text", ".parquet": "parquet",
           ".arrow": "arrow"}  # fmt: skip
PACKED = tuple(dict.fromkeys(COMPRESSED.values()))
SUFFIXES = {name + packed: kind for packed in ("", *PACKED) for name, kind in FORMATS.items()}
FETCH = "Fetch this shard again"
STRANGERS = [  # how a file begins, what it is, and the fix
    ((b"version https://git-lfs",), "a Git LFS pointer, not the file that it stands for", "Run git lfs pull"),
    ((b"%PDF",), "a PDF document", "Convert it to text"),
    ((b"\xff\xfe", b"\xfe\xff"), "UTF-16 text", "Convert it to UTF-8"),
    ((b"<!doctype", b"<html"), "an HTML page, perhaps an error of the server", FETCH),
    ((b"<?xml",), "XML, perhaps an error of the server", FETCH),
]
NOT_LINES = [
    ((b"[",), "a JSON array, and a shard holds one JSON object a line", "Convert it: jq -c '.[]' FILE > FILE.jsonl"),
    ((b"{\n", b"{\r"), "one JSON object over several lines, not one a line", "Convert it: jq -c . FILE > FILE.jsonl"),
]
DAMAGED = (EOFError, OSError, ValueError, KeyError, zlib.error, lzma.LZMAError)  # pyarrow's are of the first four

RawRow = bytes | str | dict  # a line of JSON, a text, or a record that has none


def sniff(file: File, stream: BinaryIO) -> tuple[str, str]:
    """The kind of a file (lines, text, parquet, arrow, or empty) and the suffix of its compression, or "".

    Its first bytes, not its name, say how it is compressed: downloads may change either. The file is open at its start,
    where it is left. Raises UserError if it cannot be read.
    """
    head = _first_bytes(file, stream)
    found = next((suffix for magic, suffix in COMPRESSED.items() if head.startswith(magic)), "")
    if found:
        head = _first_bytes(file, stream, found)
    if not head:
        return "empty", found
    named = next((kind for suffix, kind in SUFFIXES.items() if file.name.lower().endswith(suffix)), None)
    binary = next((kind for magic, kind in BINARY.items() if head.startswith(magic)), None)
    kind = binary or named or ("lines" if head.startswith(b"{") else None)
    if kind is None:
        rule = f"its name ends with none of {', '.join(FORMATS)}"
        raise UserError(f"{file.address}: {rule}. Rename it, or leave it out")
    if kind == "lines":
        _refuse(file, head, NOT_LINES)
    if (not binary) if kind in BINARY.values() else b"\0" in head:
        rule = f"is no UTF-8 text: it begins with {head[:8]!r}" if kind in ("lines", "text") else f"is no {kind} file"
        raise UserError(f"{file.address}: {rule}. Convert it, {FETCH.lower()}, or leave it out")
    return kind, found


def suffix_of(name: str) -> str:
    """The suffix of a file's name that says its format and compression, such as .jsonl.gz; empty if it has none."""
    return max((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), key=len, default="")


def _first_bytes(file: File, stream: BinaryIO, compression: str = "") -> bytes:
    """The first bytes of the content. Raises UserError if they are those of something else than a shard."""
    begin = io.BytesIO(stream.read(1 << 20)) if compression == ".zst" else stream  # pyarrow closes what it reads
    try:
        head = decompressed(begin, compression).read(HEAD_BYTES)
    except DAMAGED as error:
        raise UserError(f"{file.address}: damaged or cut off ({first_line(error)}). {FETCH}") from error
    finally:
        stream.seek(0)
    _refuse(file, head, STRANGERS)
    return head


def _refuse(file: File, head: bytes, strangers: list[tuple[tuple[bytes, ...], str, str]]) -> None:
    """Raise UserError if a file begins as one of ``strangers``."""
    text = head.removeprefix(BOM).lstrip().lower()
    for begins, what, fix in strangers:
        if head.startswith(begins) or text.startswith(begins):
            raise UserError(f"{file.address}: is {what}. {fix}")


def decompressed(stream: BinaryIO, compression: str) -> Any:
    """The stream of decompressed bytes."""
    if compression == ".zst":
        import pyarrow

        return pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, "r"), "zstd")
    opened: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return opened[compression](stream) if compression else stream


def rows(
    file: File, text_key: str, by_paragraph: bool = False, cache: str | None = None, start: int = 0
) -> Iterator[RawRow]:
    """The rows of a file from row ``start`` on, for ``parse_text``.

    Raises UserError if the file is damaged, is in another encoding, or has no column of text. ``data.bad_rows`` is not
    for these: they concern the file, and nearly all of its rows.
    """
    number = start
    with open_file(file, cache) as stream:
        kind, compression = sniff(file, stream)
        whole = kind == "text" and not by_paragraph
        decoded = Decoder(file.address, kind, 0 if whole else STRAYS)
        try:
            if (kind, compression) == ("lines", ".gz"):
                found: Iterator[bytes | dict] = gunzip.lines(stream, kept_beside(file, cache), start)
            else:
                found = _rows(file.address, kind, decompressed(stream, compression), text_key, start, whole)
            for number, row in enumerate(found, start + 1):
                yield row if isinstance(row, dict) else decoded(row, number - 1)
        except DAMAGED as error:
            said = first_line(error)
            raise UserError(f"{file.address}: damaged or cut off after document {number} ({said}). {FETCH}") from error
        if start == 0:  # a resume near the end must not judge a large file by its last rows
            decoded.judge(strays=0)


def head_rows(kind: str, stream: BinaryIO, by_paragraph: bool) -> Iterator[RawRow]:
    """As ``rows``, of text whose end may be cut off: characters that are not UTF-8 are not counted."""
    whole = kind == "text" and not by_paragraph
    for row in _rows("", kind, stream, "", 0, whole):
        yield row if kind == "lines" or isinstance(row, dict) else row.decode("utf-8", "replace")


def _rows(address: str, kind: str, stream: Any, text_key: str, start: int, whole: bool) -> Iterator[bytes | dict]:
    if kind in BINARY.values():
        yield from columns.texts(address, kind, stream, text_key, start)
    elif whole:
        yield from [stream.read().removeprefix(BOM)][start:]
    elif kind != "empty":
        lines = io.BufferedReader(stream, READ_BYTES)
        yield from islice(lines if kind == "lines" else _paragraphs(lines), start, None)


def _paragraphs(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Runs of lines that are not blank."""
    for has_text, run in groupby(lines, lambda line: bool(line.strip())):
        if has_text:
            yield b"\n".join(line.rstrip(b"\r\n") for line in run).removeprefix(BOM)


def parse_text(row: RawRow, text_key: str, address: str, document: int) -> str:
    """The text of a row; a blank line is an empty document. Raises UserError, which names the row, if it has none."""
    if isinstance(row, str):
        return row
    where, record = f"{address}: document {document}", row
    if isinstance(row, bytes):
        if not row.strip():
            return ""
        where += f" (line {document + 1})"
        try:
            record = json.loads(row.removeprefix(BOM).decode("utf-8", "replace"))
        except (ValueError, RecursionError) as error:
            fix = "A shard holds one JSON object a line; data.bad_rows=skip leaves such rows out"
            raise UserError(f"{where} is not JSON ({error}). {fix}") from error
    text: Any = record
    for name in [text_key] if isinstance(record, dict) and text_key in record else text_key.split("."):
        if not isinstance(text, dict) or name not in text:
            found = f"its fields are {', '.join(record)}" if isinstance(record, dict) else "it is no JSON object"
            fix = "Set data.text_key to the field that holds the text, or data.bad_rows=skip"
            raise UserError(f"{where} has no text {text_key!r}: {found}. {fix}")
        text = text[name]
    if not isinstance(text, str):
        found, fix = f"of type {type(text).__name__}", "data.bad_rows=skip leaves such rows out"
        if isinstance(text, dict):
            found += f" with the fields {', '.join(text)}"
        if text is None:
            found = "null"
        else:
            fix = f"Write it as one string, or name another field in data.text_key; {fix}, if only some are so"
        raise UserError(f"{where} has no text {text_key!r}: it is {found}. {fix}")
    return text
