"""Tables of runs: expansion, checks, ranks, states, submission, and runs on this machine. Stand-ins replace SLURM."""

import json
import os
import re
import runpy
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from dlr_pretrain.cli import load
from dlr_pretrain.config import ConfigError, identity, to_dict
from dlr_pretrain.launch import local, status
from dlr_pretrain.launch.runs import PlannedRun, expand, load_runs, read_lines, read_table
from dlr_pretrain.launch.status import JOB, Status, last_job, status_of
from dlr_pretrain.train.record import record_state, update_record
from dlr_pretrain.util.errors import EXIT_FAILED, Stopped, UserError
from slurm.submit import main
from tests.conftest import ROOT
from tests.unit.train.test_heartbeat import write_beat


@pytest.fixture
def table(tmp_path):
    """The overrides of runs below the test's folder."""
    return ["scale=tiny", "train.steps=20", f"run.root={tmp_path}/runs"]


@pytest.fixture
def now(monkeypatch) -> float:
    """The time, which does not pass, for what judges the age of a heartbeat."""
    moment = time.time()
    monkeypatch.setattr(status, "time", SimpleNamespace(time=lambda: moment))
    return moment


def loaded(words: list[str]) -> list[PlannedRun]:
    return load_runs(expand(words))


def note(run: PlannedRun, **job: object) -> None:
    run.dir.mkdir(parents=True, exist_ok=True)
    (run.dir / JOB).write_text(json.dumps(job))


def write_state(run: PlannedRun, name: str, reason: str = "", saved: int = 10) -> None:
    """Write what a run records of its own state."""
    run.dir.mkdir(parents=True, exist_ok=True)
    update_record(run.dir, {"identity": identity(run.cfg), "saved": saved})
    record_state(run.dir, name, reason)
    (run.dir / "metrics.jsonl").write_text('{"step": 9, "train/loss": 4.0}\n{"step": 10, "train/loss": 3.9}\n')


def test_a_matrix_is_the_product_of_its_values_in_order(tmp_path):
    lines = expand(["scale=60m,130m", "+backbone=cola", "dlr=off,on", "data.text_key='a b'", "seed=range(41,43)"])
    assert len(lines) == 8
    assert lines[0].words == ("scale=60m", "backbone=cola", "dlr=off", "data.text_key='a b'", "seed=41")
    assert lines[-1].words == ("scale=130m", "backbone=cola", "dlr=on", "data.text_key='a b'", "seed=42")
    (tmp_path / "one.runs").write_text(f"{lines[-1]}\n")
    (run,) = load_runs(read_lines(tmp_path / "one.runs"))
    assert to_dict(run.cfg) == to_dict(load(list(lines[-1].words), machine=False))


def test_a_runs_file_has_comments_and_quotes_but_no_shell(tmp_path):
    path = tmp_path / "my.runs"
    path.write_text("# it's a comment\n\n  seed=1\n'data.train_files=/a b/*.gz' run.dir=a#b $HOME\n")
    files, *rest = read_lines(path)[1].words
    assert (files, rest) == ("data.train_files=/a b/*.gz", ["run.dir=a#b", "$HOME"])
    bad = {"# nothing": "holds no run", "seed=1\n'x": rf"{path}:2: no closing quotation", "é": "cannot be read"}
    for text, said in bad.items():
        path.write_text(text, encoding="latin-1")
        with pytest.raises(UserError, match=said):
            read_lines(path)


def test_all_problems_of_a_table_are_reported_at_once(tmp_path):
    path = tmp_path / "my.runs"
    lines = ["seed=1", "backbone=colla", "", "train.lrr=1", "train.lrr=1 seed=9", "seed=1", "-m seed=1"]
    path.write_text("\n".join([*lines, *(f"seed={i}" for i in range(20, 33))]))  # enough for processes
    with pytest.raises(ConfigError) as caught:
        load_runs(read_lines(path))
    for said in (":2: backbone=colla: must be one of", ":4: train.lrr=1: no such key.",
                 f":6: run.dir=runs/60m-lowrank-dlr_off-s1: is the run directory of {path}:1, too",
                 ":7: -m: asks for several runs"):  # fmt: skip
        assert f"{path}{said}" in str(caught.value)
    with pytest.raises(ConfigError, match=r"data=tokens: data\.root: needs a value"):
        loaded(["scale=tiny", "data=tokens"])  # text that no key names is asked for before anything is queued
    assert loaded(["scale=tiny", "data=tokens", f"data.root={tmp_path}/not_of_this_machine"])


