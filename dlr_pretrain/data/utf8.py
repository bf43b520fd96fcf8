"""Text is UTF-8: a few characters of a file that are not become U+FFFD, and a file with more of them is refused."""

from __future__ import annotations

import logging

from dlr_pretrain.data.files import File
from dlr_pretrain.data.formats import TABLES, place
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.text import plural

REPLACEMENT = "\ufffd"
MOST_REPLACED = 0.001  # share of a file's characters that may not be UTF-8
STRAYS = 10  # documents with such characters before the share counts: a reading may begin near a few of them

log = logging.getLogger(__name__)
_told: set[str] = set()  # addresses of files whose first replaced bytes this process has told of


class Decoder:
    """Decodes the rows of one reading of a file, and counts the characters whose bytes are not UTF-8."""

    def __init__(self, file: File, kind: str):
        self.file, self.kind, self.strays = file, kind, 0 if kind == "text" else STRAYS
        self.read = self.replaced = self.documents = 0  # characters, those replaced, and documents with such
        self.last = (0, b"")  # of these documents

    def __call__(self, row: bytes, number: int) -> str:
        """The row as text. Raises UserError if too many of the file's characters are not UTF-8."""
        text = row.decode("utf-8", "replace")
        self.read += len(text)
        if REPLACEMENT in text and (replaced := text.count(REPLACEMENT) - row.count(REPLACEMENT.encode())):
            self.replaced, self.documents, self.last = self.replaced + replaced, self.documents + 1, (number, row)
            self.judge(self.strays)
            if self.file.address not in _told:
                _told.add(self.file.address)
                lost = plural(len(row) - len(row.decode("utf-8", "ignore").encode()), "byte")
                where = place(self.file, self.kind, number)
                log.warning("%s: %s not in UTF-8 became U+FFFD. Of this file no more is told", where, lost)
        return text

    def judge(self, strays: int) -> None:
        """Raise UserError if more characters than the share are replaced, in more documents than ``strays``."""
        if self.documents > strays and self.replaced > MOST_REPLACED * self.read:
            number, row = self.last
            probably, name = (", but probably cp1252", "cp1252") if _is_cp1252(row) else ("", "ITS_ENCODING")
            rule = f"is not UTF-8{probably}: {self.replaced:,} of {self.read:,} characters read would become U+FFFD"
            how = f"iconv -f {name.upper()} -t UTF-8"
            if self.kind in TABLES.values():
                how = f"value.decode({name!r})"
            raise UserError(f"{place(self.file, self.kind, number)} {rule}. Convert the text: {how}")


def _is_cp1252(row: bytes) -> bool:
    """Whether bytes are probably Western text: few are not ASCII, most of these not UTF-8, and all are in cp1252."""
    utf8 = row.decode("utf-8", "ignore")
    strange, others = len(row) - len(utf8.encode()), len(utf8.encode()) - len(utf8)
    return others < strange < len(row) / 4 and REPLACEMENT not in row.decode("cp1252", "replace")
