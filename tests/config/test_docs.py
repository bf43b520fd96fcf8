"""What docs/ say stands in the code: all keys, messages by their words, and links that lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dlr_pretrain.config.document import page
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def messages() -> list[str]:
    entries = re.findall(r"^\* (`.*?`): ", (ROOT / "docs/troubleshooting.md").read_text(), flags=re.MULTILINE)
    return [words for entry in entries for words in re.findall(r"`([^`]+)`", entry)]


def anchors(path: Path) -> set[str]:
    """As GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_page_of_keys_is_that_of_the_code():
    command = "python -m dlr_pretrain.config.document > docs/configuration.md"
    assert (ROOT / "docs/configuration.md").read_text() == page(), f"run {command}"


def test_every_knob_is_explained_in_its_file():
    rows = [line.split(" | ") for line in page().splitlines() if re.match(r"\| `\w+` \| `(backbone|optimizer)\.", line)]
    assert len(rows) > 50 and [row[1] for row in rows if not row[2]] == []


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
