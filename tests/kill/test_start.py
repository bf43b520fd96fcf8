"""The first seconds of a process, and the launcher of ranks: they heed a request to stop, and say what fails."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dlr_pretrain.util.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_LOST, EXIT_STOPPED
from scripts import launch as launcher
from tests.conftest import ROOT
from tests.kill.test_kill import children

EARLY = """
process.prepare()
os.kill(os.getpid(), signal.SIGUSR2)
assert "torch" not in sys.modules
from dlr_pretrain import cli
from dlr_pretrain.__main__ import run_and_report
sys.exit(cli.main(run_and_report))
"""


def python(lines: str, *words: str, before: str = "") -> subprocess.CompletedProcess:
    """Run ``lines`` in a process, which has done ``before`` and then become another program."""
    imports = f"import os, signal, sys, threading; sys.path.insert(0, {str(ROOT)!r})\n"
    again = ["-c", f"{imports}{before}; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"]
    lines = f"{imports}from dlr_pretrain.util import process\n{lines}"
    command = [sys.executable, *(again if before else ()), "-c", lines, *words]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_stop_before_torch_is_heeded_before_the_text_is_opened(words, tmp_path):
    """Opening text may take minutes, and its own error would end a job that would otherwise be requeued."""
    done = python(EARLY, *words(f"run.dir={tmp_path}/run", f"data.root={tmp_path}"))  # has no text
    assert done.returncode == EXIT_STOPPED, done.stderr
    assert done.stderr == "stopped before the first step (asked to stop). The same command continues\n"
    assert not (tmp_path / "run").exists()


def test_ctrl_c_during_imports_ends_the_process():
    """A library may turn KeyboardInterrupt into another error, or lose it in a destructor."""
    swallows = "try: os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException: pass"
    done = python(f"process.prepare()\n{swallows}")
    assert (done.returncode, done.stderr) == (EXIT_INTERRUPTED, "\ninterrupted\n")


@pytest.mark.full
def test_ranks_that_cannot_meet_say_why(words, tmp_path):
    alone = {k: v for k, v in os.environ.items() if not k.startswith("MASTER_")} | {"RANK": "0", "WORLD_SIZE": "2"}
    command = [sys.executable, str(ROOT / "train.py"), *words(f"run.dir={tmp_path}/run")]
    done = subprocess.run(command, capture_output=True, text=True, env=alone)
    assert done.returncode == EXIT_FAILED, done.stderr
    assert "error: rank 0 of 2 cannot reach the other ranks: " in done.stderr and "MASTER_ADDR" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("ignored", ["SIGINT", "SIGHUP"])
def test_what_the_parent_ignores_asks_for_no_stop(ignored):
    """A script starts processes in the background with SIGINT ignored: a Ctrl-C there is not for them."""
    lines = f"""
process.prepare()
asked = {{number.name for number in process.stop_signals()}}
os.kill(os.getpid(), signal.{ignored})
print(sorted(asked), process.stop_requests)
"""
    done = python(lines, before=f"signal.signal(signal.{ignored}, signal.SIG_IGN)")
    others = sorted({"SIGINT", "SIGHUP", "SIGTERM", "SIGUSR1", "SIGUSR2"} - {ignored})
    assert done.stdout == f"{others} []\n", done.stderr


@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_sweep_in_the_queue_is_no_longer_waited_for(number):
    done = python(f"""
process.prepare()
with process.passing_on_stops(queued=True):
    os.kill(os.getpid(), signal.{number})
    threading.Event().wait()
