"""Tables of runs: expansion, checks, resources, states and their table. The scheduler is a stand-in of a few lines."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlr_pretrain.cli import load
from dlr_pretrain.config import ConfigError, to_dict
from dlr_pretrain.launch import command, saved
from dlr_pretrain.launch.command import status_table
from dlr_pretrain.launch.queue import Queued, last_job, note, resources, spans
from dlr_pretrain.launch.runs import Line, PlannedRun, expand, load_runs, read_runs
from dlr_pretrain.launch.show import duration, shorten, table
from dlr_pretrain.launch.state import Status, look
from dlr_pretrain.train.lock import RunLock
from dlr_pretrain.train.record import update_record
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.history import newest_first, read_metrics
from tests.conftest import ROOT, commands

SBATCH = """#!/bin/sh
printf '%s\\n' "$@" > {folder}/asked
echo 70
"""
SQUEUE = """#!/bin/sh
cat {folder}/queue
"""


@pytest.fixture
def scheduler(tmp_path, monkeypatch):
    """A PATH with an sbatch that notes its words and gives job 70, and a squeue that prints the file ``queue``."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE)):
        (folder / name).write_text(text.format(folder=folder))
        (folder / name).chmod(0o755)
    (folder / "queue").write_text("")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("RANKS_PER_NODE", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(ROOT)
    return folder


@pytest.fixture
def table_of(tmp_path):
    """The words of two runs below the test's folder."""
    return ["scale=tiny", "seed=1,2", "train.steps=20", f"run.root={tmp_path}/runs"]


def loaded(words: list[str]) -> list[PlannedRun]:
    return load_runs(expand(words), 1)


def asked(scheduler) -> list[str]:
    return (scheduler / "asked").read_text().splitlines()


def write_metrics(run: PlannedRun, steps: int, **last) -> None:
    run.dir.mkdir(parents=True, exist_ok=True)
    records = [{"step": i + 1, "train/loss": 4 - i / 100} for i in range(steps)]
    records[-1] |= last
    (run.dir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def write_end(run: PlannedRun) -> None:
    write_metrics(run, run.cfg.train.steps)
    (run.dir / "folded").mkdir()
    for name in ("folded/config.json", "folded/model.safetensors", "report.md"):
        (run.dir / name).touch()


def write_job(run: PlannedRun, log: str | None, name: str = "70_1") -> None:
    run.dir.mkdir(parents=True, exist_ok=True)
    path = run.dir / "the.log"
    (run.dir / "jobs.jsonl").write_text(json.dumps({"time": 0, "job": name, "log": str(path)}) + "\n")
    if log is not None:
        path.write_text(log)


# ----------------------------------------------------------------------------------------------------
# From words to runs


def test_a_matrix_is_the_product_of_its_values_in_order():
    lines = expand(["scale=60m,130m", "+backbone=cola", "dlr=off,on", "seed=range(41,43)", "train.lr=1e-3"])
    words = [str(line) for line in lines]
    assert len(words) == 8
    assert words[0] == "scale=60m backbone=cola dlr=off seed=41 train.lr=1e-3"
    assert words[-1] == "scale=130m backbone=cola dlr=on seed=42 train.lr=1e-3"


def test_a_line_means_what_the_same_words_mean_to_train(tmp_path):
    words = ["scale=60m", "train.lr=1e-3", "data.text_key='a b'", "experiment=table1/cola_dlr", "seed=3"]
    (run,) = loaded(words)
    assert to_dict(run.cfg) == to_dict(load(words, machine=False))
    path = tmp_path / "one.runs"
    path.write_text(f"{run.line}\n")
    assert read_runs(path)[0].words == run.line.words


def test_a_runs_file_has_comments_and_quotes_and_no_shell(tmp_path):
    path = tmp_path / "my.runs"
    path.write_text("# it's a comment\n\n  seed=1 # and \"more\n'data.train_files=/a b/*.gz' run.dir=a#b $HOME\n")
    assert [line.words for line in read_runs(path)] == [
        ("seed=1",),
        ("data.train_files=/a b/*.gz", "run.dir=a#b", "$HOME"),
    ]
    path.write_text("# nothing\n")
    with pytest.raises(UserError, match="holds no run"):
        read_runs(path)


def test_every_problem_of_every_line_is_said_at_once_with_file_and_line(tmp_path):
    path = tmp_path / "my.runs"
    path.write_text(
        "seed=1\nbackbone=colla\n\nbackbone=full dlr=on\ntrain.lrr=1\ntrain.lrr=1 seed=9\nseed=1\n'x\n-m seed=1\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_runs(read_runs(path), 1)
    said = str(caught.value)
    for number, text in (
        (2, "backbone=colla: must be one of"),
        (4, "dlr=on: backbone=full has no up-projection"),
        (5, "and 1 more: train.lrr=1: no such key. Did you mean train.lr?"),
        (7, f"run.dir=runs/60m-lowrank-dlr_off-s1: is the run directory of {path}:1, too"),
        (8, "no closing quotation"),
        (9, "-m: asks for several runs"),
    ):
        assert any(f"{path}:{number}" in line and text in line for line in said.splitlines()), (number, said)


def test_an_invalid_combination_is_an_error_that_names_it():
    with pytest.raises(ConfigError, match=r"backbone=full dlr=on: dlr=on: backbone=full has no up-projection"):
        loaded(["backbone=lowrank,full", "dlr=off,on"])
    with pytest.raises(ConfigError, match=r"train.global_batch=12: must be a multiple of the 8 ranks"):
        load_runs(expand(["seed=1,2", "train.global_batch=12"]), 8)


@pytest.mark.parametrize("source", ["c4_local", "tokens"])
def test_text_that_no_word_names_is_asked_for_before_anything_is_queued(source, tmp_path):
    with pytest.raises(
        ConfigError, match=rf"data={source}: data\.root=null: needed by data={source}.*[Ss]et data\.root="
    ):
        loaded(["scale=tiny", f"data={source}"])
    assert loaded(["scale=tiny", f"data={source}", f"data.root={tmp_path}/not_of_this_machine"])


def test_many_lines_are_checked_by_several_processes_to_the_same_end(monkeypatch):
    monkeypatch.setattr("dlr_pretrain.launch.runs.FEW", 2)
    lines = expand(["seed=range(0,3)"])
    lines[1:2] = [Line("the second", ("seed=1", "train.lrr=1"))]
    with pytest.raises(ConfigError, match=r"^the second: train\.lrr=1: no such key"):
        load_runs(lines, 1)
    lines[1:2] = []
    assert [(run.number, run.cfg.seed) for run in load_runs([*lines, *expand(["seed=7"])], 1)] == [
        (1, 0),
        (2, 2),
        (3, 7),
    ]


def test_the_ready_files_are_valid():
    for path in sorted((ROOT / "slurm").glob("*.runs")):
        lines = read_runs(path)
        assert len(load_runs(lines[:: len(lines) // 4], 8)) >= 4, path


def test_a_task_reads_the_words_of_its_number(tmp_path):
    path = tmp_path / "my.runs"
    path.write_text("# first\nseed=1\n\n'data.text_key=a b' seed=2\n")

    def task(number: int) -> subprocess.CompletedProcess:
        words = [sys.executable, "-m", "dlr_pretrain.launch.runs", str(path), str(number)]
        return subprocess.run(words, capture_output=True, text=True, cwd=ROOT)

    assert task(2).stdout.split("\0") == ["data.text_key=a b", "seed=2", ""]
    beyond = task(3)
    assert (beyond.returncode, beyond.stdout) == (3, "") and "has 2 runs" in beyond.stderr


# ----------------------------------------------------------------------------------------------------
# Submission


@pytest.mark.parametrize(("words", "nodes", "per_node", "gpus"), [
    ([], 1, 1, False),
    (["--gpus-per-node=8"], 1, 8, True),
    (["--gpus-per-node=h100:4", "-N", "2"], 2, 4, True),
    (["--gres=gpu:a100:2,disk:1", "--nodes=3"], 3, 2, True),
    (["--gres=gpu:h100"], 1, 1, True),
    (["-N3", "-n8", "--gpus-per-node=4"], 3, 4, True),
    (["--gres=gpu:a:4,gpu:b:4,gpus_of_another_kind:2"], 1, 8, True),
    (["-G", "8", "-N2"], 2, 4, True),
    (["--ntasks-per-node", "2", "--mem=4G", "--time=1:00:00"], 1, 2, False),
    (["-n4", "-N2"], 2, 2, False),
    (["--ntasks-per-node=4", "--gpus-per-task=1", "-N2"], 2, 4, True),
    (["--gpus-per-task=h100:2"], 1, 2, True),
])  # fmt: skip
def test_ranks_follow_from_the_words_for_sbatch(monkeypatch, words, nodes, per_node, gpus):
    monkeypatch.delenv("RANKS_PER_NODE", raising=False)
    found = resources(words)
    assert (found.nodes, found.per_node, found.gpus, found.ranks) == (nodes, per_node, gpus, nodes * per_node)
    monkeypatch.setenv("RANKS_PER_NODE", "3")
    assert resources(words).ranks == 3 * nodes


@pytest.mark.parametrize(
    "words", [["--array=1-3"], ["-o", "x"], ["--chdir=/"], ["--nodes=2-4"], ["--gpus-per-node=0"], ["-n3", "-N2"]]
)
def test_words_for_sbatch_that_cannot_be_are_refused(words):
    with pytest.raises(UserError):
        resources(words)


def test_an_array_is_queued_with_its_limit_and_the_words_for_sbatch(scheduler, table_of, capsys):
    assert command.main([*table_of, "--limit", "1", "--", "--mem=4G", "--ntasks-per-node=2"]) == 0
    runs = loaded(table_of)
    words = asked(scheduler)
    assert "--array=1-2%1" in words and {"--mem=4G", "--ntasks-per-node=2"} < set(words)
    assert words[-2] == "slurm/array.sbatch" and [str(x) for x in read_runs(Path(words[-1]))] == [
        str(r.line) for r in runs
    ]
    assert last_job(runs[1].dir)["job"] == "70_2" and last_job(runs[1].dir)["log"].endswith("/70_2.log")
    assert "as job 70" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--status", "--resubmit"), "--resubmit has no place beside --status, which submits nothing"),
        (("--write", "a.runs", "--limit", "3"), "--limit has no place beside --write"),
    ],
)
def test_a_flag_that_would_be_ignored_is_refused(flags, told, capsys):
    with pytest.raises(SystemExit):
        command.main(["scale=60m,130m", *flags])
    assert told in capsys.readouterr().err


def test_a_line_that_a_kill_cut_off_costs_no_other(tmp_path):
    note(tmp_path, "70_1", tmp_path / "1.log")
    with open(tmp_path / "jobs.jsonl", "a") as file:
        file.write('{"time": 1.5, "jo')
    assert last_job(tmp_path)["job"] == "70_1"
    note(tmp_path, "71_1", tmp_path / "2.log")
    assert last_job(tmp_path)["job"] == "71_1"
    assert len((tmp_path / "jobs.jsonl").read_text().splitlines()) == 3


def test_a_run_directory_that_cannot_be_written_is_found_before_anything_is_queued(scheduler, table_of, capsys):
    for run in loaded(table_of):
        run.dir.parent.mkdir(parents=True, exist_ok=True)
    (loaded(table_of)[1].dir).write_text("in the way")
    assert command.main(table_of) == 3
    assert "in the way" not in (said := capsys.readouterr().err) and said.startswith("error: ") and "s2" in said
    assert not (scheduler / "asked").exists()


@pytest.mark.parametrize("root", [".", "runs", "/elsewhere/runs"])
def test_names_of_one_root_are_whole(root):
    runs = loaded(["scale=tiny", "seed=1,2", f"run.root={root}"])
    lines = status_table(runs, [Status("not started")] * 2, 120).splitlines()
    assert [line.split()[1] for line in lines[1:3]] == [run.dir.name for run in runs]


def test_what_sets_runs_apart_stands_below_those_whose_names_do_not_say_it(scheduler, capsys):
    words = ["scale=tiny", "data=sample", "dlr=off,on", "seed=1", "train.steps=20"]
    command.main([*words, "--dry-run"])
    assert "train" not in capsys.readouterr().out
    command.main([*words, "train.lr=0.003,0.01", "--dry-run"])
    _, *lines = capsys.readouterr().out.splitlines()[:9]
    assert [line.strip() for line in lines[1::2]] == ["train.lr=0.003", "train.lr=0.01"] * 2
    command.main([*words, "train.lr=0.003,0.01", "--status"])
    assert capsys.readouterr().out.splitlines()[2].strip() == "train.lr=0.003"


def test_how_runs_stand_asks_for_no_number_of_ranks(scheduler, capsys):
    """A recipe that only some numbers of ranks can train, and --status without the words for sbatch."""
    words = ["scale=7b", "experiment=7b/cola_dlr", "train.micro_batch=16", "train.global_batch=96"]
    assert command.main([*words, "--status"]) == 0
    assert command.main([*words, "--dry-run", "--", "--gpus-per-node=1"]) == 2
    assert "train.micro_batch" in capsys.readouterr().err


def test_nothing_is_queued_from_a_wrong_table_or_in_a_dry_run(scheduler, table_of, capsys):
    assert command.main([*table_of, "backbone=full", "dlr=off,on"]) == 2
    assert "no up-projection" in capsys.readouterr().err
    assert command.main([*table_of, "--dry-run"]) == 0
    assert "warning: no GPUs are asked for" in capsys.readouterr().out
    assert command.main([*table_of, "--dry-run", "--", "--gpus-per-node=1"]) == 0
    assert not (scheduler / "asked").exists() and not loaded(table_of)[0].dir.exists()
    assert "Would submit 2: sbatch" in (out := capsys.readouterr().out) and "warning" not in out


def test_runs_that_have_ended_run_or_wait_are_left_out(scheduler, tmp_path, capsys):
    words = ["scale=tiny", "seed=1,2,3,4,5", "train.steps=20", f"run.root={tmp_path}/runs"]
    finished, waiting, failed, held, fresh = loaded(words)
    write_end(finished)
    write_job(waiting, None, "9_2")
    write_job(failed, "job 8_3, start 1: x\nerror: no\njob 8_3: ended with exit code 3\n", "8_3")
    (scheduler / "queue").write_text("9_2|PENDING|Resources\n9_4|RUNNING|None\n")
    lock = RunLock(held.dir)
    lock.acquire()
    try:
        assert command.main(words) == 0
        assert f"--array={fresh.number}" in asked(scheduler)
        (scheduler / "queue").write_text("9_2|PENDING|Resources\n70_5|PENDING|None\n")
        assert command.main([*words, "--resubmit"]) == 0
        assert f"--array={failed.number}" in asked(scheduler)
        (scheduler / "queue").write_text("70_3|RUNNING|None\n70_5|PENDING|None\n9_2|RUNNING|None\n")
        (scheduler / "asked").unlink()
        assert command.main(words) == 0 and not (scheduler / "asked").exists()
    finally:
        lock.release()
    assert "Nothing to submit" in capsys.readouterr().out


def test_the_step_last_saved_is_told_by_the_words_of_a_run(tmp_path, capsys):
    words = ["scale=tiny", f"run.dir={tmp_path}/run"]
    assert saved.main(words) == 0 and capsys.readouterr().out == "0\n"
    (tmp_path / "run").mkdir()
    update_record(tmp_path / "run", {"identity": {}, "saved": 300})
    assert saved.main(words) == 0 and capsys.readouterr().out == "300\n"
    update_record(tmp_path / "run", {"forked": {"step": 300}})  # so that one was another run's
    assert saved.main(words) == 0 and capsys.readouterr().out == "0\n"
    assert saved.main([*words, "train.lrr=1"]) == 2 and capsys.readouterr().out == ""


def test_without_a_scheduler_nothing_is_submitted_and_the_rest_is_shown(table_of, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert command.main(table_of) == 3
    assert "squeue is not on PATH" in capsys.readouterr().err
    assert command.main([*table_of, "--status"]) == 0
    shown = capsys.readouterr()
    assert "2 not started" in shown.out and "warning" in shown.err


def test_a_file_takes_further_words_and_a_table_is_written_once(table_of, tmp_path, capsys):
    path = tmp_path / "my.runs"
    assert command.main([*table_of, "--write", str(path)]) == 0
    assert len(read_runs(path)) == 2
    assert command.main([*table_of, "--write", str(path)]) == 3
    assert command.main([str(path), "train.lr=1e-3,2e-3", "--dry-run"]) == 0
    assert "Would submit 4" in capsys.readouterr().out
    assert command.main([str(path), "seed=3"]) == 2
    assert "given twice" in capsys.readouterr().err


def test_the_tables_of_docs_are_valid(scheduler, monkeypatch, tmp_path, capsys):
    tables = [line.split("submit.py ")[1] for line in commands("README.md", "docs/*.md") if "slurm/submit.py" in line]
    assert len(tables) > 3
    monkeypatch.setattr(command, "load_runs", lambda lines, ranks: load_runs(lines[:: len(lines) // 2], ranks))
    for words in map(shlex.split, tables):
        assert command.main(["--dry-run", *words]) == 0, capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------
# How runs stand


CHILD = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "
CANCELLED = "slurmstepd-n1: error: *** JOB 9 ON n1 CANCELLED AT 2026-11-20T17:41:15"


@pytest.mark.parametrize(("end", "code", "state", "reason"), [
    (f"error: shards gone. Mend it\nTraceback\n{CHILD}", 1, "failed", "shards gone. Mend it"),
    ("error: 2 problems\n  a=1: no\n  b=2: no", 2, "failed", "2 problems a=1: no"),
    (f"[rank1]: RuntimeError: boom\n{CHILD}\na summary", 1, "failed", "RuntimeError: boom"),
    ("slurmstepd: error: Detected 1 oom_kill event", 137, "failed", "Detected 1 oom_kill event"),
    ("bash: python: command not found", 127, "failed", "bash: python: command not found"),
    ("stopped: stopped after step 3 of 20", 75, "stopped", "stopped after step 3 of 20"),
    (f"{CANCELLED} ***\nerror: torn", 1, "stopped", "cancelled"),
    (f"{CANCELLED} DUE TO TIME LIMIT ***", None, "stopped", "time limit"),
    ("step 3/20", -9, "failed", "killed by signal 9"),
    ("error: the fold differs", -15, "failed", "the fold differs"),
    ("step 3/20", None, "stopped", "its job left the queue without a word: cancelled, or its node failed"),
])  # fmt: skip
def test_a_job_that_has_left_the_queue_is_judged_by_the_last_start_in_its_log(table_of, end, code, state, reason):
    run = loaded(table_of)[0]
    earlier = "job 70_1, start 1: seed=1\nerror: earlier\njob 70_1: ended with exit code 75\n"
    last = "" if code is None else f"job 70_1: ended with exit code {code}\n"
    write_job(run, f"{earlier}job 70_1, start 2: seed=1\n{end}\n{last}")
    status = look(run, {})
    assert (status.state, status.reason) == (state, reason)


def test_a_job_that_ends_before_its_first_line_says_why(table_of):
    run = loaded(table_of)[0]
    write_job(run, "error: /home/me is not the root of the repository: submit from there, or add --chdir=<root>\n")
    assert look(run, {}).state == "failed" and look(run, {}).reason.startswith("/home/me is not the root")


def test_a_run_is_told_by_its_numbers_and_the_queue(table_of):
    run = loaded(table_of)[0]
    assert look(run, {}) == Status("not started")
    rate = 2 * run.positions  # two steps a second
    write_metrics(run, 10, **{"perf/tokens_per_second": rate, "eval/loss": 3.0, "eval/perplexity": 20.1})
    assert look(run, {}) == Status("stopped", "", 10, 3.91, 20.1, None)
    write_job(run, None, "9_1")
    assert look(run, {"9_1": Queued("RUNNING", "None")}) == Status("running", "", 10, 3.91, 20.1, 5.0)
    assert look(run, {"9_1": Queued("PENDING", "JobHeldUser")}) == Status("pending", "JobHeldUser", 10, 3.91, 20.1)
    assert look(run, {"9_1": Queued("PENDING", "Resources")}).reason == ""
    assert look(run, {"9_2": Queued("RUNNING", "None")}) == Status(
        "stopped", "cancelled before it started", 10, 3.91, 20.1
    )


def test_a_run_whose_lease_is_fresh_is_running_and_one_that_is_whole_has_finished(table_of):
    run = loaded(table_of)[0]
    lock = RunLock(run.dir)
    lock.acquire()
    assert look(run, {}).state == "running"
    lock.release()
    assert look(run, {}).state == "not started"
    (run.dir / ".lock").write_text(json.dumps({"host": "elsewhere", "pid": 1, "beat": time.time() - 3600}))
    assert look(run, {}).state == "not started"
    write_end(run)
    assert look(run, {}).state == "finished"
    (run.dir / "folded" / "model.safetensors").unlink()
    assert look(run, {}).state == "stopped"


def test_a_run_that_has_diverged_is_submitted_neither_first_nor_again(scheduler, table_of, capsys):
    """Its manifest says so, unless that is of another run, or it is being trained."""
    run, other = loaded(table_of)
    write_metrics(run, 10)
    update_record(run.dir, {"identity": {"train.lr": run.cfg.train.lr}, "diverged": "step 11: loss nan"})
    write_job(other, "job 8_3, start 1: x\nerror: no\njob 8_3: ended with exit code 3\n", "8_3")
    update_record(other.dir, {"identity": {"train.lr": 9.0}, "diverged": "step 11: loss nan"})
    assert look(run, {}) == Status("diverged", "step 11: loss nan", 10, 3.91)
    assert look(other, {}).state == "failed"
    assert command.main([*table_of, "--resubmit"]) == 0
    assert f"--array={other.number}" in asked(scheduler)
    assert "2 runs: 1 diverged, 1 failed" in capsys.readouterr().out
    with_lock = RunLock(run.dir)
    with_lock.acquire()
    assert look(run, {}).state == "running"
    with_lock.release()


def test_a_run_that_was_killed_is_not_running_though_its_lease_is_fresh(table_of):
    run = loaded(table_of)[0]
    lease = run.dir / ".lock"
    write_job(run, "job 0_1, start 1: seed=1\njob 0_1: ended with exit code -9\n")
    lease.write_text(json.dumps({"host": "here", "pid": 1, "beat": time.time() - 3}))
    assert look(run, {}) == Status("failed", "killed by signal 9")
    lease.write_text(json.dumps({"host": "here", "pid": 2, "beat": time.time() + 1}))  # since then, without a job
    assert look(run, {}).state == "running"


def test_metrics_are_read_from_their_end_without_what_a_kill_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert list(newest_first(path)) == []
    lines = [json.dumps({"step": i, "x": "y" * (i % 7)}) + "\n" for i in range(50)]
    path.write_text("".join(lines) + '{"step": 50, "x')
    for block in (1, 7, 64, 1 << 16):
        assert list(newest_first(path, block)) == read_metrics(path)[::-1], block
    path.write_text("".join(lines) + "junk\n")
    with pytest.raises(UserError, match="damaged"):
        next(newest_first(path))


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_of_states_fits_the_terminal(scheduler, tmp_path, monkeypatch, capsys, width):
    monkeypatch.setenv("COLUMNS", str(width))
    words = ["scale=350m", "experiment=table1/cola_lax_dlr,table1/cola_lax", "seed=41,42", f"run.root={tmp_path}/runs"]
    for run, steps in zip(loaded(words), (3, 4, 5, 6), strict=True):
        write_metrics(run, steps, **{"eval/loss": 9.0, "eval/perplexity": 12345.678})
        write_job(run, f"job 70_1, start 1: x\nerror: {'a long reason ' * 20}\njob 70_1: ended with exit code 3\n")
    assert command.main([*words, "--status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    rows = [line.split() for line in lines if "/65,000" in line]
    assert rows[0][2:] == ["failed", "3/65,000", "3.980", "12,345.68"] and "a long reason" in lines[2]
    assert len({row[1] for row in rows}) == 4


def test_names_lose_what_they_share_before_what_tells_them_apart():
    names = ["runs/60m-cola-dlr_off-s1-abc", "runs/60m-cola-dlr_on-s1-abc"]
    assert shorten(names, 40) == names
    assert shorten(names, 16) == ["…dlr_off-s1-abc", "…dlr_on-s1-abc"]
    assert shorten(names, 10) == ["…dlr_off-…", "…dlr_on-…"]
    assert shorten(["abcdefgh"], 5) == ["ab…gh"]


def test_small_things_are_written_as_people_do():
    assert spans([5, 1, 2, 3, 7, 8]) == "1-3,5,7-8"
    assert [duration(s) for s in (None, 5, 65, 3725, 90000)] == ["", "5s", "1m5s", "1h2m", "1d1h"]
    assert table(["#", "name", ">n", "empty"], [["1", "a", "10", ""], ["2", "b", "9", ""]], 80) == (
        "#  name   n\n1  a     10\n2  b      9"
    )


def test_time_is_estimated_from_such_a_run_alone(scheduler, tmp_path, capsys):
    from omegaconf import OmegaConf

    words = ["scale=tiny", "seed=1", "train.steps=20", f"run.root={tmp_path}/runs"]
    timed = loaded(words)[0]
    write_metrics(timed, 20, **{"perf/tokens_per_second": timed.positions / 60})  # a minute a step
    (timed.dir / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(to_dict(timed.cfg))))
    start = {"world_size": 2, "device": "a GPU"}
    (timed.dir / "manifest.json").write_text(json.dumps({"identity": {}, "starts": [start]}))
    others = ["scale=tiny", "seed=2", "backbone=lowrank,cola", "train.steps=40", f"run.root={tmp_path}/runs"]
    assert command.main([*others, "--time", "--dry-run", "--", "-n2"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].endswith("40m0s") and shown[2].endswith("not started") and "a GPU" in shown[3]
    assert command.main([*others, "--time", "--dry-run", "--", "-n4"]) == 0
    assert "40m" not in capsys.readouterr().out


def test_the_launcher_does_without_torch():
    code = "import sys, dlr_pretrain.launch.command; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "False"
