"""A signal comes at any moment of a run: the run heeds it, its exit code is documented, and the same command continues.

A moment is a random call in the main thread in one of the phases of the run. When it is reached, the run says so and
goes on, and its signal arrives wherever it is then: in our code, in that of others, in a system call. So no trial
depends on the speed of the machine. Those of the start, and every twentieth, are processes of their own; the others
have imported torch before, but nothing that export, verification and report import.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from itertools import count

import pytest

from dlr_pretrain.util.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from tests.conftest import ROOT
from tests.kill.driven import PHASES, signal_at_the_moment
from tests.resume.test_resume import assert_same, final

pytestmark = [pytest.mark.slow, pytest.mark.full]
TRIALS, SEED = int(os.environ.get("DLR_SIGNALS", "6")), int(os.environ.get("DLR_SIGNAL_SEED", "1"))
SIGNALS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2]
RUN = ("train.steps=8", "checkpoint.every=3", "eval.every=4", "backbone=cola", "dlr=on")


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


def test_a_signal_at_any_moment_loses_nothing(warm, tepid, words, tmp_path):
    """``DLR_SIGNALS`` is the number of trials, ``DLR_SIGNAL_SEED`` their seed."""
    rng, seen, failed = random.Random(SEED), Counter(), []
    warm.learn(words(f"run.dir={tmp_path}/learnt", *RUN))
    calls = {}  # in each phase of a run, by how it is run
    for run in (run_alone, tepid.follow):
        folder = tmp_path / f"whole_{len(calls)}"
        code, output, told, _ = run(words(f"run.dir={folder}", *RUN), moment=["report", sys.maxsize])
        assert code == 0, output
        whole, calls[run] = final(folder), json.loads(told[told.index("{") :])
    phases = (phase for _ in count() for phase in rng.sample([*PHASES], len(PHASES)))
    for trial, phase in zip(range(TRIALS), phases, strict=False):
        run = run_alone if phase == "start" or trial % 20 == 0 else tepid.follow
        number, moment, folder = (
            SIGNALS[trial % len(SIGNALS)],
            [phase, rng.randint(1, calls[run][phase])],
            tmp_path / "run",
        )
        given = words(f"run.dir={folder}", *RUN)
        code, output, _, before = run(given, moment=moment, number=number)
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
