"""The evidence page shows the measured numbers, and its commands are valid."""

from __future__ import annotations

import os
import subprocess

import pytest
from scipy.stats import t

from benchmarks.evidence import geometry, report
from dlr_pretrain.cli import load
from dlr_pretrain.launch.runs import load_runs, read_table
from tests.conftest import ROOT


def test_the_page_and_its_files_show_the_tables_of_runs():
    text, folder = report.PAGE.read_text(), report.PAGE.parent / "evidence"
    assert report.insert(text, report.HERE) == text
    linked = {folder / piece / f"{name}.{kind}" for piece, name, kind in report.linked_files(text)}
    assert linked == set(folder.glob("*/*")) - set(geometry.PACKED.glob("*"))
    for path in linked:
        assert path.suffix == ".png" or report.made(path.parent.name, path.stem, report.HERE).csv() == path.read_text()


def test_the_page_of_geometry_shows_its_numbers():
    text = geometry.PAGE.read_text()
    assert geometry.filled(text) == text
    assert all(f"evidence/geometry/{path.name}" in text for path in geometry.PACKED.glob("*.png"))


def test_the_intervals_of_a_table_hold_together():
    """Three differences with known p: 0.01, 0.02 and 0.04 become 0.03, 0.04 and 0.04."""
    values = {p: [t.ppf(1 - p / 2, 2) / 3**0.5 + x for x in (-1, 0, 1)] for p in (0.04, 0.01, 0.02)}
    effects = [{"method": str(p), "against": "plain", "by_seed": dict(enumerate(found))} for p, found in values.items()]
    found = report.together([*effects, effects[0]])  # repeated runs count once
    assert [round(d["p"], 6) for d in found] == [0.04, 0.03, 0.04, 0.04]
    assert {d["level"] for d in found} == {1 - (1 - 0.95) / 3} and {d["better"] for d in found} == {"plain"}


STUB = """#!/bin/sh
for word in "$@"; do
  case "$word" in /dev/fd/*) cat "$word" > "$SAID.$$"; word=$SAID.$$ ;; esac  # keep a copy of the table of runs
  printf "%s\\0" "$word" >> "$SAID"
done
echo >> "$SAID"
"""


@pytest.fixture
def commands(tmp_path):
    """The commands of train.sh by their script; each is written to a file instead of being run."""
    stub, said = tmp_path / "python", tmp_path / "said"
    stub.write_text(STUB)
    stub.chmod(0o755)

    def of(*pieces: str, **given: str) -> dict[str, list[list[str]]]:
        said.write_text("")
        environment = os.environ | {"PYTHON": str(stub), "SAID": str(said)} | given
        subprocess.run([ROOT / "benchmarks" / "evidence" / "train.sh", *pieces], env=environment, check=True)
        found = {}
        for script, *words in (line.split("\0")[:-1] for line in said.read_text().splitlines()):
            found.setdefault(script, []).append(words)
        return found

    return of


@pytest.mark.full
def test_every_command_of_the_programme_composes(commands, tmp_path):
    for words, given in (
        ("data=c4 ", {}),
        ("data.root=texts", {"TEXT": "texts"}),
        ("tokenizer.path=m", {"SPIECE": "m"}),
    ):
        for piece in ("tokens", "smoke"):
            (prepared,) = commands(piece, **given)["scripts/prepare_data.py"]
            assert words in " ".join(prepared)
            load([word for word in prepared if word.startswith(("data", "tokenizer"))], machine=False)
    assert len({load(words, machine=False).run.dir for words in commands("smoke")["train.py"]}) == 4
    tuned = commands(TEXT="texts")["slurm/submit.py"]
    assert len(tuned) == 31 and len({words[words.index("--report") + 1] for words in tuned}) == 31
    for words in tuned:
        table = [word for word in words if "=" in word or word.startswith(str(tmp_path))]
        load_runs(read_table(table)[-1:])
