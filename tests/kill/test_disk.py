"""A full disk ends a run at any stage, with the reason. With free space the run continues."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dlr_pretrain.util.errors import UserError
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
