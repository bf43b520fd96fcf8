"""``tune.py --slurm`` on a real scheduler: its grid, then the fresh seeds, then the comparison, by one command."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from dlr_pretrain.launch.queue import queue
from tests.conftest import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_the_same_command_queues_goes_on_and_compares(words, tmp_path):
    lists = ["pair=cola,cola+dlr", "lr=0.003,0.01", "seeds=1", "confirm=2"]
    short = words(f"run.root={tmp_path}/runs", "train.steps=4", "eval.every=4", "checkpoint.every=4")
    given = [word for word in short if not word.startswith("train.lr=")] + lists
    options = ["--output", str(tmp_path / "out"), "--slurm", "--", "--ntasks-per-node=1", "--mem=1G", "--time=10"]

    def give() -> str:
        command = [sys.executable, str(ROOT / "scripts" / "tune.py"), *given, *options]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ended() -> None:
        deadline = time.monotonic() + 600
        while queue():
            assert time.monotonic() < deadline, queue()
            time.sleep(0.5)

    assert "Submitted 4 of 4 as job " in give()
    ended()
    assert "Submitted 2 of 2 as job " in give()
    ended()
    assert "Submitted" not in (last := give())
    found = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert [trial["state"] for trial in found["trials"]] == ["finished"] * 6
    (comparison,) = found["comparisons"]
    assert list(comparison["by_seed"]) == ["2"] and "cola+dlr" in last
