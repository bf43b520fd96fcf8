"""The script of the GPU programme, where it needs no GPU."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the script needs Linux")
SCRIPT = ROOT / "benchmarks" / "gpu.sh"


def test_no_measurement_outlives_a_killed_script(tmp_path):
    stub, began = tmp_path / "python", tmp_path / "began"
    stub.write_text(f"#!/bin/sh\n[ $1 = -c ] || {{ touch {began}; exec sleep 600; }}\n")  # -c asks for a GPU
    stub.chmod(0o755)
    given = {"PYTHON": str(stub), "PACK": str(tmp_path / "none")}
    command = [SCRIPT, tmp_path / "out", "a"]
    script = subprocess.Popen(command, env=os.environ | given, stdin=subprocess.PIPE, start_new_session=True)
    while not began.exists():
        assert script.poll() is None
        time.sleep(0.01)
    os.killpg(script.pid, signal.SIGKILL)
    script.wait()
    readers = select.poll()
    readers.register(script.stdin, 0)
    assert readers.poll(60_000), "its standard input is still open in a process that it started"
