"""A run is killed at each file operation, or the operation fails, or the disk is full: no saved work is lost.

When the fault is gone, the same command ends where an undisturbed run does, bit for bit.
"""

import errno
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from dlr_pretrain.train.checkpoint import directories, fault
from dlr_pretrain.util.errors import EXIT_FAILED, EXIT_STOPPED, UserError
from tests.conftest import forked
from tests.resume.test_resume import assert_same, final

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


# ----------------------------------------------------------------------------------------------------
# Failing operations


ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.ESTALE, errno.EDQUOT)
PLACES = {  # part of a path, and the kinds of operations of layer.c there
    "checkpoints": "open create write fsync rename list mkdir chmod unlink",
    "metrics.jsonl": "open create write fsync rename",
    "manifest.json": "open create write fsync rename",
    "config.yaml": "open create write fsync rename",
    "tokenizer/": "open create write",
    ".beats": "open create write fsync",
    "folded": "open create write fsync rename list mkdir chmod",
    "folded.partial/tokenizer.json": "create write",
    "folded.partial/spiece.model": "create write",
    "folded.partial/config.json": "create write",
    "folded.partial/README.md": "create write",
    "plots": "open create write mkdir",
    "report.": "open create write fsync rename",
}
CASES = [(place, kind) for place, kinds in PLACES.items() for kind in kinds.split()]


@pytest.fixture(scope="module")
def whole(layered, words, tmp_path_factory):
    """The result of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    layered.learn(words(f"run.dir={folder}", *RUN))
    return final(folder)


@pytest.fixture
def half(layered, words, tmp_path):
    """The folder of a run that was stopped, with a checkpoint."""
    code, output = layered(words(f"run.dir={tmp_path}/half", *RUN, "train.stop_after=4"))
    assert code == EXIT_STOPPED, output
    return tmp_path / "half"


@pytest.mark.parametrize(("place", "kind", "error"), [
    pytest.param(*case, error, marks=pytest.mark.full if i == n % len(ERRORS) else pytest.mark.exhaustive,
                 id=f"{case[0]} {case[1]} {errno.errorcode[error]}")
    for n, case in enumerate(CASES) for i, error in enumerate(ERRORS)
])  # fmt: skip
def test_a_failing_operation_is_reported_with_its_file(layered, words, half, whole, tmp_path, place, kind, error):
    given, log = words(f"run.dir={half}", *RUN), tmp_path / "log"
    layer = {"folder": str(half), "kind": kind, "part": place, "error": error, "log": str(log)}
    code, output = layered(given, layer=layer)
    operations = [line.split(" ", 1) for line in log.read_text().splitlines()]
    assert any(kind == of and place in path for of, path in operations), "it does not happen"
    may_fail, reports = kind in ("unlink", "chmod"), place in ("plots", "report.")
    assert code == (0 if may_fail or reports else EXIT_FAILED), output
    assert "Traceback" not in output
    said = [line for line in output.splitlines() if re.match("(error|warning|note): ", line)]
    if not may_fail:  # files that stay only take space, until the next save deletes them, and modes serve comfort
        assert 1 <= len(said) <= 2, output  # a save that is tried again warns first
        assert all(place in line and os.strerror(error) in line for line in said), said
    assert not any(map(fault, directories(half / "checkpoints")))
    code, output = layered(given)
    assert code == 0 and "Traceback" not in output, output
    assert_same(final(half), whole)


@pytest.mark.full
def test_a_file_system_without_modes_keeps_whole_runs(layered, words, whole, tmp_path):
    """As gcsfuse, CIFS and drvfs are: what they refuse, nobody relies on, and nothing is said of it."""
    layer = {"folder": str(tmp_path), "kind": "chmod", "part": "", "error": errno.EPERM, "log": str(tmp_path / "log")}
    code, output = layered(words(f"run.dir={tmp_path}/run", *RUN), layer=layer)
    assert code == 0 and not re.search("warning|note|Traceback", output), output
    assert "chmod " in (tmp_path / "log").read_text(), "it does not happen"
    assert_same(final(tmp_path / "run"), whole)


REFUSED = {  # kinds of layer.c, and the operation that the message names
    "fsync": "flushing a file to the disk (fsync)",
    "rename": "replacing a file by another (rename)",
    "mkdir": "creating a folder",
    "create": "creating a file",
    "unlink": "deleting a file",
}


@pytest.mark.full
@pytest.mark.parametrize("kind", REFUSED)
def test_a_refused_operation_is_named_before_the_text_is_opened(layered, words, tmp_path, kind):
    """The run has no text: its error would come next."""
    given = words(f"run.dir={tmp_path}/run", f"data.root={tmp_path}", *RUN)
    layer = {"folder": str(tmp_path), "kind": kind, "part": "", "error": errno.ENOTSUP}
    code, output = layered(given, layer=layer)
    assert code == EXIT_FAILED and output.count("\n") == 1, output
    assert output.startswith(f"error: {tmp_path}: {REFUSED[kind]} fails on this file system ("), output
    assert "mounted at /" in output and "Operation not supported. Saved work" in output
    assert kind == "unlink" or not [*tmp_path.glob(".dlr_pretrain*")]


# ----------------------------------------------------------------------------------------------------
# A full disk


CHOICE = ("backbone=cola", "dlr=on")


@pytest.fixture
def small_disk(tmp_path):
    """``small_disk(kilobytes)`` mounts, or resizes, a file system of that size."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(kilobytes: int) -> Path:
        again = "remount," if os.path.ismount(folder) else ""
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"{again}size={kilobytes}k", "tmpfs", folder], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"no file system of its own here: {done.stderr.strip()}")
        return folder

    yield mount
    if os.path.ismount(folder):
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.usefixtures("no_export")
@pytest.mark.parametrize(("kilobytes", "ranks"), [  # full at once, before a checkpoint, in the second, in the third
    (520, 1), *(pytest.param(*case, marks=pytest.mark.full) for case in ((20, 1), (400, 2), (760, 2))),
])  # fmt: skip
def test_a_run_stopped_by_a_full_disk_resumes_with_room(train, words, tmp_path, small_disk, kilobytes, ranks):
    whole = final(train(tmp_path / "whole", *CHOICE))
    run = small_disk(kilobytes) / "run"
    full = r"No space left.*the same command resumes|spiece.model: No space left|a checkpoint takes .*Free some space"
    with pytest.raises((UserError, AssertionError), match=f"(?s)({full})"):
        if ranks == 1:
            train(run, *CHOICE)
        else:
            forked(words(f"run.dir={run}", *CHOICE), ranks)
    assert not list(run.glob("checkpoints/.writing_*"))
    small_disk(20_000)
    train(run, *CHOICE)
    if ranks == 1:
        assert_same(final(run), whole)
