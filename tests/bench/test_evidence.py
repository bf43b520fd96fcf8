"""The evidence, and the results of benchmarks: pages show what was measured, and commands can be given."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess

import pytest

from benchmarks.evidence import report
from dlr_pretrain.launch.runs import load_runs, read_table
from tests.conftest import ROOT

RATIO = re.compile(r"(\d\.(\d+)) \[(\d\.\d+), (\d\.\d+)\]")
PAGE = (ROOT / "benchmarks" / "README.md").read_text()
ROWS = [line for line in PAGE.partition("## What was found")[2].splitlines() if re.match(r"\| .*`\w+` \|$", line)]


def test_the_page_shows_what_its_tables_of_runs_say():
    text = report.PAGE.read_text()
    assert report.insert(text, report.HERE) == text
    links = re.findall(r"\((evidence/\w+/\w+\.png)\)", text)
    assert len(links) == 8 and all((report.PAGE.parent / link).is_file() for link in links)


def test_every_kept_run_names_its_commit_command_and_text_and_no_place_of_a_machine():
    runs = [run for name in report.PIECES for run in report.read(report.HERE / f"{name}.jsonl.gz").runs.values()]
    assert len(runs) == 358
    for run in runs:
        assert all(re.fullmatch(r"[0-9a-f]{40}", commit) for commit in run["commits"]) and run["commits"]
        assert run["starts"][0]["command"][0] == "train.py" and all(run["fingerprints"].values())
        assert not re.search(r'[" ]/\w', json.dumps(run)) and "host" not in run["starts"][0]


STUB = """#!/bin/sh
for word in "$@"; do
  case "$word" in /dev/fd/*) cat "$word" > "$SAID.$$"; word=$SAID.$$ ;; esac  # a table of runs that is not kept
  printf "%s\\0" "$word" >> "$SAID"
done
echo >> "$SAID"
"""


@pytest.mark.full
def test_every_comparison_of_the_programme_can_be_trained(tmp_path):
    """Each command is written to a file in place of being run."""
    stub, said = tmp_path / "python", tmp_path / "said"
    stub.write_text(STUB)
    stub.chmod(0o755)
    environment = os.environ | {"PYTHON": str(stub), "SAID": str(said), "TEXT": "texts"}
    subprocess.run([ROOT / "benchmarks" / "evidence" / "train.sh"], env=environment, check=True)
    commands = [line.split("\0")[:-1] for line in said.read_text().splitlines()]
    tuned = [command for command in commands if command[0] == "scripts/tune.py"]
    assert len(tuned) == 33 and len({command[command.index("--output") + 1] for command in tuned}) == 33
    for command in tuned:
        table = [word for word in command[1:] if "=" in word or word.startswith(str(said))]
        load_runs(read_table(table)[-1:])


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
