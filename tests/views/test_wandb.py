"""W&B is a view that never stands in the way: the real client, against a server of the loopback and against trouble."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from loopback_wandb import KEY, NOBODY

from dlr_pretrain.cli import load
from dlr_pretrain.train import wandb_view
from dlr_pretrain.train.metrics import MetricsFile
from dlr_pretrain.train.wandb_sender import Lines, choose_mode, log
from dlr_pretrain.train.wandb_view import wandb_id
from dlr_pretrain.util.errors import Stopped, UserError
from tests.conftest import ROOT

pytest.importorskip("wandb")

pytestmark = pytest.mark.usefixtures("wandb_alone")


# ----------------------------------------------------------------------------------------------------
# Online


def test_all_that_is_trained_arrives_over_the_runs_own_step(run, server):
    run.start()
    run.train(1, 2, 3)
    run.connect()
    run.train(4)
    run.end()
    sent = server.runs[wandb_id(run.dir)]
    assert sent["exit_code"] == 0
    assert [(row["step"], row["train/loss"], row["_timestamp"]) for row in sent["history"]] == [
        (step, 1 / step, 1e9 + step) for step in (1, 2, 3, 4)
    ]
    assert not any("perf/mfu" in row or "time" in row for row in sent["history"])
    assert sent["config"]["train"]["value"]["steps"] == 9
    assert [metric for metric in sent["config"]["_wandb"]["value"]["m"] if metric.get("2") == "*"]  # of step
    text = run.said.getvalue().split()
    assert text[:2] == ["wandb", "online,"] and text[2].endswith(f"/runs/{wandb_id(run.dir)}") and len(text) == 3


def test_a_run_that_was_killed_goes_on_without_a_gap_and_nothing_twice(run, server):
    run.start()
    run.train(1, 2, 3, 4, 5, 6)
    run.connect()
    run.end()
    run.start(resumed_step=4)  # the checkpoint; 5 and 6 are trained again
    run.train(5, 6, 7)
    run.connect()
    run.end(KeyError())
    sent = server.runs[wandb_id(run.dir)]
    assert server.steps(wandb_id(run.dir)) == [1, 2, 3, 4, 5, 6, 7] and sent["exit_code"] == 1
    assert [row["_step"] for row in sent["history"]] == [0, 1, 2, 3, 4, 5, 6]
    assert len(server.runs) == 1


def test_what_an_outage_or_another_logger_left_out_is_sent_by_the_next_start(run, server):
    with MetricsFile(run.dir / "metrics.jsonl", 0) as run.file:
        run.train(1, 2, 3)  # logger=jsonl
    run.start(resumed_step=3)
    run.train(4)
    run.connect()
    run.end()
    assert server.steps(wandb_id(run.dir)) == [1, 2, 3, 4]


def test_wandbs_own_process_may_die(run, server):
    run.start()
    run.train(1, 2)
    run.connect()
    for core in children(run.view.process.pid):
        os.kill(core, signal.SIGTERM)  # as SLURM sends it to all processes of a job
    run.train(3)
    run.wait_until(lambda: run.said.getvalue().count("wandb ") == 2)
    run.end(Stopped())
    assert server.steps(wandb_id(run.dir)) == [1, 2, 3]
    assert run.said.getvalue().count("warning") == 1 and "W&B is tried again" in run.said.getvalue()


def test_signals_for_the_job_leave_the_view_alone(run, server):
    run.start()
    run.connect()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(run.view.process.pid, number)
    run.train(1)
    run.end(Stopped())
    assert server.steps(wandb_id(run.dir)) == [1] and server.runs[wandb_id(run.dir)]["exit_code"] == 0
    assert "warning" not in run.said.getvalue()


KILLED = """
import os, signal, sys, time
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from loopback_wandb import Trained
run = Trained(Path(sys.argv[1]))
run.start()
run.train(1)
run.connect()
print(run.view.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_trainer_that_is_killed_leaves_no_process_behind(run, server):
    words = [sys.executable, "-c", KILLED, str(run.dir), str(ROOT / "tests" / "views"), str(ROOT)]
    killed = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = killed.stdout.readline()
    assert line, killed.stderr.read()
    sender = int(line)
    killed.communicate()
    run.wait_until(lambda: not Path(f"/proc/{sender}").exists() and not cores_of(sender))


def children(pid: int) -> list[int]:
    """The processes that ``pid`` started."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [int(word) for word in listed.split()]


def cores_of(sender: int) -> list[str]:
    """wandb's own processes that were started for ``sender``."""
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout.splitlines()
    return [line for line in listed if "wandb-core" in line and line.endswith(f"--pid {sender}")]


# ----------------------------------------------------------------------------------------------------
# Trouble


def timed(act) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["stall", "refuse", 401, 403, 500, "junk"])
def test_a_server_in_trouble_costs_a_run_nothing_but_a_bounded_end(run, monkeypatch, request, trouble):
    if trouble == "refuse":
        monkeypatch.setenv("WANDB_BASE_URL", NOBODY)
    else:
        request.getfixturevalue("server").trouble = trouble
    assert timed(run.start) < 10.0  # wandb itself would wait for a minute and more
    assert timed(lambda: run.train(*range(1, 101))) < 10.0
    time.sleep(1.0)
    assert timed(run.end) < 3.0 + 10.0
    run.wait_until(lambda: not cores_of(run.view.process.pid))
    assert f"python scripts/replay_wandb.py {run.dir}" in " ".join(run.said.getvalue().split())
    assert KEY not in run.said.getvalue()


