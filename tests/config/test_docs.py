"""What docs/ say stands in the code: all keys, messages by their words, and links that lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def messages() -> list[str]:
    entries = re.findall(r"^\* (`.*?`): ", (ROOT / "docs/troubleshooting.md").read_text(), flags=re.MULTILINE)
    return [words for entry in entries for words in re.findall(r"`([^`]+)`", entry)]


def anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", path.read_text()):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_messages_that_are_explained_are_those_of_the_code():
    assert len(messages()) > 20
    source = "".join(p.read_text() for folder in ("dlr_pretrain", "scripts") for p in (ROOT / folder).rglob("*.py"))
    joined = re.sub(r'"\s*f?"', "", source)  # strings that lie on several lines
    assert [words for words in messages() if words not in joined] == []
