"""The figures of benchmarks/README.md are those of the results that it names."""

from __future__ import annotations

import gzip
import json
import re

from tests.conftest import ROOT

RATIO = re.compile(r"(\d\.(\d+)) \[(\d\.\d+), (\d\.\d+)\]")
PAGE = (ROOT / "benchmarks" / "README.md").read_text()
ROWS = [line for line in PAGE.partition("## What was found")[2].splitlines() if re.match(r"\| .*`\w+` \|$", line)]


def test_every_result_is_on_the_page_as_it_was_measured():
    with gzip.open(ROOT / "benchmarks" / "cpu.jsonl.gz", "rt") as file:
        files = {json.loads(line)["name"]: line for line in file}
    assert {row.split("`")[-2] for row in ROWS} == files.keys()
    for row in ROWS:
        text = files[row.split("`")[-2]]
        found = json.loads(text)
        assert found["command"].startswith("python ") and re.fullmatch(r"[0-9a-f]{40}", found["commit"])
        assert not re.search(r'[" =:]/\w', text), "a place of a machine"
        variants = found.get("variants") or found.get("arms") or found.get("models") or []
        ratios = [v["ratio"] for v in variants if "ratio" in v and (v.get("parity") or {}).get("passes", True)]
        for median, digits, low, high in RATIO.findall(row):
            shown = [tuple(f"{ratio[key]:.{len(digits)}f}" for key in ("median", "low", "high")) for ratio in ratios]
            assert (median, low, high) in shown, row
