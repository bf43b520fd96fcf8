"""A signal at any moment of a run: it is heard, the exit code is the documented one, and the same command goes on.

The moments are calls of Python functions in the main thread, at random in a random phase of the run. When the call is
reached, the run says so and goes on, and its signal arrives wherever it is then: in our code, in that of others, in a
system call. So no trial depends on the speed of the machine.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from itertools import count

import pytest

from dlr_pretrain.util.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from tests.conftest import ROOT
from tests.resume.test_resume import assert_same, final

pytestmark = [pytest.mark.slow, pytest.mark.full]
TRIALS, SEED = int(os.environ.get("DLR_SIGNALS", "6")), int(os.environ.get("DLR_SIGNAL_SEED", "1"))
SIGNALS = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2]
RUN = ("train.steps=8", "checkpoint.every=3", "eval.every=4", "backbone=cola", "dlr=on")
# Each phase begins when a function is called (or returns, of the first), and ends where the next one begins.
PHASES = {
    "start": "return prepare",
    "training": "call Run.train",
    "fold": "call Run.fold",
    "export": "call export",
    "verification": "call agreement",
    "report": "call StopRequest.__exit__",
}
DRIVEN = f"""
import atexit, json, os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
pipe, wanted = int(sys.argv.pop(1)), json.loads(sys.argv.pop(1))
phases = {list(PHASES)!r}
signs = {{sign: phase for phase, sign in {PHASES!r}.items()}}
now, calls = None, dict.fromkeys(phases, 0)

def tell(word):
    os.write(pipe, word.encode() + b" ")

def see(frame, event, arg):
    global now, wanted
    phase = signs.get(f"{{event}} {{frame.f_code.co_qualname}}")
    if phase and "dlr_pretrain" in frame.f_code.co_filename:
        now = phase
        tell(phase)
    if now is None:
        return
    calls[now] += 1
    if wanted and (phases.index(now), calls[now]) >= (phases.index(wanted[0]), wanted[1]):
        wanted = None
        tell("here")

def end():
    sys.setprofile(None)
    tell(json.dumps(calls))

from dlr_pretrain.__main__ import main
atexit.register(end)
sys.setprofile(see)
sys.exit(main())
"""


def run_and_signal(words: list[str], moment: list | None = None, number: int = 0) -> tuple[int, str, str, str]:
    """The run of ``words``, which gets signal ``number`` at ``moment`` (a phase and the number of a call in it).

    Returns its exit code, its output, what it has told, and what of that when it had been sent the signal.
    """
    ours, theirs = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVEN, str(theirs), json.dumps(moment), *words],
        pass_fds=[theirs], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    os.close(theirs)
    told = before = b""
    while more := os.read(ours, 4096):
        told += more
        if b"here" in told and not before:
            process.send_signal(number)
            os.set_blocking(ours, False)
            try:
                told += os.read(ours, 4096)
            except BlockingIOError:
                pass
            os.set_blocking(ours, True)
            before = told
    os.close(ours)
    output, _ = process.communicate()
    return process.returncode, output, told.decode(), before.decode()


def test_a_signal_at_any_moment_is_heard_and_nothing_is_lost(warm, words, tmp_path):
    """``DLR_SIGNALS`` is the number of trials, ``DLR_SIGNAL_SEED`` what draws them."""
    rng, seen, failed = random.Random(SEED), Counter(), []
    warm.learn(words(f"run.dir={tmp_path}/learnt", *RUN))
    code, output, told, _ = run_and_signal(words(f"run.dir={tmp_path}/whole", *RUN))
    assert code == 0, output
    whole, calls = final(tmp_path / "whole"), json.loads(told[told.index("{") :])
    phases = (phase for _ in count() for phase in rng.sample([*PHASES], len(PHASES)))
    for trial, phase in zip(range(TRIALS), phases, strict=False):
        number, moment, folder = SIGNALS[trial % len(SIGNALS)], [phase, rng.randint(1, calls[phase])], tmp_path / "run"
        given = words(f"run.dir={folder}", *RUN)
        code, output, _, before = run_and_signal(given, moment, number)
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
        at = (before.split() or ["", ""])[-2]
        seen[at, number.name, code] += 1
        print(f"trial {trial}: {at} {moment[1]}, {number.name}: {code}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(f"{times:4} {' '.join(map(str, what))}" for what, times in sorted(seen.items())))
    assert not failed, "\n".join(failed)


def assert_heard(number: signal.Signals, code: int, before: str) -> None:
    """The exit code is that of a stop, unless only the report was missing, or Ctrl-C came while code was imported."""
    interrupted = {EXIT_INTERRUPTED} if number == signal.SIGINT else set()
    if "report" in before:
        assert code in {0, *interrupted}
    else:
        assert code in {EXIT_STOPPED, *(interrupted if "training" not in before else ())}
