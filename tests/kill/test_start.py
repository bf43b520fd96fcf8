"""The first seconds of a process: it heeds a request to stop, and says why it cannot reach the other ranks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dlr_pretrain.util.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED
from tests.conftest import ROOT

EARLY = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from dlr_pretrain.util import process
process.prepare()
os.kill(os.getpid(), signal.SIGUSR2)
assert "torch" not in sys.modules
from dlr_pretrain import cli
from dlr_pretrain.__main__ import run_and_report
sys.exit(cli.main(run_and_report))
"""


def test_a_signal_that_comes_before_torch_is_remembered(words, tmp_path):
    command = [sys.executable, "-c", EARLY, *words(f"run.dir={tmp_path}/run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == EXIT_STOPPED, done.stderr
    assert done.stderr == "stopped before the first step (asked to stop). The same command continues\n"
    assert not (tmp_path / "run").exists()


def test_ctrl_c_during_imports_ends_the_process():
    """A library may turn KeyboardInterrupt into another error, or lose it in a destructor."""
    swallows = "try: os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException: pass"
    lines = ["import os, signal", f"sys.path.insert(0, {str(ROOT)!r})", "from dlr_pretrain.util import process"]
    ready = "signal.signal(signal.SIGINT, signal.default_int_handler); process.prepare()"
    command = [sys.executable, "-c", "\n".join(["import sys", *lines, ready, swallows])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (EXIT_INTERRUPTED, "\ninterrupted\n")


@pytest.mark.full
def test_ranks_that_cannot_meet_say_why(words, tmp_path):
    alone = {k: v for k, v in os.environ.items() if not k.startswith("MASTER_")} | {"RANK": "0", "WORLD_SIZE": "2"}
    command = [sys.executable, str(ROOT / "train.py"), *words(f"run.dir={tmp_path}/run")]
    done = subprocess.run(command, capture_output=True, text=True, env=alone)
    assert done.returncode == EXIT_FAILED, done.stderr
    assert "error: rank 0 of 2 cannot reach the other ranks: " in done.stderr and "MASTER_ADDR" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_stop_before_torch_is_heeded_before_the_text_is_opened(words, tmp_path):
    """Opening text may take minutes, and its own error would end a job that would otherwise be requeued."""
    command = [sys.executable, "-c", EARLY, *words(f"run.dir={tmp_path}/run", f"data.root={tmp_path}")]  # has no text
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "asked to stop" in done.stderr) == (EXIT_STOPPED, True), done.stderr


@pytest.mark.parametrize("ignored", ["SIGINT", "SIGHUP"])
def test_what_the_parent_ignores_asks_for_no_stop(ignored):
    """A script starts processes in the background with SIGINT ignored: a Ctrl-C there is not for them."""
    lines = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from dlr_pretrain.util import process
process.prepare()
asked = {{number.name for number in process.stop_signals()}}
os.kill(os.getpid(), signal.{ignored})
print(sorted(asked), process.stop_requests)
"""
    ignore = f"import os, signal, sys; signal.signal(signal.{ignored}, signal.SIG_IGN); "
    ignore += "os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])"
    done = subprocess.run([sys.executable, "-c", ignore, lines], capture_output=True, text=True)
    others = sorted({"SIGINT", "SIGHUP", "SIGTERM", "SIGUSR1", "SIGUSR2"} - {ignored})
    assert done.stdout == f"{others} []\n", done.stderr


@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_sweep_in_the_queue_is_no_longer_waited_for(number):
    lines = f"""
import os, signal, sys, threading
sys.path.insert(0, {str(ROOT)!r})
from dlr_pretrain.util import process
process.prepare()
with process.passing_on_stops(queued=True):
    os.kill(os.getpid(), signal.{number})
    threading.Event().wait()
"""
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True)
    assert done.returncode == EXIT_STOPPED and "the queued jobs of the sweep go on" in done.stderr


def test_compile_that_cannot_work_is_refused_before_any_text(words, tmp_path):
    (tmp_path / "a b").mkdir()
    given = words(f"run.dir={tmp_path}/run", "compile=true", f"data.root={tmp_path}")  # has no text
    where = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"} | {"TMPDIR": str(tmp_path / "a b")}
    done = subprocess.run([sys.executable, ROOT / "train.py", *given], capture_output=True, text=True, env=where)
    rule = f"error: compile=true: torch cannot compile in {tmp_path}/a b (TMPDIR), whose name holds a space"
    assert done.returncode == EXIT_CONFIG and done.stderr.startswith(rule) and done.stderr.count("\n") == 1, done.stderr
