"""What a disk can do to a run: fill up, refuse, damage and lose what was written. Nothing good is deleted by it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dlr_pretrain.train import saver
from dlr_pretrain.util.errors import Stopped, UserError
from dlr_pretrain.util.history import read_metrics
from tests.conftest import forked
from tests.resume.test_resume import assert_same, final

pytestmark = pytest.mark.usefixtures("no_export")
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


@pytest.mark.full
def test_a_disk_that_has_room_again_while_the_run_waits_takes_the_checkpoint(
    train, tmp_path, small_disk, monkeypatch, capsys
):
    whole = final(train(tmp_path / "whole", *CHOICE))
    monkeypatch.setattr(saver, "PAUSE", 60.0)
    monkeypatch.setattr(saver.time, "sleep", lambda seconds: small_disk(20_000) if seconds == 60.0 else None)
    assert_same(final(train(small_disk(500) / "run", *CHOICE)), whole)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(said) == 1 and "No space left" in said[0] and "Free space: it is tried for another 60 s" in said[0]


@pytest.mark.parametrize(("kilobytes", "ranks"), [  # full before all, before a checkpoint, in the second, in the third
    (520, 1), *(pytest.param(*case, marks=pytest.mark.full) for case in ((20, 1), (400, 2), (760, 2))),
])  # fmt: skip
def test_a_full_disk_stops_the_run_and_with_room_it_goes_on(train, words, tmp_path, small_disk, kilobytes, ranks):
    whole = final(train(tmp_path / "whole", *CHOICE))
    run = small_disk(kilobytes) / "run"
    ends = r"(?s)(No space left.*the same command resumes|spiece.model: No space left|a checkpoint takes .*Free space)"
    with pytest.raises((UserError, AssertionError), match=ends):
        if ranks == 1:
            train(run, *CHOICE)
        else:
            forked(words(f"run.dir={run}", *CHOICE), ranks)
    assert not list(run.glob("checkpoints/.writing_*"))
    small_disk(20_000)
    train(run, *CHOICE)
    if ranks == 1:
        assert_same(final(run), whole)


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("chattr"), reason="root may write anywhere here")
def test_a_directory_that_cannot_be_written_is_named_and_left_as_it_is(train, tmp_path):
    with pytest.raises(Stopped):
        train(tmp_path / "run", "train.stop_after=7")
    checkpoints = tmp_path / "run" / "checkpoints"
    before = {path: path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()}
    if not locked(checkpoints, True):
        pytest.skip("this file system has no immutable directories")
    try:
        with pytest.raises(UserError, match=r"(?i)\.writing_rehearsal.*|(not permitted|denied)"):
            train(tmp_path / "run")  # before its first step
        assert [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")][-1] == 7
    finally:
        locked(checkpoints, False)
    assert {path: path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()} == before
    train(tmp_path / "run")


def locked(folder: Path, on: bool) -> bool:
    if os.geteuid() != 0:
        folder.chmod(0o500 if on else 0o700)
        return True
    return subprocess.run(["chattr", "+i" if on else "-i", folder], capture_output=True).returncode == 0
