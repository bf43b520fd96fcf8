"""The formats that are read, plain or compressed, and which of them a file has.

The first bytes are checked before a file is read, because downloads and editors put other content under valid names.
"""

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Sequence
from typing import Any, BinaryIO

from dlr_pretrain.config.tree import Data
from dlr_pretrain.data.csv_files import CSV, TSV
from dlr_pretrain.data.files import File
from dlr_pretrain.data.formats import BOM, Format, Head
from dlr_pretrain.data.tables import ARROW, PARQUET
from dlr_pretrain.data.text_files import JSON_LINES, PARAGRAPHS, TEXT
from dlr_pretrain.util.errors import UserError, file_error, first_line

FORMATS = (JSON_LINES, TEXT, PARQUET, ARROW, CSV, TSV)
HEAD_BYTES = 512  # checked at the start of a file
SKIPPABLE = {bytes((0x50 + i,)) + b"*M\x18": ".zst" for i in range(16)}  # frames with which a zstd file may begin
COMPRESSED = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"BZh": ".bz2", b"\xfd7zXZ\0": ".xz"} | SKIPPABLE
COMPRESSIONS = tuple(dict.fromkeys(COMPRESSED.values()))
SUFFIXES = tuple(suffix for format in FORMATS for suffix in format.suffixes)
FETCH = "Fetch this shard again"
UNSUPPORTED: list[Head] = [  # how a file begins, what it is, and the fix
    ((b"version https://git-lfs",), "a Git LFS pointer, not the file that it stands for", "Run git lfs pull"),
    ((b"%PDF",), "a PDF document", "Convert it to text"),
    ((b"\xff\xfe", b"\xfe\xff"), "UTF-16 text", "Convert it to UTF-8"),
    ((b"<!doctype", b"<html"), "an HTML page, perhaps a server error", FETCH),
    ((b"<?xml",), "XML, perhaps a server error", FETCH),
]
DAMAGED = (EOFError, OSError, ValueError, KeyError, zlib.error, lzma.LZMAError)  # pyarrow's are among the first four


def unreadable(file: File, error: Exception, where: str = "") -> UserError:
    """Turns one of ``DAMAGED`` into an error that names the file, and says whether disk or content is at fault."""
    if isinstance(error, OSError) and error.errno:
        return file_error(OSError(error.errno, f"cannot be read{where}: {os.strerror(error.errno)}", file.address))
    if "requires too much memory" in str(error):  # pyarrow's reader of zstd does not take a limit
        rule = "was compressed with a window above 128 MB, as by zstd --long=31 or --ultra, which is not supported"
        return UserError(file.address, rule, "Compress it again: zstd -dc --long=31 FILE | zstd -o NEW_FILE")
    return UserError(file.address, f"damaged or cut off{where} ({first_line(error)})", FETCH)


def format_of(name: str) -> Format | None:
    """The format by file name; None if the name is that of none."""
    lowered = name.lower()
    plain = next((lowered.removesuffix(packed) for packed in COMPRESSIONS if lowered.endswith(packed)), lowered)
    return next((format for format in FORMATS if plain.endswith(format.suffixes)), None)


def is_compressed(name: str) -> bool:
    """Whether a file is compressed, judged by its name."""
    return name.lower().endswith(COMPRESSIONS)


def as_read(format: Format, data: Data) -> Format:
    """The format of a file whose name or content is that of ``format``."""
    return PARAGRAPHS if format is TEXT and data.document == "paragraph" else format


def sniff(file: File, stream: BinaryIO, data: Data) -> tuple[Format | None, str]:
    """The format of a file, None if it is empty; and the suffix of its compression or "".

    The first bytes decide the compression, not the name, because downloads may change either. The stream is at its
    start, and is left there. Raises UserError if the file cannot be read.
    """
    head = _first_bytes(file, stream)
    compression = next((suffix for magic, suffix in COMPRESSED.items() if head.startswith(magic)), "")
    if compression:
        head = _first_bytes(file, stream, compression)
    if not head:
        return None, compression
    by_content = next((format for format in FORMATS if format.magic and head.startswith(format.magic)), None)
    format = by_content or format_of(file.name) or (JSON_LINES if head.startswith(b"{") else None)
    if format is None:
        raise UserError(file.address, f"its name ends with none of {', '.join(SUFFIXES)}", "Rename it, or leave it out")
    _refuse(file, head, format.refused)
    wrong = ""
    if format.magic and not by_content:
        wrong = f"is not in {format.name} format"
    elif not by_content and b"\0" in head:
        wrong = f"is not UTF-8 text: it begins with {head[:8]!r}"
    if wrong:
        raise UserError(f"{file.address}: {wrong}. Convert it, {FETCH.lower()}, or leave it out")
    return as_read(format, data), compression


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


def _refuse(file: File, head: bytes, others: Sequence[Head]) -> None:
    """Raise UserError if a file begins like one of ``others``."""
    text = head.removeprefix(BOM).lstrip().lower()
    for begins, what, fix in others:
        if head.startswith(begins) or text.startswith(begins):
            raise UserError(f"{file.address}: is {what}. {fix}")


def decompressed(stream: BinaryIO, compression: str) -> Any:
    if compression == ".zst":
        import pyarrow

        return pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, "r"), "zstd")
    opened: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return opened[compression](stream) if compression else stream
