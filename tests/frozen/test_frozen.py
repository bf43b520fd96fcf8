"""The command line gives the numbers of ``recording.json`` and the answers of ``mistakes``: see the package."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tests.frozen.suite import RECORDING, differences, machine

pytestmark = pytest.mark.full
ROOT = Path(__file__).resolve().parents[2]


def suite(*words: str) -> subprocess.CompletedProcess:
    """The suite in a process that has not imported the library, as conftest has in this one."""
    command = [sys.executable, "-m", "tests.frozen.suite", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_every_loss_and_folded_tensor_is_that_of_the_recording(tmp_path):
    done = suite("record", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    expected, found = (json.loads(path.read_text()) for path in (RECORDING, tmp_path / "found.json"))
    if expected["machine"] != machine():
        warnings.warn(f"recorded on {expected['machine']}: losses of fp32 to 1e-5, no hashes", stacklevel=1)
    assert differences(expected, found) == []


def test_mistakes_are_answered_with_what_a_user_needs():
    done = suite("errors")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
