"""The format of a file: JSON lines, text, parquet or arrow, plain or compressed.

The first bytes are checked before a file is read, because downloads and editors put other content under valid names.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zlib
from typing import Any, BinaryIO

from dlr_pretrain.config.tree import Data
from dlr_pretrain.data.files import File
from dlr_pretrain.util.errors import UserError, file_error, first_line

HEAD_BYTES = 512  # checked at the start of a file
BOM = b"\xef\xbb\xbf"
SKIPPABLE = {bytes((0x50 + i,)) + b"*M\x18": ".zst" for i in range(16)}  # frames with which a zstd file may begin
COMPRESSED = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"BZh": ".bz2", b"\xfd7zXZ\0": ".xz"} | SKIPPABLE
TABLES = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
FORMATS = {".json": "lines", ".jsonl": "lines", ".ndjson": "lines", ".txt": "text", ".parquet": "parquet",
           ".arrow": "arrow"}  # fmt: skip
COMPRESSIONS = tuple(dict.fromkeys(COMPRESSED.values()))
SUFFIXES = {name + packed: kind for packed in ("", *COMPRESSIONS) for name, kind in FORMATS.items()}
FETCH = "Fetch this shard again"
UNSUPPORTED = [  # how a file begins, what it is, and the fix
    ((b"version https://git-lfs",), "a Git LFS pointer, not the file that it stands for", "Run git lfs pull"),
    ((b"%PDF",), "a PDF document", "Convert it to text"),
    ((b"\xff\xfe", b"\xfe\xff"), "UTF-16 text", "Convert it to UTF-8"),
    ((b"<!doctype", b"<html"), "an HTML page, perhaps a server error", FETCH),
    ((b"<?xml",), "XML, perhaps a server error", FETCH),
]
NOT_JSON_LINES = [
    ((b"[",), "a JSON array, but a shard holds one JSON object per line", "Convert it: jq -c '.[]' FILE > FILE.jsonl"),
    ((b"{\n", b"{\r"), "one JSON object over several lines, not one per line", "Convert it: jq -c . FILE > FILE.jsonl"),
]
DAMAGED = (EOFError, OSError, ValueError, KeyError, zlib.error, lzma.LZMAError)  # pyarrow's are among the first four


def unreadable(file: File, error: Exception, where: str = "") -> UserError:
    """Turns one of ``DAMAGED`` into an error that names the file, and says whether disk or content is at fault."""
    if isinstance(error, OSError) and error.errno:
        return file_error(OSError(error.errno, f"cannot be read{where}: {os.strerror(error.errno)}", file.address))
    if "requires too much memory" in str(error):  # pyarrow's reader of zstd does not take a limit
        rule = "was compressed with a window above 128 MB, as by zstd --long=31 or --ultra"
        fix = "Compress it again: zstd -dc --long=31 FILE | zstd -o NEW_FILE"
        return UserError(f"{file.address}: {rule}, which this reader does not support. {fix}")
    return UserError(f"{file.address}: damaged or cut off{where} ({first_line(error)}). {FETCH}")


def suffix_of(name: str) -> str:
    """The suffix that gives a file's format and compression, such as .jsonl.gz; "" if the format is unknown."""
    return next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), "")


def kind_of(name: str) -> str:
    """The format by file name: lines, text, parquet or arrow; "" if it is unknown."""
    return SUFFIXES.get(suffix_of(name), "")


def sniff(file: File, stream: BinaryIO, data: Data) -> tuple[str, str]:
    """The kind of a file, and the suffix of its compression or "".

    The kind is lines, text (one document), paragraphs, parquet, arrow or empty. The first bytes decide the compression,
    not the name, because downloads may change either. The stream is at its start, and is left there. Raises UserError
    if the file cannot be read.
    """
    head = _first_bytes(file, stream)
    compression = next((suffix for magic, suffix in COMPRESSED.items() if head.startswith(magic)), "")
    if compression:
        head = _first_bytes(file, stream, compression)
    if not head:
        return "empty", compression
    table = next((kind for magic, kind in TABLES.items() if head.startswith(magic)), None)
    kind = table or kind_of(file.name) or ("lines" if head.startswith(b"{") else None)
    if kind is None:
        rule = f"its name ends with none of {', '.join(FORMATS)}"
        raise UserError(f"{file.address}: {rule}. Rename it, or leave it out")
    if kind == "lines":
        _refuse(file, head, NOT_JSON_LINES)
    wrong = ""
    if kind in TABLES.values() and not table:
        wrong = f"is not in {kind} format"
    elif not table and b"\0" in head:
        wrong = f"is not UTF-8 text: it begins with {head[:8]!r}"
    if wrong:
        raise UserError(f"{file.address}: {wrong}. Convert it, {FETCH.lower()}, or leave it out")
    return "paragraphs" if kind == "text" and data.document == "paragraph" else kind, compression


def _first_bytes(file: File, stream: BinaryIO, compression: str = "") -> bytes:
    """The first bytes of the content. Raises UserError if they are those of an unsupported format."""
    begin = io.BytesIO(stream.read(1 << 20)) if compression == ".zst" else stream  # pyarrow closes what it reads
    try:
        head = decompressed(begin, compression).read(HEAD_BYTES)
    except DAMAGED as error:
        raise unreadable(file, error) from error
    finally:
        stream.seek(0)
    _refuse(file, head, UNSUPPORTED)
    return head


def _refuse(file: File, head: bytes, formats: list[tuple[tuple[bytes, ...], str, str]]) -> None:
    """Raise UserError if a file begins like one of ``formats``."""
    text = head.removeprefix(BOM).lstrip().lower()
    for begins, what, fix in formats:
        if head.startswith(begins) or text.startswith(begins):
            raise UserError(f"{file.address}: is {what}. {fix}")


def decompressed(stream: BinaryIO, compression: str) -> Any:
    if compression == ".zst":
        import pyarrow

        return pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, "r"), "zstd")
    opened: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return opened[compression](stream) if compression else stream