def test_an_outage_that_ends_leaves_nothing_out(run, server):
    server.trouble = 401  # the client gives up at once
    run.start()
    run.train(1, 2)
    run.wait_until(lambda: "401" in run.said.getvalue())
    server.trouble = None
    run.train(3)
    run.connect()
    run.end()
    assert server.steps(wandb_id(run.dir)) == [1, 2, 3] and run.said.getvalue().count("warning") == 1


def test_a_server_that_goes_holds_the_end_of_the_run_no_longer_than_its_bound(run, server, monkeypatch):
    monkeypatch.setattr(wandb_view, "FINISH_SECONDS", 2.0)
    run.start()
    run.train(1)
    run.connect()
    server.trouble = "stall"
    run.train(2)
    assert timed(run.end) < 2.0 + 10.0
    assert "W&B lacks the last metrics" in " ".join(run.said.getvalue().split())


@pytest.fixture
def small_disk(run) -> Iterator[Path]:
    """A file system of its own, of 64 KiB, where W&B writes."""
    folder = run.dir / "wandb"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small disk needs to be root: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("state", ["full", "read-only"])
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_disk_that_takes_nothing_does_not_reach_the_run(run, server, small_disk, monkeypatch, state, mode):
    monkeypatch.setenv("WANDB_MODE", mode)
    if state == "full":
        with suppress(OSError), open(small_disk / "filling", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert timed(run.start) < 2.0
    run.train(*range(1, 101))
    time.sleep(1.0)
    assert timed(run.end) < 3.0 + 4.0
    assert len((run.dir / "metrics.jsonl").read_text().splitlines()) == 100


def test_a_client_that_is_broken_is_named(run, tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text("raise ImportError('no such symbol')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run.start()
    run.wait_until(lambda: "no such symbol" in run.said.getvalue())
    run.end()


def test_without_wandb_the_fix_is_said_before_anything_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"package wandb, which is not installed. Install it, or use logger=jsonl"):
        load(["scale=tiny", "data=sample", "logger=wandb"])
    load(["scale=tiny", "data=sample", "logger=jsonl"])


# ----------------------------------------------------------------------------------------------------
# Parts


@pytest.mark.parametrize(("given", "mode"), [
    (None, "online"), ("", "online"), ("online", "online"), ("offline", "offline"), ("dryrun", "offline"),
    ("disabled", "disabled"),
])  # fmt: skip
def test_the_mode_follows_the_environment(monkeypatch, given, mode):
    if given is not None:
        monkeypatch.setenv("WANDB_MODE", given)
    assert choose_mode() == mode


@pytest.mark.parametrize(("variables", "netrc", "said"), [
    ({}, None, "offline (no API key found: set WANDB_API_KEY for online), under"),
    ({"WANDB_MODE": "online"}, None, "offline (no API key found"),
    ({}, "machine another login user password " + KEY, "offline (no API key found"),
    ({}, "machine {host} login user password " + KEY, "online, http"),
    ({"WANDB_MODE": "offline"}, "machine {host} login user password " + KEY, "offline (WANDB_MODE), under"),
    ({"WANDB_MODE": "disabled"}, None, "disabled (WANDB_MODE)"),
])  # fmt: skip
def test_without_a_key_the_run_is_offline_and_nobody_is_asked(
    run, server, tmp_path, monkeypatch, variables, netrc, said
):
    monkeypatch.delenv("WANDB_API_KEY")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if netrc:
        (tmp_path / "netrc").write_text(netrc.format(host=os.environ["WANDB_BASE_URL"].removeprefix("http://")))
    run.start()
    run.train(1)
    run.connect()
    run.end()
    text = " ".join(run.said.getvalue().split())
    assert text.startswith(f"wandb {said}") and "warning" not in text
    assert len(server.runs) == said.startswith("online")
    assert len(list(run.dir.glob("wandb/offline-run-*"))) == said.startswith("offline")


@pytest.mark.parametrize("kind", [None, Stopped, UserError, KeyError])
def test_a_run_that_failed_is_marked_so(run, server, kind):
    run.start()
    run.train(1)
    run.connect()
    with pytest.raises(kind) if kind else nullcontext(), run.view:
        if kind:
            raise kind("why")
    assert server.runs[wandb_id(run.dir)]["exit_code"] == (0 if kind in (None, Stopped) else 1)


def test_lines_are_read_once_and_whole(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"st')
    lines, later = Lines(path, 0), Lines(path, len('{"step": 1}\n'))
    assert list(lines.new()) == [{"step": 1}, {"step": 2}] and list(lines.new()) == []
    with path.open("ab") as file:
        file.write(b'ep": 3}\n')
    assert list(lines.new()) == [{"step": 3}]
    assert list(later.new()) == [{"step": 2}, {"step": 3}]


def test_only_later_steps_are_logged():
    class Run:
        rows: list = []  # noqa: RUF012

        def log(self, row):
            self.rows.append(row)

    run = Run()
    records = [{"step": step, "x": None, "time": 5.0} for step in (1, 2, 3, 3, 2, 4)]
    assert log(run, records, after=1) == 4
    assert [row["step"] for row in run.rows] == [2, 3, 4] and run.rows[0] == {"step": 2, "_timestamp": 5.0}
    assert log(run, [], after=7) == 7
