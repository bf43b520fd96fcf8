"""A run trains in whatever environment a supervisor, a container or a scheduler gives it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dlr_pretrain.util.files import read_metrics
from tests.conftest import ROOT

RUN = "scale=tiny data=sample compile=false precision=fp32 train.steps=2 train.warmup_steps=1 eval.tokens=300"


@pytest.mark.full
@pytest.mark.parametrize(
    ("redirect", "variables"),
    [
        (">&-", {}),
        ("2>&-", {}),
        ("<&- >&- 2>&-", {}),
        ("| head -1", {}),
        ("", {"HOME": "/dev/null"}),
        ("", {"TERM": "dumb", "COLUMNS": "1"}),
        ("logger=wandb", {"WANDB_DISABLED": "true"}),
        ("logger=wandb", {"WANDB_MODE": "disabled"}),
        ("logger=wandb", {"WANDB_MODE": "offline", "HOME": "/dev/null", "WANDB_TAGS": "a,b", "WANDB_RUN_GROUP": "g"}),
    ],
)
def test_a_run_ends_well(redirect, variables, tmp_path):
    logger = "" if "logger" in redirect else "logger=jsonl"
    command = f"{sys.executable} {ROOT}/train.py {RUN} train.seq_len=32 {logger} run.dir={tmp_path}/run {redirect}"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], env=os.environ | variables, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
