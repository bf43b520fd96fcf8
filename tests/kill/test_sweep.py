"""A sweep whose launcher starts workers is asked to stop: its runs save, and the same command continues them."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from dlr_pretrain.config.run_folder import read_record
from dlr_pretrain.util.errors import EXIT_STOPPED
from dlr_pretrain.util.files import read_metrics, wait_for
from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.full]
SWEEPS = {
    "joblib": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "submitit": ["hydra/launcher=submitit_local"],
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP], ids=lambda number: number.name)
@pytest.mark.parametrize("launcher", SWEEPS)
def test_a_sweep_that_is_asked_to_stop_saves_its_runs(words, tmp_path, launcher, number):
    pytest.importorskip(f"hydra_plugins.hydra_{launcher}_launcher", reason='pip install -e ".[sweeps]"')
    given = [word for word in words("train.steps=100000", f"run.root={tmp_path}") if not word.startswith("run.dir")]
    command = [sys.executable, str(ROOT / "train.py"), "-m", *SWEEPS[launcher], "seed=1,2,3", *given]
    output = tmp_path / "output"
    with output.open("w") as out:
        sweep = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT)
        try:
            begun = lambda: [path for path in tmp_path.glob("*/metrics.jsonl") if len(read_metrics(path)) > 5]  # noqa: E731
            while sweep.poll() is None and len(begun()) < 2:
                wait_for(lambda: len(begun()) >= 2, 5)
            sweep.send_signal(number)
            sweep.wait()
        finally:
            sweep.kill()
    said = output.read_text()
    assert sweep.returncode == EXIT_STOPPED, said[-6000:]
    assert "asked to stop: waiting until the jobs of the sweep have saved" in said and "Traceback" not in said
    for path in tmp_path.glob("*/metrics.jsonl"):
        record = read_record(path.parent)
        assert record["state"]["name"] == "stopped" and record["saved"] == read_metrics(path)[-1]["step"], said[-6000:]
