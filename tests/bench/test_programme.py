"""The script of the GPU programme, where it needs no GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import time
from zipfile import ZipFile

import pytest

from benchmarks.page import losses
from tests.conftest import ROOT, killed_with_its_group

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the script needs Linux")
SCRIPT = ROOT / "benchmarks" / "gpu.sh"


def test_no_measurement_outlives_a_killed_script(tmp_path):
    stub, began = tmp_path / "python", tmp_path / "began"
    stub.write_text(f"#!/bin/sh\n[ $1 = -c ] || {{ touch {began}; exec sleep 600; }}\n")  # -c asks for a GPU
    stub.chmod(0o755)
    given = {"PYTHON": str(stub), "PACK": str(tmp_path / "none")}
    command = [SCRIPT, tmp_path / "out", "g"]
    script = subprocess.Popen(command, env=os.environ | given, stdin=subprocess.PIPE, start_new_session=True)
    while not began.exists():
        assert script.poll() is None
        time.sleep(0.01)
    assert killed_with_its_group(script, 60_000), "its standard input is still open in a process that it started"


def test_a_pack_that_is_too_large_for_a_slice_is_refused(tmp_path):
    for part, size in {"wheels/a": 4, "tf448/a": 13, "peers/a": 46, "tokens.tar.xz": 60}.items():
        (tmp_path / part).parent.mkdir(exist_ok=True)
        (tmp_path / part).touch()
        os.truncate(tmp_path / part, size << 20)
    found = subprocess.run([SCRIPT, "sizes", tmp_path], capture_output=True, text=True)
    assert found.returncode == 1
    assert re.findall(r"slice (\w): 65 MiB of .* must be less than 64", found.stderr) == ["g", "e", "f", "h"]


def test_a_pack_is_unpacked_before_anything_is_measured(tmp_path):
    pack, about = tmp_path / "pack", "thing-1.dist-info"
    (pack / "wheels").mkdir(parents=True)
    with ZipFile(pack / "wheels" / "thing-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("thing.py", "")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    with tarfile.open(pack / "tokens.tar.xz", "w:xz") as tokens:
        tokens.add(__file__, "manifest.json")
    given = {"PYTHON": sys.executable, "PACK": str(pack), "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    assert subprocess.run([SCRIPT, tmp_path / "out", "g"], env=os.environ | given).returncode == 2  # without a GPU
    unpacked = tmp_path / f"dlr_pretrain_pack.{os.getuid()}"
    assert (unpacked / "wheels" / "thing.py").exists() and (unpacked / "tokens" / "manifest.json").exists()


def test_each_backbone_has_an_interval_of_its_pairs():
    """Over rates and seeds, at the same number of tokens; a lone pair has none."""
    about = {"text": "c4", "commit": "0"}
    runs = [
        about | {"method": [backbone, dlr], "lr": lr, "seed": seed, "losses": [[1e6, 5.0], [tokens, loss]]}
        for backbone, lr, seed, tokens, difference in (
            *(("cola", lr, seed, 2e6, -seed / 10) for lr in (0.003, 0.01) for seed in (1, 2)),
            ("lost", 0.003, 1, 2e6, 0.5),
        )
        for dlr, loss in (("off", 4.0), ("on", 4.0 + difference))
    ]
    assert losses(runs).splitlines()[-2:] == [
        "| cola | 2.0M | 4 | -0.1500 | -0.2419 to -0.0581 |",
        "| lost | 2.0M | 1 | +0.5000 |  |",
    ]
