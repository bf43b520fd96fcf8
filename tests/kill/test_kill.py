"""A run that is killed, asked to stop or left by a rank, however often, ends like an undisturbed run.

The soak kills one rank, the agent and all ranks, the agent alone (and the run is started again at once), or all of them
some time after they were asked to stop; after a random time, or inside a save, an evaluation or the fold.
"""

import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from dlr_pretrain.config.run_folder import read_record
from dlr_pretrain.train import checkpoint, run, saver
from dlr_pretrain.train.guard import Guard
from dlr_pretrain.util.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from dlr_pretrain.util.files import read_metrics, wait_for
from tests.conftest import ROOT, forked
from tests.kill.driven import PHASES, signal_at_the_moment
from tests.resume.test_resume import assert_same, final

STEPS = 120
RUN = (f"train.steps={STEPS}", "eval.every=20", "backbone=cola", "dlr=on")
KILLS, SEED = int(os.environ.get("DLR_KILLS", "20")), int(os.environ.get("DLR_KILL_SEED", "4"))
VICTIMS = ("one rank", "all", "agent alone", "asked to stop")
MOMENTS, WEIGHTS = ("any", "save", "evaluation", "fold"), (3, 4, 2, 1)


def start(words: list[str], ranks: int = 1, log=subprocess.PIPE) -> subprocess.Popen:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launch, str(ROOT / "train.py"), *words]
    return subprocess.Popen(command, stdout=log, stderr=log, text=True)


def children(process: subprocess.Popen) -> list[int]:
    return [int(pid) for pid in os.popen(f"pgrep -P {process.pid}").read().split()]


