"""JSON lines, with one record a line, and plain text, which is one document or one a paragraph."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, islice
from typing import Any

from dlr_pretrain.data.formats import BOM, OR_SKIP, Format, NoText, Opened, field_path, lines_of

BLANK = " \t\n\r\v\f"


def _lines(opened: Opened) -> Iterator[bytes | None]:
    return islice(lines_of(opened), opened.start, None)


def _text_field(line: str, text_key: str) -> Any:
    """The value of the text field in a line of JSON; a blank line is an empty document."""
    if not line.strip(BLANK):
        return ""
    try:
        record = value = json.loads(line.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise NoText(f"is not JSON ({error})", f"A shard holds one JSON object per line; {OR_SKIP}") from error
    for name in field_path(text_key, record if isinstance(record, dict) else ()):
        if not isinstance(value, dict) or name not in value:
            fields = f"its fields are {', '.join(record)}" if isinstance(record, dict) else "it is not a JSON object"
            fix = "Set data.text_key to the field that holds the text, or data.bad_rows=skip"
            raise NoText(f"has no text {text_key!r}: {fields}", fix)
        value = value[name]
    return value


def _document(opened: Opened) -> Iterator[bytes | None]:
    return iter([opened.stream.read().removeprefix(BOM)][opened.start :])


def _paragraphs(opened: Opened) -> Iterator[bytes | None]:
    """Yields each run of lines that are not blank."""
    runs = groupby(lines_of(opened, is_border=bytes.isspace), lambda line: not line.isspace())
    texts = (b"\n".join(line.rstrip(b"\r\n") for line in run).removeprefix(BOM) for has_text, run in runs if has_text)
    return islice(texts, opened.start, None)


JSON_LINES = Format(
    "JSON lines",
    (".json", ".jsonl", ".ndjson"),
    _lines,
    cut="lines",
    parse=_text_field,
    row="line",
    refused=[
        ((b"[",), "a JSON array, but a shard holds one JSON object per line",
         "Convert it: jq -c '.[]' FILE > FILE.jsonl"),
        ((b"{\n", b"{\r"), "one JSON object over several lines, not one per line",
         "Convert it: jq -c . FILE > FILE.jsonl"),
    ],
)  # fmt: skip
TEXT = Format("text", (".txt",), _document, cut="nowhere", is_document=True)
PARAGRAPHS = replace(TEXT, read=_paragraphs, cut="lines", is_document=False)
