"""A run is killed before each change that it makes to a file, and within each write, from its start to its report.

After each kill the same command ends where an undisturbed run does, bit for bit.
"""

from __future__ import annotations

import re
import shutil
import signal

import pytest

from tests.resume.test_resume import assert_same, final

pytestmark = pytest.mark.slow
RUN = ("train.steps=8", "checkpoint.every=3", "eval.every=4", "backbone=cola", "dlr=on")
CHANGES = ("create", "write", "rename", "unlink", "mkdir", "chmod")  # of layer.c


@pytest.mark.parametrize("everything", [
    pytest.param(False, marks=pytest.mark.full), pytest.param(True, marks=pytest.mark.exhaustive),
], ids=["one of each kind and file", "all"])  # fmt: skip
def test_a_kill_at_every_file_operation_loses_nothing(layered, words, tmp_path, everything):
    layered.learn(words(f"run.dir={tmp_path}/whole", *RUN))
    whole, folder, log = final(tmp_path / "whole"), tmp_path / "run", tmp_path / "log"
    given = words(f"run.dir={folder}", *RUN)
    code, output = layered(given, layer={"folder": str(folder), "log": str(log)})
    assert code == 0, output
    kills, known = [], set()
    operations = [line.split(" ", 1) for line in log.read_text().splitlines()]
    for number, (kind, path) in enumerate([one for one in operations if one[0] in CHANGES], 1):
        name = re.sub(r"_[0-9a-f]{8}\b|\.tmp\w+", "", path.removeprefix(str(folder)))  # without random parts
        if everything or (kind, name) not in known:
            kills += [(number, kind, name, torn) for torn in ((False, True) if kind == "write" else (False,))]
        known.add((kind, name))
    assert {kind for kind, _ in known} == {*CHANGES}
    for number, kind, name, torn in kills:
        shutil.rmtree(folder)
        code, output = layered(given, layer={"folder": str(folder), "deadly": number, "torn": torn})
        about = f"kill {number}, {'in' if torn else 'before'} {kind} {name}: {output[-3000:]}"
        assert code == -signal.SIGKILL, about
        code, again = layered(given)
        assert code == 0 and "Traceback" not in again, f"{about}\n{again}"
        assert "transformers loads it" in output + again, about
        assert_same(final(folder), whole)
        assert (folder / "report.md").exists(), about
        assert not [path for path in folder.rglob("*") if path.name.startswith((".writing", ".folded"))], about
    print(f"{len(kills)} kills, every resume as the undisturbed run")
