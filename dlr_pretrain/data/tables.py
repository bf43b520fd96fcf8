"""Parquet files, arrow files, and arrow streams as ``save_to_disk`` writes them.

pyarrow reads their text column in batches, several times faster than ``datasets`` reads rows.
"""

from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from typing import Any, BinaryIO

from dlr_pretrain.data.formats import WHOLE, Format, Opened, Part, field_path
from dlr_pretrain.util.errors import UserError

BATCH_ROWS = 256
ARROW_FILE = b"ARROW1"  # the first bytes of an arrow file; a stream lacks them


def _parquet_texts(opened: Opened) -> Iterator[bytes | None]:
    """Yields the texts of a part. Reads only their column, and skips earlier row groups."""
    from pyarrow import parquet

    file, start = parquet.ParquetFile(opened.stream), opened.start
    group, last = opened.part.span(file.num_row_groups)
    last = file.num_row_groups if last is None else last
    while group < last and start >= (size := file.metadata.row_group(group).num_rows):
        group, start = group + 1, start - size
    names = file.schema_arrow.names
    column = field_path(opened.text_key, names)[0]
    columns = [column] if column in names else names  # all columns: the error lists them
    # One group at a time: pyarrow cannot join the dictionaries of several groups inside a nested field.
    batches = (file.iter_batches(BATCH_ROWS, [number], columns) for number in range(group, last))
    return _texts(opened, chain.from_iterable(batches), start)


def _arrow_texts(opened: Opened) -> Iterator[bytes | None]:
    return _texts(opened, _arrow_batches(opened.stream, opened.part), opened.start)


def _arrow_batches(stream: BinaryIO, part: Part) -> Iterator[Any]:
    import pyarrow

    magic = stream.read(len(ARROW_FILE))
    stream.seek(0)
    if magic == ARROW_FILE:
        file = pyarrow.ipc.open_file(stream)
        return map(file.get_batch, range(file.num_record_batches)[slice(*part.span(file.num_record_batches))])
    if part == WHOLE:
        return iter(pyarrow.ipc.open_stream(stream))
    batches = list(pyarrow.ipc.open_stream(pyarrow.memory_map(stream.name)))  # does not read their contents
    return iter(batches[slice(*part.span(len(batches)))])


def _texts(opened: Opened, batches: Iterator[Any], start: int) -> Iterator[bytes | None]:
    """Yields the texts of batches from row ``start`` on. Raises UserError if the column is missing or holds no text."""
    for batch in batches:
        if start < len(batch):  # the column of an empty file may have any type
            yield from _texts_of_batch(opened.address, batch.slice(start), opened.text_key)
        start = max(0, start - len(batch))


def _parquet_rows(stream: BinaryIO) -> int:
    from pyarrow import parquet

    return parquet.ParquetFile(stream).metadata.num_rows


def _texts_of_batch(address: str, batch: Any, text_key: str) -> list[bytes | None]:
    """The texts of a batch. Raises UserError if its column does not hold text."""
    import pyarrow
    from pyarrow import compute, types

    column, fields = batch.to_struct_array(), f"its fields are {', '.join(batch.schema.names)}"
    rule, binary = f"{address}: has no text {text_key!r}", pyarrow.large_binary()
    for name in field_path(text_key, batch.schema.names):
        if not types.is_struct(column.type) or column.type.get_field_index(name) < 0:
            raise UserError(f"{rule}: {fields}. Set data.text_key to the field that holds the text")
        column = compute.struct_field(column, name)
        fields = f"{name!r} is of type {column.type}"
    kind, values = column.type, []
    with suppress(pyarrow.ArrowNotImplementedError):
        if types.is_dictionary(kind):
            column = column.dictionary.cast(binary).take(column.indices)
        values = column.cast(binary).to_pylist()  # a cast to text would fail on bytes that are not UTF-8
    if values and not types.is_null(kind):
        return values
    if types.is_struct(kind):
        fix = f"Name one of its fields: data.text_key={text_key}.FIELD"
    elif types.is_nested(kind):
        fix = "First join each value into one string, as pyarrow.compute.binary_join(column, '\\n') does for lists"
    else:
        fix = "Name a text column in data.text_key, or cast this one first: column.cast('string')"
    raise UserError(rule, fields, fix)


PARQUET = Format("parquet", (".parquet",), _parquet_texts, cut="batches", magic=(b"PAR1",), count_rows=_parquet_rows)
ARROW = Format("arrow", (".arrow",), _arrow_texts, cut="batches", magic=(ARROW_FILE, b"\xff\xff\xff\xff"))
