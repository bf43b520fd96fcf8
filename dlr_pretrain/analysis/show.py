"""Text for a terminal of 80 columns."""

from __future__ import annotations

import textwrap

WIDTH = 80


def fill(text: str, indent: int = 0) -> str:
    """``text`` wrapped; lines after the first are indented."""
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
