"""How documents lie in a file: JSON lines, text, parquet or arrow, plain or compressed, and what is none of these.

The first bytes of a file are looked at before it is read, because downloads and editors leave much behind that has the
right name. Rows of parquet and arrow files come from pyarrow in batches (``datasets``' rows are several times slower).
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from itertools import groupby, islice
from typing import Any, BinaryIO, NamedTuple

from dlr_pretrain.data.files import File, open_file
from dlr_pretrain.util.errors import UserError, first_line

READ_BYTES = 1 << 20  # decompressed at once: large enough that Python's overhead is small
HEAD_BYTES = 512  # that are looked at
BOM = b"\xef\xbb\xbf"
COMPRESSED = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"BZh": ".bz2", b"\xfd7zXZ\0": ".xz"}
FORMATS = {".json": "lines", ".jsonl": "lines", ".ndjson": "lines", ".txt": "text", ".parquet": "parquet",
           ".arrow": "arrow"}  # fmt: skip
SUFFIXES = tuple(FORMATS) + tuple(name + packed for name in FORMATS for packed in COMPRESSED.values())
FETCH = "Fetch this shard again"
STRANGERS = [  # how a file begins, what it is, and the fix
    ((b"version https://git-lfs",), "a Git LFS pointer, not the file that it stands for", "Run git lfs pull"),
    ((b"PK\3\4",), "a zip archive", "Unpack it"),
    ((b"7z\xbc\xaf",), "a 7z archive", "Unpack it"),
    ((b"%PDF",), "a PDF document", "Convert it to text"),
    ((b"\0\5\x16\7",), "an AppleDouble file of macOS", "Delete it"),
    ((b"\xff\xfe", b"\xfe\xff"), "UTF-16 text", "Convert it to UTF-8"),
    ((b"<!doctype", b"<html"), "an HTML page, perhaps an error of the server", FETCH),
    ((b"<?xml",), "XML, perhaps an error of the server", FETCH),
    ((bytes(64),), "full of zeros, as of a download that broke off", FETCH),
]
DAMAGED = (EOFError, OSError, ValueError, zlib.error, lzma.LZMAError)  # pyarrow's errors are ValueErrors and OSErrors


Row = bytes | str | None  # a line of JSON, or a text; None: no text


class Format(NamedTuple):
    """What the first bytes and the name of a file say."""

    kind: str  # lines, text, parquet, arrow, or empty
    compression: str  # its suffix; "" if there is none


def sniff(file: File, stream: BinaryIO) -> Format:
    """The format of a file that is open at its start, where it is left. Raises UserError if it cannot be read."""
    name = file.name.lower()
    packed = next((suffix for suffix in COMPRESSED.values() if name.endswith(suffix)), "")
    kind = next((k for suffix, k in FORMATS.items() if name.removesuffix(packed).endswith(suffix)), None)
    head = _head(file, stream)
    found = next((suffix for magic, suffix in COMPRESSED.items() if head.startswith(magic)), "")
    if head and packed != found and (packed or kind):
        said = f"named {packed} and not compressed so" if packed else f"compressed ({found}), and its name hides it"
        right = file.name.removesuffix(packed) + found
        raise UserError(f"{file.address}: is {said}. Rename it to {right.rsplit('/', 1)[-1]}, or fetch it again")
    head = _head(file, stream, found) if found else head
    return Format(_kind(file, head, kind) if head else "empty", found)


def _head(file: File, stream: BinaryIO, compression: str = "") -> bytes:
    """The first bytes of the content. Raises UserError if they are those of something else than a shard."""
    begin = io.BytesIO(stream.read(1 << 20)) if compression == ".zst" else stream  # pyarrow closes what it reads
    try:
        head = _decompressed(begin, compression).read(HEAD_BYTES)
    except DAMAGED as error:
        raise UserError(f"{file.address}: damaged or cut off ({first_line(error)}). {FETCH}") from error
    finally:
        stream.seek(0)
    text = head.removeprefix(BOM).lstrip().lower()
    for magics, what, fix in STRANGERS:
        if head.startswith(magics) or text.startswith(magics):
            raise UserError(f"{file.address}: is {what}. {fix}")
    return head


def _kind(file: File, head: bytes, kind: str | None) -> str:
    """The kind of a file by its first bytes and by the kind that its name says. Raises UserError if they disagree."""
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return "arrow"
    text = head.removeprefix(BOM).lstrip()
    if kind is None and text.startswith(b"{"):
        kind = "lines"
    wrong = ""
    if kind is None:
        wrong = f"its name ends with none of {', '.join(FORMATS)}. Rename it, or leave it out"
    elif kind in ("parquet", "arrow"):
        wrong = f"is no {kind} file: it begins with {head[:8]!r}. {FETCH}"
    elif kind == "lines" and text.startswith(b"["):
        wrong = "is a JSON array, and a shard holds one JSON object a line. Convert it: jq -c '.[]' FILE > FILE.jsonl"
    elif kind == "lines" and text.split(b"\n")[0].strip() == b"{":
        wrong = "is one JSON object over several lines, not one a line. Convert it: jq -c . FILE > FILE.jsonl"
    elif kind == "text" and b"\0" in head:
        wrong = "is binary, not text. Leave it out"
    if wrong or kind is None:
        raise UserError(f"{file.address}: {wrong}")
    return kind


def _decompressed(stream: BinaryIO, compression: str) -> Any:
    """The stream of decompressed bytes."""
    if compression == ".zst":
        import pyarrow

        return pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, "r"), "zstd")
    opened: dict[str, Callable[[BinaryIO], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return opened[compression](stream) if compression else stream


def rows(
    file: File, text_key: str, by_paragraph: bool = False, cache: str | None = None, start: int = 0
) -> Iterator[Row]:
    """The rows of a file from row ``start`` on: lines of JSON as bytes, otherwise the texts (None: no text).

    Raises UserError, which names the row, if the file is damaged.
    """
    number = start
    with open_file(file, cache) as stream:
        kind, compression = sniff(file, stream)
        try:
            with closing(_rows(kind, _decompressed(stream, compression), text_key, start, by_paragraph)) as found:
                for row in found:
                    yield row
                    number += 1
        except KeyError as error:
            raise UserError(f"{file.address}: {error.args[0]}. Set data.text_key to the field with the text") from error
        except DAMAGED as error:
            said = first_line(error)
            raise UserError(f"{file.address}: damaged or cut off after document {number} ({said}). {FETCH}") from error


def _rows(kind: str, stream: Any, text_key: str, start: int, by_paragraph: bool) -> Generator[Row, None, None]:
    if kind in ("parquet", "arrow"):
        for batch in _batches(kind, stream, text_key, start):
            yield from _texts(batch, text_key)
    elif kind == "text" and not by_paragraph:
        yield from [stream.read().decode("utf-8-sig", "replace")][start:]
    elif kind != "empty":
        lines = io.BufferedReader(stream, READ_BYTES)
        if lines.peek(len(BOM)).startswith(BOM):
            lines.read(len(BOM))
        yield from islice(lines if kind == "lines" else _paragraphs(lines), start, None)


def _paragraphs(lines: Iterable[bytes]) -> Iterator[str]:
    """Runs of lines that are not blank."""
    for has_text, run in groupby(lines, lambda line: bool(line.strip())):
        if has_text:
            yield b"\n".join(line.rstrip(b"\r\n") for line in run).decode("utf-8", "replace")


def _batches(kind: str, stream: io.BufferedReader, text_key: str, start: int) -> Iterator[Any]:
    """The record batches of a parquet file, an arrow file, or an arrow stream as ``save_to_disk`` writes it; from row
    ``start`` on. Row groups of parquet before that are not read."""
    import pyarrow
    from pyarrow import parquet

    if kind == "parquet":
        file = parquet.ParquetFile(stream)
        column, group = _field(file.schema_arrow, text_key)[0], 0
        while group < file.num_row_groups and start >= (size := file.metadata.row_group(group).num_rows):
            group, start = group + 1, start - size
        found = file.iter_batches(256, row_groups=range(group, file.num_row_groups), columns=[column])
    elif stream.peek(6).startswith(b"ARROW1"):
        opened = pyarrow.ipc.open_file(stream)
        found = map(opened.get_batch, range(opened.num_record_batches))
    else:
        found = pyarrow.ipc.open_stream(stream)
    for batch in found:
        if start < len(batch):
            yield batch.slice(start)
        start = max(0, start - len(batch))


def _field(schema: Any, text_key: str) -> list[str]:
    """The names of the column, and of the fields in it, that ``text_key`` stands for."""
    names = [text_key] if text_key in schema.names else text_key.split(".")
    if names[0] not in schema.names:
        raise KeyError(f"has no column {text_key!r}: its columns are {', '.join(schema.names)}")
    return names


def _texts(batch: Any, text_key: str) -> list[str | None]:
    """The texts of a record batch; None for a row whose text is missing or no string."""
    import pyarrow.compute

    first, *inner = _field(batch.schema, text_key)
    column = batch.column(first)
    for name in inner:
        if not pyarrow.types.is_struct(column.type) or column.type.get_field_index(name) < 0:
            raise KeyError(f"has no field {text_key!r}: {first} is {column.type}")
        column = pyarrow.compute.struct_field(column, name)
    return [text if isinstance(text, str) else None for text in column.to_pylist()]


def parse_text(row: Row, text_key: str, address: str, document: int) -> str:
    """The text of a row; a blank line is an empty document. Bytes that are not UTF-8 become U+FFFD."""
    if isinstance(row, str):
        return row
    where = f"{address}: document {document}"
    fix = "Set data.text_key to the field that holds the text, or data.bad_rows=skip"
    if row is None:
        raise UserError(f"{where} has no text {text_key!r}: it is null or no string. {fix}")
    if not row.strip():
        return ""
    where += f" (line {document + 1})"
    try:
        record = json.loads(row.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        rule = "A shard holds one JSON object a line"
        raise UserError(f"{where} is not JSON ({error}). {rule}; data.bad_rows=skip leaves such rows out") from error
    text = record
    for name in [text_key] if isinstance(record, dict) and text_key in record else text_key.split("."):
        text = text.get(name) if isinstance(text, dict) else None
    if not isinstance(text, str):
        found = f"its fields are {', '.join(record)}" if isinstance(record, dict) else "it is no JSON object"
        raise UserError(f"{where} has no text {text_key!r}: {found}. {fix}")
    return text