@pytest.mark.parametrize("end", ["\n", "\f", "\x85", "\u2028"])
def test_a_value_with_a_line_break_is_refused(end):
    """Each line of the file that an array reads is one run."""
    with pytest.raises(ConfigError, match="contains a line break"):
        read_table(["scale=tiny", f"logger.notes=a{end}b"])


def test_an_override_selects_rows_or_is_added_to_them(scheduler, tmp_path, capsys):
    path = tmp_path / "my.runs"
    path.write_text("scale=tiny dlr=off\nscale=tiny dlr=on\nscale=60m dlr=on\n")
    for words, count in ((["dlr=on"], 2), (["scale=tiny", "dlr=on", "seed=1,2"], 2), (["seed=3,4"], 6)):
        assert main([str(path), *words, "--dry-run", "--config-dir", str(tmp_path)]) == 0
        assert f"Would submit {count} of {count}: sbatch" in capsys.readouterr().out
    assert main([str(path), "scale=130m", "--dry-run"]) == 3
    assert "no run of the table has scale=130m" in capsys.readouterr().err
    assert not (scheduler / "asked").exists() and not (tmp_path / "runs").exists()


def test_only_due_runs_are_queued_and_each_is_noted(scheduler, table, now, capsys):
    words = [*table, "seed=1,2,3,4,5,6"]
    complete, waiting, failed, held, fresh, diverged = runs = loaded(words)
    write_state(complete, "complete", saved=20)
    write_state(failed, "failed", "the disk is full")
    write_state(diverged, "diverged", "step 11: loss nan")
    note(waiting, time=0, job="9_2", log="x")
    write_beat(held.dir, now - 3)
    queue, asked = scheduler / "queue", scheduler / "asked"
    queue.write_text("9_2 PENDING\n")
    fresh.dir.write_text("in the way")
    assert main(words) == 3 and not asked.exists()
    fresh.dir.unlink()
    assert main([*words, "--limit", "1", "--", "--mem=4G"]) == 0
    given = asked.read_text().splitlines()
    assert {f"--array={failed.number},{fresh.number}%1", "--mem=4G"} < set(given) and given[-2] == "slurm/array.sbatch"
    assert [str(line) for line in read_lines(Path(given[-1]))] == [str(run.line) for run in runs]
    assert last_job(fresh.dir)["job"] == "70_5" and last_job(fresh.dir)["log"].endswith("/70_5.log")
    queue.write_text("9_2 RUNNING\n70_3 PENDING\n70_5 RUNNING\n")
    asked.unlink()
    assert main(words) == 0 and not asked.exists()
    said = capsys.readouterr().out
    assert "Submitted 2 of 6 as job 70" in said and "6 runs: 1 complete, 1 diverged, 3 running, 1 pending" in said


