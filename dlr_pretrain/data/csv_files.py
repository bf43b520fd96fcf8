"""CSV and TSV with a header. A quoted field may hold delimiters and line breaks."""

import csv
from collections.abc import Iterator
from functools import partial
from itertools import islice

from dlr_pretrain.data.formats import BOM, MAX_LINE_BYTES, Format, Opened, lines_of
from dlr_pretrain.util.errors import UserError

csv.field_size_limit(MAX_LINE_BYTES)  # of characters; by default a field ends at 128 KB


def _texts(opened: Opened, delimiter: str) -> Iterator[bytes | None]:
    """Yields the fields of the column ``text_key``; None for a record that has not as many fields as the header.

    Raises UserError if the column is missing, and ValueError if a quoted field is not closed.
    """
    lines = (line.decode("utf-8", "surrogateescape") for line in lines_of(opened))
    records = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        header = next(records, [])
        names = [name.removeprefix(BOM.decode()) for name in header]
        if opened.text_key not in names:
            raise UserError(
                opened.address,
                f"has no text {opened.text_key!r}: its columns are {names}",
                "Set data.text_key to the column that holds the text",
            )
        column = names.index(opened.text_key)
        for record in islice(filter(None, records), opened.start, None):
            whole = len(record) == len(names)
            yield record[column].encode("utf-8", "surrogateescape") if whole else None
    except csv.Error as error:
        raise ValueError(f"line {records.line_num}: {error}") from error


UNEQUAL = "it has not as many fields as the header"
CSV = Format("CSV", (".csv",), partial(_texts, delimiter=","), cut="nowhere", without_text=UNEQUAL)
TSV = Format("TSV", (".tsv",), partial(_texts, delimiter="\t"), cut="nowhere", without_text=UNEQUAL)