""")
    assert done.returncode == EXIT_STOPPED and "the queued jobs of the sweep go on" in done.stderr


def test_compile_that_cannot_work_is_refused_before_any_text(words, tmp_path):
    (tmp_path / "a b").mkdir()
    given = words(f"run.dir={tmp_path}/run", "compile=true", f"data.root={tmp_path}")  # has no text
    where = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"} | {"TMPDIR": str(tmp_path / "a b")}
    done = subprocess.run([sys.executable, ROOT / "train.py", *given], capture_output=True, text=True, env=where)
    rule = f"error: compile=true: torch cannot compile in {tmp_path}/a b (TMPDIR), whose name holds a space"
    assert done.returncode == EXIT_CONFIG and done.stderr.startswith(rule) and done.stderr.count("\n") == 1, done.stderr


# ----------------------------------------------------------------------------------------------------
# The launcher: signals reach the workers, which need time to save, and it returns their exit code


WORKER = """
import os, signal, sys, time
def save(number, frame):
    signal.signal(number, signal.SIG_IGN)
    time.sleep(1)
    open(f"{sys.argv[1]}/saved{os.environ['RANK']}", "w").close()
    sys.exit(int(sys.argv[2]))
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, save)
open(f"{sys.argv[1]}/ready{os.environ['RANK']}", "w").close()
parent = os.getppid()
while os.getppid() == parent:
    time.sleep(0.1)
"""


def launch(*words: str) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "scripts" / "launch.py"), "--nproc-per-node", "2", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextmanager
def launch_workers(folder, code: int = EXIT_STOPPED) -> Iterator[subprocess.Popen]:
    """Two workers that are ready, and end with ``code`` when they have saved, or with their parent."""
    (folder / "worker.py").write_text(WORKER)
    with launch(str(folder / "worker.py"), str(folder), str(code)) as process:
        try:
            while len(list(folder.glob("ready*"))) < 2 and process.poll() is None:
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "code", "repeated"), [
    (signal.SIGUSR1, EXIT_STOPPED, False),
    *(pytest.param(n, EXIT_STOPPED, False, marks=pytest.mark.full) for n in (signal.SIGTERM, signal.SIGHUP)),
    pytest.param(signal.SIGUSR1, EXIT_FAILED, True, marks=pytest.mark.full),  # to the very end
])  # fmt: skip
def test_a_signal_reaches_all_workers_and_their_code_comes_out(tmp_path, number, code, repeated):
    with launch_workers(tmp_path, code) as process:
        process.send_signal(number)
        while repeated and process.poll() is None:
            process.send_signal(number)
            time.sleep(0.001)
        _, err = process.communicate(timeout=600)
    assert process.returncode == code, err
    assert {path.name for path in tmp_path.glob("saved*")} == {"saved0", "saved1"}
    assert repeated or "Traceback" not in err


@pytest.mark.full
def test_a_killed_worker_gives_the_code_of_its_signal(tmp_path):
    with launch_workers(tmp_path) as process:
        workers = children(process)
        os.kill(workers[1], signal.SIGKILL)
        _, err = process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGKILL
    assert "Signal 9 (SIGKILL) received" in err
    assert not any(os.path.exists(f"/proc/{pid}") for pid in workers)


def test_codes_of_workers_and_restarts_by_torchrun(monkeypatch, capsys):
    assert [launcher.exit_code(code, {15}) for code in (0, 3, 75, -15, -9)] == [0, 3, 75, EXIT_STOPPED, 137]
    monkeypatch.setattr(sys, "argv", ["launch.py", "--max-restarts", "2", "train.py"])
    assert launcher.launch(set()) == EXIT_CONFIG
    assert "--max-restarts: a run that has stopped would be started again" in capsys.readouterr().err


STUCK = f"""
import subprocess, sys, time
sys.path.insert(0, {str(ROOT / "scripts")!r})
import launch
import torch.distributed.run
def run(given):
    subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(4)"])
    time.sleep(6000)
torch.distributed.run.run = run
launch.GRACE = 0.5
sys.argv[1:] = ["worker.py"]
sys.exit(launch.main())
"""


@pytest.mark.full
def test_the_launcher_ends_with_its_workers_if_a_node_is_lost():
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=600)
    assert done.returncode == EXIT_LOST, done.stderr
    assert "torchrun has not ended" in done.stderr
