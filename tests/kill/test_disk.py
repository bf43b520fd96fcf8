"""What a disk can do to a run: fill up, refuse, damage and lose what was written. Nothing good is deleted by it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dlr_pretrain.train import saver
from dlr_pretrain.train.checkpoint import CONTENT, directories, newest
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
    run = small_disk(300) / "run"
    monkeypatch.setattr(saver, "PAUSE", 60.0)
    monkeypatch.setattr(saver.time, "sleep", lambda seconds: small_disk(20_000) if seconds == 60.0 else None)
    with pytest.raises(UserError, match=r"was not taken. The \d+ steps before it are saved.*could not be written"):
        train(run, *CHOICE)
    assert "It is tried for another 60 s" in capsys.readouterr().out
    steps = [record["step"] for record in read_metrics(run / "metrics.jsonl")]
    assert newest(run / "checkpoints")[0].name == f"step_{steps[-1]:08d}" and steps == list(range(1, len(steps) + 1))


@pytest.mark.parametrize(("kilobytes", "ranks"), [  # full before the first checkpoint, in the first, second, third
    (420, 1), *(pytest.param(*case, marks=pytest.mark.full) for case in ((20, 1), (300, 2), (560, 2))),
])  # fmt: skip
def test_a_full_disk_stops_the_run_and_with_room_it_goes_on(train, words, tmp_path, small_disk, kilobytes, ranks):
    whole = final(train(tmp_path / "whole", *CHOICE))
    run = small_disk(kilobytes) / "run"
    with pytest.raises((UserError, AssertionError), match=r"(?s)(could not be written|No space left|disk)"):
        if ranks == 1:
            train(run, *CHOICE)
        else:
            forked(words(f"run.dir={run}", *CHOICE), ranks)
    before = {d.name for d in directories(run / "checkpoints")}
    if before:
        assert newest(run / "checkpoints")[0].name == max(before)
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


def flip(directory: Path) -> None:
    part = max(directory.glob("part_*"))
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)


def only_the_marker(directory: Path) -> None:
    for path in directory.iterdir():
        if path.name != CONTENT:
            path.unlink()


def junk(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()
    (directory / CONTENT).write_bytes(os.urandom(300))
    (directory / "part_00000_of_00001.safetensors").write_bytes(os.urandom(3000))
    (directory / "subdirectory").mkdir()


DAMAGES = {
    "a flipped byte": flip,
    "a file cut short": lambda d: os.truncate(max(d.glob("part_*")), 1000),
    "a rank's file missing": lambda d: max(d.glob("part_*")).unlink(),
    "a marker without data": only_the_marker,
    "no marker": lambda d: (d / CONTENT).unlink(),
    "junk": junk,
    "an empty folder": lambda d: (shutil.rmtree(d), d.mkdir()),
}


@pytest.fixture(scope="module")
def two_ranks_part_way(tmp_path_factory):
    """Made once: a run of two ranks with checkpoints of steps 5 and 10, and where an undisturbed one ends."""
    return tmp_path_factory.mktemp("two_ranks")


@pytest.mark.full
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_of_two_ranks_is_passed_over(words, tmp_path, two_ranks_part_way, damage, capfd):
    made = two_ranks_part_way
    if not (made / "whole").exists():
        forked(words(f"run.dir={made}/parts", *CHOICE, "train.steps=10"), 2)
        shutil.rmtree(made / "parts" / "folded")
        forked(words(f"run.dir={made}/whole", *CHOICE, "train.steps=10"), 2)
    run = tmp_path / "run"
    shutil.copytree(made / "parts", run)
    DAMAGES[damage](run / "checkpoints" / "step_00000010")
    forked(words(f"run.dir={run}", *CHOICE, "train.steps=10"), 2)
    assert_same(final(run), final(made / "whole"))
    assert [d.name for d in directories(run / "checkpoints")] == ["step_00000010", "step_00000005"]
    assert newest(run / "checkpoints") == (run / "checkpoints" / "step_00000010", {})
