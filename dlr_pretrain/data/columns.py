"""The text column of a parquet file, an arrow file, or an arrow stream as ``save_to_disk`` writes it.

pyarrow reads it in batches, several times faster than ``datasets`` reads rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, BinaryIO

from dlr_pretrain.util.errors import UserError

BATCH_ROWS = 256
ARROW_FILE = b"ARROW1"  # the first bytes of an arrow file; a stream lacks them


@dataclass(frozen=True)
class Part:
    """One of ``count`` parts of a file that are about equal."""

    index: int
    count: int

    def span(self, size: int) -> tuple[int, int]:
        """Where the part begins and ends in a file of ``size`` bytes, batches or row groups."""
        return size * self.index // self.count, size * (self.index + 1) // self.count


WHOLE = Part(0, 1)


def field_path(text_key: str, fields: Collection[str]) -> Sequence[str]:
    """The nested fields that lead to the text. A dot in ``text_key`` separates them, unless a field has that name."""
    return [text_key] if text_key in fields else text_key.split(".")


def read_texts(
    address: str, kind: str, stream: BinaryIO, text_key: str, start: int, part: Part = WHOLE
) -> Iterator[bytes | None]:
    """Yields the texts of a part from row ``start`` on. Reads only the text column, and skips earlier row groups.

    Raises UserError if the column is missing or does not hold text.
    """
    batches: Any = _arrow_batches(stream, part) if kind == "arrow" else None
    if kind == "parquet":
        from pyarrow import parquet

        opened = parquet.ParquetFile(stream)
        group, last = part.span(opened.num_row_groups)
        while group < last and start >= (size := opened.metadata.row_group(group).num_rows):
            group, start = group + 1, start - size
        names = opened.schema_arrow.names
        column = field_path(text_key, names)[0]
        columns = [column] if column in names else names  # all columns: the error lists them
        # One group at a time: pyarrow cannot join the dictionaries of several groups inside a nested field.
        groups = ([number] for number in range(group, last))
        batches = chain.from_iterable(opened.iter_batches(BATCH_ROWS, one, columns) for one in groups)
    for batch in batches:
        if start < len(batch):  # the column of an empty file may have any type
            yield from _texts_of_batch(address, batch.slice(start), text_key)
        start = max(0, start - len(batch))


def count_rows(kind: str, stream: BinaryIO) -> int:
    if kind == "parquet":
        from pyarrow import parquet

        return parquet.ParquetFile(stream).metadata.num_rows
    return sum(map(len, _arrow_batches(stream)))


def _arrow_batches(stream: BinaryIO, part: Part = WHOLE) -> Iterator[Any]:
    import pyarrow

    magic = stream.read(len(ARROW_FILE))
    stream.seek(0)
    if magic == ARROW_FILE:
        opened = pyarrow.ipc.open_file(stream)
        return map(opened.get_batch, range(*part.span(opened.num_record_batches)))
    if part == WHOLE:
        return iter(pyarrow.ipc.open_stream(stream))
    batches = list(pyarrow.ipc.open_stream(pyarrow.memory_map(stream.name)))  # does not read their contents
    return iter(batches[slice(*part.span(len(batches)))])


def _texts_of_batch(address: str, batch: Any, text_key: str) -> list[bytes | None]:
    """The texts of a batch. Raises UserError if its column does not hold text."""
    import pyarrow
    from pyarrow import compute, types

    column, found = batch.to_struct_array(), f"its fields are {', '.join(batch.schema.names)}"
    rule, binary = f"{address}: has no text {text_key!r}", pyarrow.large_binary()
    for name in field_path(text_key, batch.schema.names):
        if not types.is_struct(column.type) or column.type.get_field_index(name) < 0:
            raise UserError(f"{rule}: {found}. Set data.text_key to the field that holds the text")
        column = compute.struct_field(column, name)
        found = f"{name!r} is of type {column.type}"
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
    raise UserError(f"{rule}: {found}. {fix}")
