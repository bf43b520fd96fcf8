"""The figures of benchmarks/README.md are those of the files that it names."""

from __future__ import annotations

import json
import re

import pytest

from tests.conftest import ROOT

RATIO = re.compile(r"(\d\.(\d+)) \[(\d\.\d+), (\d\.\d+)\]")
PAGE = (ROOT / "benchmarks" / "README.md").read_text()
ROWS = [line for line in PAGE.partition("## What was found")[2].splitlines() if re.match(r"\| .*`\w+` \|$", line)]
FILES = sorted((ROOT / "benchmarks" / "cpu").glob("*.json"))


@pytest.mark.parametrize("row", [row for row in ROWS if RATIO.search(row)])
def test_a_ratio_of_the_page_was_measured(row):
    found = json.loads((ROOT / "benchmarks" / "cpu" / f"{row.split('`')[-2]}.json").read_text())
    arms = [
        arm["ratio"] for arm in found.get("arms", found.get("models")) if (arm.get("parity") or {}).get("passes", True)
    ]
    for median, digits, low, high in RATIO.findall(row):
        shown = [tuple(f"{arm[key]:.{len(digits)}f}" for key in ("median", "low", "high")) for arm in arms]
        assert (median, low, high) in shown


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_names_its_command_and_a_commit_and_no_place_of_a_machine(path):
    text = path.read_text()
    found = json.loads(text)
    assert found["command"].startswith("python scripts/benchmark.py ") and re.fullmatch(
        r"[0-9a-f]{40}", found["commit"]
    )
    assert not re.search(r'[" =:]/\w', text)


def test_every_result_is_on_the_page():
    assert {row.split("`")[-2] for row in ROWS} == {path.stem for path in FILES}