def last_step(folder: Path) -> int:
    """The last step that the run has logged, read from the end of the file, so that watching is cheap."""
    with suppress(OSError, ValueError, IndexError), open(folder / "metrics.jsonl", "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 2000))
        return int(file.read().splitlines()[-1].split(b'"step": ')[1].split(b",")[0])
    return 0


def wait_until(reached: Callable[[], bool], process: subprocess.Popen) -> None:
    while process.poll() is None and not reached():
        time.sleep(0.0005)


def wait_for_step(folder: Path, step: int, process: subprocess.Popen) -> None:
    wait_until(lambda: last_step(folder) >= step, process)


@pytest.mark.parametrize("name", ["TERM", *(pytest.param(n, marks=pytest.mark.full) for n in ("INT", "HUP", "USR1"))])
def test_a_signal_saves_and_gives_its_exit_code(words, tmp_path, name):
    process = start(words(f"run.dir={tmp_path}/run", "train.steps=1000000", "checkpoint.every=1000000"))  # has no end
    wait_for_step(tmp_path / "run", 5, process)
    process.send_signal(signal.Signals[f"SIG{name}"])
    _, err = process.communicate()
    assert process.returncode == EXIT_STOPPED, err
    assert "saved. The same command continues" in err and "Traceback" not in err
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    assert [d.name for d in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step_{last:08d}"]


@pytest.mark.full
def test_a_soak_of_kills(train, words, tmp_path):
    """``DLR_KILLS`` is the number of kills of runs on two ranks, ``DLR_KILL_SEED`` their seed."""
    choices = (*RUN, "checkpoint.every=3")
    whole = final(train(tmp_path / "whole", *choices, ranks=2))
    rng, done, number, log = random.Random(SEED), 0, 0, tmp_path / "log"
    with log.open("a") as out:
        while done < KILLS:
            number += 1
            folder, killed = tmp_path / f"run_{number}", Counter()
            given = words(*choices, f"run.dir={folder}")
            while done < KILLS and (how := start_and_kill(given, folder, rng, out)):
                done += 1
                killed[how] += 1
            assert start(given, 2, out).wait() == 0, f"{folder}: {log.read_text()[-3000:]}"
            assert_same(final(folder), whole)
            assert not [p for p in folder.rglob("*") if p.name.startswith((".writing", ".folded"))], folder
            print(f"{folder.name}: {killed.total()} kills ({dict(killed)}): as the undisturbed run", flush=True)


def start_and_kill(words: list[str], folder: Path, rng: random.Random, log) -> str | None:
    """Start the run and kill it. Returns who was killed and where; None if the run was complete before."""
    victim, moment = rng.choice(VICTIMS), rng.choices(MOMENTS, WEIGHTS)[0]
    process = start(words, 2, log)
    wait_for_step(folder, min(last_step(folder) + rng.randint(1, STEPS // 5), STEPS), process)
    wait_until(lambda: is_at(moment, folder), process)
    time.sleep(rng.random() * 0.02)
    if process.poll() is not None:
        assert process.returncode == 0, folder
        return None
    if victim == "asked to stop":
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(rng.uniform(0, 0.4))
    workers = children(process)
    killed = {"one rank": [rng.choice(workers or [process.pid])], "agent alone": [process.pid]}
    for pid in killed.get(victim, [process.pid, *workers]):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    return f"{victim}, {moment}"


def is_at(moment: str, folder: Path) -> bool:
    """Whether the run directory shows that the run is at ``moment``."""
    if moment == "save":
        return any(folder.glob("checkpoints/.writing_*"))
    if moment == "evaluation":
        return last_step(folder) % 20 == 19
    return moment == "any" or any(folder.glob(".folded.partial")) or last_step(folder) == STEPS


# ----------------------------------------------------------------------------------------------------
# A signal at any moment


TRIALS, SIGNAL_SEED = int(os.environ.get("DLR_SIGNALS", "6")), int(os.environ.get("DLR_SIGNAL_SEED", "1"))
SIGNALS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2]
EIGHT = ("train.steps=8", "checkpoint.every=3", "eval.every=4", "backbone=cola", "dlr=on")


def run_alone(words: list[str], moment: tuple[str, int] | None = None, number: int = 0) -> tuple[int, str, str, str]:
    """As ``Warm.follow``, in a process of its own, which has imported nothing."""
    ours, theirs = os.pipe()
    command = [sys.executable, "-m", "tests.kill.driven", str(theirs), json.dumps(moment), *words]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, pass_fds=[theirs], stdout=output, stderr=output, cwd=ROOT)
        os.close(theirs)
        told = signal_at_the_moment(process.pid, ours, number)
        code = process.wait()
        output.seek(0)
        return code, output.read(), *told


@pytest.mark.full
def test_a_signal_at_any_moment_loses_nothing(warm, tepid, words, tmp_path):
    """``DLR_SIGNALS`` is the number of trials, ``DLR_SIGNAL_SEED`` their seed."""
    rng, seen, failed = random.Random(SIGNAL_SEED), Counter(), []
    warm.learn(words(f"run.dir={tmp_path}/learnt", *EIGHT))
    calls = {}  # in each phase of a run, by how it is run
    for start_run in (run_alone, tepid.follow):
        folder = tmp_path / f"whole_{len(calls)}"
        code, output, told, _ = start_run(words(f"run.dir={folder}", *EIGHT), moment=["report", sys.maxsize])
        assert code == 0, output
        whole, calls[start_run] = final(folder), json.loads(told[told.index("{") :])
    phases = (phase for _ in count() for phase in rng.sample([*PHASES], len(PHASES)))
    for trial, phase in zip(range(TRIALS), phases, strict=False):
        start_run = run_alone if phase == "start" or trial % 20 == 0 else tepid.follow
        number, moment, folder = (
            SIGNALS[trial % len(SIGNALS)],
            [phase, rng.randint(1, calls[start_run][phase])],
            tmp_path / "run",
        )
        given = words(f"run.dir={folder}", *EIGHT)
        code, output, _, before = start_run(given, moment=moment, number=number)
        again, more = warm(given)
        try:
            assert before, "it has ended before"
            assert_heard(number, code, before)
            assert "Traceback" not in output + more and "Exception ignored" not in output + more
            assert again == 0 and "transformers loads it" in output + more
            assert_same(final(folder), whole)
            assert (folder / "report.md").exists()
            assert not [path for path in folder.rglob("*") if path.name.startswith((".writing", ".folded"))]
        except AssertionError as error:
            failed.append(
                f"trial {trial}: {number.name} at {moment}, {code}: {error}\n{output[-3000:]}\n{more[-3000:]}"
            )
            print(failed[-1], flush=True)
        at = before.partition(" here")[0].split(" ")[-1]
        seen[at, number.name, code] += 1
        print(f"trial {trial}: {at} {moment[1]}, {number.name}: {code}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(f"{times:4} {' '.join(map(str, what))}" for what, times in sorted(seen.items())))
    assert not failed, "\n".join(failed)


def assert_heard(number: signal.Signals, code: int, before: str) -> None:
    """The exit code is that of a stop, unless only the report was missing, or Ctrl-C came during imports."""
    interrupted = {EXIT_INTERRUPTED} if number == signal.SIGINT else set()
    if "report" in before:
        assert code in {0, *interrupted}
    else:
        assert code in {EXIT_STOPPED, *(interrupted if "training" not in before else ())}


# ----------------------------------------------------------------------------------------------------
# Sweeps


SWEEPS = {
    "joblib": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "submitit": ["hydra/launcher=submitit_local"],
}


@pytest.mark.full
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


# ----------------------------------------------------------------------------------------------------
# Ranks that hang or die


SECONDS = 6
PATIENT = ("eval.every=100", "checkpoint.every=5")
IMPATIENT = (*PATIENT, f"run.timeout_minutes={SECONDS / 60}")
SEEN = rf"RankLost: rank 1 on host {re.escape(socket.gethostname())} was last seen at step "
SEEN_HERE = SEEN.removeprefix("RankLost: ") + r"7, in train/loop\.py:\d+ \(fit\)"
AWAY = r"[0-7], in [^;]*"


def steps(folder: Path) -> list[int]:
    return [record["step"] for record in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.usefixtures("no_export")
@pytest.mark.parametrize(("how", "seen", "why"), [
    ("sleep", SEEN_HERE, ".+"),
    pytest.param("end first", SEEN_HERE, ".+closed by peer.*", marks=pytest.mark.full),
    pytest.param("SIGSTOP", SEEN.removeprefix("RankLost: ") + AWAY, r"no step for \d+ s", marks=pytest.mark.full),
    pytest.param("SIGKILL", SEEN + AWAY, ".+", marks=pytest.mark.full),
], ids=["sleeps", "ends first", "is suspended", "dies"])  # fmt: skip
def test_a_hanging_rank_is_named(words, tmp_path, monkeypatch, how, seen, why):
    """Rank 1 hangs, with or without its thread, or dies, instead of taking the batch of step 8."""
    folder, real, batches = tmp_path / "run", Guard.next_batch, itertools.count(1)

    def next_batch(self, loader):
        if next(batches) == 8 and self.ranks.rank == 1:
            os.kill(os.getpid(), signal.Signals[how]) if how.startswith("SIG") else time.sleep(600)
        elif self.ranks.rank == 0 and how == "end first":
            self.ranks.heartbeat.limit = math.inf  # it learns of the end by its collective alone
        return real(self, loader)

    with monkeypatch.context() as broken:
        broken.setattr(Guard, "next_batch", next_batch)
        broken.setattr(os, "fsync", lambda _: None)  # a busy disk would delay the beat of a live rank
        with pytest.raises(AssertionError) as ended:
            forked(words(f"run.dir={folder}", *IMPATIENT), ranks=2)
    said = str(ended.value)
    assert len(re.findall(rf"{seen}; the others wait at 8 \({why}\)\. ", said)) == 1, said
    stacks = {path.stem: path.read_text() for path in (folder / "stacks").iterdir()}
    own = {"SIGKILL": "RuntimeError", "SIGSTOP": "no progress for"}.get(how, "RuntimeError|no progress for")
    assert re.search(own, stacks["rank_0"])  # a sleeping rank 1 may end itself before rank 0 does
    assert how.startswith("SIG") or "in next_batch" in stacks["rank_1"]
    forked(words(f"run.dir={folder}", *PATIENT), ranks=2)
    assert steps(folder) == list(range(1, 21))


@pytest.mark.usefixtures("no_export")
@pytest.mark.full
def test_a_long_wait_for_rank_0_is_not_a_hang(words, tmp_path, monkeypatch):
    """The fold takes longer than a step may."""
    real = run.finish

    def slow(*given, **named):
        time.sleep(1.5 * SECONDS)
        return real(*given, **named)

    monkeypatch.setattr(run, "finish", slow)
    forked(words(f"run.dir={tmp_path}/run", *IMPATIENT), ranks=2)
    assert steps(tmp_path / "run") == list(range(1, 21))
    assert not (tmp_path / "run" / "stacks").exists()


@pytest.mark.usefixtures("no_export")
def test_a_save_that_never_returns_ends_the_run(words, tmp_path, monkeypatch):
    """It is told while training waits, ends with the code of a hang, and the manifest says so."""
    folder = tmp_path / "run"
    with monkeypatch.context() as broken:
        broken.setattr(checkpoint, "write_part", lambda *_: threading.Event().wait())
        broken.setattr(saver, "NOTE_SECONDS", 0.1)
        with pytest.raises(AssertionError) as ended:
            forked(words(f"run.dir={folder}", *IMPATIENT), ranks=1)
    said = str(ended.value)
    assert re.search(rf"note: the save to {folder}/checkpoints has not ended for \d+ s", said), said
    assert re.search(r"was last seen at step 10, in train/saver\.py:\d+ \(wait\) \(no step for \d+ s\)", said), said
    state = read_record(folder)["state"]
    assert state["name"] == "failed" and "in train/saver.py" in state["reason"]
    forked(words(f"run.dir={folder}", *PATIENT), ranks=1)
    assert steps(folder) == list(range(1, 21))