def test_without_a_scheduler_the_table_is_shown(table, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(table) == 3
    assert "squeue is not on PATH" in capsys.readouterr().err
    assert main([*table, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "1 not started" in said and "Would submit 1 of 1: sbatch" in said


@pytest.mark.parametrize("name", ["complete", "stopped", "failed", "diverged"])
def test_a_run_records_how_it_ended(table, name):
    run, other = loaded([*table, "seed=1,2"])
    note(run, time=time.time() - 9, job="70_1", log="x")
    write_state(run, name, "a reason")
    assert status_of(run, {}) == Status(name, "" if name == "complete" else "a reason", 10, 3.9)
    note(run, time=time.time() + 9, job="71_1", log="/the.log")  # a later start that left no word
    assert status_of(run, {}).state == (name if name == "complete" else "failed")
    write_state(other, name)
    update_record(other.dir, {"identity": {"train.lr": 9.0}})
    assert re.match("its directory holds another run: .*train.lr: 9.0 there", status_of(other, {}).reason)
    update_record(other.dir, {"saved": None})  # nothing was saved, so it may become this run
    assert status_of(other, {}).state == "not started"


def test_queue_heartbeat_and_job_tell_a_silent_runs_state(table, now):
    run = loaded(table)[0]
    assert status_of(run, {}) == Status("not started")
    note(run, time=now, job="9_1", log="/the.log")
    assert status_of(run, {"9_2": "RUNNING"}) == Status("failed", "its job has left the queue: see /the.log")
    write_state(run, "running")
    assert [status_of(run, {"9_1": said}).state for said in ("RUNNING", "REQUEUED")] == ["running", "pending"]
    for seconds, name in ((3, "running"), (3600, "failed")):
        write_beat(run.dir, now - seconds)
        assert status_of(run, {}).state == name
    (run.dir / JOB).unlink()
    assert status_of(run, {}) == Status("failed", "it ended without a word", 10, 3.9)


def test_batch_scripts_get_a_runs_words_and_its_saved_step(tmp_path, capsys):
    def asked(module: str, *words: str) -> str:
        with patch("sys.argv", [module, *words]), pytest.raises(SystemExit):
            runpy.run_path(ROOT / f"dlr_pretrain/launch/{module}.py", run_name="__main__")
        return capsys.readouterr().out

    path = tmp_path / "my.runs"
    path.write_text("# first\nseed=1\n\n'data.text_key=a b' seed=2\n")
    assert asked("runs", str(path), "2").split("\0") == ["data.text_key=a b", "seed=2", ""]
    assert asked("runs", str(path), "3") == ""
    words = ["scale=tiny", f"run.dir={tmp_path}/run"]
    assert asked("status", *words) == f"0 {tmp_path}/run\n"
    (tmp_path / "run").mkdir()
    update_record(tmp_path / "run", {"identity": {}, "saved": 300})
    assert asked("status", *words) == f"300 {tmp_path}/run\n"


STAND_IN = """
import os, signal, sys
words = dict(word.split("=", 1) for word in sys.argv[1:])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
with open(words["run.root"] + "/order", "a") as file:
    print(words["seed"], os.environ.get("CUDA_VISIBLE_DEVICES"), words.get("train.micro_batch"), file=file)
if float(words["train.lr"]) > 1:
    while True:
        signal.pause()
print("error: the disk is full")
sys.exit(3)
"""


@pytest.fixture
def four(tmp_path, monkeypatch):
    """Words of four runs of a stand-in for train.py: it fails, or waits for a signal if ``train.lr`` is above 1."""
    (tmp_path / "train.py").write_text(STAND_IN)
    monkeypatch.setattr(local, "TRAIN", [str(tmp_path / "train.py")])
    return ["scale=tiny", "device=cpu", "seed=1,2,3,4", f"run.root={tmp_path}"]


def test_local_runs_leave_logs_and_outcomes(four, tmp_path, monkeypatch, capsys):
    """On two GPUs. Failed runs are tried again. Three at a time share a GPU, and none takes all of its memory."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    for at_once, micro_batch in (("2", "None"), ("3", "null")):
        assert main([*four, "train.lr=0.001", "--local", "--limit", at_once]) == EXIT_FAILED
        order = [line.split()[1:] for line in (tmp_path / "order").read_text().splitlines()]
        assert {gpu for gpu, _ in order} == {"6", "7"} and {size for _, size in order[-4:]} == {micro_batch}
    said = capsys.readouterr().out
    assert said.count("4/4  ") == 2
    for run in loaded([*four, "train.lr=0.001"]):
        assert said.count(f"{run.dir.name}: not started (exit code 3: see {run.dir}/local.log)") == 2
        assert (run.dir / "local.log").read_text() == "error: the disk is full\n" * 2


def test_a_signal_stops_what_runs_and_starts_nothing(four, tmp_path):
    order, over = tmp_path / "order", threading.Event()

    def ask() -> None:
        while not over.wait(0.02):
            if order.exists() and len(order.read_text().splitlines()) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                return

    before, runs = signal.getsignal(signal.SIGTERM), loaded([*four, "train.lr=60"])
    asking = threading.Thread(target=ask)
    asking.start()
    try:
        with pytest.raises(Stopped, match="The same command continues"):
            local.train_here(runs, 2)
    finally:
        over.set()
        asking.join()
    assert len(order.read_text().splitlines()) == 2
    assert signal.getsignal(signal.SIGTERM) is before
