"""How documents lie in a file: JSON lines, text, parquet or arrow, plain or compressed, and what is none of these.

The first bytes of a file are looked at before it is read, because downloads and editors leave much behind that has the
right name. Rows of parquet and arrow files come from pyarrow in batches (``datasets``' rows are several times slower).
Parquet, and JSON lines in gzip files, are read from near any row on; other files from their start.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any, BinaryIO

from dlr_pretrain.data import gunzip
from dlr_pretrain.data.files import File, kept_beside, open_file
from dlr_pretrain.util.errors import UserError, first_line

READ_BYTES = 1 << 20  # decompressed at once: large enough that Python's overhead is small
HEAD_BYTES = 512  # that are looked at
BOM = b"\xef\xbb\xbf"
COMPRESSED = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"BZh": ".bz2", b"\xfd7zXZ\0": ".xz"}
BINARY = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
FORMATS = {".json": "lines", ".jsonl": "lines", ".ndjson": "lines", ".txt": "text", ".parquet": "parquet",
           ".arrow": "arrow"}  # fmt: skip
SUFFIXES = {name + packed: kind for packed in ("", *COMPRESSED.values()) for name, kind in FORMATS.items()}
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

RawRow = bytes | str | dict  # a line of JSON, a text, or a record


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


def _first_bytes(file: File, stream: BinaryIO, compression: str = "") -> bytes:
    """The first bytes of the content. Raises UserError if they are those of something else than a shard."""
    begin = io.BytesIO(stream.read(1 << 20)) if compression == ".zst" else stream  # pyarrow closes what it reads
    try:
        head = _decompressed(begin, compression).read(HEAD_BYTES)
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


def _decompressed(stream: BinaryIO, compression: str) -> Any:
    """The stream of decompressed bytes."""
    if compression == ".zst":
        import pyarrow

        return pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, "r"), "zstd")
    opened: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return opened[compression](stream) if compression else stream


def rows(
    file: File, text_key: str, by_paragraph: bool = False, cache: str | None = None, start: int = 0
) -> Iterator[RawRow]:
    """The rows of a file from row ``start`` on, for ``parse_text``. Raises UserError, which names the row, if the file
    is damaged."""
    number = start
    with open_file(file, cache) as stream:
        kind, compression = sniff(file, stream)
        try:
            if (kind, compression) == ("lines", ".gz"):
                found: Iterator[RawRow] = gunzip.lines(stream, kept_beside(file, cache), start)
            else:
                found = _rows(kind, _decompressed(stream, compression), text_key, start, by_paragraph)
            for number, row in enumerate(found, start + 1):  # noqa: B007 (the error below names it)
                yield row
        except DAMAGED as error:
            said = first_line(error)
            raise UserError(f"{file.address}: damaged or cut off after document {number} ({said}). {FETCH}") from error


def _rows(kind: str, stream: Any, text_key: str, start: int, by_paragraph: bool) -> Iterator[RawRow]:
    if kind in BINARY.values():
        yield from _records(kind, stream, text_key, start)
    elif kind == "text" and not by_paragraph:
        yield from [stream.read().decode("utf-8-sig", "replace")][start:]
    elif kind != "empty":
        lines = io.BufferedReader(stream, READ_BYTES)
        yield from islice(lines if kind == "lines" else _paragraphs(lines), start, None)


def _paragraphs(lines: Iterable[bytes]) -> Iterator[str]:
    """Runs of lines that are not blank."""
    for has_text, run in groupby(lines, lambda line: bool(line.strip())):
        if has_text:
            yield b"\n".join(line.rstrip(b"\r\n") for line in run).decode("utf-8-sig", "replace")


def _records(kind: str, stream: io.BufferedReader, text_key: str, start: int) -> Iterator[dict]:
    """The records from ``start`` on of a parquet file, an arrow file, or an arrow stream as ``save_to_disk`` writes it.

    Of their fields only the text's is read. Row groups of parquet before ``start`` are not read.
    """
    import pyarrow
    from pyarrow import parquet

    if kind == "parquet":
        file, group = parquet.ParquetFile(stream), 0
        while group < file.num_row_groups and start >= (size := file.metadata.row_group(group).num_rows):
            group, start = group + 1, start - size
        columns = _columns(file.schema_arrow.names, text_key)
        batches = file.iter_batches(256, row_groups=range(group, file.num_row_groups), columns=columns)
    elif stream.peek(6).startswith(b"ARROW1"):
        opened = pyarrow.ipc.open_file(stream)
        batches = map(opened.get_batch, range(opened.num_record_batches))
    else:
        batches = pyarrow.ipc.open_stream(stream)
    for batch in batches:
        yield from batch.select(_columns(batch.schema.names, text_key)).slice(start).to_pylist()
        start = max(0, start - len(batch))


def _columns(names: Sequence[str], text_key: str) -> Sequence[str]:
    """The column that holds ``text_key``; all if there is none, so that the error tells of them."""
    column = text_key if text_key in names else text_key.split(".")[0]
    return [column] if column in names else names


def parse_text(row: RawRow, text_key: str, address: str, document: int) -> str:
    """The text of a row; a blank line is an empty document. Bytes that are not UTF-8 become U+FFFD."""
    if isinstance(row, str):
        return row
    where, record = f"{address}: document {document}", row
    if isinstance(row, bytes):
        if not row.strip():
            return ""
        where += f" (line {document + 1})"
        try:
            record = json.loads(row.decode("utf-8-sig", "replace"))
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
        found = "null" if text is None else f"of type {type(text).__name__}"
        raise UserError(f"{where} has no text {text_key!r}: it is {found}. data.bad_rows=skip leaves such rows out")
    return text
